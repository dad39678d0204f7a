"""Snapshot: the rate, sixth by sixth, while somebody's old snapshot keeps vacuum from removing anything."""

from __future__ import annotations

from typing import Final

from worker.bench.handlers import EFFECT
from worker.bench.running import Bench, drain, jobs_of

_TIMES_JOBS: Final = 10


async def measure(bench: Bench) -> None:
    plan = bench.plan
    jobs = plan.jobs * _TIMES_JOBS
    case = f"old snapshot, {jobs:,} jobs, one effect"
    last_to_first: list[float] = []
    last_to_best: list[float] = []
    async with bench.arena("snapshot") as on:
        for turn in range(plan.runs):
            bench.say(f"snapshot, {jobs:,} jobs, run {turn + 1} of {plan.runs}")
            await on.empty()
            sample = await drain(bench, on, jobs_of(EFFECT, jobs), tasks=plan.tasks[0], under_old_snapshot=True)
            bench.book.add("snapshot", case, "jobs/s", sample)
            if 0 not in sample.parts:
                last_to_first.append(sample.parts[-1] / sample.parts[0])
                last_to_best.append(sample.parts[-1] / max(sample.parts))
    if last_to_first:
        bench.book.note_ratio("snapshot", "last sixth / first sixth", last_to_first)
        # The first sixth holds the start of the run, which is slower than what follows: this is the stricter figure.
        bench.book.note_ratio("snapshot", "last sixth / best sixth", last_to_best)
