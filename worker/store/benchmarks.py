"""What `worker bench` does in the schemas of its own: fill them, watch a run, count what came of it.

Statements that run while something is measured carry a comment by which pg_stat_statements can leave them out.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

_SETTINGS = (
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "wal_level",
    "synchronous_standby_names",
    "commit_delay",
    "wal_compression",
    "wal_buffers",
    "max_wal_size",
    "checkpoint_timeout",
    "shared_buffers",
    "data_checksums",
    "autovacuum",
    "autovacuum_naptime",
    "track_commit_timestamp",
    "default_toast_compression",
    "max_connections",
    "shared_preload_libraries",
)


class Session(NamedTuple):
    """The server as this role sees it."""

    version: str
    backend: int
    user: str
    database: str
    started_at: str
    """By its clock, ISO 8601 UTC."""
    settings: dict[str, str]


SESSION = """
SELECT current_setting('server_version'), pg_backend_pid(), current_user::text, current_database()::text,
    to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
"""
SETTINGS = "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY ($1)"


async def describe(connection: Connection) -> Session:
    """What a reader has to know of the server. What this role may not see is left out of the settings."""
    values = dict(await connection.fetch(SETTINGS, list(_SETTINGS)))
    settings = {name: values[name] for name in _SETTINGS if name in values}
    version, backend, user, database, started_at = await connection.fetchrow(SESSION)
    return Session(version, backend, user, database, started_at, settings)


async def remove(connection: Connection, database: Database) -> None:
    """Drop the schema with everything in it."""
    await connection.execute(database.sql("DROP SCHEMA IF EXISTS {schema} CASCADE"))


# --- jobs to measure with

EMPTY = "TRUNCATE {schema}.jobs, {schema}.processed_messages, {schema}.job_effects, {schema}.job_failures"
EMPTY_BUT_LEDGER = "TRUNCATE {schema}.jobs, {schema}.processed_messages, {schema}.job_failures"


async def empty(connection: Connection, database: Database) -> None:
    await connection.execute(database.sql(EMPTY))


async def empty_but_ledger(connection: Connection, database: Database) -> None:
    await connection.execute(database.sql(EMPTY_BUT_LEDGER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Jobs to write, all alike but for their number, key, queue and priority."""

    count: int
    kind: str
    text: str
    """Part of each payload, `{"n": 17, "text": …}`."""
    queues: tuple[str, ...] = ("default",)
    """In turn."""
    priorities: int = 1
    """So many, from the highest to 0, each for as many jobs: in the order of the ids as well as in that of the claims."""
    random_keys: bool = False
    """Else they rise, as those of an application that takes them from a sequence."""
    max_attempts: int = 5


FILL = """
INSERT INTO {schema}.jobs (idempotency_key, kind, queue, priority, payload, max_attempts, available_at)
SELECT CASE WHEN $2 THEN gen_random_uuid()::text ELSE $1 || g END, $3, ($4::text[])[1 + g % cardinality($4::text[])],
    $5::int - 1 - (g - 1)::bigint * $5::int / $6::int, jsonb_build_object('n', g, 'text', $7::text), $8, to_timestamp($9::float8)
FROM generate_series(1, $6::int) AS g
"""
LAST_ID = "SELECT COALESCE(max(id), 0) FROM {schema}.jobs"


class Jobs(NamedTuple):
    """Jobs with neighbouring ids, both ends included."""

    first_id: int
    last_id: int

    @property
    def number(self) -> int:
        return self.last_id - self.first_id + 1


async def fill(connection: Connection, database: Database, filling: Filling, *, keys: str, due_at_seconds: float) -> Jobs:
    """Jobs with keys that begin with `keys`, due together at a moment of the database's clock (seconds since 1970)."""
    await connection.execute(
        database.sql(FILL),
        keys,
        filling.random_keys,
        filling.kind,
        list(filling.queues),
        filling.priorities,
        filling.count,
        filling.text,
        filling.max_attempts,
        due_at_seconds,
    )
    last_id: int = await connection.fetchval(database.sql(LAST_ID))
    # Nobody else inserts here, so the ids follow each other.
    return Jobs(last_id - filling.count + 1, last_id)


FILL_FINISHED = """
INSERT INTO {schema}.jobs (idempotency_key, kind, payload, state, attempts, fence, created_at, started_at, completed_at)
SELECT 'finished-' || g, $1, jsonb_build_object('n', g, 'text', $2::text), 'succeeded', 1, nextval('{schema}.fence_seq'),
    now() - make_interval(secs => $4), now() - make_interval(secs => $4), now() - make_interval(secs => $4)
FROM generate_series(1, $3::int) AS g
"""


async def fill_finished(
    connection: Connection, database: Database, count: int, *, kind: str, text: str, age_seconds: float = 0
) -> None:
    """History: jobs that have succeeded so long ago."""
    await connection.execute(database.sql(FILL_FINISHED), kind, text, count, age_seconds)


async def vacuum(connection: Connection, database: Database) -> None:
    """What autovacuum would do in a while, so that each run starts alike."""
    await connection.execute(database.sql("VACUUM (ANALYZE) {schema}.jobs"))


async def checkpoint(connection: Connection) -> bool:
    """So that none comes in the middle of a run by chance; False where this role may not."""
    try:
        await connection.execute("CHECKPOINT")
    except asyncpg.InsufficientPrivilegeError:
        return False
    return True


MOMENT = "SELECT extract(epoch FROM clock_timestamp())::float8 + $1::float8 /* worker bench */"


async def moment_in(connection: Connection, seconds: float) -> float:
    """The database's clock that far ahead, in seconds since 1970."""
    moment: float = await connection.fetchval(MOMENT, seconds)
    return moment


# --- watching

# jobs_pkey. A row that is gone (a retention of 0) has ended.
HAS_ENDED = "SELECT state FROM {schema}.jobs WHERE id = $1 /* worker bench */"

HAVE_ENDED = """
SELECT NOT EXISTS (SELECT FROM {schema}.jobs WHERE id BETWEEN $1 AND $2 AND state IN ('ready', 'running')),
    extract(epoch FROM clock_timestamp())::float8 /* worker bench */
"""


async def has_ended(connection: Connection, database: Database, id: int) -> bool:
    return await connection.fetchval(database.sql(HAS_ENDED), id) not in ("ready", "running")


async def ended_at(connection: Connection, database: Database, jobs: Jobs) -> float | None:
    """The database's clock (seconds since 1970) if all of these have ended, else None."""
    ended, seconds = await connection.fetchrow(database.sql(HAVE_ENDED), *jobs)
    return seconds if ended else None


IDLE = "SELECT count(*) FROM {schema}.processes WHERE hungry AND pid = ANY ($1::int[])"
KNOWN = "SELECT count(*) FROM {schema}.processes WHERE pid = ANY ($1::int[])"
RUNNING = "SELECT count(*) FROM {schema}.jobs WHERE state = 'running'"
READY = "SELECT count(*) FROM {schema}.jobs WHERE state = 'ready' AND available_at <= now()"


async def count_idle(connection: Connection, database: Database, pids: Sequence[int]) -> int:
    """How many of these processes have looked, found nothing, and wait to be woken."""
    return int(await connection.fetchval(database.sql(IDLE), list(pids)))


async def count_known(connection: Connection, database: Database, pids: Sequence[int]) -> int:
    """How many of these processes have told that they are there."""
    return int(await connection.fetchval(database.sql(KNOWN), list(pids)))


async def count_running(connection: Connection, database: Database) -> int:
    return int(await connection.fetchval(database.sql(RUNNING)))


async def count_ready(connection: Connection, database: Database) -> int:
    """How many wait that could run."""
    return int(await connection.fetchval(database.sql(READY)))


async def count_rows(connection: Connection, database: Database, *, kind: str) -> int:
    """All jobs of a kind, whatever their state."""
    return int(await connection.fetchval(database.sql("SELECT count(*) FROM {schema}.jobs WHERE kind = $1"), kind))


# --- what came of it

TALLY = """
SELECT extract(epoch FROM min(started_at))::float8, count(*) FILTER (WHERE state = 'succeeded'),
    count(*) FILTER (WHERE attempts > 1),
    count(*) FILTER (WHERE EXISTS (
        SELECT FROM {schema}.processed_messages AS m WHERE m.idempotency_key = j.idempotency_key))
FROM {schema}.jobs AS j
WHERE id BETWEEN $1 AND $2
"""


class Tally(NamedTuple):
    first_claim_at: float
    succeeded: int
    retried: int
    effects: int


async def tally(connection: Connection, database: Database, jobs: Jobs) -> Tally:
    return Tally(*await connection.fetchrow(database.sql(TALLY), *jobs))


PARTS = """
WITH ordered AS (
    SELECT completed_at, row_number() OVER (ORDER BY completed_at, id) AS place
    FROM {schema}.jobs
    WHERE id BETWEEN $1 AND $2
)
SELECT extract(epoch FROM completed_at)::float8 FROM ordered WHERE place = ANY ($3::bigint[]) ORDER BY place
"""


async def completed_at(connection: Connection, database: Database, jobs: Jobs, places: Sequence[int]) -> list[float]:
    """When the first, second, … job to complete did so (the beginning of its transaction), for these places, counted from 1."""
    return [row[0] for row in await connection.fetch(database.sql(PARTS), *jobs, list(places))]


RESULTS = "SELECT id, result::text::float8 FROM {schema}.jobs WHERE state = 'succeeded' AND id = ANY ($1::bigint[])"


async def results(connection: Connection, database: Database, ids: Sequence[int]) -> dict[int, float]:
    """The numbers that these jobs returned, as far as they have."""
    return {row[0]: row[1] for row in await connection.fetch(database.sql(RESULTS), list(ids))}


# --- an old snapshot


@contextlib.asynccontextmanager
async def old_snapshot(database: Database) -> AsyncIterator[None]:
    """A REPEATABLE READ transaction that has read once and stays open for the block."""
    connection = await database.connect("bench snapshot", settings={"idle_in_transaction_session_timeout": "0"})
    try:
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await connection.fetchval(database.sql(LAST_ID))
        yield
    finally:
        connection.terminate()
