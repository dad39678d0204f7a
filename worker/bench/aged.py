"""Aged: what a single-row INSERT costs when a daemon has been at 90 % load for minutes, under an old snapshot, beside a fresh one.

Jobs come at random moments (a Poisson process) with 90 % of what the worker tasks can take; each keeps its task busy without a
core. First the INSERTs are timed on the young schema, before any snapshot. Then an old snapshot is opened, and after the minutes a
second schema with a daemon and a load of its own; INSERTs into the two are timed alternately, a few milliseconds apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Final

from worker.bench.arena import Arena, text_of
from worker.bench.daemons import Daemon
from worker.bench.handlers import BUSY, NOTHING
from worker.bench.results import BenchFailed, Sample
from worker.bench.running import SMALL_BYTES, Bench
from worker.clock import local_seconds
from worker.store import bench_tables, benchmarks
from worker.store.connection import Connection

LOAD: Final = 0.9
PRODUCERS: Final = 4
# Two daemons, two loads and the measuring share the machine at the end: so many jobs a second leave most of it free.
_MOST_JOBS_A_SECOND: Final = 150.0
_LEAST_BUSY_SECONDS: Final = 0.05
_WARM_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 1.0
_MOST_PROBES: Final = 200
_LEAST_PROBES: Final = 20
_PROBES_SHARE: Final = 100
_PAUSE_SECONDS: Final = (0.004, 0.012)
_MOST_WAITING_A_TASK: Final = 20

YOUNG: Final = "before, no snapshot"
FRESH: Final = "a fresh schema beside it"


async def measure(bench: Bench) -> None:
    plan = bench.plan
    tasks = plan.tasks[0]
    warm_seconds = min(_WARM_SECONDS, plan.minutes * 60)
    probes = max(min(plan.jobs // _PROBES_SHARE, _MOST_PROBES), _LEAST_PROBES)
    aged_case = f"after {plan.minutes:g} minutes at {LOAD:.0%} load under an old snapshot"
    async with bench.arena("aged") as aged, bench.daemons(aged, tasks=tasks) as running, _load(aged, tasks):
        bench.say("aged, before")
        await aged.wait_until_known(running)
        await asyncio.sleep(warm_seconds)
        for turn in range(plan.runs):
            [milliseconds] = await _probe([aged], turn, probes)
            _add(bench, YOUNG, milliseconds)
        async with benchmarks.old_snapshot(aged.database):
            await _age(bench, aged, plan.minutes * 60, running)
            async with bench.arena("fresh") as fresh, bench.daemons(fresh, tasks=tasks) as others, _load(fresh, tasks):
                await fresh.wait_until_known(others)
                await asyncio.sleep(warm_seconds)
                for turn in range(plan.runs):
                    bench.say(f"aged, both, run {turn + 1} of {plan.runs}")
                    for case, milliseconds in zip((aged_case, FRESH), await _probe([aged, fresh], turn, probes), strict=True):
                        _add(bench, case, milliseconds)
                await _must_keep_up(aged, tasks, running)
                await _must_keep_up(fresh, tasks, others)
    for case in (FRESH, YOUNG):
        bench.book.compare("aged", _name(aged_case), _name(case))


def _name(case: str) -> str:
    return f"single-row INSERT, {case}"


def _add(bench: Bench, case: str, milliseconds: Sequence[float]) -> None:
    sample = Sample(value=statistics.median(milliseconds), jobs=len(milliseconds), seconds=sum(milliseconds) / 1_000)
    bench.book.add("aged", _name(case), "ms", sample)


async def _age(bench: Bench, on: Arena, seconds: float, running: Sequence[Daemon]) -> None:
    ends_at = local_seconds() + seconds
    while (left_seconds := ends_at - local_seconds()) > 0:
        bench.say(f"aged, {left_seconds / 60:.1f} minutes to go")
        for daemon in running:
            daemon.must_live()
        await asyncio.sleep(min(_LOOK_SECONDS, left_seconds))
    await _must_keep_up(on, bench.plan.tasks[0], running)


async def _must_keep_up(on: Arena, tasks: int, running: Sequence[Daemon]) -> None:
    """The load is below what the daemon can take: else jobs would pile up, and it would be something else that is measured."""
    for daemon in running:
        daemon.must_live()
    waiting = await benchmarks.count_ready(on.connection, on.database)
    if waiting > _MOST_WAITING_A_TASK * tasks:
        raise BenchFailed(f"{waiting} jobs wait for {tasks} tasks: this machine cannot take the load of this scenario")


async def _probe(arenas: Sequence[Arena], turn: int, probes: int) -> list[list[float]]:
    """Milliseconds of single-row INSERTs, each its own commit, into each of these schemas alternately."""
    chance = random.Random(turn)
    payload = json.dumps({"n": 1, "text": text_of(SMALL_BYTES)})
    milliseconds: list[list[float]] = [[] for _ in arenas]
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(_connected(on)) for on in arenas]
        for number in range(-1, probes):
            for on, connection, values in zip(arenas, connections, milliseconds, strict=True):
                await asyncio.sleep(chance.uniform(*_PAUSE_SECONDS))
                started_at = local_seconds()
                await bench_tables.insert_one(connection, on.database, key=f"probe-{uuid.uuid4()}", kind=NOTHING, payload=payload)
                if number >= 0:  # the first prepares the statement
                    values.append((local_seconds() - started_at) * 1_000)
    return milliseconds


@contextlib.asynccontextmanager
async def _load(on: Arena, tasks: int) -> AsyncIterator[None]:
    """Jobs that come for as long as the block lasts."""
    busy_seconds = max(_LEAST_BUSY_SECONDS, LOAD * tasks / _MOST_JOBS_A_SECOND)
    jobs_a_second = LOAD * tasks / busy_seconds / PRODUCERS
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(_connected(on)) for _ in range(PRODUCERS)]
        async with asyncio.TaskGroup() as group:
            producers = [
                group.create_task(_produce(connection, on, busy_seconds, jobs_a_second, number), name=f"producer {number}")
                for number, connection in enumerate(connections)
            ]
            yield
            for producer in producers:
                producer.cancel()


async def _produce(connection: Connection, on: Arena, busy_seconds: float, jobs_a_second: float, number: int) -> None:
    """By the clock, however long a single INSERT takes."""
    chance = random.Random(number)
    payload = json.dumps({"seconds": busy_seconds})
    next_at = local_seconds()
    while True:
        next_at += chance.expovariate(jobs_a_second)
        await asyncio.sleep(max(next_at - local_seconds(), 0))
        await bench_tables.insert_one(connection, on.database, key=f"load-{uuid.uuid4()}", kind=BUSY, payload=payload)


@contextlib.asynccontextmanager
async def _connected(on: Arena) -> AsyncIterator[Connection]:
    connection = await on.database.connect("bench enqueue")
    try:
        yield connection
    finally:
        connection.terminate()
