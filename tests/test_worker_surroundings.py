"""Worker and what is around it: the application's loop, signals and logs, other Workers, the host, and mute connections."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.inprocess import quick, running, seen, works
from tests.ports import Proxy
from tests.waiting import await_for, block_loop, until_cancelled
from worker import Handlers, Job, Worker, events
from worker.clock import local_seconds
from worker.store import claiming, shared_pool


async def test_a_host_that_has_slept_past_the_trust_stops_its_handlers(
    database_url: str, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers do not count the time that a host sleeps, the clock of leases does."""
    handlers, noted = works()
    slept = [0.0]

    if not hasattr(time, "CLOCK_BOOTTIME"):
        pytest.skip("this system has no clock that goes on while it sleeps")
    monkeypatch.setattr("worker.clock._read", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + slept[0])
    async with running(database_url, handlers, lease_seconds=60, job_timeout_seconds=300) as run:
        id = await run.enqueue("work", "until stopped")
        await await_for(lambda: noted == ["started"])
        async with connection.transaction():
            # Nothing renews it as the host wakes up: the server has not slept, and might let it.
            await connection.execute("SELECT FROM jobs WHERE id = $1 FOR UPDATE", id)
            slept[0] = 55
            await run.said(events.JOB_ABANDONED, job_id=id, reason="lease_untrusted")
    assert noted == ["started", "lease_untrusted"]


async def test_it_touches_no_signals_no_logging_and_no_hooks(database_url: str) -> None:
    def state() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
        root = logging.getLogger()
        log = (list(root.handlers), root.level, list(logging.getLogger("worker").handlers), logging.raiseExceptions)
        loop = asyncio.get_running_loop()
        hooks = (sys.excepthook, sys.unraisablehook, threading.excepthook, loop.get_exception_handler(), sys.stdout, sys.stderr)
        return handlers, log, hooks, os.getcwd(), list(sys.path), dict(os.environ)

    handlers, _ = works()
    before = state()
    async with Worker(handlers, quick(database_url)):
        assert state() == before
    assert state() == before


async def test_two_workers_in_one_process_share_the_work_and_keep_apart(database_url: str) -> None:
    handlers, owners = Handlers(), set()
    both = asyncio.Barrier(2)

    @handlers.job("who")
    async def who(job: Job[object]) -> None:
        await both.wait()  # one job in each Worker at the same time
        async with job.connection() as c:
            owners.add(await c.fetchval("SELECT lease_owner FROM jobs WHERE id = $1", job.id))

    async with seen(database_url) as run:
        ids = [await run.enqueue("who") for _ in range(2)]
        settings = quick(database_url, workers=1)
        async with Worker(handlers, settings) as first, Worker(handlers, settings) as second:
            for id in ids:
                assert (await run.ended(id))["attempts"] == 1
            assert first.id != second.id
            assert owners == {first.id, second.id}

            async def are_present() -> bool:
                return bool(await run.value("SELECT count(*) FROM processes") == 2)

            await await_for(are_present)


async def test_the_built_in_handlers_serve_when_none_are_given(database_url: str) -> None:
    async with seen(database_url) as run:
        await run.connection.execute(
            "INSERT INTO jobs (idempotency_key, payload, max_attempts) VALUES"
            " ('welcome-1001', '{\"message\":\"welcome\",\"sleep_ms\":8}', 5), ('invalid-1002', '{\"sleep_ms\":0}', 3)"
        )
        async with Worker(settings=quick(database_url)):

            async def over() -> bool:
                return not await run.value("SELECT EXISTS (SELECT FROM jobs WHERE state IN ('ready', 'running'))")

            await await_for(over)
        rows = await run.connection.fetch(
            "SELECT state, attempts, last_error IS NULL, lease_owner IS NULL AND lease_until IS NULL FROM jobs ORDER BY id"
        )
        assert [tuple(row) for row in rows] == [("succeeded", 1, True, True), ("dead", 3, False, True)]
        assert await run.column("SELECT message FROM processed_messages WHERE idempotency_key = 'welcome-1001'") == ["welcome"]


async def quietly_blocked(go: asyncio.Event, blocked: asyncio.Event) -> None:
    """Let a handler block the loop while nothing of the test itself is on its way: our own statements have a time limit, too."""
    go.set()
    async with asyncio.timeout(20):
        await blocked.wait()


async def test_a_handler_that_blocks_the_loop_costs_neither_lease_nor_commit(database_url: str) -> None:
    handlers, innocents, go, blocked = Handlers(), [], asyncio.Event(), asyncio.Event()

    @handlers.job("block", timeout_seconds=20)
    async def block(job: Job[object]) -> None:
        await go.wait()
        block_loop(6)
        blocked.set()

    @handlers.job("innocent", timeout_seconds=20)
    async def innocent(job: Job[object]) -> None:
        innocents.append(job.fence)
        await blocked.wait()

    async with running(database_url, handlers, workers=4, lease_seconds=4) as run:
        ids = [await run.enqueue(kind) for kind in ("innocent", "innocent", "block")]
        await await_for(lambda: len(innocents) == 2)
        await quietly_blocked(go, blocked)
        for id in ids:
            row = await run.ended(id)
            assert (row["state"], row["attempts"]) == ("succeeded", 1)
        assert "block_loop" in (await run.said(events.LOOP_BLOCKED))["stack"]
        assert run.log.find(events.LEASE_EXPIRED) == []
    assert len(innocents) == 2


async def test_the_stack_of_a_blocked_loop_shows_no_password(database_url: str) -> None:
    handlers, go, blocked = Handlers(), asyncio.Event(), asyncio.Event()

    @handlers.job("block")
    async def block(job: Job[object]) -> None:
        await go.wait()
        block_loop(3)  # postgresql://app:geheim@db/app
        blocked.set()

    async with running(database_url, handlers) as run:
        await run.enqueue("block")
        await quietly_blocked(go, blocked)
        stack = (await run.said(events.LOOP_BLOCKED))["stack"]
    assert "postgresql://app:" in stack
    assert "geheim" not in stack


async def test_what_handlers_are_lent_is_new_once_the_claimer_has_met_a_server_that_takes_no_writes(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A primary that was demoted keeps its connections, and answers questions with what was true then."""
    handlers, claim, started = Handlers(), claiming.claim, asyncio.Event()
    refusals: list[int] = []

    @handlers.job("pid")
    async def pid(job: Job[object]) -> int:
        async with job.connection() as connection:
            return connection.get_server_pid()

    async def refused(*arguments: Any, **options: Any) -> Any:
        if refusals:
            refusals.pop()
            raise asyncpg.ReadOnlySQLTransactionError("cannot execute UPDATE in a read-only transaction")
        return await claim(*arguments, **options)

    @handlers.job("long")
    async def long(job: Job[object]) -> None:
        started.set()
        await until_cancelled()

    async with running(database_url, handlers) as run:
        first = (await run.run("pid"))["result"]

        async def demoted(connection: asyncpg.Connection) -> None:
            if connection.get_server_pid() == first:
                raise asyncpg.ReadOnlySQLTransactionError("the server takes no writes")

        monkeypatch.setattr(shared_pool, "ping", demoted)  # what it would say if it were asked
        id = await run.enqueue("long")
        await started.wait()
        await run.value("SELECT cancel_job($1)", id)
        await run.said(events.JOB_ABANDONED, job_id=id, reason="cancelled")
        assert (await run.run("pid"))["result"] == first, "a cancellation is no trouble with the database"
        monkeypatch.setattr(claiming, "claim", refused)
        refusals.append(1)
        await run.said(events.CLAIM_FAILED)
        assert (await run.run("pid"))["result"] != first


async def test_jobs_beside_a_process_that_is_gone_are_taken_over(database_url: str) -> None:
    """A row left running by a process that exists no more: reaped, a suspect, and run."""
    handlers, noted = works()
    async with seen(database_url) as run:
        id = await run.enqueue("work", "nothing")
        await run.connection.execute(
            "UPDATE jobs SET state = 'running', lease_owner = 'gone-00000000', lease_until = now() - interval '1 second',"
            " fence = nextval('fence_seq'), attempts = 1"
        )
        async with Worker(handlers, quick(database_url)):
            row = await run.ended(id)
        assert (row["state"], row["attempts"], row["crashes"]) == ("succeeded", 2, 1)
        assert run.log.find(events.LEASE_EXPIRED, job_id=id, outcome="crashed", lost_worker="gone-00000000")
    assert noted == ["started", None]


async def test_a_worker_without_runtime_directory_still_works(database_url: str, tmp_path: Path) -> None:
    handlers, _ = works()
    async with running(database_url, handlers, runtime_dir=tmp_path / "missing") as run:
        assert (await run.run("work", "nothing"))["state"] == "succeeded"
    assert list(tmp_path.iterdir()) == []


async def test_a_host_of_any_name_is_present(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that is no UTF-8 reads as an unpaired surrogate, which nothing can store."""
    monkeypatch.setattr("socket.gethostname", lambda: "h\udcff\u00fc" + "x" * 300)
    handlers, _ = works()
    async with running(database_url, handlers) as run:
        assert (await run.run("work", "nothing"))["state"] == "succeeded"

        async def its_name() -> Any:
            return await run.value("SELECT hostname FROM processes")

        assert (await await_for(its_name)).startswith("h?\u00fcx")
        assert run.log.find(events.RENEW_FAILED) == []


@pytest.mark.parametrize("uses", ["transaction", "connection"])
async def test_a_handler_that_is_told_to_stop_waits_for_no_connection_that_has_gone_mute(database_url: str, uses: str) -> None:
    """Guarantee 5: its lease passes on within the margin, and another may start then."""
    handlers = Handlers()
    left = asyncio.get_running_loop().create_future()

    @handlers.job("query")
    async def query(job: Job[object]) -> None:
        async with job.connection() as connection:
            await connection.execute("SELECT 1")
        proxy.go_mute()
        told_at = local_seconds() + job.remaining_seconds()  # nothing renews it from here on
        try:
            async with job.transaction() if uses == "transaction" else job.connection() as connection:
                await connection.execute("SELECT 1")
        finally:
            left.set_result((job.cancel_reason, local_seconds() - told_at))

    async with seen(database_url) as run, Proxy(database_url) as proxy:
        async with Worker(handlers, quick(proxy.dsn, lease_seconds=8, query_timeout_seconds=4)):
            await run.connection.execute("SELECT enqueue_job('query', '{}')")
            async with asyncio.timeout(60):
                reason, seconds = await left
            proxy.flow()
        assert reason == "lease_untrusted"
        assert 0 <= seconds < 3.5, "it was waited for as long as for any statement"
