"""Everything at once on the same rows: whoever gets in whose way, nobody is told of a deadlock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.inprocess import both_shapes, quick, seen
from tests.servers import Server, execute
from worker import Handlers, Job, Snooze, Worker, enqueue_many, events
from worker.store import pruning, reports
from worker.store.connection import Connection, Database
from worker.store.reports import JobFilter

KEYS = 400
ROUNDS = 20
# One row only: an operator's statement that locks several in an order of its own may well be the one that gives in.
EXPIRE = """
UPDATE jobs SET lease_until = now() - interval '1 second'
WHERE id = (SELECT id FROM jobs WHERE state = 'running' ORDER BY random() LIMIT 1) AND state = 'running'
"""


async def chance(at_most_seconds: float) -> None:
    """Who meets whom is left to it."""
    await asyncio.sleep(random.uniform(0, at_most_seconds))


def everything() -> Handlers:
    """One kind that ends in every way there is, with effects on rows that all jobs share."""
    handlers = Handlers()

    @handlers.job("any")
    async def any(job: Job[Any]) -> None:
        await chance(0.02)
        job.effect("UPDATE counters SET n = n + 1 WHERE id = $1", job.id % 5)
        if job.fence % 4 == 0:
            raise ValueError("no")
        if job.fence % 7 == 0:
            raise Snooze(0.01)
        if job.fence % 5 == 0:
            job.effect("UPDATE counters SET n = n - 1 WHERE id = $1", (job.id + 2) % 5)
            job.enqueue("any", {}, key=f"{job.key[:100]}-next")

    return handlers


@pytest.mark.parametrize("victims", ["commands", "workers"])
@both_shapes
async def test_whatever_meets_on_the_same_rows_nobody_is_told_of_a_deadlock(
    server: Server, database_url: str, shape: dict[str, Any], victims: str
) -> None:
    """G4: claims, renewals, completions, failures, the reaper, cancel and retry in bulk, prune, enqueue by the same keys, at once.
    Who looks for deadlocks first is the one that gives in."""
    looks_after = {"commands": "10ms", "workers": "10ms"} | {victims: "1ms"}
    execute(server.dsn, f"ALTER DATABASE {{}} SET deadlock_timeout = '{looks_after['workers']}'", urlsplit(database_url).path[1:])
    database = Database(database_url, environ={})
    done = dict.fromkeys(("cancelled", "ready"), 0)

    async def cancel(connection: Connection) -> None:
        ids = await reports.find_ids(connection, database, JobFilter(states=reports.CANCELLABLE))
        done["cancelled"] += sum(answer.state == "cancelled" for answer in await reports.cancel_jobs(connection, database, ids))

    async def retry(connection: Connection) -> None:
        ids = await reports.find_ids(connection, database, JobFilter(states=reports.RETRYABLE))
        done["ready"] += sum(answer.state == "ready" for answer in await reports.retry_jobs(connection, database, ids))

    async def prune(connection: Connection) -> None:
        await pruning.prune_all(
            connection, database, retention_seconds=0.1, dead_retention_seconds=0.1, ledger_retention_seconds=0.1
        )

    async def expire(connection: Connection) -> None:
        for _ in range(5):
            await connection.execute(EXPIRE)

    async def add(connection: Connection) -> None:
        some = random.sample(range(KEYS), 50)
        await enqueue_many(connection, [{"kind": "any", "payload": {}, "key": f"key-{n}", "max_attempts": 3} for n in some])

    async def repeat(step: Callable[[Connection], Awaitable[None]]) -> None:
        connection = await database.connect("test", statement_timeout_seconds=30)
        # Who waits long for somebody else's lock is told of something else.
        await connection.execute(f"SET deadlock_timeout = '{looks_after['commands']}'; SET lock_timeout = '30s'")
        try:
            for _ in range(ROUNDS):
                await step(connection)
                await chance(0.1)
        finally:
            connection.terminate()

    async with seen(database_url) as run:
        await run.connection.execute("CREATE TABLE counters (id int PRIMARY KEY, n int NOT NULL)")
        await run.connection.execute("INSERT INTO counters SELECT id, 0 FROM generate_series(0, 4) AS id")
        settings = {"renew_seconds": 0.1, "reap_seconds": 0.05, "workers": 20, "retention_seconds": 0, "backoff_base_seconds": 0}
        async with (
            Worker(everything(), quick(database_url, **settings, **shape)),
            Worker(everything(), quick(database_url, **settings, **shape)),
            asyncio.TaskGroup() as group,
        ):
            for step in (cancel, retry, prune, expire, add, add):
                group.create_task(repeat(step))
        assert "deadlock" not in run.log.text
        assert run.log.find(events.LEASE_EXPIRED)
        assert all(done.values())
        assert run.log.find(events.JOB_SUCCEEDED)
