"""What was measured: samples, gathered into figures by case, and the ratios between cases of the same turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


class BenchFailed(Exception):
    """A run that did not do what it was to measure. The message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one run used, all of it. None: cannot be told here; the document's `not_measured` says why."""

    worker_cpu_seconds: float | None = None
    """Of the daemons; of the bench itself where the loop under test is its own (yardsticks, enqueue)."""
    server_cpu_seconds: float | None = None
    """Of the whole server."""
    bench_cpu_seconds: float | None = None
    cores_busy: float | None = None
    """The mean number of busy cores of the machine, whoever used them."""
    least_busy_core: float | None = None
    """The busy share of the core that was least busy."""
    wal_bytes: int | None = None
    """Of the whole server."""
    dead_tuples: int | None = None
    """Row versions that became dead: updates and deletions of the schema's tables, vacuumed since or not."""
    hot_updates: int | None = None
    statements: int | None = None
    """Of this role in this database, BEGIN and COMMIT included, effects left out."""
    effect_statements: int | None = None
    transactions: int | None = None
    """Of this database, the questions of the bench left out. A statement outside a transaction is one, several inside one count
    once. About a hundred are too many, whatever the run: a daemon's sessions report those of its start late, and its stop is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured run."""

    value: float
    """In the unit of its figure."""
    jobs: int
    seconds: float
    usage: Usage | None = None
    retried: int = 0
    """Jobs that took more than one attempt."""
    parts: tuple[float, ...] = ()
    """The same unit, part by part of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One case, and what its runs gave."""

    scenario: str
    case: str
    unit: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        return [sample.value for sample in self.samples]

    def per_job(self) -> dict[str, float | None]:
        """Medians of what a job used."""
        return {name: self._median_per_job(part, scale) for name, (part, scale) in _PER_JOB.items()}

    def _median_per_job(self, part: str, scale: float) -> float | None:
        used = [getattr(sample.usage, part) for sample in self.samples if sample.usage is not None]
        if not used or None in used:
            return None
        jobs = [sample.jobs for sample in self.samples]
        return float(statistics.median(amount * scale / count for amount, count in zip(used, jobs, strict=True)))


_PER_JOB = {
    "worker_cpu_microseconds": ("worker_cpu_seconds", 1e6),
    "server_cpu_microseconds": ("server_cpu_seconds", 1e6),
    "wal_bytes": ("wal_bytes", 1.0),
    "dead_tuples": ("dead_tuples", 1.0),
    "statements": ("statements", 1.0),
    "transactions": ("transactions", 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """What one case makes of another, turn by turn."""

    scenario: str
    name: str
    values: Sequence[float]


class Book:
    """All figures and ratios of one bench, in the order in which they came."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, str], Figure] = {}
        self.ratios: list[Ratio] = []

    @property
    def figures(self) -> list[Figure]:
        return list(self._figures.values())

    def add(self, scenario: str, case: str, unit: str, sample: Sample) -> None:
        figure = self._figures.setdefault((scenario, case), Figure(scenario=scenario, case=case, unit=unit))
        figure.samples.append(sample)

    def compare(self, scenario: str, case: str, *others: str) -> None:
        """Note the ratio of `case` to the sum of `others`, each turn by itself."""
        mine = self._figures[scenario, case].values
        theirs = zip(*(self._figures[scenario, other].values for other in others), strict=True)
        values = [own / sum(parts) for own, parts in zip(mine, theirs, strict=True)]
        self.note_ratio(scenario, f"{case} / {' + '.join(others)}", values)

    def note_ratio(self, scenario: str, name: str, values: Sequence[float]) -> None:
        self.ratios.append(Ratio(scenario=scenario, name=name, values=values))

    def figure_rows(self) -> list[tuple[object, ...]]:
        """For a table: scenario, case, median, least, most, unit."""
        return [(figure.scenario, figure.case, *_middle_and_ends(figure.values), figure.unit) for figure in self.figures]

    def cost_rows(self) -> list[tuple[object, ...]]:
        """For a table: scenario and case in one, and what a job used, as far as anything is known of it."""
        costs = [(figure, tuple(figure.per_job().values())) for figure in self.figures]
        return [(f"{figure.scenario}: {figure.case}", *cost) for figure, cost in costs if any(value is not None for value in cost)]

    def ratio_rows(self) -> list[tuple[object, ...]]:
        """For a table: scenario, ratio, median, least, most."""
        return [(ratio.scenario, ratio.name, *_middle_and_ends(ratio.values)) for ratio in self.ratios]

    def document(self) -> dict[str, object]:
        """Figures and ratios for `--json`."""
        return {
            "figures": [
                {
                    "scenario": figure.scenario,
                    "case": figure.case,
                    "unit": figure.unit,
                    **spread(figure.values),
                    "per_job": figure.per_job(),
                    "runs": [asdict(sample) for sample in figure.samples],
                }
                for figure in self.figures
            ],
            "ratios": [{"scenario": ratio.scenario, "name": ratio.name, **spread(ratio.values)} for ratio in self.ratios],
        }


def _middle_and_ends(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def spread(values: Sequence[float]) -> dict[str, object]:
    """The median, the range, and every value behind them."""
    median, least, most = _middle_and_ends(values)
    return {"median": median, "min": least, "max": most, "values": list(values)}


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the sorted values that at least this share of them does not exceed."""
    return ordered[max(math.ceil(len(ordered) * share) - 1, 0)]
