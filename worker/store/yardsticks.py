"""Three yardsticks for `worker bench`: a queue as anybody writes it in an afternoon, and what PostgreSQL can do at most.

- `naive`: the recipe as it is described: a pool of connections, a claim that reads ready and expired jobs with one OR, and one
  transaction with effect and completion a job;
- `one by one`: the same with what an experienced hand would change: connections of their own, a claim over the ready index;
- `ceiling`: claims of 300 and grouped commits of 300, each on a connection of its own, with nothing between the two: no
  handlers, no leases to renew, no ledger, no logs.

All work on a table that has what such a queue needs and nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from worker.clock import local_seconds

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

# As the daemon's own connections: a custom plan for each group would cost more than it gains.
CEILING_SETTINGS = {"plan_cache_mode": "force_generic_plan"}

TABLES = """
CREATE TABLE {schema}.yardstick_jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key text COLLATE "C" NOT NULL UNIQUE,
    payload jsonb NOT NULL,
    state text COLLATE "C" NOT NULL DEFAULT 'ready' CHECK (state IN ('ready', 'running', 'succeeded', 'dead')),
    attempts int NOT NULL DEFAULT 0,
    max_attempts int NOT NULL DEFAULT 5,
    fence bigint NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL DEFAULT now(),
    owner text COLLATE "C",
    owned_until timestamptz,
    last_error text,
    created_at timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz
);
CREATE INDEX ON {schema}.yardstick_jobs (due_at, id) WHERE state = 'ready';
CREATE INDEX ON {schema}.yardstick_jobs (owned_until) WHERE state = 'running';
CREATE TABLE {schema}.yardstick_effects (
    key text COLLATE "C" PRIMARY KEY,
    message text NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now()
);
"""
EMPTY = "TRUNCATE {schema}.yardstick_jobs, {schema}.yardstick_effects"
FILL = """
INSERT INTO {schema}.yardstick_jobs (key, payload)
SELECT 'k-' || g, jsonb_build_object('n', g, 'text', $2::text) FROM generate_series(1, $1::int) AS g
"""


async def make_tables(connection: Connection, database: Database) -> None:
    await connection.execute(database.sql(TABLES))


async def fill(connection: Connection, database: Database, count: int, *, text: str) -> None:
    """Exactly `count` jobs, all due."""
    await connection.execute(database.sql(EMPTY))
    await connection.execute(database.sql(FILL), count, text)
    await connection.execute(database.sql("VACUUM (ANALYZE) {schema}.yardstick_jobs"))


COUNT = """
SELECT (SELECT count(*) FROM {schema}.yardstick_jobs WHERE state = 'succeeded' AND attempts = 1),
    (SELECT count(*) FROM {schema}.yardstick_effects)
"""


async def count_done(connection: Connection, database: Database) -> tuple[int, int]:
    """Jobs that have succeeded, and effects."""
    succeeded, effects = await connection.fetchrow(database.sql(COUNT))
    return succeeded, effects


# --- one by one

CLAIM_NAIVE = """
WITH candidate AS (
    SELECT id FROM {schema}.yardstick_jobs
    WHERE attempts < max_attempts
        AND ((state = 'ready' AND due_at <= now()) OR (state = 'running' AND owned_until < now()))
    ORDER BY due_at, id
    FOR UPDATE SKIP LOCKED
    LIMIT 1
)
UPDATE {schema}.yardstick_jobs AS j
SET state = 'running', owner = $1, owned_until = now() + interval '30 seconds', attempts = attempts + 1, fence = fence + 1
FROM candidate
WHERE j.id = candidate.id
RETURNING j.id, j.key, j.fence, j.payload::text
"""
CLAIM_ONE = """
UPDATE {schema}.yardstick_jobs
SET state = 'running', owner = $1, owned_until = now() + interval '30 seconds', attempts = attempts + 1, fence = fence + 1
WHERE id = (
    SELECT id FROM {schema}.yardstick_jobs
    WHERE state = 'ready' AND due_at <= now()
    ORDER BY due_at, id
    LIMIT 1
    FOR NO KEY UPDATE SKIP LOCKED)
RETURNING id, key, fence, payload::text
"""
FINISH_ONE = """
UPDATE {schema}.yardstick_jobs
SET state = 'succeeded', completed_at = now(), owner = NULL, owned_until = NULL, last_error = NULL
WHERE id = $1 AND fence = $2 AND owner = $3
"""
EFFECT = "INSERT INTO {schema}.yardstick_effects (key, message) VALUES ($1, 'm')"


class Claimed(NamedTuple):
    id: int
    key: str
    fence: int
    payload: str


async def claim_naive(connection: Connection, database: Database, *, owner: str) -> Claimed | None:
    """One claim as the recipe has it, committed; None when nothing is left."""
    row = await connection.fetchrow(database.sql(CLAIM_NAIVE), owner)
    return None if row is None else Claimed(*row)


async def claim_one(connection: Connection, database: Database, *, owner: str) -> Claimed | None:
    """One claim, committed; None when nothing is left."""
    row = await connection.fetchrow(database.sql(CLAIM_ONE), owner)
    return None if row is None else Claimed(*row)


async def finish_one(connection: Connection, database: Database, job: Claimed, *, owner: str, effect: bool) -> None:
    """Effect and completion in one transaction."""
    async with connection.transaction():
        if effect:
            await connection.execute(database.sql(EFFECT), job.key)
        await connection.execute(database.sql(FINISH_ONE), job.id, job.fence, owner)


# --- in groups

CLAIM_GROUP = """
WITH due AS MATERIALIZED (
    SELECT id, state FROM {schema}.yardstick_jobs
    WHERE state = 'ready' AND due_at <= now() AND (due_at, id) > ($1, $2)
    ORDER BY due_at, id
    LIMIT 300
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {schema}.yardstick_jobs AS j
SET state = 'running', owner = 'c', owned_until = now() + interval '30 seconds', attempts = j.attempts + 1, fence = j.fence + 1
FROM due
WHERE j.id = due.id AND j.state = due.state
RETURNING j.id, j.key, j.fence, j.payload::text, j.due_at
"""
FINISH_GROUP = """
UPDATE {schema}.yardstick_jobs AS j
SET state = 'succeeded', completed_at = now(), owner = NULL, owned_until = NULL, last_error = NULL
FROM unnest($1::bigint[], $2::bigint[]) AS held(id, fence)
WHERE j.id = held.id AND j.fence = held.fence AND j.owner = 'c'
RETURNING j.id
"""


class Cursor(NamedTuple):
    """The last job taken: the next claim starts behind it, and walks over no dead index entry twice."""

    due_at: datetime
    id: int


START = Cursor(datetime(2000, 1, 1, tzinfo=UTC), 0)


async def claim_group(connection: Connection, database: Database, cursor: Cursor) -> tuple[list[Claimed], Cursor]:
    """Up to 300 jobs behind the cursor, committed, and where the next claim starts."""
    rows = await connection.fetch(database.sql(CLAIM_GROUP), *cursor)
    return [Claimed(*row[:4]) for row in rows], max((Cursor(row[4], row[0]) for row in rows), default=cursor)


async def finish_group(connection: Connection, database: Database, jobs: Sequence[Claimed], *, effect: bool) -> None:
    """Effects and completions of a group in one transaction."""
    async with connection.transaction():
        await connection.fetch(database.sql(FINISH_GROUP), [job.id for job in jobs], [job.fence for job in jobs])
        if effect:
            await connection.executemany(database.sql(EFFECT), [(job.key,) for job in jobs])


# --- NOTIFY


class Echo:
    """Two connections, of which one notifies and the other listens."""

    def __init__(self, sender: Connection, channel: str) -> None:
        self._sender = sender
        self._channel = channel
        self._arrived: asyncio.Future[float] | None = None

    def heard(self, *_: object) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(local_seconds())

    async def round_trip_seconds(self) -> float:
        """From sending a NOTIFY to its arrival at the other connection."""
        self._arrived = asyncio.get_running_loop().create_future()
        sent_at = local_seconds()
        await self._sender.execute(f"NOTIFY {self._channel} /* worker bench */")
        async with asyncio.timeout(10):
            return await self._arrived - sent_at


@contextlib.asynccontextmanager
async def echo(database: Database) -> AsyncIterator[Echo]:
    """A bare NOTIFY to measure against."""
    channel = f"{database.schema}_echo"
    sender = await database.connect("bench notify")
    try:
        listener = await database.connect("bench listen")
        try:
            found = Echo(sender, channel)
            await listener.add_listener(channel, found.heard)
            yield found
        finally:
            listener.terminate()
    finally:
        sender.terminate()
