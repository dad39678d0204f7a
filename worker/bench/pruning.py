"""Pruning: the rate while the reaper removes finished rows that are past their retention, and while it finds none to remove."""

from __future__ import annotations

from typing import Final

from worker.bench.arena import text_of
from worker.bench.handlers import EFFECT, NOTHING
from worker.bench.results import BenchFailed, Sample
from worker.bench.running import SMALL_BYTES, Bench, drain, jobs_of
from worker.store import benchmarks

# The reaper removes rows once a second: a run has to last for several of its steps.
_TIMES_JOBS: Final = 10
_AGE_SECONDS: Final = 86_400.0
_RETENTION_SECONDS: Final = 3_600.0

KEPT: Final = "one effect, all rows kept"
PRUNED: Final = "one effect, old rows being removed"


async def measure(bench: Bench) -> None:
    plan = bench.plan
    jobs = jobs_of(EFFECT, plan.jobs * _TIMES_JOBS)
    async with bench.arena("pruning") as on:
        for turn in range(plan.runs):
            for case, seconds in ((KEPT, "never"), (PRUNED, str(_RETENTION_SECONDS))):
                bench.say(f"pruning, {case}, run {turn + 1} of {plan.runs}")
                await on.empty()
                await benchmarks.fill_finished(
                    on.connection, on.database, plan.rows, kind=NOTHING, text=text_of(SMALL_BYTES), age_seconds=_AGE_SECONDS
                )
                sample = await drain(bench, on, jobs, tasks=plan.tasks[0], extra={"WORKER_RETENTION_SECONDS": seconds})
                bench.book.add("pruning", case, "jobs/s", sample)
                gone = plan.rows - await benchmarks.count_rows(on.connection, on.database, kind=NOTHING)
                if (gone > 0) != (case == PRUNED):
                    raise BenchFailed(f"{case}: {gone} rows were removed")
                if case == PRUNED:
                    # From the beginning of the daemon on, so while it was idle, too.
                    bench.book.add(
                        "pruning", "rows removed meanwhile", "rows", Sample(value=gone, jobs=gone, seconds=sample.seconds)
                    )
    bench.book.compare("pruning", PRUNED, KEPT)
