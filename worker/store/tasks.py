"""Tasks: jobs as the HTTP interface shows them, and how an attempt of a remote worker stands.

What ends an attempt are the statements of `settling` and `leasing`, its claim is in `task_claiming`. What only a remote claim needs
stands in the row's `meta`, under "http": the id of the request, which makes a repeated claim find its task, the length of the
lease, for which a heartbeat renews it, and who it was, which is remembered when the lease is over. It is true of the claim that
began at `started_at`, and of no later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from worker.lease_terms import MAX_TTL_SECONDS, MIN_TTL_SECONDS
from worker.store.reports import moment

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

OWNER_PREFIX = "http:"
"""No daemon's name begins so: its owner is a remote worker."""
FINISH_ROLE = "http commit"
HEARTBEAT_ROLE = "http leases"

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

    def log_fields(self) -> dict[str, object]:
        """What the events about a job carry, and who holds it."""
        return {
            "job_id": self.id,
            "kind": self.kind,
            "queue": self.queue,
            "attempt": self.attempt,
            "fence": self.fence,
            "processor": self.processor,
        }


REMOTE = f"j.lease_owner ^@ '{OWNER_PREFIX}'"
# Whoever writes into `meta` by hand makes no list fail: what no claim can have asked for counts as nothing.
_LEASE_SECONDS = f"""jsonb_path_query_first(
        j.meta, 'strict $.http.lease_seconds ? (@ >= {MIN_TTL_SECONDS:.0f} && @ <= {MAX_TTL_SECONDS:.0f})', silent => true
    )::float8"""
_CLAIMED_BY = """CASE WHEN j.meta #> '{http,started}' = to_jsonb(extract(epoch FROM j.started_at))
        THEN j.meta #>> '{http,processor}' END"""
COLUMNS = f"""j.id, j.idempotency_key, j.kind, j.queue, j.payload::text, j.state,
    CASE WHEN {REMOTE} THEN substr(j.lease_owner, {len(OWNER_PREFIX) + 1}) WHEN j.lease_owner IS NOT NULL THEN j.lease_owner
        WHEN j.completed_at IS NOT NULL THEN {_CLAIMED_BY} END,
    j.fence, j.attempts, {moment("j.available_at")}, {moment("j.started_at")},
    CASE WHEN {REMOTE} AND isfinite(j.lease_until) THEN to_char(
        NULLIF(j.lease_until - {_LEASE_SECONDS} * interval '1 second', j.started_at) AT TIME ZONE 'UTC',
        'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') END,
    CASE WHEN isfinite(j.lease_until)
        THEN GREATEST(floor(extract(epoch FROM j.lease_until - clock_timestamp()) * 1000), 0)::bigint END,
    {moment("j.completed_at")}, j.result::text"""
_SIZE = "CASE WHEN pg_column_size({0}) < 256 THEN 256 ELSE octet_length({0}::text) END"


# Index jobs_pkey.
GET = f"SELECT {COLUMNS} FROM {{schema}}.jobs AS j WHERE j.id = $1"


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
SELECT f.found, {COLUMNS}
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
    since_claim_ms: float | None
    """How long ago, at the begin of this transaction, the last claim was. None: it is not known."""
    task: Task


SINCE_CLAIM_MS = """CASE WHEN isfinite(j.started_at)
        THEN round(GREATEST(extract(epoch FROM now() - j.started_at), 0)::numeric * 1000, 3)::float8 END"""

# Indexes jobs_pkey and job_failures_pkey. A plain read, which waits for nobody.
LOOK = f"""
SELECT a.place, j.lease_owner, {_CLAIMED_BY}, j.lease_until > clock_timestamp() IS TRUE, {_LEASE_SECONDS}, f.outcome,
    {SINCE_CLAIM_MS}, {COLUMNS}
FROM unnest($1::bigint[], $2::bigint[], $3::text[]) WITH ORDINALITY AS a(id, fence, owner, place)
JOIN {{schema}}.jobs AS j ON j.id = a.id
LEFT JOIN {{schema}}.job_failures AS f ON f.job_id = a.id AND f.fence = a.fence AND f.worker = a.owner
"""


async def look(connection: Connection, database: Database, attempts: Sequence[tuple[int, int, str]]) -> list[Standing | None]:
    """How each attempt (id, fence, owner) stands, in their order; None: there is no such job."""
    ids, fences, owners = map(list, zip(*attempts, strict=True))
    found: list[Standing | None] = [None] * len(attempts)
    for place, owner, claimed_by, live, lease_seconds, failure, since_claim_ms, *columns in await connection.fetch(
        database.sql(LOOK), ids, fences, owners
    ):
        found[place - 1] = Standing(owner, claimed_by, live, lease_seconds, failure, since_claim_ms, Task(*columns))
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
