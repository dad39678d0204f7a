"""How a handler is stopped: by its time-out, by a cancellation, by the loss of its lease. And what cannot be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.inprocess import APPLIED, APPLY, TABLE, claim_ahead, deaf_until, expire, quick, running, seen
from tests.waiting import await_for, await_while, until_cancelled, wait_for
from worker import Handlers, Job, LeaseLost, Worker, attempt, events
from worker.holding import Phase

# --- time-outs


async def test_an_async_handler_is_cancelled_at_its_time_out(database_url: str) -> None:
    handlers, reasons = Handlers(), []

    @handlers.job("slow", timeout_seconds=0.2)
    async def slow(job: Job[object]) -> None:
        try:
            await until_cancelled()
        finally:
            reasons.append(job.cancel_reason)

    async with running(database_url, handlers) as run:
        row = await run.run("slow", max_attempts=2)
        assert (row["state"], row["attempts"]) == ("dead", 2)
        assert row["last_error"] == "TimeoutError: not done after 0.2 s"
        assert await run.column("SELECT outcome FROM job_failures") == ["timeout", "timeout"]
        assert await run.value("SELECT max(extract(epoch FROM completed_at - started_at)) FROM jobs") < 30
    assert reasons == ["timeout", "timeout"]


async def test_a_handler_that_swallows_its_cancellation_has_timed_out_all_the_same(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("stubborn", timeout_seconds=0.2)
    async def stubborn(job: Job[object]) -> str:
        job.effect(APPLY, job.key, job.fence)
        with contextlib.suppress(asyncio.CancelledError):
            await until_cancelled()
        return "all is well"

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        row = await run.run("stubborn", max_attempts=1)
        assert (row["state"], row["result"]) == ("dead", None)
        assert await run.column(APPLIED) == []


async def test_the_exception_a_cancelled_handler_ends_with_is_kept_as_the_cause(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("slow", timeout_seconds=0.1)
    async def slow(job: Job[object]) -> None:
        try:
            await until_cancelled()
        except asyncio.CancelledError:
            raise ValueError("the tidying failed") from None

    async with running(database_url, handlers) as run:
        row = await run.run("slow", max_attempts=1)
        assert row["last_error"].startswith("TimeoutError: not done after")
        assert "the tidying failed" in await run.value("SELECT error FROM job_failures")


async def test_a_deaf_handler_keeps_its_slot_until_it_really_ends(database_url: str) -> None:
    handlers, release = Handlers(), asyncio.Event()

    @handlers.job("deaf", timeout_seconds=0.2)
    async def deaf(job: Job[object]) -> None:
        await deaf_until(release)

    @handlers.job("next")
    async def next_(job: Job[object]) -> None:
        assert release.is_set()

    async with running(database_url, handlers, workers=1) as run:
        await run.run("deaf", max_attempts=1)
        assert run.worker.parts is not None
        pool = run.worker.parts.pool
        assert pool.claimer is not None
        id = await run.enqueue("next", max_attempts=1)
        passed_at = pool.claimer.passed_at
        await await_for(lambda: pool.claimer.passed_at > passed_at)  # it was woken, or looked by itself, and claimed nothing
        assert pool.free() == 0
        assert (await run.row(id))["state"] == "ready"
        release.set()
        assert (await run.ended(id))["state"] == "succeeded"


async def test_a_handler_deaf_in_a_transaction_of_its_own_has_timed_out_once_the_server_has_ended_that(database_url: str) -> None:
    """What was decided without it stays, and stays renewed until it is written, also when it comes back."""
    handlers, release, inside = Handlers(), asyncio.Event(), asyncio.Event()

    @handlers.job("deaf", timeout_seconds=0.2)
    async def deaf(job: Job[object]) -> None:
        async with job.transaction() as connection:
            await connection.execute(APPLY, job.key, job.fence)
            inside.set()
            await deaf_until(release)

    async with running(database_url, handlers, lease_seconds=6) as run, seen(database_url) as other:
        await run.connection.execute(TABLE)
        id = await run.enqueue("deaf", max_attempts=1)
        await inside.wait()
        assert run.worker.parts is not None
        (held,), pool = run.worker.parts.holdings, run.worker.parts.pool
        async with other.connection.transaction():
            # Waits until the server has ended that of the handler, and then keeps the outcome from being written.
            no_limits = "; ".join(
                f"SET LOCAL {limit} = 0" for limit in ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
            )
            await other.connection.execute(no_limits)
            await other.connection.execute("SELECT FROM jobs WHERE id = $1 FOR UPDATE", id)
            await await_for(lambda: held.phase is Phase.FINISHED)
            release.set()
            await await_for(lambda: not pool.running())
            assert held.phase is Phase.FINISHED
        assert (await run.ended(id))["state"] == "dead"
        assert await run.column("SELECT outcome FROM job_failures") == ["timeout"]
        assert await run.column(APPLIED) == []
    assert run.worker.status == 0
    assert run.log.find(events.JOB_ABANDONED) == []


async def test_a_thread_past_its_time_out_is_failed_at_once_fenced_and_keeps_its_slot(database_url: str) -> None:
    handlers, release, reasons = Handlers(), threading.Event(), []

    @handlers.job("thread", timeout_seconds=0.2)
    def thread(job: Job[object]) -> str:
        job.effect(APPLY, job.key, job.fence)
        if job.attempt == 1:
            assert release.wait(20)
            reasons.append(job.cancel_reason)
        return f"attempt {job.attempt}"

    async with running(database_url, handlers, workers=1) as run:
        await run.connection.execute(TABLE)
        id = await run.enqueue("thread", key="k")
        await run.said(events.JOB_FAILED, job_id=id)
        assert (await run.row(id))["state"] == "ready"
        assert await run.value("SELECT outcome FROM job_failures") == "timeout"
        assert run.worker.parts is not None
        assert run.worker.parts.pool.free() == 0
        release.set()
        row = await run.ended(id)
        assert (row["state"], row["result"]) == ("succeeded", "attempt 2")
        assert await run.column("SELECT fence FROM applied") == [row["fence"]]
    assert reasons == ["timeout"]


async def test_the_time_of_a_thread_starts_when_it_does(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.demand.SURPLUS_SECONDS", 60.0)  # what waits is not given back meanwhile
    handlers, release, started = Handlers(), threading.Event(), []

    @handlers.job("first", timeout_seconds=60)
    def first(job: Job[object]) -> None:
        assert release.wait(20)

    @handlers.job("thread", timeout_seconds=1)
    def thread(job: Job[object]) -> None:
        started.append(job.id)

    async with running(database_url, handlers, workers=1) as run:
        assert run.worker.parts is not None
        pool = run.worker.parts.pool
        await run.enqueue("first")
        await await_for(lambda: pool.busy() == 1)
        id = await run.enqueue("thread", max_attempts=1)
        await claim_ahead(run.worker, 1)
        await await_while(lambda: pool.waiting() == 1 and not started, 1.2)  # longer than its time-out
        release.set()
        assert (await run.ended(id))["state"] == "succeeded"
    assert started == [id]


async def test_plain_functions_run_in_threads_of_their_own_with_the_context_of_nobody_else(database_url: str) -> None:
    handlers, names = Handlers(), set()
    together = threading.Barrier(3, timeout=60)

    @handlers.job("thread")
    def thread(job: Job[object]) -> None:
        names.add(threading.current_thread().name)
        together.wait()

    async with running(database_url, handlers, workers=3) as run:
        ids = [await run.enqueue("thread", max_attempts=1) for _ in range(3)]
        for id in ids:
            assert (await run.ended(id))["state"] == "succeeded"
    assert len(names) == 3
    assert threading.main_thread().name not in names


async def test_every_attempt_begins_with_the_context_of_nobody_else(database_url: str) -> None:
    """Attempts start each other in their slots: neither tenants nor trace spans may come along."""
    handlers, found, go_on = Handlers(), [], asyncio.Event()
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")

    @handlers.job("tenant")
    async def of_a_tenant(job: Job[object]) -> None:
        found.append(tenant.get())
        tenant.set(f"tenant of {job.id}")
        await go_on.wait()

    async with running(database_url, handlers, workers=1) as run:
        ids = [await run.enqueue("tenant")]
        await await_for(lambda: found)
        ids += [await run.enqueue("tenant") for _ in range(3)]
        await claim_ahead(run.worker, 3)
        go_on.set()
        for id in ids:
            await run.ended(id)
    assert found == ["none"] * 4


async def test_callables_of_every_sort_are_handlers(database_url: str) -> None:
    handlers = Handlers()

    async def with_word(word: str, job: Job[object]) -> str:
        return word

    class Asynchronous:
        async def __call__(self, job: Job[object]) -> str:
            return "object"

        async def method(self, job: Job[object]) -> str:
            return "method"

    class Plain:
        def __call__(self, job: Job[object]) -> str:
            return f"thread {threading.current_thread() is not threading.main_thread()}"

    @functools.wraps(with_word)
    async def wrapped(job: Job[object]) -> str:
        return "wrapped"

    handlers.job("partial")(functools.partial(with_word, "partial"))
    handlers.job("object")(Asynchronous())
    handlers.job("method")(Asynchronous().method)
    handlers.job("plain")(Plain())
    handlers.job("plain partial")(functools.partial(lambda word, job: word, "plain partial"))
    handlers.job("wrapped")(wrapped)
    async with running(database_url, handlers) as run:
        for kind in ("partial", "object", "method", "plain partial", "wrapped"):
            assert (await run.run(kind, max_attempts=1))["result"] == kind
        assert (await run.run("plain", max_attempts=1))["result"] == "thread True"


# --- being told to stop


async def test_cancelling_a_running_job_stops_its_handler_and_applies_nothing(database_url: str) -> None:
    handlers, reasons = Handlers(), []
    started = asyncio.Event()

    @handlers.job("long")
    async def long(job: Job[object]) -> None:
        job.effect(APPLY, job.key, job.fence)
        started.set()
        try:
            await until_cancelled()
        finally:
            reasons.append(job.cancel_reason)

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        id = await run.enqueue("long")
        await started.wait()
        assert await run.value("SELECT cancel_job($1)", id) == "cancelled"
        await run.said(events.JOB_ABANDONED, job_id=id, reason="cancelled")
        row = await run.row(id)
        assert (row["state"], row["lease_owner"]) == ("cancelled", None)
        assert await run.column(APPLIED) == []
    assert reasons == ["cancelled"]


async def test_a_thread_whose_job_is_cancelled_is_told_and_fenced(database_url: str) -> None:
    handlers, reasons, started = Handlers(), [], threading.Event()

    @handlers.job("long")
    def long(job: Job[object]) -> None:
        job.effect(APPLY, job.key, job.fence)
        started.set()
        reasons.append(wait_for(lambda: job.cancel_reason, 20))
        with pytest.raises(LeaseLost):
            job.ensure_lease()
        reasons.append(wait_for(lambda: job.remaining_seconds() == 0))

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        id = await run.enqueue("long")
        await await_for(started.is_set)
        await run.value("SELECT cancel_job($1)", id)
        await run.said(events.JOB_ABANDONED, job_id=id, reason="cancelled")
        await await_for(lambda: reasons)
        assert await run.column(APPLIED) == []
        assert (await run.row(id))["state"] == "cancelled"
    assert reasons == ["cancelled", True]


async def test_a_handler_is_told_when_another_process_has_taken_its_job(database_url: str) -> None:
    handlers, reasons, started = Handlers(), [], asyncio.Event()

    @handlers.job("long")
    async def long(job: Job[object]) -> None:
        started.set()
        try:
            await until_cancelled()
        finally:
            reasons.append(job.cancel_reason)

    async with running(database_url, handlers, lease_seconds=12) as run:  # it is told by the renewal that is refused, within 4 s
        id = await run.enqueue("long")
        await started.wait()
        await expire(run, id)
        await run.said(events.JOB_ABANDONED, job_id=id, reason="lease_lost")
    assert reasons == ["lease_lost"]


async def test_a_thread_that_gets_going_late_starts_no_handler_behind_the_begin_of_a_shutdown(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an hour of torture found one, on a loaded machine."""
    handlers, ran = Handlers(), []
    is_late, may_go = threading.Event(), threading.Event()

    class LateThread:
        def run(self, function: Callable[..., object], *arguments: object) -> object:
            is_late.set()
            assert may_go.wait(60)
            return function(*arguments)

    @handlers.job("plain")
    def plain(job: Job[object]) -> None:
        ran.append(job.id)

    monkeypatch.setattr(attempt, "contextvars", SimpleNamespace(copy_context=LateThread))
    async with seen(database_url) as run:
        async with Worker(handlers, quick(database_url)) as worker, asyncio.TaskGroup() as group:
            id = await run.enqueue("plain")
            await await_for(is_late.is_set)

            async def go_once_it_stops() -> None:
                await await_for(lambda: worker.is_stopping)
                may_go.set()

            group.create_task(go_once_it_stops())
            worker.request_stop("test")
        row = await run.row(id)
        assert (row["state"], row["attempts"]) == ("ready", 0)
        assert [event["reason"] for event in run.log.find(events.JOB_RELEASED, job_id=id)] == ["not_started"]
    assert ran == []
