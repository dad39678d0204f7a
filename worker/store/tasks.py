"""Tasks: jobs as the HTTP interface shows them, and their claim by workers of other processes.

The claim is that of `claiming`, for several owners in one statement; what ends an attempt are the statements of `settling` and
`leasing`. What only a remote claim needs stands in the row's `meta`, under "http": the id of the request, which makes a repeated
claim find its task, the length of the lease, for which a heartbeat renews it, and who it was, which is remembered when the lease
is over. It is true of the claim that began at `started_at`, and of no later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from worker.store.claiming import Cursor
from worker.store.leasing import Key
from worker.store.reports import moment

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

OWNER_PREFIX = "http:"
"""No daemon's name begins so: its owner is a remote worker."""
CLAIM_ROLE = "http claim"
FINISH_ROLE = "http commit"
HEARTBEAT_ROLE = "http leases"

LIMITS = (64, 32, 16, 12, 8, 6, 4, 3, 2, 1)
"""A limit is a literal (see `claiming`), so the claim has a text for each of these."""
PAGE_BYTES = 16 * 1024 * 1024
"""A page of a list ends before its payloads and outputs are more than this; one task always fits."""

Which = Literal["all", "started", "processed"]


class Task(NamedTuple):
    """One job. Moments are ISO 8601 in UTC, payload and output the JSON text that is stored, exact to the last digit."""

    id: int
    key: str
    kind: str
    queue: str
    payload: str
    state: str
    processor: str | None
    """Who holds it (the name a remote worker gave itself, or a daemon's id), or which remote worker held it last when it ended."""
    fence: int
    attempt: int
    scheduled_at: str
    started_at: str | None
    last_heartbeat_at: str | None
    """For a remote worker's task: the last renewal, None before the first."""
    expires_in_ms: int | None
    completed_at: str | None
    output: str | None


_REMOTE = f"j.lease_owner ^@ '{OWNER_PREFIX}'"
# Whoever writes into `meta` by hand makes no list fail.
_LEASE_SECONDS = """CASE WHEN jsonb_typeof(j.meta #> '{http,lease_seconds}') = 'number'
        THEN (j.meta #>> '{http,lease_seconds}')::float8 END"""
_CLAIMED_BY = """CASE WHEN j.meta #> '{http,started}' = to_jsonb(extract(epoch FROM j.started_at))
        THEN j.meta #>> '{http,processor}' END"""
_COLUMNS = f"""j.id, j.idempotency_key, j.kind, j.queue, j.payload::text, j.state,
    CASE WHEN {_REMOTE} THEN substr(j.lease_owner, {len(OWNER_PREFIX) + 1}) WHEN j.lease_owner IS NOT NULL THEN j.lease_owner
        WHEN j.completed_at IS NOT NULL THEN {_CLAIMED_BY} END,
    j.fence, j.attempts, {moment("j.available_at")}, {moment("j.started_at")},
    CASE WHEN {_REMOTE} AND isfinite(j.lease_until) THEN to_char(
        NULLIF(j.lease_until - {_LEASE_SECONDS} * interval '1 second', j.started_at) AT TIME ZONE 'UTC',
        'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') END,
    CASE WHEN isfinite(j.lease_until)
        THEN GREATEST(floor(extract(epoch FROM j.lease_until - clock_timestamp()) * 1000), 0)::bigint END,
    {moment("j.completed_at")}, j.result::text"""
_SIZE = "CASE WHEN pg_column_size({0}) < 256 THEN 256 ELSE octet_length({0}::text) END"


# Index jobs_pkey.
GET = f"SELECT {_COLUMNS} FROM {{schema}}.jobs AS j WHERE j.id = $1"


async def get(connection: Connection, database: Database, *, id: int) -> Task | None:
    """The task as it is now; None: there is none (any more)."""
    row = await connection.fetchrow(database.sql(GET), id)
    return None if row is None else Task(*row)


_CONDITIONS: dict[Which, str] = {
    "all": "true",
    "started": "j.state = 'running'",
    "processed": "j.state IN ('succeeded', 'dead', 'cancelled')",
}

# Index jobs_pkey from its end, jobs_running for what is started.
LIST = f"""
WITH page AS MATERIALIZED (
    SELECT j.id, {_SIZE.format("j.payload")} + COALESCE({_SIZE.format("j.result")}, 0) AS bytes
    FROM {{schema}}.jobs AS j
    WHERE j.id < $1 AND {{condition}}
    ORDER BY j.id DESC
    LIMIT $2 + 1
), fitting AS MATERIALIZED (
    SELECT id, row_number() OVER newest AS n, sum(bytes) OVER newest - bytes AS bytes_before, count(*) OVER () AS found
    FROM page
    WINDOW newest AS (ORDER BY id DESC)
)
SELECT f.found, {_COLUMNS}
FROM fitting AS f JOIN {{schema}}.jobs AS j ON j.id = f.id
WHERE f.n <= $2 AND (f.n = 1 OR f.bytes_before < {PAGE_BYTES})
ORDER BY f.n
"""
_LIST = {which: LIST.replace("{condition}", condition) for which, condition in _CONDITIONS.items()}


class Page(NamedTuple):
    tasks: list[Task]
    has_more: bool


async def list_tasks(connection: Connection, database: Database, *, which: Which, before_id: int, limit: int) -> Page:
    """At most `limit` tasks with lower ids than `before_id`, newest first."""
    rows = await connection.fetch(database.sql(_LIST[which]), before_id, limit)
    return Page([Task(*list(row)[1:]) for row in rows], bool(rows) and rows[0][0] > len(rows))


# --- claim


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
    + _COLUMNS
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
SELECT j.lease_owner, j.meta #>> '{{http,request_id}}', {_COLUMNS}
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


# Index jobs_running. Runs only after an answer was lost.
RECOVER = f"""
WITH orphans AS MATERIALIZED (
    SELECT j.id, j.fence, j.lease_owner
    FROM {{schema}}.jobs AS j
    WHERE j.state = 'running' AND j.lease_until > now() AND {_REMOTE} AND j.meta #>> '{{http,request_id}}' = ANY ($1)
    FOR NO KEY UPDATE
)
UPDATE {{schema}}.jobs AS j
SET state = 'ready', lease_owner = NULL, lease_until = NULL, attempts = GREATEST(j.attempts - 1, 0)
FROM orphans AS o
WHERE j.id = o.id AND j.fence = o.fence AND j.lease_owner = o.lease_owner
RETURNING j.id, j.fence, j.queue, {{schema}}.wake_workers(j.queue)
"""


async def recover(connection: Connection, database: Database, *, request_ids: Sequence[str]) -> list[Key]:
    """Give back, attempt refunded, what claims without an answer have taken, once they can no longer commit."""
    return [(row[0], row[1]) for row in await connection.fetch(database.sql(RECOVER), list(request_ids))]


# --- what became of an attempt


class Standing(NamedTuple):
    """What the database says of an attempt (id, fence) of `owner`."""

    owner: str | None
    """Who has the row now."""
    claimed_by: str | None
    """The remote worker whose claim was the last one."""
    live: bool
    """Its lease has not expired."""
    lease_seconds: float | None
    """How long a remote lease was asked for."""
    failure: str | None
    """How the attempt ended, if it failed: an outcome of `job_failures`, of this owner and fence."""
    task: Task


# Indexes jobs_pkey and job_failures_pkey. A plain read, which waits for nobody.
LOOK = f"""
SELECT a.place, j.lease_owner, {_CLAIMED_BY}, j.lease_until > clock_timestamp() IS TRUE, {_LEASE_SECONDS}, f.outcome, {_COLUMNS}
FROM unnest($1::bigint[], $2::bigint[], $3::text[]) WITH ORDINALITY AS a(id, fence, owner, place)
JOIN {{schema}}.jobs AS j ON j.id = a.id
LEFT JOIN {{schema}}.job_failures AS f ON f.job_id = a.id AND f.fence = a.fence AND f.worker = a.owner
"""


async def look(connection: Connection, database: Database, attempts: Sequence[tuple[int, int, str]]) -> list[Standing | None]:
    """How each attempt (id, fence, owner) stands, in their order; None: there is no such job."""
    ids, fences, owners = map(list, zip(*attempts, strict=True))
    found: list[Standing | None] = [None] * len(attempts)
    for place, owner, claimed_by, live, lease_seconds, failure, *columns in await connection.fetch(
        database.sql(LOOK), ids, fences, owners
    ):
        found[place - 1] = Standing(owner, claimed_by, live, lease_seconds, failure, Task(*columns))
    return found


# Index jobs_pkey. How often a job was tried is what its next delay depends on.
COUNT_ATTEMPTS = "SELECT id, attempts FROM {schema}.jobs WHERE id = ANY ($1::bigint[])"


async def count_attempts(connection: Connection, database: Database, ids: Sequence[int]) -> dict[int, int]:
    rows = await connection.fetch(database.sql(COUNT_ATTEMPTS), list(ids))
    return {row[0]: row[1] for row in rows}


RESULT_SIZE = "SELECT pg_column_size($1::text::jsonb)"


async def measure_result(connection: Connection, text: str) -> int:
    """The bytes that this JSON text takes as stored, before it is compressed."""
    return int(await connection.fetchval(RESULT_SIZE, text))
