"""Pulse: how the jobs and daemons of a torture are doing while it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.store.audit import microseconds

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

UNFINISHED = """
SELECT count(*) FILTER (WHERE state = 'ready'), count(*) FILTER (WHERE state = 'running')
FROM {schema}.jobs WHERE state IN ('ready', 'running')
"""


async def count_unfinished(connection: Connection, database: Database) -> tuple[int, int]:
    """How many jobs are ready, and how many run."""
    ready, running = await connection.fetchrow(database.sql(UNFINISHED))
    return ready, running


# Index torture_jobs_done.
COMPLETED = f"""
SELECT count(*), {microseconds("clock_timestamp()")} FROM {{schema}}.torture_jobs
WHERE new_state = 'succeeded' AND old_state = 'running' AND at > clock_timestamp() - $1::float8 * interval '1 second'
"""


async def count_completed(connection: Connection, database: Database, *, seconds: float) -> tuple[int, int]:
    """How many jobs succeeded in the last so many seconds, and the database's clock."""
    completed, now = await connection.fetchrow(database.sql(COMPLETED), seconds)
    return completed, now


async def read_clock(connection: Connection) -> int:
    """Microseconds since 1970 by the database's clock."""
    now: int = await connection.fetchval(f"SELECT {microseconds('clock_timestamp()')}")
    return now


LEFT = "SELECT count(*) FROM {schema}.jobs WHERE kind = $1 AND state IN ('ready', 'running')"


async def count_unfinished_of(connection: Connection, database: Database, *, kind: str) -> int:
    """The same for one kind."""
    return int(await connection.fetchval(database.sql(LEFT), kind))


PROCESSES = "SELECT count(*) FROM {schema}.processes WHERE expires_at > now()"


async def count_processes(connection: Connection, database: Database) -> int:
    """How many daemons have said that they live."""
    return int(await connection.fetchval(database.sql(PROCESSES)))
