"""Jobs to be claimed, who claims them without a Worker, and in which order they start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.inprocess import Run
from worker import Handlers, Job
from worker.domain import ClaimedJob
from worker.store import claiming
from worker.store.connection import Connection, Database, read_moments_as_microseconds

OWNER = "test-00000000"

ADD = """
INSERT INTO jobs (idempotency_key, kind, queue, priority, available_at, payload)
SELECT $1 || n, 'note', $2, $3, now() - interval '1 hour' + n * interval '1 second' + $4 * interval '1 second', '{}'
FROM generate_series(1, $5::int) AS n
"""


async def add(run: Run, name: str, count: int = 1, *, queue: str = "default", priority: int = 0, later_seconds: float = 0) -> None:
    """Jobs `<name>1`, `<name>2` … of kind `note`, a second apart, due an hour ago."""
    await run.connection.execute(ADD, name, queue, priority, later_seconds, count)


def noting() -> tuple[Handlers, list[str]]:
    """A handler that notes the keys of its jobs in the order in which they start."""
    handlers, started = Handlers(), []

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        started.append(job.key)

    return handlers, started


@asynccontextmanager
async def session(dsn: str, settings: dict[str, str]) -> AsyncIterator[tuple[Connection, Database]]:
    """A connection as one of the loops has it."""
    database = Database(dsn, environ={})
    connection = await database.connect("claim", settings=settings, statement_timeout_seconds=20)
    try:
        await read_moments_as_microseconds(connection)
        yield connection, database
    finally:
        connection.terminate()


async def claim(connection: Connection, database: Database, limit: int = 10, **options: Any) -> list[ClaimedJob]:
    chosen = {"queue": "default", "priority": 0, "owner": OWNER, "lease_seconds": 3600, "payload_bytes": 10_000_000} | options
    return await claiming.claim(connection, database, limit=limit, **chosen)
