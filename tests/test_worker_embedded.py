"""Worker inside an application: entering it, leaving it, and the same drain as the daemon's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.inprocess import both_shapes, claim_ahead, deaf_until, quick, running, seen, until_the_drain, works
from tests.servers import PrivateCluster
from tests.waiting import await_for, await_while, until_cancelled
from tests.workplace import frozen
from worker import Handlers, Job, Worker, events

LONG_GRACE = {"shutdown_grace_seconds": 60}
"""For jobs that end as soon as the drain begins."""


@both_shapes
async def test_entering_returns_when_jobs_are_being_claimed_and_leaving_drains(database_url: str, shape: dict[str, Any]) -> None:
    handlers, noted = works()

    @handlers.job("enqueue while it drains")
    async def enqueue_while_it_drains(job: Job[object]) -> str:
        noted.append("started")
        await until_the_drain()
        later = await run.enqueue("work", "nothing")

        async def is_left_alone() -> bool:
            return (await run.row(later))["state"] == "ready"

        await await_while(is_left_alone, 0.5)
        return "drained"

    async with seen(database_url) as run:
        async with Worker(handlers, quick(database_url, workers=2, **LONG_GRACE, **shape)) as worker:
            assert worker.is_ready

            async def is_present() -> bool:
                return bool(await run.value("SELECT id FROM processes") == worker.id)

            await await_for(is_present)
            assert worker.id.startswith("test-")
            running_one = await run.enqueue("enqueue while it drains")
            await await_for(lambda: noted)
        assert worker.status == 0
        row = await run.row(running_one)
        assert (row["state"], row["result"], row["attempts"]) == ("succeeded", "drained", 1)
        assert await run.column("SELECT state FROM jobs WHERE id <> $1", running_one) == ["ready"]
        assert await run.value("SELECT count(*) FROM processes") == 0
        assert run.log.names()[-1] == "job_succeeded"
        assert len(run.log.find(events.SHUTDOWN_STARTED, running=1)) == 1


async def test_what_outlasts_the_grace_is_cancelled_and_given_back_with_its_attempt(database_url: str) -> None:
    handlers, noted = works()
    async with seen(database_url) as run:
        began = time.monotonic()
        async with Worker(handlers, quick(database_url, shutdown_grace_seconds=0.2)) as worker:
            id = await run.enqueue("work", "until stopped", max_attempts=1)
            await await_for(lambda: noted)
            place = (await run.row(id))["available_at"]
        assert time.monotonic() - began < 30
        row = await run.row(id)
        assert (row["state"], row["attempts"], row["available_at"], row["lease_owner"]) == ("ready", 0, place, None)
        assert row["fence"] > 0
        assert worker.status == 0
        assert run.log.find(events.JOB_RELEASED, job_id=id, reason="shutdown")
    assert noted == ["started", "shutdown"]


async def test_jobs_claimed_and_not_started_are_given_back(database_url: str) -> None:
    handlers, noted = works()
    async with seen(database_url) as run:
        async with Worker(handlers, quick(database_url, workers=1, **LONG_GRACE)) as worker:
            first = await run.enqueue("work", "until the drain")
            await await_for(lambda: noted)
            ids = [await run.enqueue("work", "nothing", max_attempts=1) for _ in range(3)]
            await claim_ahead(worker, 3)
        for id in ids:
            row = await run.row(id)
            assert (row["state"], row["attempts"]) == ("ready", 0)
            assert run.log.find(events.JOB_RELEASED, job_id=id, reason="not_started")
        assert (await run.row(first))["state"] == "succeeded"


async def test_a_deaf_handler_is_left_to_lease_expiry_and_the_status_says_so(database_url: str) -> None:
    handlers, started, free = Handlers(), asyncio.Event(), asyncio.Event()

    @handlers.job("deaf")
    async def deaf(job: Job[object]) -> None:
        started.set()
        await deaf_until(free)

    settings = quick(database_url, shutdown_grace_seconds=0.1, query_timeout_seconds=1, lease_seconds=12, lease_margin_seconds=0.6)
    async with seen(database_url) as run:
        async with Worker(handlers, settings) as worker:
            id = await run.enqueue("deaf")
            await started.wait()
        assert worker.status == 75
        assert worker.has_deaf
        row = await run.row(id)
        assert (row["state"], row["lease_owner"]) == ("running", worker.id)
        assert run.log.find(events.JOB_ABANDONED, job_id=id, reason="deaf_handler")
        free.set()
        await await_for(lambda: asyncio.all_tasks() == {asyncio.current_task()})  # the handler was left, and has ended now


async def test_a_mute_server_and_a_small_budget_are_left_within_it(private_cluster: Callable[..., PrivateCluster]) -> None:
    """Closing what cannot be closed in peace takes none of the time that is not there."""
    handlers, _ = works()
    cluster = private_cluster()
    settings = quick(cluster.dsn, shutdown_grace_seconds=0, query_timeout_seconds=0.05, lease_seconds=1)
    too_long: list[float] = []
    async with seen(cluster.dsn) as run:
        postmaster = int(str(await run.value("SELECT pg_read_file('postmaster.pid')")).split()[0])
        for _ in range(3):  # a machine may stand still for a while, but not each time
            async with Worker(handlers, settings) as worker:
                pids = await run.column("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'reliable-worker %'")
                stopping = contextlib.ExitStack()
                stopping.enter_context(frozen([*pids, postmaster]))
                began = time.monotonic()
            with stopping:
                too_long.append(time.monotonic() - began - worker.budget_seconds)
    assert min(too_long) < 0.5


async def test_cancelling_the_application_drains_and_goes_on_cancelling(database_url: str) -> None:
    handlers, noted = works()
    async with seen(database_url) as run:
        inside = asyncio.Event()

        async def application() -> None:
            async with Worker(handlers, quick(database_url, **LONG_GRACE)):
                inside.set()
                await until_cancelled()

        task = asyncio.create_task(application())
        await inside.wait()
        id = await run.enqueue("work", "until the drain")
        await await_for(lambda: noted)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await run.row(id))["state"] == "succeeded"
        assert await run.value("SELECT count(*) FROM processes") == 0


async def test_cancelling_again_while_it_drains_skips_the_grace_and_still_gives_back(database_url: str) -> None:
    handlers, noted = works()
    async with seen(database_url) as run:
        inside = asyncio.Event()

        async def application() -> None:
            async with Worker(handlers, quick(database_url, shutdown_grace_seconds=60)):
                inside.set()
                await until_cancelled()

        task = asyncio.create_task(application())
        await inside.wait()
        id = await run.enqueue("work", "until stopped")
        await await_for(lambda: noted)
        task.cancel()
        await await_for(lambda: run.log.find(events.SHUTDOWN_STARTED))
        task.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await task
        row = await run.row(id)
        assert (row["state"], row["attempts"]) == ("ready", 0)


async def test_an_exception_in_the_block_drains_and_is_raised(database_url: str) -> None:
    handlers, noted = works()
    async with seen(database_url) as run:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012  (it is about the block)
            async with Worker(handlers, quick(database_url, **LONG_GRACE)):
                id = await run.enqueue("work", "until the drain")
                await await_for(lambda: noted)
                raise ZeroDivisionError
        assert (await run.row(id))["state"] == "succeeded"


async def test_a_bug_in_a_loop_ends_in_an_orderly_stop_with_status_1(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, noted = works()

    async def broken(self: object) -> None:
        await await_for(lambda: noted)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("worker.reaper.Reaper.run", broken)
    async with seen(database_url) as run:
        id = await run.enqueue("work", "until the drain")
        worker = Worker(handlers, quick(database_url, **LONG_GRACE))
        await worker.start()
        await worker.wait_stopped()
        assert worker.status == 1
        assert (await run.row(id))["state"] == "succeeded"
        assert run.log.find(events.INTERNAL_ERROR, where="reaper")
    assert noted == ["started", None]


async def test_a_process_that_has_left_is_not_present_any_more(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keeper goes on until the end, and writes the presence as often as it can here."""
    monkeypatch.setattr("worker.job_renewals.PRESENCE_SECONDS", 0.01)
    handlers, _ = works()
    for _ in range(5):
        async with running(database_url, handlers) as run:
            assert (await run.run("work", "nothing"))["state"] == "succeeded"
        async with seen(database_url) as run:
            assert await run.value("SELECT count(*) FROM processes") == 0
