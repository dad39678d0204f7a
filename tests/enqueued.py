"""What has been enqueued: how many jobs, and one of them as it is stored."""

from __future__ import annotations

import asyncpg

COUNT = "SELECT count(*) FROM jobs"


async def row_of(connection: asyncpg.Connection, id: int) -> asyncpg.Record:
    """All columns of a job, and its payload as text."""
    return await connection.fetchrow("SELECT *, payload::text AS payload_text FROM jobs WHERE id = $1", id)
