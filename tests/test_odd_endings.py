"""How a Worker ends when something does not: a question that nobody answers, a handler that outlives the drain."""

from __future__ import annotations

import asyncio

import pytest

from tests.inprocess import deaf_until, quick, seen
from tests.waiting import await_for, until_cancelled
from worker import Handlers, Job, Worker, events
from worker.store import waiting
from worker.store.connection import Connection, Database


async def test_a_burst_ends_although_it_was_not_told_once_whether_work_is_left(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers, asked = Handlers(), [0]
    ask = waiting.work_is_left

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        pass

    async def ask_a_mute_server_first(connection: Connection, database: Database, *, queues: list[str], kinds: list[str]) -> bool:
        asked[0] += 1
        if asked[0] == 1:
            await until_cancelled()
        return await ask(connection, database, queues=queues, kinds=kinds)

    monkeypatch.setattr("worker.store.waiting.work_is_left", ask_a_mute_server_first)
    async with seen(database_url) as run:
        await run.enqueue("note")
        worker = Worker(handlers, quick(database_url, query_timeout_seconds=0.5), burst=True)
        await worker.start()
        await asyncio.wait_for(worker.wait_stopped(), 30)
        assert worker.status == 0
        assert await run.value("SELECT state FROM jobs") == "succeeded"
    assert asked[0] >= 2


async def test_a_handler_that_outlives_its_worker_ends_in_peace(database_url: str) -> None:
    """Its job was left to lease expiry, and the log has said so: there is nothing more to say, and nobody to say it to."""
    handlers, started, leave = Handlers(), asyncio.Event(), asyncio.Event()

    @handlers.job("deaf")
    async def deaf(job: Job[object]) -> None:
        started.set()
        await deaf_until(leave)

    async with seen(database_url) as run:
        settings = quick(database_url, shutdown_grace_seconds=0, lease_margin_seconds=1, lease_seconds=10, query_timeout_seconds=1)
        async with Worker(handlers, settings) as worker:
            assert worker.parts is not None
            pool = worker.parts.pool
            id = await run.enqueue("deaf")
            await started.wait()
        assert (worker.status, worker.has_deaf) == (75, True)
        leave.set()
        await await_for(lambda: pool.busy() == 0, 20)
        assert not run.log.find(events.INTERNAL_ERROR)
        assert worker.status == 75
        assert (await run.row(id))["state"] == "running"
