"""The load: an application that enqueues at a steady rate, and an operator who cancels, retries and cleans up.

What the application was told stands in its own memory, as it would in real life: the ids that an enqueue has answered with.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

from worker.clock import local_seconds
from worker.store import pulse, sabotage
from worker.store.bulk import enqueue_many
from worker.store.connection import DATABASE_ERRORS, Connection, Database
from worker.torture import handlers
from worker.torture.job_rules import OPERATOR

T = TypeVar("T")

JOBS_PER_SECOND: Final = 15.0
"""For each daemon."""
_TICK_SECONDS: Final = 0.1
_MOST_WAITING: Final = 1_500
"""During an outage the application holds back, too."""
_STATEMENT_SECONDS: Final = 10.0
_CONNECT_AGAIN_SECONDS: Final = 0.2
_OPERATE_SECONDS: Final = 0.7
_REMEMBERED: Final = 4_000

# Kind, how many in a hundred, and how long it takes at most.
_MIX: Final = (
    (handlers.EFFECT, 38, 0.3),
    (handlers.NOTHING, 18, 0.3),
    (handlers.TRANSACTION, 12, 0.2),
    (handlers.CHAIN, 8, 0.1),
    (handlers.THREAD, 5, 0.2),
    (handlers.READ, 5, 0.1),
    (handlers.FAIL, 6, 0.05),
    (handlers.SNOOZE, 3, 0.3),
    (handlers.RETRY, 2, 0.2),
    (handlers.DISCARD, 1, 0.0),
    (handlers.SPOILT, 2, 0.05),
)
_SLOW_IN_A_HUNDRED: Final = 8


class Operator:
    """A session of the torture's own that comes back after whatever the faults do to it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Connection]:
        """A connection for the block, one block at a time. Raises DATABASE_ERRORS, after which the next one is a new one."""
        async with self._lock, asyncio.timeout(_STATEMENT_SECONDS * 2):
            if self._connection is None or self._connection.is_closed():
                self._connection = await self.database.connect(
                    OPERATOR, statement_timeout_seconds=_STATEMENT_SECONDS, settings=sabotage.OPERATOR_SETTINGS
                )
            try:
                yield self._connection
            except BaseException:
                self._connection.terminate()
                self._connection = None
                raise

    async def patiently(self, seconds: float, work: Callable[[Connection], Awaitable[T]]) -> T:
        """`work` on a session, again and again for that long while the database is away."""
        until = local_seconds() + seconds
        while True:
            try:
                async with self.session() as connection:
                    return await work(connection)
            except DATABASE_ERRORS:
                if local_seconds() > until:
                    raise
            await asyncio.sleep(_CONNECT_AGAIN_SECONDS)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.terminate()


class Load:
    """Goes on until it is told to stop; `acknowledged` is what the database has answered with so far."""

    def __init__(self, database: Database, *, seed: int, jobs_per_second: float, lease_seconds: float) -> None:
        self.acknowledged: set[int] = set()
        self._application = Operator(database)
        self._operator = Operator(database)
        self._database = database
        self._seed = seed
        self._jobs_per_second = jobs_per_second
        self._lease_seconds = lease_seconds
        self._number = 0
        self._recent: list[int] = []
        self._chance = random.Random(f"operator {seed}")

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._enqueue(), name="load")
            group.create_task(self._operate(), name="operator")

    def close(self) -> None:
        self._application.close()
        self._operator.close()

    async def add(self, kind: str, count: int, *, seconds: float, max_attempts: int = 5) -> None:
        """Jobs beside the steady load, for a fault."""
        jobs = [self._job(kind, seconds=seconds, max_attempts=max_attempts) for _ in range(count)]
        with contextlib.suppress(*DATABASE_ERRORS):
            await self._send(jobs)

    async def _enqueue(self) -> None:
        owed = 0.0
        before = local_seconds()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = local_seconds()
            owed = min(owed + (now - before) * self._jobs_per_second, self._jobs_per_second)
            before = now
            count, owed = int(owed), owed % 1
            try:
                async with self._application.session() as connection:
                    ready, _ = await pulse.count_unfinished(connection, self._database)
                if ready < _MOST_WAITING:
                    await self._send([self._any_job() for _ in range(count)])
            except DATABASE_ERRORS:
                # Nobody has said whether these were enqueued: they count as maybe.
                await asyncio.sleep(_CONNECT_AGAIN_SECONDS)

    async def _send(self, jobs: list[dict[str, object]]) -> None:
        async with self._application.session() as connection:
            answers = await enqueue_many(connection, jobs, schema=self._database.schema)
        ids = [answer.id for answer in answers]
        self.acknowledged.update(ids)
        self._recent = (self._recent + ids)[-_REMEMBERED:]

    def _any_job(self) -> dict[str, object]:
        chance = random.Random(f"{self._seed} {self._number}")
        [(kind, _, longest)] = chance.choices(_MIX, weights=[share for _, share, _ in _MIX])
        seconds = chance.uniform(0.005, longest) if longest else 0.0
        if chance.randrange(100) < _SLOW_IN_A_HUNDRED:
            seconds = chance.uniform(0.5, 1.2) * self._lease_seconds
        # One that fails more often than it may is to end dead.
        failures = chance.randint(1, 6) if kind == handlers.FAIL else 0
        job = self._job(kind, seconds=round(seconds, 3), failures=failures)
        if kind == handlers.SPOILT and chance.random() < 0.3:
            job["payload"] = {"seconds": "soon"}  # which its handler cannot read
        if kind != handlers.CHAIN and chance.random() < 0.5:
            del job["key"]  # a generated one, which leaves no row in the ledger
        return job | {"priority": chance.choice((0, 0, 0, 5))}

    def _job(self, kind: str, *, seconds: float, failures: int = 0, max_attempts: int = 5) -> dict[str, object]:
        self._number += 1
        payload = {"seconds": seconds, "failures": failures}
        return {"kind": kind, "payload": payload, "key": f"k{self._number}", "max_attempts": max_attempts}

    async def _operate(self) -> None:
        while True:
            await asyncio.sleep(_OPERATE_SECONDS)
            if not self._recent:
                continue
            try:
                async with self._operator.session() as connection:
                    await self._operate_once(connection)
            except DATABASE_ERRORS:
                await asyncio.sleep(_CONNECT_AGAIN_SECONDS)

    async def _operate_once(self, connection: Connection) -> None:
        database, chance = self._database, self._chance
        some = chance.sample(self._recent, min(200, len(self._recent)))
        unfinished = await sabotage.ids_in_state(connection, database, some, ("ready", "running"), but_kinds=())
        cancelled = chance.sample(unfinished, min(2, len(unfinished)))
        await sabotage.cancel(connection, database, cancelled)
        stopped = await sabotage.ids_in_state(connection, database, some, ("dead", "cancelled"), but_kinds=(handlers.POISON,))
        # One of them at once: its first attempt may not have heard yet.
        await sabotage.retry(connection, database, [*cancelled[:1], *chance.sample(stopped, min(2, len(stopped)))])
        again = await sabotage.forget(connection, database, some[:3])
        jobs = [{"kind": kind, "payload": {"seconds": 0.01}, "key": key} for key, kind in again]
        answers = await enqueue_many(connection, jobs, schema=database.schema)
        self.acknowledged.update(answer.id for answer in answers)
