"""A Worker inside the test's own process and loop: what it did to the rows, and what it said."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Literal

import asyncpg
import pytest

from tests.waiting import await_for, until_cancelled
from worker import Handlers, Job, Settings, Worker, enqueue, events
from worker.domain_json import decode_json
from worker.events import ALL, Event
from worker.store.connection import Connection, Database, SessionLimits

SHAPES: dict[str, dict[str, Any]] = {"batches": {}, "single": {"claim_batch": 1, "commit_batch": 1}}
"""The default shape, and the textbook one: one claim statement and one transaction a job."""
both_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)

_TERMINAL = ("succeeded", "dead", "cancelled")
_QUICK = {
    "poll_seconds": 0.05,
    "reap_seconds": 0.1,
    "backoff_base_seconds": 0.02,
    "shutdown_grace_seconds": 2,
    "name": "test",
    "workers": 4,
}

_PATIENT = SessionLimits(statement_timeout_seconds=60, lock_timeout_seconds=60, idle_in_transaction_seconds=60)
"""Of the tests' own sessions: no stall of the machine ends them."""


def quick(dsn: str, **settings: Any) -> Settings:
    """Settings that make nobody wait."""
    return Settings(database_url=dsn, **(_QUICK | settings))


class Log(logging.Handler):
    """What a Worker says to an application that has not set up structlog: (event name, fields), oldest first."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = {key: value for key, value in vars(record).items() if key not in _RECORD}
        self.lines.append((str(fields.pop("event", record.getMessage())), fields))

    def find(self, event: Event, **fields: object) -> list[dict[str, Any]]:
        """The lines of this event, with these fields."""
        return [said for name, said in self.lines if name == event.name and fields.items() <= said.items()]

    def names(self) -> list[str]:
        known = {event.name for event in ALL}
        return [name for name, _ in self.lines if name in known]

    @property
    def text(self) -> str:
        return repr(self.lines)


_RECORD = frozenset(vars(logging.makeLogRecord({})))


@contextlib.contextmanager
def listening() -> Iterator[Log]:
    """The log of this process's Workers while the block runs."""
    logger, log = logging.getLogger("worker"), Log()
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.DEBUG)
    try:
        yield log
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)


async def nothing(job: Job[object]) -> None:
    """A handler with nothing to do."""


async def until_the_drain() -> None:
    """In a handler: its work takes until a Worker of this process has begun to drain."""
    with listening() as log:
        await await_for(lambda: log.find(events.SHUTDOWN_STARTED))


def works() -> tuple[Handlers, list[Any]]:
    """A kind `work` that takes as long as its payload says; that it started, and why it was stopped, is noted."""
    handlers, noted = Handlers(), []

    @handlers.job("work")
    async def work(job: Job[Literal["nothing", "until the drain", "until stopped"]]) -> str:
        noted.append("started")
        try:
            match job.payload:
                case "until the drain":
                    await until_the_drain()
                case "until stopped":
                    await until_cancelled()
        finally:
            noted.append(job.cancel_reason)
        return "worked"

    return handlers, noted


async def deaf_until(free: asyncio.Event) -> None:
    """In a handler: swallow every cancellation until then; but not for ever, or a failed test would not end."""
    while not free.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.timeout(60):
                await free.wait()


class Run:
    """One database, seen from outside the Worker, and its log."""

    def __init__(self, dsn: str, connection: Connection, log: Log, schema: str) -> None:
        self.dsn = dsn
        self.connection = connection
        self.log = log
        self.schema = schema
        self.worker: Worker
        self._keys = itertools.count()
        self._turn = asyncio.Lock()  # handlers and hooks ask in between

    async def enqueue(self, kind: str, payload: object = None, **options: Any) -> int:
        """The id of a new job, which has a key of its own unless one is given."""
        options.setdefault("key", f"job-{next(self._keys)}")
        async with self._turn:
            return (await enqueue(self.connection, kind, payload, schema=self.schema, **options)).id

    async def row(self, id: int) -> Mapping[str, Any]:
        table = '"' + self.schema.replace('"', '""') + '".jobs'
        async with self._turn:
            row = await self.connection.fetchrow(f"SELECT * FROM {table} WHERE id = $1", id)
        assert row is not None, f"no job {id}"
        return dict(row) | {"result": None if row["result"] is None else decode_json(row["result"])}

    async def ended(self, id: int, timeout_seconds: float = 30) -> Mapping[str, Any]:
        """The row once its job is terminal. The log may be a moment behind: see `said`."""

        async def terminal() -> Mapping[str, Any] | None:
            row = await self.row(id)
            return row if row["state"] in _TERMINAL else None

        row = await await_for(terminal, timeout_seconds)
        assert row is not None
        return row

    async def all_ended(self, timeout_seconds: float = 30) -> Counter[str]:
        """How many jobs are in which state, once all are terminal."""

        async def over() -> bool:
            return not await self.value("SELECT EXISTS (SELECT FROM jobs WHERE state IN ('ready', 'running'))")

        await await_for(over, timeout_seconds)
        return Counter(await self.column("SELECT state FROM jobs"))

    async def run(self, kind: str, payload: object = None, **options: Any) -> Mapping[str, Any]:
        """Enqueue, and the row at its end."""
        return await self.ended(await self.enqueue(kind, payload, **options))

    async def value(self, sql: str, *arguments: object) -> Any:
        async with self._turn:
            return await self.connection.fetchval(sql, *arguments)

    async def column(self, sql: str, *arguments: object) -> list[Any]:
        async with self._turn:
            return [row[0] for row in await self.connection.fetch(sql, *arguments)]

    async def said(self, event: Event, timeout_seconds: float = 30, **fields: object) -> dict[str, Any]:
        """The first such line; waits for it, since lines follow the rows they tell of."""
        found = await await_for(lambda: self.log.find(event, **fields), timeout_seconds)
        return dict(found[0])


@contextlib.asynccontextmanager
async def seen(dsn: str, *, schema: str = "public") -> AsyncIterator[Run]:
    """The database without a Worker: enqueue first, start Workers with `working`."""
    connection = await Database(dsn, schema=schema, environ={}, limits=_PATIENT).connect("test")
    try:
        with listening() as log:
            yield Run(dsn, connection, log, schema)
    finally:
        connection.terminate()


@contextlib.asynccontextmanager
async def running(dsn: str, handlers: Handlers, *, schema: str = "public", **settings: Any) -> AsyncIterator[Run]:
    """A Worker at work, drained when the block is left."""
    async with seen(dsn, schema=schema) as run, Worker(handlers, quick(dsn, schema_name=schema, **settings)) as worker:
        run.worker = worker
        yield run


async def claim_ahead(worker: Worker, jobs: int) -> None:
    """As if its jobs had been quick lately: claim so many although every slot is taken."""
    assert worker.parts is not None
    claimer = worker.parts.claimer
    await await_for(lambda: not claimer.is_hungry)  # its own loop asks for nothing then
    await claimer._round(jobs)
    assert worker.parts.pool.waiting() == jobs


TABLE = "CREATE TABLE applied (key text, fence bigint, note text)"
APPLY = "INSERT INTO applied (key, fence) VALUES ($1, $2)"
APPLIED = "SELECT key FROM applied ORDER BY key"
"""A table for effects, one of them, and what has been committed."""


async def expire(run: Run, id: int) -> None:
    """What the reaper does when another process has taken the job away meanwhile: owner and fence move on."""
    sql = "UPDATE jobs SET fence = nextval('fence_seq'), lease_owner = 'somebody-else' WHERE id = $1 AND state = 'running'"
    assert await run.connection.execute(sql, id) == "UPDATE 1"


async def connect(dsn: str) -> asyncpg.Connection:
    """A plain connection, as an application has one."""
    return await asyncpg.connect(dsn)
