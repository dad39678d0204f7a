"""Something to compare with, in the same minutes on the same server: see worker/store/yardsticks.py for what they do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Final

from worker.bench.arena import STATEMENT_SECONDS, Arena, text_of
from worker.bench.results import BenchFailed, Sample
from worker.bench.running import SMALL_BYTES, Bench, usage
from worker.clock import local_seconds
from worker.store import yardsticks
from worker.store.connection import Connection
from worker.store.yardsticks import CEILING_SETTINGS, START, Claimed

# As many as the recipe's tasks, and so few jobs that its claim, which sorts all that wait, is not worse than it has to be.
CONNECTIONS: Final = 10
ONE_BY_ONE_JOBS: Final = 5_000
_CLAIMS_AHEAD: Final = 2
_CONNECT_SECONDS: Final = 10.0


async def naive(bench: Bench, on: Arena, *, jobs: int, effect: bool) -> Sample:
    """One claim and one transaction with effect and completion a job, by ten tasks on a pool of ten connections."""
    database = on.database
    pool = database.pool(CONNECTIONS)

    async def work(owner: str) -> None:
        while True:
            async with pool.acquire(timeout_seconds=_CONNECT_SECONDS) as connection:
                job = await yardsticks.claim_naive(connection, database, owner=owner)
            if job is None:
                return
            async with pool.acquire(timeout_seconds=_CONNECT_SECONDS) as connection:
                await yardsticks.finish_one(connection, database, job, owner=owner, effect=effect)

    try:
        # Opened before the clock starts, as everybody's.
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(CONNECTIONS):
                await stack.enter_async_context(pool.acquire(timeout_seconds=_CONNECT_SECONDS))
        return await _timed(bench, on, jobs=jobs, effect=effect, work=lambda: _tasks(work))
    finally:
        await pool.close(_CONNECT_SECONDS)


async def one_by_one(bench: Bench, on: Arena, *, jobs: int, effect: bool) -> Sample:
    """The same on ten connections of the tasks' own, with a claim that reads the ready index only."""
    async with _connected(on, CONNECTIONS) as connections:
        free = list(connections)

        async def work(owner: str) -> None:
            connection = free.pop()
            while (job := await yardsticks.claim_one(connection, on.database, owner=owner)) is not None:
                await yardsticks.finish_one(connection, on.database, job, owner=owner, effect=effect)

        return await _timed(bench, on, jobs=jobs, effect=effect, work=lambda: _tasks(work))


async def _tasks(work: Callable[[str], Coroutine[None, None, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(CONNECTIONS):
            group.create_task(work(f"w-{number}"), name=f"yardstick {number}")


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
    await yardsticks.fill(on.connection, on.database, jobs, text=text_of(SMALL_BYTES))
    await on.checkpoint()
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
