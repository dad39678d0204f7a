"""For the tests of applications: run jobs in this process against a real database, with everything that production does.

result = await run_job(handlers, "welcome", {"message": "hi"}, dsn=dsn)
assert result.state == "succeeded"

await drain(handlers, dsn)                    # until nothing is running or ready any more
"""

from __future__ import annotations

import secrets

from worker.embedded import Worker
from worker.handlers import Handlers
from worker.settings import Settings
from worker.store import schema as tables
from worker.store.connection import Database
from worker.store.enqueueing import enqueue
from worker.store.finished import Finished, wait

_WORKERS = 4


async def run_job(
    handlers: Handlers,
    kind: str,
    payload: object,
    *,
    dsn: str,
    key: str | None = None,
    max_attempts: int = 1,
    timeout_seconds: float = 30.0,
    schema: str = "public",
) -> Finished:
    """Enqueue one job, run it to its end (one attempt, unless `max_attempts` says more), and return its state, result and error.

    The job goes to a queue of its own, so nothing else is touched. With a key that exists already, the existing job is waited for.
    Raises LookupError for a kind that these handlers do not know, TimeoutError when the job has not ended in time, ConfigError when
    the database has not our tables or not the rights.
    """
    if kind not in handlers.kinds:
        raise LookupError(f"kind {kind!r} is none of these handlers: {', '.join(sorted(handlers.kinds)) or 'they have none'}")
    queue = f"testing-{secrets.token_hex(8)}"
    connection = await Database(dsn, schema=schema).connect("testing")
    try:
        await tables.verify(connection, schema)
        enqueued = await enqueue(connection, kind, payload, key=key, queue=queue, max_attempts=max_attempts, schema=schema)
        settings = Settings(
            database_url=dsn, schema_name=schema, workers=1, queues=(queue,), backoff_base_seconds=0, poll_seconds=0.05
        )
        async with Worker(handlers, settings):
            return await wait(connection, enqueued.id, timeout_seconds=timeout_seconds, schema=schema)
    finally:
        connection.terminate()


async def drain(
    handlers: Handlers,
    dsn: str,
    *,
    queues: tuple[str, ...] = ("default",),
    workers: int = _WORKERS,
    schema: str = "public",
) -> None:
    """Run the jobs of these queues until none of a kind known here is running or ready, retries included; delays between
    attempts are left out. Jobs first due in the future stay."""
    settings = Settings(
        database_url=dsn,
        schema_name=schema,
        workers=workers,
        queues=queues,
        backoff_base_seconds=0,
        poll_seconds=0.05,
    )
    worker = Worker(handlers, settings, burst=True)
    await worker.start()
    await worker.wait_stopped()
