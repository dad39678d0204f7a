"""The state of a queue in numbers: what waits, runs, failed, and how fast it goes.

What is unfinished, dead or cancelled is counted exactly, through the partial indexes. Succeeded jobs of a big
table and the rates of the last hour are estimates, and named as such: counting them would read the whole
table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from worker.domain_json import decode_json
from worker.store.figures import Backlog, ProcessSummary, Statistics
from worker.store.reports import moment

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

HOUR_SECONDS = 3_600.0
# Up to this size a table is counted in well under a second (about 200,000 jobs with small payloads).
COUNTED_BYTES = 64 * 1024 * 1024
SAMPLE_JOBS = 5_000
_SAMPLED_KINDS = 50_000
_SAMPLED_FAILURES = 20_000


async def statistics(connection: Connection, database: Database) -> Statistics:
    """Everything at about one moment; several statements, each under the session's time limit."""
    numbers = Statistics()
    await _count_ready(connection, database, numbers)
    await _count_running(connection, database, numbers)
    await _count_finished(connection, database, numbers)
    await _measure_last_hour(connection, database, numbers)
    await _describe_processes(connection, database, numbers)
    await _find_oldest_transaction(connection, numbers)
    return numbers


_DUE = "available_at <= now()"
_WAITING = f"""
    count(*) FILTER (WHERE {_DUE}) AS ready,
    count(*) FILTER (WHERE NOT {_DUE}) AS scheduled,
    extract(epoch FROM now() - min(available_at) FILTER (WHERE {_DUE} AND isfinite(available_at)))::float8
        AS oldest_ready_seconds"""

# Indexes jobs_ready and jobs_suspect; the due ones are a range of each queue and priority.
COUNT_READY = f"""
SELECT queue, {_WAITING}
FROM (
    SELECT queue, available_at FROM {{schema}}.jobs WHERE state = 'ready' AND crashes = 0
    UNION ALL
    SELECT queue, available_at FROM {{schema}}.jobs WHERE state = 'ready' AND crashes > 0) AS waiting
GROUP BY queue
"""

# No index holds the kind, so only so many rows are visited.
COUNT_READY_KINDS = f"""
SELECT kind, count(*) AS jobs, {_WAITING}
FROM (
    SELECT kind, available_at FROM {{schema}}.jobs WHERE state = 'ready' AND (crashes = 0 OR crashes > 0)
    LIMIT {_SAMPLED_KINDS}) AS waiting
GROUP BY kind
"""


async def _count_ready(connection: Connection, database: Database, numbers: Statistics) -> None:
    for row in await connection.fetch(database.sql(COUNT_READY)):
        queue = numbers.queues.setdefault(row["queue"], Backlog())
        queue.ready, queue.scheduled = row["ready"], row["scheduled"]
        queue.oldest_ready_seconds = row["oldest_ready_seconds"]
        numbers.ready += row["ready"]
        numbers.scheduled += row["scheduled"]
    ages = [queue.oldest_ready_seconds for queue in numbers.queues.values()]
    numbers.oldest_ready_seconds = max((age for age in ages if age is not None), default=None)
    rows = await connection.fetch(database.sql(COUNT_READY_KINDS))
    seen = sum(row["jobs"] for row in rows)
    scale = 1.0
    if seen >= _SAMPLED_KINDS and numbers.ready + numbers.scheduled > seen:
        scale = (numbers.ready + numbers.scheduled) / seen
        numbers.estimated.append("kinds")
    for row in rows:
        kind = numbers.kinds.setdefault(row["kind"], Backlog())
        kind.ready, kind.scheduled = round(row["ready"] * scale), round(row["scheduled"] * scale)
        kind.oldest_ready_seconds = row["oldest_ready_seconds"]


# Index jobs_running.
COUNT_RUNNING = """
SELECT queue, kind, count(*) AS running, count(*) FILTER (WHERE lease_until < now()) AS expired
FROM {schema}.jobs
WHERE state = 'running'
GROUP BY queue, kind
"""


async def _count_running(connection: Connection, database: Database, numbers: Statistics) -> None:
    for row in await connection.fetch(database.sql(COUNT_RUNNING)):
        queue = numbers.queues.setdefault(row["queue"], Backlog())
        kind = numbers.kinds.setdefault(row["kind"], Backlog())
        for part in (numbers, queue, kind):
            part.running += row["running"]
            part.expired += row["expired"]


# Index jobs_unsuccessful.
COUNT_UNSUCCESSFUL = """
SELECT state, count(*) AS jobs
FROM {schema}.jobs
WHERE state IN ('dead', 'cancelled')
GROUP BY state
"""

COUNT_SUCCEEDED = """
SELECT count(*)
FROM {schema}.jobs
WHERE state = 'succeeded'
"""

READ_TABLE_SIZE = """
SELECT pg_relation_size(oid) AS bytes, reltuples, relpages,
    pg_relation_size(oid) / current_setting('block_size')::bigint AS pages
FROM pg_class
WHERE relnamespace = to_regnamespace(quote_ident($1)) AND relname = 'jobs'
"""


async def _count_finished(connection: Connection, database: Database, numbers: Statistics) -> None:
    unsuccessful = {row["state"]: row["jobs"] for row in await connection.fetch(database.sql(COUNT_UNSUCCESSFUL))}
    numbers.dead, numbers.cancelled = unsuccessful.get("dead", 0), unsuccessful.get("cancelled", 0)
    table = await connection.fetchrow(READ_TABLE_SIZE, database.schema)
    if table["bytes"] <= COUNTED_BYTES or table["reltuples"] <= 0 or table["relpages"] == 0:
        numbers.succeeded = await connection.fetchval(database.sql(COUNT_SUCCEEDED))
        return
    # As the planner does it: the density at the last analysis, times the size of now.
    jobs = round(table["reltuples"] / table["relpages"] * table["pages"])
    others = numbers.ready + numbers.scheduled + numbers.running + numbers.dead + numbers.cancelled
    numbers.succeeded = max(0, jobs - others)
    numbers.estimated.append("succeeded")


# Recent jobs are found by id, as there is no index on completed_at: the newest, those before the youngest
# that runs, and those before the oldest that waits, wherever the workers are in their backlog.
SAMPLE_LAST_HOUR = """
WITH anchors AS (
    SELECT max(id) AS id FROM {schema}.jobs
    UNION SELECT max(id) FROM (SELECT id FROM {schema}.jobs WHERE state = 'running' OFFSET 0) AS running
    UNION (
        SELECT id FROM {schema}.jobs WHERE state = 'ready' AND crashes = 0
        ORDER BY queue, priority, available_at, id LIMIT 1)
), sample AS MATERIALIZED (
    SELECT DISTINCT s.id, s.queue, s.kind, s.state, s.started_at, s.completed_at
    FROM anchors AS a CROSS JOIN LATERAL (
        SELECT j.id, j.queue, j.kind, j.state, j.started_at, j.completed_at
        FROM {schema}.jobs AS j
        WHERE j.id <= a.id
        ORDER BY j.id DESC
        LIMIT {limit}) AS s
), hour AS MATERIALIZED (
    SELECT queue, kind, completed_at,
        CASE WHEN isfinite(started_at) THEN extract(epoch FROM completed_at - started_at)::float8 END AS seconds
    FROM sample
    WHERE state = 'succeeded' AND completed_at > now() - interval '1 hour' AND isfinite(completed_at)
)
SELECT NULL AS queue, NULL AS kind, count(*) AS succeeded,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) AS p50,
    percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) AS p95,
    extract(epoch FROM now() - min(completed_at))::float8 AS covered_seconds,
    (SELECT count(*) >= {limit} AND NOT bool_or(COALESCE(completed_at <= now() - interval '1 hour', false)) FROM sample)
        AS is_cut
FROM hour
UNION ALL
SELECT queue, kind, count(*), NULL, NULL, NULL, NULL
FROM hour
GROUP BY queue, kind
"""

# Index job_failures_failed_at.
COUNT_FAILURES = """
SELECT j.queue, j.kind, count(*) AS failures,
    count(*) FILTER (WHERE f.outcome IN ('lease_lost', 'crashed')) AS lost_leases
FROM (
    SELECT job_id, outcome
    FROM {schema}.job_failures
    WHERE failed_at > now() - interval '1 hour'
    ORDER BY failed_at DESC
    LIMIT {limit}) AS f
LEFT JOIN LATERAL (SELECT queue, kind FROM {schema}.jobs WHERE id = f.job_id OFFSET 0) AS j ON true
GROUP BY j.queue, j.kind
"""


async def _measure_last_hour(connection: Connection, database: Database, numbers: Statistics) -> None:
    numbers.estimated.append("throughput")
    rows = await connection.fetch(database.sql(SAMPLE_LAST_HOUR.replace("{limit}", str(SAMPLE_JOBS))))
    total = next(row for row in rows if row["queue"] is None)
    numbers.duration_seconds = {"p50": total["p50"], "p95": total["p95"]}
    # A full sample without a job from before this hour stands for the part of the hour that it covers.
    covered_seconds = HOUR_SECONDS
    if total["is_cut"] and total["covered_seconds"] is not None:
        covered_seconds = max(total["covered_seconds"], 1.0)
    numbers.throughput = total["succeeded"] / covered_seconds
    for row in rows:
        if row["queue"] is not None:
            for part in _parts(numbers, row):
                part.throughput += row["succeeded"] / covered_seconds
    failures = 0
    for row in await connection.fetch(database.sql(COUNT_FAILURES.replace("{limit}", str(_SAMPLED_FAILURES)))):
        failures += row["failures"]
        numbers.lost_leases += row["lost_leases"]
        if row["queue"] is not None:
            for part in _parts(numbers, row):
                part.failures += row["failures"]
    if failures >= _SAMPLED_FAILURES:
        numbers.estimated += ["failures", "lost_leases"]
    ended = failures + numbers.throughput * HOUR_SECONDS
    numbers.retry_rate = failures / ended if ended else 0.0
    numbers.estimated += ["retry_rate", "duration_seconds"]


def _parts(numbers: Statistics, row: Mapping[str, Any]) -> tuple[Backlog, Backlog]:
    return (
        numbers.queues.setdefault(row["queue"], Backlog()),
        numbers.kinds.setdefault(row["kind"], Backlog()),
    )


DESCRIBE_PROCESSES = f"""
SELECT id, name, hostname, pid, version, array_remove(queues, NULL) AS queues, slots, busy, {moment("started_at")} AS started_at,
    {moment("seen_at")} AS seen_at, expires_at > now() AS live, hungry, health::text AS health
FROM {{schema}}.processes
ORDER BY processes.started_at, id
"""


async def _describe_processes(connection: Connection, database: Database, numbers: Statistics) -> None:
    known: set[str] | None = None
    for row in await connection.fetch(database.sql(DESCRIBE_PROCESSES)):
        values = dict(row)
        health = values.pop("health")
        process = ProcessSummary(**values)
        numbers.processes.append(process)
        kinds = _kinds_in(health) if process.live else None
        if kinds is not None:
            known = kinds | (known or set())
    if known is not None:
        numbers.unknown_kinds = {
            kind: backlog.ready + backlog.scheduled
            for kind, backlog in numbers.kinds.items()
            if kind not in known and backlog.ready + backlog.scheduled
        }


def _kinds_in(health: str) -> set[str] | None:
    """The kinds that a process says it knows; None where it says nothing of them, as one of another version may."""
    try:
        said = decode_json(health)
    except ValueError:
        return None
    kinds = said.get("kinds") if isinstance(said, dict) else None
    return {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else None


# What other roles' sessions do is NULL for all but members of this role and superusers.
SEES_ALL_SESSIONS = "pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"

# Old snapshots keep dead rows alive and make every claim slower.
OLDEST_TRANSACTION = f"""
SELECT extract(epoch FROM now() - min(xact_start))::float8, {SEES_ALL_SESSIONS}
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


async def _find_oldest_transaction(connection: Connection, numbers: Statistics) -> None:
    numbers.oldest_transaction_seconds, sees_all = await connection.fetchrow(OLDEST_TRANSACTION)
    if not sees_all:
        numbers.estimated.append("oldest_transaction_seconds")


async def sees_all_sessions(connection: Connection) -> bool:
    """Whether this role is shown what the sessions of other roles do."""
    return bool(await connection.fetchval(f"SELECT {SEES_ALL_SESSIONS}"))
