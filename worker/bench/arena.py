"""One schema of the bench: made with `migrate`, filled, watched, and removed whatever happens in it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from worker.bench.daemons import LOOK_AGAIN_SECONDS, Daemon
from worker.bench.results import BenchFailed
from worker.clock import local_seconds
from worker.store import benchmarks, schema
from worker.store.benchmarks import Filling, Jobs
from worker.store.connection import DATABASE_ERRORS, Connection, Database, safe_text

STATEMENT_SECONDS: Final = 3_600.0
START_SECONDS: Final = 60.0
RUN_SECONDS: Final = 3_600.0
REMOVE_SECONDS: Final = 60.0

_SETTINGS: Final = {"lock_timeout": "30s"}
# The jobs of a run become due together, this long after they are all there.
_QUIET_SECONDS: Final = 0.4
_LEAST_FILL_SECONDS: Final = 0.7
_FILLS: Final = 5
_SLOW_FILL_JOBS_A_SECOND: Final = 15_000
_SLOW_FILL_BYTES_A_SECOND: Final = 15e6
_NEARLY: Final = 0.9
_TAIL_JOBS: Final = 1_000
_SELDOM_SECONDS: Final = 0.025
_OFTEN_SECONDS: Final = 0.002


class Arena:
    """A schema with a connection for everything that is not measured."""

    def __init__(self, database: Database, connection: Connection) -> None:
        self.database = database
        self.connection = connection
        self.questions = 0
        """How often the database was asked whether jobs have ended: transactions that are not the product's."""
        self._fills = 0
        self._seconds_a_job: dict[int, float] = {}

    async def empty(self) -> None:
        await benchmarks.empty(self.connection, self.database)

    async def checkpoint(self) -> None:
        """As far as this role may, so that runs begin alike and none has a checkpoint in its middle by chance."""
        await benchmarks.checkpoint(self.connection)

    async def fill(self, filling: Filling, *, daemons: Sequence[Daemon]) -> tuple[Jobs, float]:
        """The jobs, and the moment (the database's clock) at which all of them become due, a little later.

        So the daemons can be there before, and several begin together. When writing took longer than expected, the jobs were
        begun too early: they are let run out, and it is done again with more time.
        """
        payload_bytes = len(filling.text)
        seconds_a_job = self._seconds_a_job.get(payload_bytes) or max(
            1 / _SLOW_FILL_JOBS_A_SECOND, payload_bytes / _SLOW_FILL_BYTES_A_SECOND
        )
        for attempt in range(_FILLS):
            self._fills += 1
            started_at = local_seconds()
            expected_seconds = (filling.count * seconds_a_job * 1.3 + _LEAST_FILL_SECONDS) * 2**attempt
            due_at = await benchmarks.moment_in(self.connection, expected_seconds)
            jobs = await benchmarks.fill(self.connection, self.database, filling, keys=f"k{self._fills}-", due_at_seconds=due_at)
            await benchmarks.vacuum(self.connection, self.database)
            await self.checkpoint()
            self._seconds_a_job[payload_bytes] = (local_seconds() - started_at) / filling.count
            if await self.seconds_until(due_at) >= _QUIET_SECONDS:
                return jobs, due_at
            await self.wait_for_end(jobs, daemons)
        raise BenchFailed(f"writing {filling.count:,} jobs takes longer each time: too much else is going on")

    async def seconds_until(self, moment: float) -> float:
        return moment - await benchmarks.moment_in(self.connection, 0)

    async def wait_for_end(self, jobs: Jobs, daemons: Sequence[Daemon]) -> float:
        """Wait until all of these have ended; returns when the database first said so, by its own clock.

        Asked every 25 ms, every 2 ms towards the end; each question is a look-up of one row.
        """
        connection, database = self.connection, self.database
        async with asyncio.timeout(RUN_SECONDS):
            nearly = max(jobs.first_id, min(jobs.last_id - _TAIL_JOBS, jobs.first_id + int(jobs.number * _NEARLY)))
            for id, pause_seconds in ((nearly, _SELDOM_SECONDS), (jobs.last_id, _OFTEN_SECONDS)):
                while not await benchmarks.has_ended(connection, database, id):
                    self.questions += 1
                    for daemon in daemons:
                        daemon.must_live()
                    await asyncio.sleep(pause_seconds)
            tail = Jobs(max(jobs.first_id, jobs.last_id - _TAIL_JOBS), jobs.last_id)
            tail_ended_at = await self._wait_for_all(tail, daemons, _OFTEN_SECONDS)
            if await benchmarks.ended_at(connection, database, jobs) is not None:
                return tail_ended_at
            # Stragglers from further up put the end off.
            return await self._wait_for_all(jobs, daemons, _SELDOM_SECONDS)

    async def _wait_for_all(self, jobs: Jobs, daemons: Sequence[Daemon], pause_seconds: float) -> float:
        while (ended_at := await benchmarks.ended_at(self.connection, self.database, jobs)) is None:
            self.questions += 1
            for daemon in daemons:
                daemon.must_live()
            await asyncio.sleep(pause_seconds)
        return ended_at

    async def wait_until_idle(self, daemons: Sequence[Daemon]) -> None:
        """All of these have looked for work, found none, and sleep."""
        pids = [daemon.pid for daemon in daemons]
        await self._wait_until(lambda: benchmarks.count_idle(self.connection, self.database, pids), len(daemons), daemons)

    async def wait_until_known(self, daemons: Sequence[Daemon]) -> None:
        """All of these have begun, whatever they do."""
        pids = [daemon.pid for daemon in daemons]
        await self._wait_until(lambda: benchmarks.count_known(self.connection, self.database, pids), len(daemons), daemons)

    async def wait_until_running(self, jobs: int, daemons: Sequence[Daemon]) -> None:
        """So many jobs run."""
        await self._wait_until(lambda: benchmarks.count_running(self.connection, self.database), jobs, daemons)

    async def _wait_until(self, count: Callable[[], Awaitable[int]], wanted: int, daemons: Sequence[Daemon]) -> None:
        async with asyncio.timeout(START_SECONDS):
            while await count() != wanted:
                for daemon in daemons:
                    daemon.must_live()
                await asyncio.sleep(LOOK_AGAIN_SECONDS)


@contextlib.asynccontextmanager
async def arena(database: Database, on_left_behind: Callable[[str], None]) -> AsyncIterator[Arena]:
    """The schema of `database` for the block. Raises SchemaError when the role may not create it.

    `on_left_behind` is told, in a sentence, when it cannot be removed.
    """
    connection = await database.connect("bench", statement_timeout_seconds=STATEMENT_SECONDS, settings=_SETTINGS)
    try:
        await schema.migrate(connection, database.schema)
        try:
            yield Arena(database, connection)
        finally:
            # Whatever it was in the middle of: the next statement is not its.
            connection.terminate()
            await _remove(database, on_left_behind)
    finally:
        connection.terminate()


async def _remove(database: Database, on_left_behind: Callable[[str], None]) -> None:
    try:
        async with asyncio.timeout(REMOVE_SECONDS):
            connection = await database.connect("bench", statement_timeout_seconds=REMOVE_SECONDS, settings=_SETTINGS)
            try:
                await benchmarks.remove(connection, database)
            finally:
                connection.terminate()
    except DATABASE_ERRORS as error:
        on_left_behind(f'schema "{database.schema}" could not be removed ({safe_text(error)}): drop it with CASCADE')


def text_of(payload_bytes: int) -> str:
    """Text that makes a payload about so long, of a sort that compression does not shrink."""
    length = max(payload_bytes - len('{"n": 10000, "text": ""}'), 0)
    return random.Random(4711).randbytes((length + 1) // 2).hex()[:length]
