"""Metrics and health: what they say is true, bounded, and costs one look at the database however many scrape."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import ROOT
from tests.psql import grant
from tests.roles import role, url_as
from tests.servers import Server
from tests.serving import Served
from tests.waiting import await_for, wait_for
from tests.workplace import Workplace
from worker.api import cached
from worker.api.cached import Cached
from worker.api.metrics import CACHED_SECONDS, MOST_LABELS, OTHERS, Labels
from worker.measures import SECONDS, Histogram, Measures

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(served: Served) -> Samples:
    """All samples, read by Prometheus's own parser."""
    answer = served.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_it_counts_jobs_leases_and_ages(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url)
    for _ in range(3):
        served.add()
    served.ask("UPDATE jobs SET available_at = now() - interval '1 hour' WHERE id = 1 RETURNING id")
    served.ask("INSERT INTO jobs (payload, available_at) VALUES ('1', now() + interval '1 hour') RETURNING id")
    served.ask(
        "INSERT INTO jobs (payload, state, completed_at) VALUES ('1', 'dead', now()), ('1', 'cancelled', now()) RETURNING id"
    )
    first, second = served.claimed(lease_seconds=60), served.claimed(lease_seconds=60)
    served.lapse(first["id"])
    third = served.claimed(lease_seconds=60)
    served.tell("complete", third)
    served.add("failing")
    served.tell("fail", served.claimed(lease_seconds=60), error="x")
    served.ask("UPDATE jobs SET available_at = now() - interval '1 hour' WHERE kind = 'failing' RETURNING id")
    served.http.post("/api/leases", json={"resource": "r", "holder": "h"})
    with served.db.transaction():
        served.db.execute("SELECT pg_sleep(0.2)")
        samples = scrape(served)
    states = {state: value(samples, "worker_jobs", state=state) for state in ("ready", "scheduled", "running", "succeeded")}
    assert states == {"ready": 1, "scheduled": 1, "running": 2, "succeeded": 1}
    assert value(samples, "worker_jobs", state="dead") == value(samples, "worker_jobs", state="cancelled") == 1
    assert value(samples, "worker_leases", of="jobs", state="active") == 1
    assert value(samples, "worker_leases", of="jobs", state="expired") == 1
    assert value(samples, "worker_leases", of="names", state="active") == 1
    assert 3590 < value(samples, "worker_oldest_ready_seconds") < 3700
    assert value(samples, "worker_oldest_transaction_seconds") >= 0.2
    assert value(samples, "worker_queue_jobs", queue="default", state="running") == 2
    assert value(samples, "worker_kind_jobs", kind="failing", state="ready") == 1
    assert value(samples, "worker_kind_failures_last_hour", kind="failing") == 1
    assert value(samples, "worker_database_up") == 1
    assert value(samples, "worker_claimed_total", by="http") == 4
    assert value(samples, "worker_completed_total", by="http") == 1
    assert value(samples, "worker_failed_total", by="http") == 1
    assert value(samples, "worker_claim_seconds_count", by="http") >= 4
    assert value(samples, "worker_commit_seconds_count", by="http") >= 2
    assert second["id"] != first["id"]


def test_the_age_of_the_oldest_transaction_is_left_out_where_those_of_others_are_hidden(
    server: Server, database_url: str, serve: Callable[..., Served]
) -> None:
    name = "worker_oldest_transaction_seconds"
    with role(server, database_url) as daemon, psycopg.connect(database_url) as other:
        grant(database_url, "daemon", daemon)
        served = serve(url_as(daemon, database_url))
        other.execute("SELECT 1")  # and holds its snapshot
        samples = scrape(served)
        assert value(samples, "worker_database_up") == 1
        assert (name, ()) not in samples
        with psycopg.connect(database_url, autocommit=True) as owner:
            owner.execute(f"GRANT pg_read_all_stats TO {daemon}")
        wait_for(lambda: scrape(served).get((name, ()), 0) > 0, 30)  # it has looked again
        other.rollback()
        wait_for(lambda: scrape(served).get((name, ())) == 0, 30)
        served.process.kill()


def test_a_stale_completion_and_a_lost_lease_are_counted(served: Served, queue: str) -> None:
    before = scrape(served)
    served.add(queue=queue)
    task = served.claimed(queue=queue)
    served.lapse(task["id"])
    served.tell("heartbeat", task)
    served.tell("complete", task | {"fence": task["fence"] + 1})
    after = scrape(served)
    for name in ("worker_lost_leases_total", "worker_stale_refused_total"):
        assert value(after, name, by="http") - value(before, name, by="http") == 1


def test_a_scrape_storm_costs_one_look_at_the_database(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url)
    counter = "SELECT calls FROM pg_stat_statements WHERE query LIKE '%%' || %s || '%%' AND dbid = (SELECT oid FROM pg_database"
    counter += " WHERE datname = current_database())"
    served.db.execute("CREATE EXTENSION pg_stat_statements")

    def calls() -> int:
        return sum(
            row.calls for row in served.ask(counter, "FILTER (WHERE released_at IS NULL AND expires_at > clock_timestamp())")
        )

    before = calls()
    started = time.monotonic()
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(lambda _: scrape(served), range(100)))
    rounds = int((time.monotonic() - started) / CACHED_SECONDS) + 1
    assert 1 <= calls() - before <= rounds


def test_the_number_of_series_does_not_grow_with_what_is_in_the_table(database_url: str, serve: Callable[..., Served]) -> None:
    """I10: thousands of jobs, kinds, queues and errors."""
    served = serve(database_url)
    served.ask(
        "INSERT INTO jobs (kind, queue, payload) SELECT 'kind ' || n %% 700, E'queue \"\\\\\\n' || n %% 700, '1'"
        " FROM generate_series(1, 5000) AS n RETURNING id"
    )
    first = scrape(served)
    assert 2 * MOST_LABELS < len(first) < 1_000
    assert sum(number for (name, _), number in first.items() if name == "worker_queue_jobs") == 5_000
    assert sum(number for (name, _), number in first.items() if name == "worker_kind_jobs") == 5_000
    assert value(first, "worker_queue_jobs", queue=OTHERS, state="ready") > 1_000
    served.ask("UPDATE jobs SET kind = 'other ' || id, queue = 'other ' || id RETURNING id")
    others = ("worker_queue_jobs", (("queue", OTHERS), ("state", "ready")))
    wait_for(lambda: scrape(served).get(others) == 5_000, 30)  # it has looked again
    second = scrape(served)
    assert len(second) <= len(first)


def test_labels_are_given_for_life() -> None:
    labels = Labels(2)
    assert [labels.of(name) for name in ("a", "b", "c", "a", "d", "b")] == ["a", "b", OTHERS, "a", OTHERS, "b"]


def test_a_histogram_counts_each_value_once_in_the_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram((1.0, 2.0))
    for number in (0.5, 1.0, 1.5, 2.0, 2.5, -1.0):
        histogram.observe(number)
    assert (histogram.counts, histogram.sum) == ([3, 2, 1], 6.5)


def test_measuring_costs_next_to_nothing() -> None:
    measures = Measures()
    started = time.thread_time()
    for _ in range(10_000):
        measures.claim_seconds.observe(0.003)
    assert (time.thread_time() - started) / 10_000 < 20e-6  # a batch, on a slow machine; it takes half a microsecond
    assert measures.claim_seconds.counts[SECONDS.index(0.005)] == 10_000


async def test_what_is_cached_is_asked_for_once_by_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(cached, "local_seconds", lambda: now)
    asked = 0
    answered = asyncio.Event()

    async def ask() -> int:
        nonlocal asked
        asked += 1
        await answered.wait()
        return asked

    kept = Cached(ask, seconds=0.2)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(kept.get()) for _ in range(50)]
        await await_for(lambda: asked == 1)
        answered.set()
    assert {task.result() for task in tasks} == {1}
    now += 0.1
    assert await kept.get() == 1
    now += 0.15
    assert await kept.get() == 2


def test_a_pool_says_how_it_is(workplace: Workplace, serve: Callable[..., Served]) -> None:
    ours = {"WORKER_HANDLERS": "tests.handlers_for_tests:handlers", "WORKER_LEASE_SECONDS": "60"}
    served = serve(workplace.url, "--serve", "127.0.0.1:0", command="run", **ours)
    workplace.add("nap", {"seconds": 60}, key="naps")
    workplace.wait_for_notes("start", "naps")
    samples = scrape(served)
    assert value(samples, "worker_pool_busy") == value(samples, "worker_pool_held_leases") == 1
    assert value(samples, "worker_pool_slots") == 4
    assert value(samples, "worker_claimed_total", by="pool") == value(samples, "worker_claim_seconds_count", by="pool") == 1
    assert 0 <= value(samples, "worker_pool_loop_lag_seconds") < 30
    assert 0 <= value(samples, "worker_pool_claim_age_seconds") < 30
    wait_for(lambda: value(scrape(served), "worker_pool_hungry") == 1)
    assert value(scrape(served), "worker_processes") == 1


def test_the_document_of_the_metrics_names_each_of_them(served: Served) -> None:
    documented = set(re.findall(r"`(worker_\w+)`", (ROOT / "docs" / "http.md").read_text()))
    text = served.http.get("/metrics").text
    served_names = {name.removesuffix("_total") for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)}
    pool = {name for name in documented if name.startswith("worker_pool_")}
    assert documented - pool == served_names
    assert len(pool) == 7
