"""The claim of tasks by remote workers: that of `claiming`, for several owners in one statement, and the ways back to what was
claimed when an answer was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker.store.claiming import Cursor
from worker.store.tasks import COLUMNS, OWNER_PREFIX, REMOTE, SINCE_CLAIM_MS, Task

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

ROLE = "http claim"
LIMITS = (64, 32, 16, 12, 8, 6, 4, 3, 2, 1)
"""A limit is a literal (see `claiming`), so the claim has a text for each of these."""


class Wish(NamedTuple):
    """One remote worker that asks for a task."""

    owner: str
    lease_seconds: float
    request_id: str
    """The caller's, or a generated one: it also finds the task of an answer that was lost."""


class Claimed(NamedTuple):
    """`place` is that of the wish it answers."""

    place: int
    task: Task
    cursor: Cursor


class Recovered(NamedTuple):
    """A task that nobody has heard of, given back: the attempt that it was claimed for."""

    id: int
    kind: str
    queue: str
    attempt: int
    fence: int
    processor: str
    since_claim_ms: float | None


# As in `claiming`: jobs_ready (or jobs_suspect) in order from a cursor for the candidates, jobs_pkey for the update.
# A suspect (its process was lost with it) is given to nobody who runs one already.
CLAIM = (
    """
WITH wishes AS MATERIALIZED (
    SELECT w.place, w.owner, w.lease_seconds, w.request_id
    FROM unnest($3::text[], $4::float8[], $5::text[]) WITH ORDINALITY AS w(owner, lease_seconds, request_id, place)
), due AS MATERIALIZED (
    SELECT id, state, available_at,
        CASE WHEN pg_column_size(payload) < 256 THEN 256 ELSE octet_length(payload::text) END AS bytes
    FROM {schema}.jobs
    WHERE state = 'ready' AND {crashes} AND queue = $1 AND priority = $2
        AND available_at <= now() AND (available_at, id) > ($6, $7) AND attempts < max_attempts{kinds}
    ORDER BY available_at, id
    LIMIT {limit}
    FOR NO KEY UPDATE SKIP LOCKED
), fitting AS MATERIALIZED (
    SELECT id, state, place
    FROM (
        SELECT id, state, row_number() OVER oldest AS place, sum(bytes) OVER oldest - bytes AS bytes_before
        FROM due WINDOW oldest AS (ORDER BY available_at, id)) AS sized
    WHERE bytes_before < $8
)
UPDATE {schema}.jobs AS j
SET state = 'running', lease_owner = w.owner, lease_until = now() + w.lease_seconds * interval '1 second',
    fence = nextval('{schema}.fence_seq'), attempts = j.attempts + 1, started_at = now(), completed_at = NULL,
    meta = CASE WHEN jsonb_typeof(j.meta) = 'object' THEN j.meta ELSE '{}' END
        || jsonb_build_object('http', jsonb_build_object(
            'request_id', w.request_id, 'lease_seconds', w.lease_seconds,
            'processor', substr(w.owner, 6), 'started', extract(epoch FROM now())))
FROM fitting AS f JOIN wishes AS w ON w.place = f.place
WHERE j.id = f.id AND j.state = f.state
RETURNING w.place, j.available_at, """
    + COLUMNS
)
_KINDS = " AND kind = ANY ($9::text[])"
_ORDINARY = CLAIM.replace("{crashes}", "crashes = 0")
_CLAIM = {
    (limit, by_kind): _ORDINARY.replace("{limit}", str(limit)).replace("{kinds}", _KINDS if by_kind else "")
    for limit in LIMITS
    for by_kind in (False, True)
}
_SUSPECT = CLAIM.replace("{crashes}", "crashes > 0").replace("{limit}", "1")
_NO_OTHER = """ AND NOT EXISTS (
            SELECT FROM {schema}.jobs AS r
            WHERE r.state = 'running' AND r.lease_until > now() AND r.lease_owner = ($3::text[])[1] AND r.crashes > 0)"""
_CLAIM_SUSPECT = {by_kind: _SUSPECT.replace("{kinds}", (_KINDS if by_kind else "") + _NO_OTHER) for by_kind in (False, True)}


async def claim(
    connection: Connection,
    database: Database,
    wishes: Sequence[Wish],
    *,
    queue: str,
    priority: int,
    suspect: bool,
    kinds: Sequence[str] | None,
    cursor: Cursor,
    payload_bytes: int,
) -> list[Claimed]:
    """Claim a task for each of the first so many of `wishes` as there are due jobs behind `cursor`, at most the largest of LIMITS.

    The connection must read moments as microseconds. A suspect: at most one, for the first wish.
    """
    if suspect:
        asked, text = wishes[:1], _CLAIM_SUSPECT[kinds is not None]
    else:
        limit = next(limit for limit in LIMITS if limit <= len(wishes))
        asked, text = wishes[:limit], _CLAIM[limit, kinds is not None]
    owners, lease_seconds, request_ids = map(list, zip(*asked, strict=True))
    more = () if kinds is None else (list(kinds),)
    rows = await connection.fetch(
        database.sql(text), queue, priority, owners, lease_seconds, request_ids, *cursor, payload_bytes, *more
    )
    claimed = []
    for place, available_at, *columns in rows:
        task = Task(*columns)
        claimed.append(Claimed(place - 1, task, Cursor(available_at, task.id)))
    claimed.sort()
    return claimed


# Two processes that are asked the same at the same moment must not both claim: the second waits here, and then finds.
LOCK_REQUESTS = """
SELECT pg_advisory_xact_lock(hashtextextended('reliable-worker request ' || asked.id, 0))
FROM (SELECT DISTINCT id FROM unnest($1::text[]) AS id ORDER BY id) AS asked
"""

# Index jobs_running, from now on: what has expired is not read.
FIND_CLAIMED = f"""
SELECT j.lease_owner, j.meta #>> '{{http,request_id}}', {COLUMNS}
FROM {{schema}}.jobs AS j
WHERE j.state = 'running' AND j.lease_until > now() AND j.lease_owner = ANY ($1) AND j.meta #>> '{{http,request_id}}' = ANY ($2)
"""


async def find_claimed(connection: Connection, database: Database, wishes: Sequence[Wish]) -> dict[tuple[str, str], Task]:
    """Inside a transaction: what these requests have claimed before and still hold, by (owner, request_id).

    Until the end of the transaction nobody else finds or claims for the same requests.
    """
    keys = [f"{wish.owner} {wish.request_id}" for wish in wishes]
    await connection.execute(database.sql(LOCK_REQUESTS), keys)
    rows = await connection.fetch(database.sql(FIND_CLAIMED), [wish.owner for wish in wishes], [wish.request_id for wish in wishes])
    return {(row[0], row[1]): Task(*list(row)[2:]) for row in rows}


_OF_REQUESTS = f"""
    FROM {{schema}}.jobs AS j
    WHERE j.state = 'running' AND j.lease_until > now() AND {REMOTE} AND j.meta #>> '{{http,request_id}}' = ANY ($1)"""

# Index jobs_running. Runs only after an answer was lost. A row that somebody keeps locked is passed over: it must hold up neither
# the others nor the next claim.
RECOVER = f"""
WITH orphans AS MATERIALIZED (
    SELECT j.id, j.fence, j.lease_owner{_OF_REQUESTS}
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {{schema}}.jobs AS j
SET state = 'ready', lease_owner = NULL, lease_until = NULL, attempts = GREATEST(j.attempts - 1, 0)
FROM orphans AS o
WHERE j.id = o.id AND j.fence = o.fence AND j.lease_owner = o.lease_owner
RETURNING j.id, j.kind, j.queue, j.attempts + 1, j.fence, substr(o.lease_owner, {len(OWNER_PREFIX) + 1}), {SINCE_CLAIM_MS},
    {{schema}}.wake_workers(j.queue)
"""


async def recover(connection: Connection, database: Database, *, request_ids: Sequence[str]) -> list[Recovered]:
    """Give back, attempt refunded, what claims without an answer have taken, once they can no longer commit.

    Waits for nobody: what is locked meanwhile is still claimed afterwards (`still_claimed`).
    """
    return [Recovered(*row[:7]) for row in await connection.fetch(database.sql(RECOVER), list(request_ids))]


# Index jobs_running.
STILL_CLAIMED = f"SELECT DISTINCT j.meta #>> '{{http,request_id}}'{_OF_REQUESTS}"


async def still_claimed(connection: Connection, database: Database, *, request_ids: Sequence[str]) -> set[str]:
    """Those of these requests that have a running task whose lease has not expired."""
    return {row[0] for row in await connection.fetch(database.sql(STILL_CLAIMED), list(request_ids))}
