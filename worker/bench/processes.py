"""Processes: what a second and a fourth daemon add, one effect a job, beginning together."""

from __future__ import annotations

from typing import Final

from worker.bench.handlers import EFFECT
from worker.bench.running import Bench, drain

PROCESSES: Final = (1, 2, 4)


def _name(processes: int) -> str:
    return f"{processes} daemon{'s' if processes > 1 else ''}, one effect"


async def measure(bench: Bench) -> None:
    plan = bench.plan
    async with bench.arena("processes") as on:
        for turn in range(plan.runs):
            for processes in PROCESSES:
                bench.say(f"processes, {processes}, run {turn + 1} of {plan.runs}")
                await on.empty()
                # Twice as many as elsewhere, so that two daemons have work for as long as one has there.
                sample = await drain(bench, on, kind=EFFECT, jobs=plan.jobs * 2, tasks=plan.tasks[0], processes=processes)
                bench.book.add("processes", _name(processes), "jobs/s", sample)
    for processes in PROCESSES[1:]:
        bench.book.compare("processes", _name(processes), _name(1))
