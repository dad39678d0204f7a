"""Wait until a job has ended, on the caller's own connection."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import asyncpg

from worker.domain_json import decode_json
from worker.store.enqueueing import in_schema

_FIRST_POLL_SECONDS = 0.05
_SLOWEST_POLL_SECONDS = 1.0


class Finished(NamedTuple):
    """How a job ended: `succeeded` with its result, `dead` or `cancelled` with its last error."""

    state: str
    result: object
    error: str | None


READ_STATE = """
SELECT state, result::text AS result, last_error
FROM {schema}.jobs
WHERE id = $1
"""


async def wait(connection: asyncpg.Connection, id: int, *, timeout_seconds: float, schema: str = "public") -> Finished:
    """Wait until the job has ended; polls, ever more slowly up to once a second.

    Raises TimeoutError when it has not ended in time, LookupError when there is no such job (any more: a
    retention of 0 deletes a job as it succeeds). In a transaction that began before the job ended only read
    committed sees its end.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    pause_seconds = _FIRST_POLL_SECONDS
    while True:
        # Each look may take a second even at the very end, so that a limit of 0 is one look.
        row = await connection.fetchrow(in_schema(READ_STATE, schema), id, timeout=max(deadline - loop.time(), 1.0))
        if row is None:
            raise LookupError(f"there is no job {id}")
        if row["state"] == "succeeded":
            result = row["result"]
            return Finished("succeeded", None if result is None else decode_json(result), None)
        if row["state"] in ("dead", "cancelled"):
            return Finished(row["state"], None, row["last_error"])
        remaining_seconds = deadline - loop.time()
        if remaining_seconds <= 0:
            raise TimeoutError(f"job {id} is still {row['state']} after {timeout_seconds:g} s")
        await asyncio.sleep(min(pause_seconds, remaining_seconds))
        pause_seconds = min(pause_seconds * 1.5, _SLOWEST_POLL_SECONDS)
