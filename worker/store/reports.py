"""What operators see of jobs, and what they do to them: list, show, retry, cancel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

from worker.domain import is_storable

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

STATES = ("ready", "running", "succeeded", "dead", "cancelled")
RETRYABLE = ("dead", "cancelled")
CANCELLABLE = ("ready", "running")

BATCH_JOBS = 100


def moment(column: str) -> str:
    """SQL for a moment as ISO 8601 in UTC, also where no datetime could hold it (infinity)."""
    return (
        f"CASE WHEN isfinite({column}) THEN to_char({column} AT TIME ZONE 'UTC', "
        f'\'YYYY-MM-DD"T"HH24:MI:SS.US"Z"\') ELSE {column}::text END'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """One line of a list. Moments are ISO 8601 in UTC."""

    id: int
    key: str
    kind: str
    queue: str
    priority: int
    state: str
    attempts: int
    max_attempts: int
    fence: int
    worker: str | None
    available_at: str
    lease_until: str | None
    created_at: str
    started_at: str | None
    completed_at: str | None
    last_error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSummary:
    """One failed attempt, of the last twenty of a job."""

    attempt: int
    fence: int
    worker: str
    failed_at: str
    outcome: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetails:
    """All of one job. `payload` and `result` are the JSON text that is stored, exact to the last digit."""

    summary: JobSummary
    payload: str
    result: str | None
    failures: tuple[FailureSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs; what is empty or None does not narrow."""

    states: tuple[str, ...] = ()
    kind: str | None = None
    queue: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        for state in self.states:
            if state not in STATES:
                raise ValueError(f"state: {state!r} is none of {', '.join(STATES)}")
        for name, text in (("kind", self.kind), ("queue", self.queue), ("key", self.key)):
            if text is not None and not is_storable(text):
                raise ValueError(f"{name}: holds a NUL or bytes that are not UTF-8, which no job has")

    @property
    def is_empty(self) -> bool:
        return self == JobFilter()

    def condition(self) -> tuple[str, list[object]]:
        """SQL and its parameters from $1 on. States are literals, so that partial indexes can serve them."""
        parts: list[str] = []
        arguments: list[object] = []
        if self.states:
            parts.append(f"j.state IN ({', '.join(repr(state) for state in self.states)})")
        for column, value in (("kind", self.kind), ("queue", self.queue), ("idempotency_key", self.key)):
            if value is not None:
                arguments.append(value)
                parts.append(f"j.{column} = ${len(arguments)}")
        return " AND ".join(parts) or "true", arguments


_SUMMARY_COLUMNS = f"""
    j.id, j.idempotency_key AS key, j.kind, j.queue, j.priority, j.state, j.attempts, j.max_attempts, j.fence,
    j.lease_owner AS worker, {moment("j.available_at")} AS available_at, {moment("j.lease_until")} AS lease_until,
    {moment("j.created_at")} AS created_at,
    {moment("j.started_at")} AS started_at,
    {moment("j.completed_at")} AS completed_at, j.last_error
"""

LIST_JOBS = (
    "SELECT"
    + _SUMMARY_COLUMNS
    + """
FROM {schema}.jobs AS j
WHERE {condition}
ORDER BY j.id DESC
LIMIT {limit}
"""
)


async def list_jobs(connection: Connection, database: Database, wanted: JobFilter, *, limit: int) -> list[JobSummary]:
    """The newest jobs that match, newest first."""
    condition, arguments = wanted.condition()
    text = LIST_JOBS.replace("{condition}", condition).replace("{limit}", str(int(limit)))
    return [JobSummary(**row) for row in await connection.fetch(database.sql(text), *arguments)]


SHOW_JOB = (
    "SELECT"
    + _SUMMARY_COLUMNS.rstrip()
    + """,
    j.payload::text AS payload, j.result::text AS result
FROM {schema}.jobs AS j
WHERE j.id = $1
"""
)

SHOW_FAILURES = f"""
SELECT f.attempt, f.fence, f.worker, {moment("f.failed_at")} AS failed_at, f.outcome, f.error
FROM {{schema}}.job_failures AS f
WHERE f.job_id = $1
ORDER BY f.fence
"""


async def show_job(connection: Connection, database: Database, id: int) -> JobDetails | None:
    """All of one job, or None when there is no such job."""
    row = await connection.fetchrow(database.sql(SHOW_JOB), id)
    if row is None:
        return None
    values = dict(row)
    payload, result = values.pop("payload"), values.pop("result")
    failures = await connection.fetch(database.sql(SHOW_FAILURES), id)
    return JobDetails(
        summary=JobSummary(**values),
        payload=payload,
        result=result,
        failures=tuple(FailureSummary(**failure) for failure in failures),
    )


# In the order of the ids, page by page.
FIND_IDS = """
SELECT j.id
FROM {schema}.jobs AS j
WHERE {condition} AND j.id > {cursor}
ORDER BY j.id
LIMIT {limit}
"""


async def find_ids(connection: Connection, database: Database, wanted: JobFilter, *, after_id: int = 0) -> list[int]:
    """The lowest ids above `after_id` that match, at most BATCH_JOBS."""
    condition, arguments = wanted.condition()
    text = FIND_IDS.replace("{condition}", condition)
    text = text.replace("{cursor}", f"${len(arguments) + 1}").replace("{limit}", str(BATCH_JOBS))
    return [row["id"] for row in await connection.fetch(database.sql(text), *arguments, after_id)]


COUNT_JOBS = """
SELECT count(*)
FROM {schema}.jobs AS j
WHERE {condition}
"""


async def count_jobs(connection: Connection, database: Database, wanted: JobFilter) -> int:
    """How many match."""
    condition, arguments = wanted.condition()
    count: int = await connection.fetchval(database.sql(COUNT_JOBS.replace("{condition}", condition)), *arguments)
    return count


COUNT_IDS = """
SELECT count(*)
FROM {schema}.jobs AS j
WHERE j.id = ANY ($1::bigint[]) AND j.state = ANY ($2::text[])
"""


async def count_ids(connection: Connection, database: Database, ids: Sequence[int], states: Sequence[str]) -> int:
    """How many of these jobs are in one of these states."""
    count: int = await connection.fetchval(database.sql(COUNT_IDS), list(ids), list(states))
    return count


class Answer(NamedTuple):
    """What a command did to one job: its state afterwards."""

    id: int
    state: str | None
    """None: there is no such job."""
    locked: bool
    """Another transaction holds the row; nothing was done, try again."""


# One after the other in the order of the ids, as everybody who locks several jobs does.
RETRY_JOBS = """
SELECT w.id, {schema}.retry_job(w.id) AS state
FROM (SELECT id FROM unnest($1::bigint[]) AS id ORDER BY id) AS w
"""


async def retry_jobs(connection: Connection, database: Database, ids: Sequence[int]) -> list[Answer]:
    """Give dead or cancelled jobs fresh attempts; others stay as they are. At most BATCH_JOBS at once."""
    return await _each(connection, database.sql(RETRY_JOBS), ids)


CANCEL_JOBS = """
SELECT w.id, {schema}.cancel_job(w.id) AS state
FROM (SELECT id FROM unnest($1::bigint[]) AS id ORDER BY id) AS w
"""


async def cancel_jobs(connection: Connection, database: Database, ids: Sequence[int]) -> list[Answer]:
    """Cancel ready or running jobs; others stay as they are. At most BATCH_JOBS at once."""
    return await _each(connection, database.sql(CANCEL_JOBS), ids)


async def _each(connection: Connection, text: str, ids: Sequence[int]) -> list[Answer]:
    try:
        rows = await connection.fetch(text, list(ids))
    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
        if len(ids) == 1:
            return [Answer(ids[0], None, True)]
        # Somebody holds one of the rows, a handler's own transaction for example: that one alone has to wait.
        return [answer for id in ids for answer in await _each(connection, text, [id])]
    return [Answer(row["id"], row["state"], False) for row in rows]


class SessionSummary(NamedTuple):
    """What a connection turned out to be."""

    server_version: str
    tls_version: str | None


DESCRIBE_SESSION = """
SELECT current_setting('server_version'), (SELECT version FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl)
"""


async def describe_session(connection: Connection) -> SessionSummary:
    """The server's version, and the version of TLS if that is in use."""
    return SessionSummary(*await connection.fetchrow(DESCRIBE_SESSION))
