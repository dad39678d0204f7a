"""Latency: how soon an idle process starts a job, beside the two things that nobody can do without.

Each turn of the loop measures all three, a few milliseconds apart: a pick-up (from the return of the enqueuing commit to the
handler's first line, both on this host's clock), a bare NOTIFY (from sending it to its arrival at another connection) and a
bare claim of one row, committed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Final

from worker.bench.arena import Arena, text_of
from worker.bench.handlers import MOMENT
from worker.bench.results import BenchFailed, Sample, quantile
from worker.bench.running import SMALL_BYTES, Bench
from worker.clock import local_seconds
from worker.store import benchmarks, yardsticks
from worker.store.connection import Connection
from worker.store.enqueueing import enqueue

_JOBS_SHARE: Final = 40
_LEAST_JOBS: Final = 20
_WARM_UPS: Final = 10
_REST_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = (0.005, 0.015)
_END_SECONDS: Final = 30.0
_SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

PICK_UP: Final = "pick-up"
NOTIFY: Final = "bare NOTIFY round trip"
CLAIM: Final = "bare claim commit"


async def measure(bench: Bench) -> None:
    plan = bench.plan
    jobs = max(plan.jobs // _JOBS_SHARE, _LEAST_JOBS)
    async with bench.arena("latency") as on:
        await yardsticks.make_tables(on.connection, on.database)
        for turn in range(plan.runs):
            bench.say(f"latency, {jobs} jobs, run {turn + 1} of {plan.runs}")
            await on.empty()
            await yardsticks.fill(on.connection, on.database, jobs, text=text_of(SMALL_BYTES))
            for what, values in (await _measure_turn(bench, on, jobs)).items():
                ordered = sorted(values)
                for name, share in _SHARES.items():
                    sample = Sample(value=quantile(ordered, share) * 1_000, jobs=jobs, seconds=sum(values))
                    bench.book.add("latency", f"{what} {name}", "ms", sample)
    for name in _SHARES:
        bench.book.compare("latency", f"{PICK_UP} {name}", f"{NOTIFY} {name}", f"{CLAIM} {name}")


async def _measure_turn(bench: Bench, on: Arena, jobs: int) -> Mapping[str, Sequence[float]]:
    """Seconds, by what was measured."""
    notified: list[float] = []
    claimed: list[float] = []
    committed_at: dict[int, float] = {}
    async with bench.daemons(on, tasks=bench.plan.tasks[0]) as running, yardsticks.echo(on.database) as echo:
        await on.wait_until_idle(running)
        connection = await on.database.connect("bench enqueue")
        try:
            # Everything is prepared and planned, LISTEN established and answered.
            await _starts(on, [await _enqueue(connection, on) for _ in range(_WARM_UPS)])
            await asyncio.sleep(_REST_SECONDS)
            for number in range(jobs):
                id = await _enqueue(connection, on)
                committed_at[id] = local_seconds()
                await _pause(number)
                notified.append(await echo.round_trip_seconds())
                await _pause(number)
                started_at = local_seconds()
                await yardsticks.claim_one(connection, on.database, owner="bench")
                claimed.append(local_seconds() - started_at)
                await _pause(number)
            started = await _starts(on, list(committed_at))
        finally:
            connection.terminate()
    picked_up = [started[id] - committed for id, committed in committed_at.items()]
    return {PICK_UP: picked_up, NOTIFY: notified, CLAIM: claimed}


async def _enqueue(connection: Connection, on: Arena) -> int:
    payload = {"n": 1, "text": text_of(SMALL_BYTES)}
    return (await enqueue(connection, MOMENT, payload, schema=on.database.schema)).id


async def _pause(number: int) -> None:
    """Not in step with anybody's timer, and the same in each run."""
    await asyncio.sleep(random.Random(number).uniform(*_PAUSE_SECONDS))


async def _starts(on: Arena, ids: Sequence[int]) -> dict[int, float]:
    deadline = local_seconds() + _END_SECONDS
    while len(started := await benchmarks.results(on.connection, on.database, ids)) < len(ids):
        if local_seconds() > deadline:
            raise BenchFailed(f"{len(ids) - len(started)} of {len(ids)} jobs were not picked up within {_END_SECONDS:g} s")
        await asyncio.sleep(0.05)
    return started
