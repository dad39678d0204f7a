"""Follow-up jobs: enqueued by the effect of another job, in the same transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.new_job import NewJob

if TYPE_CHECKING:
    from worker.store.connection import Database

# A key that exists already is left alone: the follow-up of a job that ran twice is one job.
FOLLOW_UP = """
INSERT INTO {schema}.jobs (kind, payload, idempotency_key, queue, priority, available_at, max_attempts)
VALUES ($1, $2::text::jsonb, COALESCE($3, 'auto:' || gen_random_uuid()), $4, $5,
    COALESCE($6::text::timestamptz, clock_timestamp() + $7 * interval '1 second'), $8)
ON CONFLICT (idempotency_key) DO NOTHING
"""


def follow_up(database: Database, job: NewJob) -> tuple[str, tuple[object, ...]]:
    """The statement and the arguments that enqueue `job`."""
    arguments = (
        job.kind,
        job.payload,
        job.key,
        job.queue,
        job.priority,
        job.run_at,
        job.delay_seconds,
        job.max_attempts,
    )
    return database.sql(FOLLOW_UP), arguments
