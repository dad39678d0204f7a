"""Reap: return jobs whose lease has expired, or bury those that have used up their attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

REAP_BATCH = 300
FROM_THE_START = -(2**63)

# Index jobs_running, from `horizon` on: what sorts before it was reaped earlier, and its dead entries need not be read again.
# `now()`, not clock_timestamp(): an index condition instead of a filter over everything that runs.
# A job is a crash's victim if its owner's presence has lapsed as well; a live owner that let the lease go only lost it. So did a
# remote worker (over HTTP): it has no presence, and nobody can tell its end from a lost connection.
REAP = """
WITH expired AS MATERIALIZED (
    SELECT j.id, j.fence, j.lease_owner, j.lease_until,
        NOT j.lease_owner ^@ 'http:'
            AND NOT EXISTS (SELECT FROM {schema}.processes AS p WHERE p.id = j.lease_owner AND p.expires_at > now()) AS crashed
    FROM {schema}.jobs AS j
    WHERE j.state = 'running' AND j.lease_until < now() AND j.lease_until >= $1
    ORDER BY j.lease_until, j.id
    LIMIT {limit}
    FOR NO KEY UPDATE SKIP LOCKED
), reaped AS (
    UPDATE {schema}.jobs AS j
    SET state = CASE WHEN j.attempts >= j.max_attempts THEN 'dead' ELSE 'ready' END,
        completed_at = CASE WHEN j.attempts >= j.max_attempts THEN now() END,
        crashes = CASE WHEN e.crashed THEN LEAST(j.crashes + 1, 32767) ELSE j.crashes END,
        last_error = left(CASE WHEN e.crashed THEN 'worker lost: ' ELSE 'lease lost: ' END || e.lease_owner, 1000),
        lease_owner = NULL, lease_until = NULL
    FROM expired AS e
    WHERE j.id = e.id AND j.fence = e.fence AND j.lease_owner = e.lease_owner
    RETURNING j.id, j.fence, j.kind, j.queue, j.attempts, j.state, e.lease_owner, e.crashed, e.lease_until
), failures AS (
    INSERT INTO {schema}.job_failures (job_id, fence, attempt, worker, outcome, error)
    SELECT r.id, r.fence, r.attempts, r.lease_owner, CASE WHEN r.crashed THEN 'crashed' ELSE 'lease_lost' END,
        CASE WHEN r.crashed THEN 'worker lost: ' ELSE 'lease lost: ' END || r.lease_owner
    FROM reaped AS r
    ON CONFLICT (job_id, fence) DO NOTHING
), trimmed AS (
    DELETE FROM {schema}.job_failures AS f
    USING reaped AS r
    WHERE f.job_id = r.id AND f.fence <= (
        SELECT g.fence FROM {schema}.job_failures AS g WHERE g.job_id = r.id ORDER BY g.fence DESC OFFSET 19 LIMIT 1)
)
SELECT id, fence, kind, queue, attempts, state, lease_owner, crashed, lease_until,
    CASE WHEN state = 'ready' THEN {schema}.wake_workers(queue) IS NULL END
FROM reaped
""".replace("{limit}", str(REAP_BATCH))


class Reaped(NamedTuple):
    """One job taken from a worker that let its lease expire."""

    id: int
    fence: int
    kind: str
    queue: str
    attempt: int
    state: str
    lost_worker: str
    crashed: bool
    lease_until: int
    """Microseconds since 2000-01-01 UTC."""


async def reap(connection: Connection, database: Database, *, horizon: int) -> list[Reaped]:
    """One batch (at most REAP_BATCH) of expired leases at or behind `horizon`, oldest first."""
    rows = await connection.fetch(database.sql(REAP), horizon)
    return sorted((Reaped(*row[:9]) for row in rows), key=lambda job: job.lease_until)


# Index jobs_exhausted, which is empty unless somebody changed attempts or max_attempts by hand.
BURY = """
UPDATE {schema}.jobs AS j
SET state = 'dead', completed_at = now(), last_error = COALESCE(j.last_error, 'attempts used up')
WHERE j.id IN (
    SELECT id FROM {schema}.jobs
    WHERE state = 'ready' AND attempts >= max_attempts
    ORDER BY id LIMIT 300
    FOR NO KEY UPDATE SKIP LOCKED)
RETURNING j.id, j.kind, j.queue, j.attempts, j.fence
"""


class Buried(NamedTuple):
    id: int
    kind: str
    queue: str
    attempt: int
    fence: int


async def bury(connection: Connection, database: Database) -> list[Buried]:
    """Ready rows without attempts left would never be claimed: make them dead."""
    return [Buried(*row) for row in await connection.fetch(database.sql(BURY))]
