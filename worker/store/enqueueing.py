"""Enqueue in the caller's own transaction, on the caller's own connection, whatever codecs it has.

A duplicate key never aborts the transaction: the first job's id comes back with `created=False`. Several keys
in one transaction belong in key order, as `enqueue_many` (see bulk) writes them, or two callers can block each other.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import asyncpg

from worker.new_job import DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE, NewJob, new_job

PAYLOAD_BYTES = 1_048_576
# Shorter text cannot become more than PAYLOAD_BYTES of jsonb: "1," takes the most, 12 bytes for 2 characters.
SURELY_FITTING_CHARACTERS = 150_000


class Enqueued(NamedTuple):
    """The job that has the key: a new one when `created`, else the one there before, in whatever state."""

    id: int
    created: bool
    state: str


# The arguments are the fields of NewJob.
ENQUEUE = """
SELECT id, created, state
FROM {schema}.enqueue_job(
    kind => $1,
    payload => $2::text::jsonb,
    key => $3,
    queue => $4,
    priority => $5,
    run_at => COALESCE($6::text::timestamptz, clock_timestamp() + $7::float8 * interval '1 second'),
    max_attempts => $8)
"""


async def enqueue(
    connection: asyncpg.Connection,
    kind: str,
    payload: object,
    *,
    key: str | None = None,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    run_at: datetime | None = None,
    delay_seconds: float | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    schema: str = "public",
) -> Enqueued:
    """Enqueue one job; it runs once the caller's transaction has committed, not before `run_at` or the delay.

    Raises TypeError or ValueError, naming the field, before anything is written: the caller's transaction
    goes on.
    """
    job = new_job(
        kind,
        payload,
        key=key,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay_seconds=delay_seconds,
        max_attempts=max_attempts,
    )
    await refuse_oversized(connection, job)
    row = await connection.fetchrow(in_schema(ENQUEUE, schema), *job)
    return Enqueued(row["id"], row["created"], row["state"])


async def refuse_oversized(connection: asyncpg.Connection, job: NewJob) -> None:
    """Raise ValueError for a payload that the table would refuse: asked first, it aborts no transaction."""
    if len(job.payload) <= SURELY_FITTING_CHARACTERS:
        return
    size: int = await connection.fetchval("SELECT pg_column_size($1::text::jsonb)", job.payload)
    if size > PAYLOAD_BYTES:
        raise ValueError(f"payload: 1 MiB ({PAYLOAD_BYTES:,} bytes) as stored is allowed, this has {size:,}")


def in_schema(template: str, schema: str) -> str:
    """`template` with `{schema}` replaced by the quoted name."""
    return template.replace("{schema}", '"' + schema.replace('"', '""') + '"')
