"""Worker inside an application: its loop, its process, its signals and logs; and the same drain as the daemon's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.inprocess import both_shapes, listening, quick, running, seen
from tests.ports import Proxy
from tests.servers import PrivateCluster, Server
from tests.waiting import await_for
from tests.workplace import frozen
from worker import Handlers, Job, Settings, Worker, events
from worker.clock import local_seconds
from worker.errors import ConfigError, DatabaseUnavailable


def sleepers() -> tuple[Handlers, list[Any]]:
    """A kind `sleep` that sleeps for its payload in seconds and notes why it was stopped; `deaf` does not stop."""
    handlers, noted = Handlers(), []

    @handlers.job("sleep")
    async def sleep(job: Job[float]) -> str:
        noted.append("started")
        try:
            await asyncio.sleep(job.payload)
        finally:
            noted.append(job.cancel_reason)
        return "slept"

    @handlers.job("deaf")
    async def deaf(job: Job[float]) -> None:
        until = time.monotonic() + job.payload
        noted.append("started")
        while time.monotonic() < until:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(until - time.monotonic())

    return handlers, noted


@both_shapes
async def test_entering_returns_when_jobs_are_being_claimed_and_leaving_drains(database_url: str, shape: dict[str, Any]) -> None:
    handlers, noted = sleepers()
    async with seen(database_url) as run:
        async with Worker(handlers, quick(database_url, workers=2, **shape)) as worker:
            assert worker.is_ready

            async def is_present() -> bool:
                return bool(await run.value("SELECT id FROM processes") == worker.id)

            await await_for(is_present)
            assert worker.id.startswith("test-")
            running_one = await run.enqueue("sleep", 2)
            await await_for(lambda: noted)
            later = await run.enqueue("sleep", 0, delay_seconds=1.5)
        assert worker.status == 0
        row = await run.row(running_one)
        assert (row["state"], row["result"], row["attempts"]) == ("succeeded", "slept", 1)
        assert (await run.row(later))["state"] == "ready", "it began to drain before"
        assert await run.value("SELECT count(*) FROM processes") == 0
        assert run.log.names()[-1] == "job_succeeded"
        assert len(run.log.find(events.SHUTDOWN_STARTED, running=1)) == 1


async def test_what_outlasts_the_grace_is_cancelled_and_given_back_with_its_attempt(database_url: str) -> None:
    handlers, noted = sleepers()
    async with seen(database_url) as run:
        began = time.monotonic()
        async with Worker(handlers, quick(database_url, shutdown_grace_seconds=0.2)) as worker:
            id = await run.enqueue("sleep", 60, max_attempts=1)
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
    handlers, noted = sleepers()
    async with seen(database_url) as run:
        async with Worker(handlers, quick(database_url, workers=1)) as worker:
            first = await run.enqueue("sleep", 0.5)
            await await_for(lambda: noted)
            # Put into its hand what a claim ahead would have brought.
            assert worker.parts is not None
            ids = [await run.enqueue("sleep", 0, max_attempts=1) for _ in range(3)]
            await worker.parts.pool.claimer._round(3) if worker.parts.pool.claimer else None
            await await_for(lambda: worker.parts is not None and worker.parts.pool.waiting() == 3)
        for id in ids:
            row = await run.row(id)
            assert (row["state"], row["attempts"]) == ("ready", 0)
            assert run.log.find(events.JOB_RELEASED, job_id=id, reason="not_started")
        assert (await run.row(first))["state"] == "succeeded"


async def test_a_deaf_handler_is_left_to_lease_expiry_and_the_status_says_so(database_url: str) -> None:
    handlers, noted = sleepers()
    settings = quick(database_url, shutdown_grace_seconds=0.1, query_timeout_seconds=0.3, lease_seconds=3, lease_margin_seconds=0.3)
    async with seen(database_url) as run:
        async with Worker(handlers, settings) as worker:
            id = await run.enqueue("deaf", 6)
            await await_for(lambda: noted)
            began = time.monotonic()
        assert time.monotonic() - began < 5
        assert worker.status == 75
        assert worker.has_deaf
        row = await run.row(id)
        assert (row["state"], row["lease_owner"]) == ("running", worker.id)
        assert run.log.find(events.JOB_ABANDONED, job_id=id, reason="deaf_handler")
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # the handler itself, which nobody can end
            await asyncio.wait({task})


async def test_a_mute_server_and_a_small_budget_are_left_within_it(private_cluster: Callable[..., PrivateCluster]) -> None:
    """Closing what cannot be closed in peace takes none of the time that is not there."""
    handlers, _ = sleepers()
    cluster = private_cluster()
    settings = quick(cluster.dsn, shutdown_grace_seconds=0, query_timeout_seconds=0.05, lease_seconds=1)
    async with seen(cluster.dsn) as run:
        postmaster = int(str(await run.value("SELECT pg_read_file('postmaster.pid')")).split()[0])
        async with Worker(handlers, settings) as worker:
            pids = await run.column("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'reliable-worker %'")
            stopping = contextlib.ExitStack()
            stopping.enter_context(frozen([*pids, postmaster]))
            began = time.monotonic()
        with stopping:
            assert time.monotonic() - began < worker.budget_seconds + 0.5


async def test_a_host_that_has_slept_past_the_trust_stops_its_handlers(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers do not count the time that a host sleeps, the clock of leases does."""
    handlers, noted = sleepers()
    slept = [0.0]

    if not hasattr(time, "CLOCK_BOOTTIME"):
        pytest.skip("this system has no clock that goes on while it sleeps")
    monkeypatch.setattr("worker.clock._read", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + slept[0])
    async with running(database_url, handlers, lease_seconds=60, job_timeout_seconds=300) as run:
        id = await run.enqueue("sleep", 200)
        await await_for(lambda: noted == ["started"])
        slept[0] = 55
        await run.said(events.JOB_ABANDONED, job_id=id, reason="lease_untrusted")
    assert noted == ["started", "lease_untrusted"]


async def test_cancelling_the_application_drains_and_goes_on_cancelling(database_url: str) -> None:
    handlers, noted = sleepers()
    async with seen(database_url) as run:
        inside = asyncio.Event()

        async def application() -> None:
            async with Worker(handlers, quick(database_url)):
                inside.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(application())
        await inside.wait()
        id = await run.enqueue("sleep", 0.3)
        await await_for(lambda: noted)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await run.row(id))["state"] == "succeeded"
        assert await run.value("SELECT count(*) FROM processes") == 0


async def test_cancelling_again_while_it_drains_skips_the_grace_and_still_gives_back(database_url: str) -> None:
    handlers, noted = sleepers()
    async with seen(database_url) as run:
        inside = asyncio.Event()

        async def application() -> None:
            async with Worker(handlers, quick(database_url, shutdown_grace_seconds=60)):
                inside.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(application())
        await inside.wait()
        id = await run.enqueue("sleep", 60)
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
    handlers, noted = sleepers()
    async with seen(database_url) as run:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012  (it is about the block)
            async with Worker(handlers, quick(database_url)):
                id = await run.enqueue("sleep", 0.2)
                await await_for(lambda: noted)
                raise ZeroDivisionError
        assert (await run.row(id))["state"] == "succeeded"


async def test_it_touches_no_signals_no_logging_and_no_hooks(database_url: str) -> None:
    def state() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
        root = logging.getLogger()
        log = (list(root.handlers), root.level, list(logging.getLogger("worker").handlers), logging.raiseExceptions)
        loop = asyncio.get_running_loop()
        hooks = (sys.excepthook, sys.unraisablehook, threading.excepthook, loop.get_exception_handler(), sys.stdout, sys.stderr)
        return handlers, log, hooks, os.getcwd(), list(sys.path), dict(os.environ)

    handlers, _ = sleepers()
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
            assert await run.value("SELECT count(*) FROM processes") == 2


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


# --- what keeps it from starting


async def _nothing_is_left(threads: set[threading.Thread]) -> None:
    await await_for(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    await await_for(lambda: set(threading.enumerate()) <= threads)


async def test_a_database_that_is_away_past_the_wait_raises_and_leaves_nothing_behind() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"postgresql://u:hunter2secret@127.0.0.1:{nobody.getsockname()[1]}/d"
        threads = set(threading.enumerate())
        with pytest.raises(DatabaseUnavailable, match=r"no database within 0\.3 s") as refused:
            async with Worker(Handlers(), quick(url, connect_wait_seconds=0.3)):
                raise AssertionError("not reached")
    assert "hunter2secret" not in str(refused.value)
    await _nothing_is_left(threads)


async def test_a_database_without_the_schema_raises_and_leaves_nothing_behind(empty_database_url: str) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match="migrate"):
        async with Worker(Handlers(), quick(empty_database_url)):
            raise AssertionError("not reached")
    await _nothing_is_left(threads)


async def test_a_database_that_is_not_there_is_refused_at_once(server: Server, database_url: str) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no_such_database"):
        async with Worker(Handlers(), quick(database_url.replace(database_url.split("/")[3].split("?")[0], "no_such_database"))):
            raise AssertionError("not reached")
    await _nothing_is_left(threads)


async def test_cancelled_while_it_waits_for_the_database_it_ends() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        worker = Worker(Handlers(), quick(f"postgresql://u@127.0.0.1:{nobody.getsockname()[1]}/d"))
        threads = set(threading.enumerate())
        with listening() as log:
            starting = asyncio.create_task(worker.start())
            await await_for(lambda: log.find(events.DATABASE_LOST))
        starting.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await starting
    await _nothing_is_left(threads)


def test_settings_that_do_not_fit_together_are_refused_before_anything_is_started(database_url: str) -> None:
    with pytest.raises(ConfigError, match="WORKER_RENEW_SECONDS"):
        Settings(database_url=database_url, lease_seconds=3, renew_seconds=3)


# --- while it runs


async def test_a_bug_in_a_loop_ends_in_an_orderly_stop_with_status_1(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, noted = sleepers()

    async def broken(self: object) -> None:
        await await_for(lambda: noted)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("worker.reaper.Reaper.run", broken)
    async with seen(database_url) as run:
        id = await run.enqueue("sleep", 0.3)
        worker = Worker(handlers, quick(database_url))
        await worker.start()
        await worker.wait_stopped()
        assert worker.status == 1
        assert (await run.row(id))["state"] == "succeeded"
        assert run.log.find(events.INTERNAL_ERROR, where="reaper")
    assert noted == ["started", None]


async def test_a_handler_that_blocks_the_loop_costs_neither_lease_nor_commit(database_url: str) -> None:
    handlers, innocents = Handlers(), []

    @handlers.job("block", timeout_seconds=20)
    async def block(job: Job[object]) -> None:
        time.sleep(3)  # noqa: ASYNC251  (that is what is tested)

    @handlers.job("innocent", timeout_seconds=20)
    async def innocent(job: Job[object]) -> None:
        innocents.append(job.fence)
        await asyncio.sleep(0.1)

    async with running(database_url, handlers, workers=4, lease_seconds=1) as run:
        ids = [await run.enqueue("innocent") for _ in range(2)]
        ids.append(await run.enqueue("block"))
        for id in ids:
            row = await run.ended(id)
            assert (row["state"], row["attempts"]) == ("succeeded", 1)
        assert run.log.find(events.LOOP_BLOCKED)
        assert "time.sleep" in run.log.find(events.LOOP_BLOCKED)[0]["stack"]
        assert run.log.find(events.LEASE_EXPIRED) == []
    assert len(innocents) == 2


async def test_jobs_beside_a_process_that_is_gone_are_taken_over(database_url: str) -> None:
    """A row left running by a process that exists no more: reaped, a suspect, and run."""
    handlers, noted = sleepers()
    async with seen(database_url) as run:
        id = await run.enqueue("sleep", 0)
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
    handlers, _ = sleepers()
    async with running(database_url, handlers, runtime_dir=tmp_path / "missing") as run:
        assert (await run.run("sleep", 0))["state"] == "succeeded"
    assert list(tmp_path.iterdir()) == []


async def test_a_host_of_any_name_is_present(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that is no UTF-8 reads as an unpaired surrogate, which nothing can store."""
    monkeypatch.setattr("socket.gethostname", lambda: "h\udcff\u00fc" + "x" * 300)
    handlers, _ = sleepers()
    async with running(database_url, handlers) as run:
        assert (await run.run("sleep", 0))["state"] == "succeeded"
        assert (await run.value("SELECT hostname FROM processes")).startswith("h?\u00fcx")
        assert run.log.find(events.RENEW_FAILED) == []


async def test_a_process_that_has_left_is_not_present_any_more(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keeper goes on until the end, and writes the presence as often as it can here."""
    monkeypatch.setattr("worker.job_renewals.PRESENCE_SECONDS", 0.01)
    handlers, _ = sleepers()
    for _ in range(5):
        async with running(database_url, handlers) as run:
            assert (await run.run("sleep", 0))["state"] == "succeeded"
        async with seen(database_url) as run:
            assert await run.value("SELECT count(*) FROM processes") == 0


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
        async with Worker(handlers, quick(proxy.dsn, lease_seconds=4)):
            await run.connection.execute("SELECT enqueue_job('query', '{}')")
            async with asyncio.timeout(60):
                reason, seconds = await left
            proxy.flow()
        assert reason == "lease_untrusted"
        assert 0 <= seconds < 2, "it was waited for as long as for any statement"
