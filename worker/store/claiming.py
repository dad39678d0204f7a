"""Claim: the short committed statement that moves ready jobs to running and gives each a lease and a new fence.

One range of the ready index a queue and priority, read in order from a cursor. The conditions that keep it fast, each of which
was seen to cost a factor of ten when missed:

- equality on queue and priority: with a range or a list of queues, a claim reads through everything that is scheduled for later;
- the limit is a literal: a parameter in a generic plan means "a tenth of the table" and turns the claim into a sort;
- a MATERIALIZED common table expression: `IN (SELECT … LIMIT …)` takes more rows than the limit under some plans;
- the cursor: claimed jobs leave dead entries at the front of the index, which stay while any old snapshot is open.

Connections for claims are opened with CLAIM_SETTINGS, so that no statistics, and no setting of the role, turn these lookups by
index into joins over the whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker.domain import ClaimedJob
from worker.store.standbys import believe

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

CLAIM_SETTINGS = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
}

ROLE = "claim"

LIMITS = (300, 100, 30, 10, 3, 1)
"""Statement texts differ in their limit only; a wish is rounded down to one of these."""


class Cursor(NamedTuple):
    """The last row taken from a range: the next claim starts behind it."""

    available_at: int
    id: int


START = Cursor(-(2**63), 0)
"""Before every row: '-infinity' as PostgreSQL sends it."""


class Range(NamedTuple):
    """One range of the ready index that has rows, and when its first one is due."""

    queue: str
    priority: int
    due_in_seconds: float
    """0: now."""
    first: Cursor
    """Its first row."""
    suspect: bool


_RETURNING = """
RETURNING j.id, j.fence, j.idempotency_key, j.kind, j.queue, j.priority, j.payload::text, j.attempts, j.max_attempts, j.crashes,
    j.available_at
"""

_TAKE = """
UPDATE {schema}.jobs AS j
SET state = 'running', lease_owner = $3, lease_until = now() + $4 * interval '1 second', fence = nextval('{schema}.fence_seq'),
    attempts = j.attempts + 1, started_at = now(), completed_at = NULL
"""

# Index jobs_ready for the candidates, jobs_pkey for the update. The row is locked when its state is read, so that
# `j.state = f.state` re-checks it without offering the planner a partial index for a look-up by id.
# `$7` bounds the bytes of payload; the first job always fits. Small values are not measured: that would cost more than they do.
CLAIM = (
    """
WITH due AS MATERIALIZED (
    SELECT id, state, available_at,
        CASE WHEN pg_column_size(payload) < 256 THEN 256 ELSE octet_length(payload::text) END AS bytes
    FROM {schema}.jobs
    WHERE state = 'ready' AND crashes = 0 AND queue = $1 AND priority = $2
        AND available_at <= now() AND (available_at, id) > ($5, $6) AND attempts < max_attempts
    ORDER BY available_at, id
    LIMIT {limit}
    FOR NO KEY UPDATE SKIP LOCKED
), fitting AS MATERIALIZED (
    SELECT id, state
    FROM (SELECT id, state, sum(bytes) OVER (ORDER BY available_at, id) - bytes AS bytes_before FROM due) AS sized
    WHERE bytes_before < $7
)"""
    + _TAKE
    + """
FROM fitting AS f
WHERE j.id = f.id AND j.state = f.state"""
    + _RETURNING
)
_CLAIM = {limit: CLAIM.replace("{limit}", str(limit)) for limit in LIMITS}


async def claim(
    connection: Connection,
    database: Database,
    *,
    queue: str,
    priority: int,
    limit: int,
    owner: str,
    lease_seconds: float,
    cursor: Cursor = START,
    payload_bytes: int,
) -> list[ClaimedJob]:
    """Claim up to `limit` (one of LIMITS) due jobs of one queue and priority behind `cursor`, in the order to run them.

    Raises ConnectionError when a synchronous standby is not known to have it: who is promoted may draw the same fences again.
    """
    rows = await connection.fetch(database.sql(_CLAIM[limit]), queue, priority, owner, lease_seconds, *cursor, payload_bytes)
    believe(connection)
    jobs = [ClaimedJob(*row) for row in rows]
    jobs.sort(key=lambda job: (job.available_at, job.id))  # RETURNING has no order
    return jobs


# Index jobs_suspect, which is small.
CLAIM_SUSPECT = (
    """
WITH due AS MATERIALIZED (
    SELECT id, state
    FROM {schema}.jobs
    WHERE state = 'ready' AND crashes > 0 AND queue = $1 AND priority = $2 AND available_at <= now() AND attempts < max_attempts
    ORDER BY available_at, id
    LIMIT 1
    FOR NO KEY UPDATE SKIP LOCKED
)"""
    + _TAKE
    + """
FROM due AS f
WHERE j.id = f.id AND j.state = f.state"""
    + _RETURNING
)


async def claim_suspect(
    connection: Connection, database: Database, *, queue: str, priority: int, owner: str, lease_seconds: float
) -> list[ClaimedJob]:
    """Claim at most one job whose process was lost with it before."""
    rows = await connection.fetch(database.sql(CLAIM_SUSPECT), queue, priority, owner, lease_seconds)
    believe(connection)
    return [ClaimedJob(*row) for row in rows]


# A loose scan of jobs_ready (and of the small jobs_suspect): one descent a priority in use, one for its first row.
SURVEY = """
WITH RECURSIVE
queues AS (SELECT queue FROM unnest($1::text[]) AS queue),
ready AS (
    SELECT q.queue, (
        SELECT j.priority FROM {schema}.jobs AS j
        WHERE j.state = 'ready' AND j.crashes = 0 AND j.queue = q.queue
        ORDER BY j.priority DESC LIMIT 1) AS priority
    FROM queues AS q
    UNION ALL
    SELECT r.queue, (
        SELECT j.priority FROM {schema}.jobs AS j
        WHERE j.state = 'ready' AND j.crashes = 0 AND j.queue = r.queue AND j.priority < r.priority
        ORDER BY j.priority DESC LIMIT 1)
    FROM ready AS r WHERE r.priority IS NOT NULL
),
suspect AS (
    SELECT DISTINCT j.queue, j.priority FROM {schema}.jobs AS j
    WHERE j.state = 'ready' AND j.crashes > 0 AND j.queue = ANY ($1)
)
SELECT r.queue, r.priority, false AS suspect, extract(epoch FROM f.due_at - now())::float8 AS due_in_seconds, f.available_at, f.id
FROM ready AS r CROSS JOIN LATERAL (
    SELECT j.available_at, j.id, GREATEST(j.available_at, now()) AS due_at FROM {schema}.jobs AS j
    WHERE j.state = 'ready' AND j.crashes = 0 AND j.queue = r.queue AND j.priority = r.priority
    ORDER BY j.available_at, j.id LIMIT 1) AS f
WHERE f.available_at < 'infinity'
UNION ALL
SELECT s.queue, s.priority, true, extract(epoch FROM f.due_at - now())::float8, f.available_at, f.id
FROM suspect AS s CROSS JOIN LATERAL (
    SELECT j.available_at, j.id, GREATEST(j.available_at, now()) AS due_at FROM {schema}.jobs AS j
    WHERE j.state = 'ready' AND j.crashes > 0 AND j.queue = s.queue AND j.priority = s.priority
    ORDER BY j.available_at, j.id LIMIT 1) AS f
WHERE f.available_at < 'infinity'
"""


async def survey(connection: Connection, database: Database, queues: Sequence[str]) -> list[Range]:
    """Which ranges have ready jobs, and when the first of each is due."""
    rows = await connection.fetch(database.sql(SURVEY), list(queues))
    return [
        Range(queue, priority, due_in_seconds, Cursor(available_at, id), suspect)
        for queue, priority, suspect, due_in_seconds, available_at, id in rows
    ]


# As young as the youngest claim so far. It draws none: that would wait for a synchronous standby, as those claims may do.
BOUND = "SELECT pg_sequence_last_value('{schema}.fence_seq')"

# Rows of this owner that nobody in the process holds. Reads the running rows, which are few; it runs only after a lost answer.
# `$4`: should it arrive late, on a connection that was given up, it must not touch what has been claimed meanwhile. A row that
# somebody keeps locked is passed over: it must hold up neither the others nor the next claim.
RECOVER = """
WITH orphans AS MATERIALIZED (
    SELECT j.id, j.fence
    FROM {schema}.jobs AS j
    WHERE j.state = 'running' AND j.lease_owner = $1 AND j.fence <= $4
        AND NOT EXISTS (
            SELECT FROM unnest($2::bigint[], $3::bigint[]) AS held(id, fence) WHERE held.id = j.id AND held.fence = j.fence)
    FOR NO KEY UPDATE SKIP LOCKED
), returned AS (
    UPDATE {schema}.jobs AS j
    SET state = 'ready', lease_owner = NULL, lease_until = NULL, attempts = GREATEST(j.attempts - 1, 0)
    FROM orphans AS o
    WHERE j.id = o.id AND j.fence = o.fence AND j.lease_owner = $1
    RETURNING j.id, j.fence, j.idempotency_key, j.kind, j.queue, j.priority, '' AS payload, j.attempts + 1 AS attempt,
        j.max_attempts, j.crashes, 0 AS available_at
)
SELECT r.*, {schema}.wake_workers(r.queue) FROM returned AS r
"""


async def recover(connection: Connection, database: Database, *, owner: str, held: Sequence[tuple[int, int]]) -> list[ClaimedJob]:
    """Give back, attempt refunded, the jobs of a claim whose answer was lost. Call it when that claim can no longer commit.

    Waits for nobody: what is locked meanwhile is still running afterwards (`orphans_are_left`).
    """
    ids, fences = [id for id, _ in held], [fence for _, fence in held]
    bound = await connection.fetchval(database.sql(BOUND))
    rows = await connection.fetch(database.sql(RECOVER), owner, ids, fences, bound)
    return [ClaimedJob(*row[:11]) for row in rows]


ORPHANS = """
SELECT EXISTS (
    SELECT FROM {schema}.jobs AS j
    WHERE j.state = 'running' AND j.lease_owner = $1
        AND NOT EXISTS (
            SELECT FROM unnest($2::bigint[], $3::bigint[]) AS held(id, fence) WHERE held.id = j.id AND held.fence = j.fence))
"""


async def orphans_are_left(connection: Connection, database: Database, *, owner: str, held: Sequence[tuple[int, int]]) -> bool:
    """Whether this owner has a running job that nobody in the process holds. No claim may be in flight."""
    return bool(await connection.fetchval(database.sql(ORPHANS), owner, [id for id, _ in held], [fence for _, fence in held]))
