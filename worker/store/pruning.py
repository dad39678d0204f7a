"""Pruning: what has outlived its retention goes, in small batches that nobody has to wait for.

Each function is one short statement, skips locked rows and returns where to go on; whoever calls decides how
often, and may stop between any two. A walk that is broken off loses nothing: the next one starts at the
front.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

FROM_THE_START = 0
_LEDGER_BATCH = 1_000


class PruneStep(NamedTuple):
    """What one step did, and the cursor of the next one; None at the end of the walk."""

    deleted: int
    next_cursor: int | None


# A page of the primary key: there is no index on completed_at on purpose, every completion would pay for it.
# Rows come in about the order of their creation, and nothing ends before it is created: the walk is over at
# the first page that is younger than every retention, which in a table of young rows is the first one. `= ANY
# (ARRAY(…))` keeps the look-ups on the primary key whatever the planner believes about the number of rows.
PRUNE_JOBS = """
WITH page AS MATERIALIZED (
    SELECT id, created_at
    FROM {schema}.jobs
    WHERE id > $1
    ORDER BY id
    LIMIT 1000
), bound AS MATERIALIZED (
    SELECT max(id) AS id,
        min(created_at) < now() - LEAST($2::float8, $3::float8) * interval '1 second' AS goes_on
    FROM page
), old AS MATERIALIZED (
    SELECT id
    FROM {schema}.jobs
    WHERE id > $1 AND id <= (SELECT bound.id FROM bound) AND state NOT IN ('ready', 'running')
        AND completed_at
            < now() - CASE state WHEN 'dead' THEN $3::float8 ELSE $2::float8 END * interval '1 second'
    FOR UPDATE SKIP LOCKED
), failures AS (
    DELETE FROM {schema}.job_failures WHERE job_id = ANY (ARRAY(SELECT id FROM old))
), deleted AS (
    DELETE FROM {schema}.jobs WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
)
SELECT (SELECT count(*) FROM deleted) AS deleted, bound.id, bound.goes_on
FROM bound
"""


async def prune_jobs(
    connection: Connection,
    database: Database,
    *,
    cursor: int = FROM_THE_START,
    retention_seconds: float | None,
    dead_retention_seconds: float | None,
) -> PruneStep:
    """Look at one page of at most 1,000 jobs; delete the finished ones past retention with their failures.

    `retention_seconds` is for succeeded and cancelled jobs; None keeps them for ever. The cursor is an id.
    """
    if retention_seconds is None and dead_retention_seconds is None:
        return PruneStep(0, None)
    row = await connection.fetchrow(database.sql(PRUNE_JOBS), cursor, retention_seconds, dead_retention_seconds)
    return PruneStep(row["deleted"], row["id"] if row["goes_on"] else None)


# What a deleted job leaves behind: one deleted by its completion (a retention of 0), or by hand.
PRUNE_ORPHANED_FAILURES = """
WITH page AS MATERIALIZED (
    SELECT job_id
    FROM {schema}.job_failures
    WHERE job_id > $1
    ORDER BY job_id
    LIMIT 1000
), orphaned AS MATERIALIZED (
    SELECT DISTINCT p.job_id
    FROM page AS p
    WHERE (SELECT j.id FROM {schema}.jobs AS j WHERE j.id = p.job_id) IS NULL
), deleted AS (
    DELETE FROM {schema}.job_failures WHERE job_id = ANY (ARRAY(SELECT job_id FROM orphaned)) RETURNING job_id
)
SELECT (SELECT count(*) FROM deleted) AS deleted, (SELECT max(job_id) FROM page) AS last_id
"""


async def prune_orphaned_failures(connection: Connection, database: Database, *, cursor: int = FROM_THE_START) -> PruneStep:
    """Look at one page of at most 1,000 failures; delete those whose job is gone. The cursor is a job id."""
    row = await connection.fetchrow(database.sql(PRUNE_ORPHANED_FAILURES), cursor)
    return PruneStep(row["deleted"], row["last_id"])


# Index job_effects_committed_at, block ranges. The lower bound keeps a walk from reading again what it has deleted.
# The job is looked up key by key, through its unique index: as a join it could become a scan of all jobs.
# No row locks: they would need the right to UPDATE the ledger, which nobody should have. Two at once wait for each other
# in key order, as the primary key is read.
PRUNE_LEDGER = """
WITH old AS MATERIALIZED (
    SELECT e.idempotency_key, e.committed_at
    FROM {schema}.job_effects AS e
    WHERE e.committed_at >= timestamptz 'epoch' + $1::bigint * interval '1 microsecond'
        AND e.committed_at < now() - $2::float8 * interval '1 second'
        AND COALESCE(
            (SELECT j.state FROM {schema}.jobs AS j WHERE j.idempotency_key = e.idempotency_key), 'none'
        ) NOT IN ('ready', 'running')
    LIMIT 1000
), deleted AS (
    DELETE FROM {schema}.job_effects
    WHERE idempotency_key = ANY (ARRAY(SELECT idempotency_key FROM old))
    RETURNING committed_at
)
SELECT count(*) AS deleted, (extract(epoch FROM max(committed_at)) * 1000000)::bigint AS last_moment
FROM deleted
"""


async def prune_ledger(
    connection: Connection,
    database: Database,
    *,
    cursor: int = FROM_THE_START,
    ledger_retention_seconds: float | None,
) -> PruneStep:
    """Delete at most 1,000 ledger rows past retention, never one whose key an unfinished job has.

    From then on a job that is enqueued with that key has its effect again. The cursor is a moment.
    """
    if ledger_retention_seconds is None:
        return PruneStep(0, None)
    row = await connection.fetchrow(database.sql(PRUNE_LEDGER), cursor, ledger_retention_seconds)
    return PruneStep(row["deleted"], row["last_moment"] if row["deleted"] == _LEDGER_BATCH else None)


# The reaper tells crashed from merely late by presence: what has lapsed says the same as what is gone.
PRUNE_PROCESSES = """
DELETE FROM {schema}.processes
WHERE id IN (
    SELECT id FROM {schema}.processes WHERE expires_at < now() - interval '5 minutes' FOR UPDATE SKIP LOCKED)
RETURNING id
"""


async def prune_processes(connection: Connection, database: Database) -> int:
    """Delete the presence rows of processes that have been gone for five minutes; returns how many."""
    return len(await connection.fetch(database.sql(PRUNE_PROCESSES)))


# Index leases_pkey, page by page: an index on the end of a lease would cost every renewal its place in the page. A resource that
# is used again keeps its old id, so the walk looks at them all.
PRUNE_LEASES = """
WITH page AS MATERIALIZED (
    SELECT id
    FROM {schema}.leases
    WHERE id > $1
    ORDER BY id
    LIMIT 1000
), old AS MATERIALIZED (
    SELECT id
    FROM {schema}.leases
    WHERE id > $1 AND id <= (SELECT max(id) FROM page)
        AND LEAST(released_at, expires_at) < clock_timestamp() - $2::float8 * interval '1 second'
    FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM {schema}.leases WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
)
SELECT (SELECT count(*) FROM deleted) AS deleted, (SELECT max(id) FROM page) AS last_id
"""


async def prune_leases(
    connection: Connection, database: Database, *, cursor: int = FROM_THE_START, retention_seconds: float | None
) -> PruneStep:
    """Look at one page of at most 1,000 named leases; delete those that ended longer ago than the retention. The cursor is an id.

    A repeated request_id is remembered no longer than that.
    """
    if retention_seconds is None:
        return PruneStep(0, None)
    row = await connection.fetchrow(database.sql(PRUNE_LEASES), cursor, retention_seconds)
    return PruneStep(row["deleted"], row["last_id"])


class Pruned(NamedTuple):
    """How many rows of each sort `prune_all` has deleted."""

    jobs: int
    failures: int
    ledger: int
    processes: int
    leases: int


async def prune_all(
    connection: Connection,
    database: Database,
    *,
    retention_seconds: float | None,
    dead_retention_seconds: float | None,
    ledger_retention_seconds: float | None,
) -> Pruned:
    """Delete everything that is past its retention, in the same small steps; may take as long as it takes."""
    jobs = await _walk(
        lambda cursor: prune_jobs(
            connection,
            database,
            cursor=cursor,
            retention_seconds=retention_seconds,
            dead_retention_seconds=dead_retention_seconds,
        )
    )
    failures = await _walk(lambda cursor: prune_orphaned_failures(connection, database, cursor=cursor))
    ledger = 0
    # The cursor follows the order on disk, which is that of time except where room was used again: look once more.
    while walked := await _walk(
        lambda cursor: prune_ledger(connection, database, cursor=cursor, ledger_retention_seconds=ledger_retention_seconds)
    ):
        ledger += walked
    processes = await prune_processes(connection, database)
    leases = await _walk(lambda cursor: prune_leases(connection, database, cursor=cursor, retention_seconds=retention_seconds))
    return Pruned(jobs, failures, ledger, processes, leases)


async def _walk(step: Callable[[int], Awaitable[PruneStep]]) -> int:
    deleted = 0
    cursor: int | None = FROM_THE_START
    while cursor is not None:
        done = await step(cursor)
        deleted += done.deleted
        cursor = done.next_cursor
    return deleted
