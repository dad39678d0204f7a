"""Transactions are short: none of ours holds back the clean-up of the whole database for as long as a job takes."""

from __future__ import annotations

import asyncio

from tests.inprocess import running
from tests.waiting import await_for
from worker import Handlers, Job

OPEN_TRANSACTIONS = """
SELECT pid || ' since ' || xact_start FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
"""


async def test_no_transaction_is_open_while_a_handler_thinks(database_url: str) -> None:
    """G13: unless the handler has opened it itself."""
    handlers, thinking, go = Handlers(), asyncio.Event(), asyncio.Event()

    @handlers.job("think")
    async def think(job: Job[object]) -> None:
        job.effect("INSERT INTO ledger VALUES ($1, 1)", job.key)
        async with job.connection() as c:
            await c.fetchval("SELECT 1")
        thinking.set()
        await go.wait()
        job.effect("INSERT INTO ledger VALUES ($1, 2)", job.key)

    async with running(database_url, handlers) as run:
        await run.connection.execute("CREATE TABLE ledger (key text, fence bigint)")
        id = await run.enqueue("think")
        await thinking.wait()
        begun = set(await run.column(OPEN_TRANSACTIONS))

        async def all_have_ended() -> bool:
            assert begun.isdisjoint(await run.column(OPEN_TRANSACTIONS)), begun
            return True

        await await_for(all_have_ended, 4)  # the server itself ends the session of one that idles for 5 s
        go.set()
        assert (await run.ended(id))["state"] == "succeeded"
        assert await run.value("SELECT count(*) FROM ledger") == 2
