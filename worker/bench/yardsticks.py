"""Something to compare with, in the same minutes on the same server: see worker/store/yardsticks.py for what they do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

from worker.bench.arena import STATEMENT_SECONDS, Arena, filling
from worker.bench.results import BenchFailed, Sample
from worker.bench.running import SMALL_BYTES, Bench, usage
from worker.clock import local_seconds
from worker.store import yardsticks
from worker.store.connection import Connection
from worker.store.yardsticks import CEILING_SETTINGS, START, Claimed

NAIVE_CONNECTIONS: Final = 10
_CLAIMS_AHEAD: Final = 2


async def naive(bench: Bench, on: Arena, *, jobs: int, effect: bool) -> Sample:
    """One claim and one transaction with effect and completion a job, on 10 connections."""

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for number, connection in enumerate(connections):
                group.create_task(one_by_one(connection, f"w-{number}"), name=f"naive {number}")

    async def one_by_one(connection: Connection, owner: str) -> None:
        while (job := await yardsticks.claim_one(connection, on.database, owner=owner)) is not None:
            await yardsticks.finish_one(connection, on.database, job, owner=owner, effect=effect)

    async with _connected(on, NAIVE_CONNECTIONS) as connections:
        return await _timed(bench, on, jobs=jobs, effect=effect, work=work)


async def ceiling(bench: Bench, on: Arena, *, jobs: int, effect: bool) -> Sample:
    """Claims and grouped commits of 300 at the same time on two connections, nothing in between."""

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(claim_all(), name="ceiling claims")
            group.create_task(commit_all(), name="ceiling commits")

    groups: asyncio.Queue[list[Claimed]] = asyncio.Queue(_CLAIMS_AHEAD)

    async def claim_all() -> None:
        cursor = START
        while True:
            claimed, cursor = await yardsticks.claim_group(claiming, on.database, cursor)
            await groups.put(claimed)
            if not claimed:
                return

    async def commit_all() -> None:
        while claimed := await groups.get():
            await yardsticks.finish_group(committing, on.database, claimed, effect=effect)

    async with _connected(on, 2, CEILING_SETTINGS) as (claiming, committing):
        return await _timed(bench, on, jobs=jobs, effect=effect, work=work)


async def _timed(bench: Bench, on: Arena, *, jobs: int, effect: bool, work: Callable[[], Awaitable[None]]) -> Sample:
    await yardsticks.fill(on.connection, on.database, jobs, text=filling(SMALL_BYTES))
    meter = bench.meter(on)
    before = await meter.read()
    started_at = local_seconds()
    await work()
    seconds = local_seconds() - started_at
    after = await meter.read()
    succeeded, effects = await yardsticks.count_done(on.connection, on.database)
    if succeeded != jobs or effects != (jobs if effect else 0):
        raise BenchFailed(f"a yardstick completed {succeeded} of {jobs} jobs with {effects} effects")
    return Sample(value=jobs / seconds, jobs=jobs, seconds=seconds, usage=usage(before, after))


@contextlib.asynccontextmanager
async def _connected(on: Arena, count: int, settings: Mapping[str, str] | None = None) -> AsyncIterator[list[Connection]]:
    connections: list[Connection] = []
    try:
        for _ in range(count):
            connections.append(
                await on.database.connect("bench yardstick", statement_timeout_seconds=STATEMENT_SECONDS, settings=settings)
            )
        yield connections
    finally:
        for connection in connections:
            connection.terminate()
