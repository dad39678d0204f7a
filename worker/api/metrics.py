"""`/metrics` in Prometheus text. What the database tells is asked for once in some seconds, whoever scrapes; what this process
measured of itself costs nothing. The names and labels are bounded whatever is in the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from worker.api.cached import Cached
from worker.api.problems import AWAY
from worker.measures import POOL_CLAIMS, POOL_RIGHTS, REMOTE, Histogram, Measures
from worker.store.figures import Backlog, Statistics
from worker.store.scraping import LeaseCounts, count_leases
from worker.store.statistics import statistics
from worker.version import VERSION

if TYPE_CHECKING:
    from worker.api.state import Api

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CACHED_SECONDS = 5.0
MOST_LABELS = 50
OTHERS = "(others)"


class Labels:
    """The first so many names that were seen keep a series of their own, all later ones share one: no name is ever taken back, so
    that the number of series is bounded over the life of the process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, None] = {}

    def of(self, name: str) -> str:
        if name not in self._known and len(self._known) < self._most:
            self._known[name] = None
        return name if name in self._known else OTHERS


class Metrics:
    """Renders everything. One a server."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._queues = Labels(MOST_LABELS)
        self._kinds = Labels(MOST_LABELS)
        self._database = Cached(self._ask_database, seconds=CACHED_SECONDS)
        self._answer: tuple[Statistics, LeaseCounts] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def render(self) -> bytes:
        self._answer = await self._database.get()
        return generate_latest(self._registry)

    async def _ask_database(self) -> tuple[Statistics, LeaseCounts] | None:
        """None when the database is away or takes too long; each statement has the session's time limit."""
        try:
            async with self._api.connection() as connection:
                return await statistics(connection, self._api.database), await count_leases(connection, self._api.database)
        except AWAY:
            return None

    def describe(self) -> list[Metric]:
        return []  # no look at the numbers when this is registered

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        yield _gauge("worker_build_info", "The version that runs.", 1, version=VERSION)
        yield _gauge("worker_database_up", "1: the numbers of the database are there.", self._answer is not None)
        if self._answer is not None:
            yield from self._of_database(*self._answer)
        yield from self._of_process(self._api.host.gauges())

    def _of_database(self, numbers: Statistics, leases: LeaseCounts) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("worker_jobs", "Jobs by state; succeeded ones may be an estimate.", labels=["state"])
        for state in ("ready", "scheduled", "running", "succeeded", "dead", "cancelled"):
            jobs.add_metric([state], getattr(numbers, state))
        yield jobs
        held = GaugeMetricFamily("worker_leases", "Leases of jobs and named leases, by state.", labels=["of", "state"])
        held.add_metric(["jobs", "active"], numbers.running - numbers.expired)
        held.add_metric(["jobs", "expired"], numbers.expired)
        held.add_metric(["names", "active"], leases.active)
        held.add_metric(["names", "expired"], leases.expired)
        held.add_metric(["names", "released"], leases.released)
        yield held
        yield _gauge("worker_oldest_ready_seconds", "How long the oldest due job has waited.", numbers.oldest_ready_seconds or 0)
        yield _gauge("worker_retry_ratio", "Share of the last hour's attempts that failed.", numbers.retry_rate)
        yield _gauge("worker_lost_leases_last_hour", "Leases lost in the last hour, crashes included.", numbers.lost_leases)
        yield _gauge("worker_succeeded_per_second", "Jobs that succeeded a second, over the last hour.", numbers.throughput)
        if numbers.sees_all_transactions:
            oldest_seconds = numbers.oldest_transaction_seconds or 0
            yield _gauge("worker_oldest_transaction_seconds", "Age of the oldest transaction.", oldest_seconds)
        yield _gauge("worker_processes", "Processes whose presence is live.", sum(one.live for one in numbers.processes))
        yield from self._backlogs("queue", numbers.queues, self._queues)
        yield from self._backlogs("kind", numbers.kinds, self._kinds)

    def _backlogs(self, label: str, backlogs: Mapping[str, Backlog], labels: Labels) -> Iterator[Metric]:
        jobs = GaugeMetricFamily(f"worker_{label}_jobs", f"Unfinished jobs by {label} and state.", labels=[label, "state"])
        failures = GaugeMetricFamily(f"worker_{label}_failures_last_hour", f"Failed attempts by {label}.", labels=[label])
        oldest = GaugeMetricFamily(f"worker_{label}_oldest_ready_seconds", f"Age of the oldest due job by {label}.", labels=[label])
        sums: dict[str, Backlog] = {}
        for name in sorted(backlogs):
            one, total = backlogs[name], sums.setdefault(labels.of(name), Backlog())
            total.ready += one.ready
            total.scheduled += one.scheduled
            total.running += one.running
            total.failures += one.failures
            total.oldest_ready_seconds = max(total.oldest_ready_seconds or 0.0, one.oldest_ready_seconds or 0.0)
        for name, total in sums.items():
            for state in ("ready", "scheduled", "running"):
                jobs.add_metric([name, state], getattr(total, state))
            failures.add_metric([name], total.failures)
            oldest.add_metric([name], total.oldest_ready_seconds or 0.0)
        yield from (jobs, failures, oldest)

    def _of_process(self, gauges: Mapping[str, float]) -> Iterator[Metric]:
        for name, value in gauges.items():
            yield _gauge(f"worker_pool_{name}", f"Of the pool in this process: {name.replace('_', ' ')}.", value)
        for name, about in (
            ("claim_seconds", "Round trip of a claim."),
            ("renew_seconds", "Round trip of a renewal."),
            ("commit_seconds", "From the first statement of a group of outcomes to its commit."),
            ("trust_left_seconds", "Trust left in the lease when outcomes were committed, the least of each group."),
        ):
            family = HistogramMetricFamily(f"worker_{name}", about, labels=["by"])
            for by, measures in _SOURCES[name]:
                histogram: Histogram = getattr(measures, name)
                family.add_metric([by], _buckets(histogram), histogram.sum)
            yield family
        for name, about in (
            ("claimed", "Jobs claimed by this process."),
            ("completed", "Jobs completed by this process."),
            ("failed", "Failed attempts written by this process."),
            ("lost_leases", "Leases of this process that were found lost."),
            ("stale_refused", "Outcomes of this process that the fence has refused."),
        ):
            counter = CounterMetricFamily(f"worker_{name}", about, labels=["by"])
            for by, writers in (("pool", (POOL_CLAIMS, POOL_RIGHTS)), ("http", (REMOTE,))):
                counter.add_metric([by], sum(getattr(writer, name) for writer in writers))
            yield counter


_SOURCES: dict[str, tuple[tuple[str, Measures], ...]] = {
    "claim_seconds": (("pool", POOL_CLAIMS), ("http", REMOTE)),
    "renew_seconds": (("pool", POOL_RIGHTS), ("http", REMOTE)),
    "commit_seconds": (("pool", POOL_RIGHTS), ("http", REMOTE)),
    "trust_left_seconds": (("pool", POOL_RIGHTS),),
}


def _gauge(name: str, about: str, value: float, **labels: str) -> Metric:
    gauge = GaugeMetricFamily(name, about, labels=list(labels))
    gauge.add_metric(list(labels.values()), float(value))
    return gauge


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """As Prometheus wants them: cumulative, the last without bound."""
    total = 0
    buckets = []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
