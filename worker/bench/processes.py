"""Processes: what a second and a fourth daemon add, one effect a job, beginning together."""

from __future__ import annotations

import os
from typing import Final

from worker.bench.handlers import EFFECT
from worker.bench.results import Sample
from worker.bench.running import Bench, drain, jobs_of

PROCESSES: Final = (1, 2, 4)


def _name(processes: int) -> str:
    return f"{processes} daemon{'s' if processes > 1 else ''}, one effect"


async def measure(bench: Bench) -> None:
    plan = bench.plan
    samples: dict[int, list[Sample]] = {number: [] for number in PROCESSES}
    async with bench.arena("processes") as on:
        for turn in range(plan.runs):
            for processes in PROCESSES:
                bench.say(f"processes, {processes}, run {turn + 1} of {plan.runs}")
                await on.empty()
                # Twice as many as elsewhere, so that two daemons have work for as long as one has there.
                sample = await drain(bench, on, jobs_of(EFFECT, plan.jobs * 2), tasks=plan.tasks[0], processes=processes)
                samples[processes].append(sample)
                bench.book.add("processes", _name(processes), "jobs/s", sample)
    for processes in PROCESSES[1:]:
        bench.book.compare("processes", _name(processes), _name(1))
    for processes, of in samples.items():
        _note_busy_cores(bench, f"with {_name(processes)}", of)


def _note_busy_cores(bench: Bench, when: str, samples: list[Sample]) -> None:
    """The whole machine's: beyond a full one, nothing can be gained by more processes."""
    busy = [sample.usage.cores_busy for sample in samples if sample.usage and sample.usage.cores_busy is not None]
    least = [sample.usage.least_busy_core for sample in samples if sample.usage and sample.usage.least_busy_core is not None]
    if busy and least:
        cores = os.cpu_count() or 1
        bench.book.note_ratio("processes", f"busy share of all {cores} cores, {when}", [value / cores for value in busy])
        bench.book.note_ratio("processes", f"busy share of the least busy core, {when}", least)
