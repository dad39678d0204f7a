"""The connections of a handler for reading, which are neither its transaction nor anybody else's session."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tests.inprocess import APPLIED, APPLY, TABLE, running
from tests.servers import ADVISORY_LOCKS
from tests.waiting import await_for
from worker import (
    Handlers,
    Job,
    events,
)


async def test_misuse_of_transaction_effect_and_connection_is_a_runtime_error(database_url: str) -> None:
    handlers, tried = Handlers(), []

    async def refused(what: str, entering: contextlib.AbstractAsyncContextManager[Any]) -> None:
        with pytest.raises(RuntimeError) as caught:
            async with entering:
                pass
        tried.append((what, str(caught.value)))

    @handlers.job("both")
    async def both(job: Job[object]) -> None:
        job.effect(APPLY, job.key, job.fence)
        await refused("effect, then transaction", job.transaction())

    @handlers.job("inside")
    async def inside(job: Job[object]) -> None:
        async with job.connection():
            await refused("transaction while connection is held", job.transaction())
        async with job.transaction() as tx:
            with pytest.raises(RuntimeError, match="run the statement on `tx`"):
                job.effect(APPLY, job.key, job.fence)
            with pytest.raises(RuntimeError, match="run the statement on `tx`"):
                job.enqueue("other", {})
            await refused("connection inside transaction", job.connection())
            await refused("transaction inside transaction", job.transaction())
            await tx.execute(APPLY, job.key, job.fence)
        await refused("transaction twice", job.transaction())

    @handlers.job("thread")
    def thread(job: Job[object]) -> None:
        async def enter(what: str) -> None:
            await refused(what, getattr(job, what)())

        asyncio.run(enter("transaction"))
        asyncio.run(enter("connection"))

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        for kind in ("both", "inside", "thread"):
            row = await run.run(kind, max_attempts=1)
            assert row["state"] == "succeeded", row["last_error"]
        assert len(await run.column(APPLIED)) == 2
    assert len(tried) == 7


async def test_a_connection_reads_outside_the_fence_also_after_the_transaction(database_url: str) -> None:
    handlers, read = Handlers(), []

    @handlers.job("read")
    async def read_(job: Job[object]) -> None:
        async with job.connection() as c:
            read.append(await c.fetchval("SELECT state FROM jobs WHERE id = $1", job.id))
        async with job.transaction():
            pass
        async with job.connection() as c:
            read.append(await c.fetchval("SELECT state FROM jobs WHERE id = $1", job.id))

    async with running(database_url, handlers) as run:
        id = await run.enqueue("read")
        await run.said(events.JOB_SUCCEEDED, job_id=id)
        assert run.log.find(events.HANDLER_FAILED_AFTER_COMMIT) == []
    assert read == ["running", "succeeded"]


async def test_a_session_changed_on_a_connection_is_clean_for_the_next_borrower(database_url: str) -> None:
    handlers, found = Handlers(), []

    @handlers.job("read")
    async def read(job: Job[object]) -> None:
        async with job.connection() as c:
            found.append((await c.fetchval("SHOW search_path"), await c.fetchval("SELECT pg_try_advisory_lock(7)")))
            await c.execute("SET search_path = odd")
            await c.execute("BEGIN")

    async with running(database_url, handlers, workers=1) as run:
        await run.run("read")
        await run.run("read")
        assert await run.value(ADVISORY_LOCKS) == 0
    assert found == [('"$user", public', True)] * 2


async def test_handlers_that_hold_every_connection_starve_neither_renewals_nor_completions(database_url: str) -> None:
    handlers, all_hold = Handlers(), asyncio.Barrier(3)

    @handlers.job("hold")
    async def hold(job: Job[object]) -> None:
        async with job.connection() as c:
            await all_hold.wait()  # two jobs, and the test
            await c.fetchval("SELECT 1")
            await held.wait()

    @handlers.job("starve")
    async def starve(job: Job[object]) -> None:
        async with job.connection():
            pass

    held = asyncio.Event()
    async with running(database_url, handlers, pool_size=2, query_timeout_seconds=2, lease_seconds=9) as run:
        ids = [await run.enqueue("hold", max_attempts=1) for _ in range(2)]
        await all_hold.wait()
        row = await run.run("starve", max_attempts=1)
        assert row["last_error"].startswith("TimeoutError")
        until = (await run.row(ids[0]))["lease_until"]

        async def renewed() -> bool:
            return bool((await run.row(ids[0]))["lease_until"] > until)

        await await_for(renewed)
        held.set()
        for id in ids:
            assert (await run.ended(id))["state"] == "succeeded"
