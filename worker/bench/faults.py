"""Faults: how long 101 jobs take to settle when the effect of one of them cannot be applied, and what that does to the next ones.

Every round has a statement text of its own, which a first batch has prepared: then a batch without fault, one with, and three
without again, of the same text, on the same daemon. The guilty job has one attempt, so that it is settled when it is dead.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Final

from worker.bench.arena import Arena
from worker.bench.daemons import Daemon
from worker.bench.handlers import FAULTY, GUILTY
from worker.bench.results import BenchFailed, Sample
from worker.bench.running import Bench
from worker.store import benchmarks
from worker.store.benchmarks import Filling

JOBS: Final = 101
ROUNDS: Final = 7
# A round is six batches; fewer of them where fewer jobs a run are wanted.
_JOBS_A_ROUND: Final = 6 * JOBS
_CLEAN_TEXT: Final = "none fails"
_READY_BEFORE_SECONDS: Final = 0.05

NONE: Final = f"{JOBS} jobs, none fails"
ONE: Final = f"{JOBS} jobs, one effect fails"
NEXT: Final = tuple(f"{JOBS} jobs, none fails, {place} batch after it" for place in ("first", "second", "third"))


async def measure(bench: Bench) -> None:
    plan = bench.plan
    rounds = max(min(plan.jobs // _JOBS_A_ROUND, ROUNDS), 1)
    async with bench.arena("faults") as on:
        for turn in range(plan.runs):
            await on.empty()
            milliseconds: dict[str, list[float]] = {name: [] for name in (NONE, ONE, *NEXT)}
            async with bench.daemons(on, tasks=plan.tasks[0]) as running:
                await on.wait_until_idle(running)
                for number in range(rounds):
                    bench.say(f"faults, round {number + 1} of {rounds}, run {turn + 1} of {plan.runs}")
                    await _settle(on, _CLEAN_TEXT, number, running)
                    for name, values in milliseconds.items():
                        values.append(await _settle(on, GUILTY if name == ONE else _CLEAN_TEXT, number, running) * 1_000)
            for name, values in milliseconds.items():
                sample = Sample(value=statistics.median(values), jobs=JOBS, seconds=sum(values) / 1_000)
                bench.book.add("faults", name, "ms", sample)
    for name in (ONE, *NEXT):
        bench.book.compare("faults", name, NONE)


async def _settle(on: Arena, text: str, number: int, running: Sequence[Daemon]) -> float:
    """Seconds from the first claim until all have ended, as they should."""
    filling = Filling(count=JOBS, kind=FAULTY, text=f"{text}, {number}", max_attempts=1)
    jobs, due_at = await on.fill(filling, daemons=running)
    await asyncio.sleep(max(await on.seconds_until(due_at) - _READY_BEFORE_SECONDS, 0))
    ended_at = await on.wait_for_end(jobs, running)
    tally = await benchmarks.tally(on.connection, on.database, jobs)
    succeeded = JOBS - 1 if text == GUILTY else JOBS
    if (tally.succeeded, tally.effects) != (succeeded, succeeded):
        raise BenchFailed(f"of {JOBS} jobs {tally.succeeded} succeeded, with {tally.effects} effects: {succeeded} were due")
    return ended_at - tally.first_claim_at
