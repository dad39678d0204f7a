"""Jobs in numbers that all write an effect into one table."""

from __future__ import annotations

from tests.inprocess import Run

TABLE = "CREATE TABLE applied (key text, note int)"

APPLY = "INSERT INTO applied VALUES ($1, $2)"


async def enqueue_many(run: Run, kind: str, count: int) -> None:
    """Keys `job-0001` and so on, in one statement; each has one attempt, and its number as the payload."""
    await run.connection.execute(
        "INSERT INTO jobs (idempotency_key, kind, payload, max_attempts)"
        " SELECT 'job-' || lpad(n::text, 4, '0'), $1, to_jsonb(n), 1 FROM generate_series(1, $2) AS n",
        kind,
        count,
    )
