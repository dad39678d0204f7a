"""Contended: two daemons whose jobs all update a thousand shared rows, in grouped commits and in one transaction a job."""

from __future__ import annotations

from typing import Final

from worker.bench.handlers import COUNTERS, SHARED
from worker.bench.results import BenchFailed
from worker.bench.running import Bench, drain, jobs_of
from worker.store import bench_tables

PROCESSES: Final = 2
GROUPED: Final = f"{PROCESSES} daemons, updates of {COUNTERS:,} shared rows"
SINGLE: Final = "the same with WORKER_COMMIT_BATCH=1"
_EXTRA: Final = {GROUPED: {}, SINGLE: {"WORKER_COMMIT_BATCH": "1"}}


async def measure(bench: Bench) -> None:
    plan = bench.plan
    hits = 0
    async with bench.arena("contended") as on:
        await bench_tables.make_counters(on.connection, on.database, COUNTERS)
        for turn in range(plan.runs):
            for name, extra in _EXTRA.items():
                bench.say(f"contended, {name}, run {turn + 1} of {plan.runs}")
                await on.empty()
                sample = await drain(bench, on, jobs_of(SHARED, plan.jobs), tasks=plan.tasks[0], processes=PROCESSES, extra=extra)
                bench.book.add("contended", name, "jobs/s", sample)
                before, hits = hits, await bench_tables.count_hits(on.connection, on.database)
                if hits - before < plan.jobs:
                    raise BenchFailed(f"{plan.jobs} jobs made {hits - before} updates")
    bench.book.compare("contended", GROUPED, SINGLE)
