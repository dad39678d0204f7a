"""The lifespans of handlers: entered before the first claim, left after the last attempt, each once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.inprocess import deaf_until, listening, nothing, quick, running, seen, until_the_drain
from tests.waiting import until_cancelled
from worker import Handlers, Job, Worker, events
from worker.clock import local_seconds
from worker.drain import Drain


async def test_a_lifespan_is_entered_before_the_first_claim_and_left_after_the_last_attempt(database_url: str) -> None:
    order: list[str] = []

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncIterator[dict[str, str]]:
        order.append("enter")
        yield {"client": "open"}
        order.append("leave")

    handlers, started = Handlers(lifespan=lifespan), asyncio.Event()

    @handlers.job("use")
    async def use(job: Job[object]) -> None:
        order.append(f"start {job.resources}")
        started.set()
        await until_the_drain()
        order.append("end")

    async with seen(database_url) as run:
        id = await run.enqueue("use")
        async with Worker(handlers, quick(database_url, shutdown_grace_seconds=20)):
            await started.wait()
        assert (await run.row(id))["state"] == "succeeded"
    assert order == ["enter", "start {'client': 'open'}", "end", "leave"]


async def test_a_lifespan_that_fails_stops_the_start_and_the_others_are_left(database_url: str) -> None:
    order: list[str] = []

    @contextlib.asynccontextmanager
    async def sound() -> AsyncIterator[None]:
        order.append("enter")
        try:
            yield
        finally:
            order.append("leave")

    @contextlib.asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise OSError("no such service")
        yield

    handlers, other = Handlers(lifespan=sound), Handlers(lifespan=broken)
    handlers.job("a")(nothing)
    other.job("b")(nothing)
    handlers.include(other)
    async with seen(database_url) as run:
        await run.enqueue("a")
        with pytest.raises(OSError, match="no such service"):
            async with Worker(handlers, quick(database_url)):
                pass
        assert await run.value("SELECT state FROM jobs") == "ready"
        assert await run.value("SELECT count(*) FROM processes") == 0
    assert order == ["enter", "leave"]


async def test_included_kinds_keep_their_own_lifespan_and_the_others_get_ours(database_url: str) -> None:
    entered: list[str] = []

    def lifespan(name: str) -> Any:
        @contextlib.asynccontextmanager
        async def enter() -> AsyncIterator[str]:
            entered.append(name)
            yield name

        return enter

    ours, theirs, plain = Handlers(lifespan=lifespan("ours")), Handlers(lifespan=lifespan("theirs")), Handlers()

    async def tell(job: Job[object]) -> object:
        return job.resources

    for handlers, kinds in ((ours, ["a", "b"]), (theirs, ["c", "d"]), (plain, ["e"])):
        for kind in kinds:
            handlers.job(kind)(tell)
    ours.include(theirs)
    ours.include(plain)
    async with running(database_url, ours) as run:
        results = [(await run.run(kind))["result"] for kind in "abcde"]
    assert results == ["ours", "ours", "theirs", "theirs", "ours"]
    assert sorted(entered) == ["ours", "theirs"], "each is entered once"


async def test_a_start_that_is_cancelled_cancels_what_is_being_entered_and_leaves_the_rest(database_url: str) -> None:
    order: list[str] = []
    entering = asyncio.Event()

    @contextlib.asynccontextmanager
    async def quick_one() -> AsyncIterator[None]:
        order.append("enter")
        yield
        order.append("leave")

    @contextlib.asynccontextmanager
    async def slow_one() -> AsyncIterator[None]:
        entering.set()
        try:
            await until_cancelled()
            yield
        finally:
            order.append("tidy")

    @contextlib.asynccontextmanager
    async def never() -> AsyncIterator[None]:
        order.append("never")
        yield

    handlers = Handlers(lifespan=quick_one)
    handlers.job("a")(nothing)
    for kind, lifespan in (("b", slow_one), ("c", never)):
        other = Handlers(lifespan=lifespan)
        other.job(kind)(nothing)
        handlers.include(other)
    starting = asyncio.create_task(Worker(handlers, quick(database_url)).start())
    await entering.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await starting
    assert order == ["enter", "tidy", "leave"]


async def test_a_time_out_of_a_lifespans_own_is_raised(database_url: str) -> None:
    @contextlib.asynccontextmanager
    async def impatient() -> AsyncIterator[None]:
        async with asyncio.timeout(0):
            await until_cancelled()
        yield

    handlers = Handlers(lifespan=impatient)
    handlers.job("a")(nothing)
    with pytest.raises(TimeoutError):
        async with Worker(handlers, quick(database_url)):
            pass


async def test_a_lifespan_that_does_not_end_holds_up_the_stop_no_longer_than_its_budget(database_url: str) -> None:
    """It is named; the drain before it is as it was, and the others are left in order."""
    order: list[str] = []

    @contextlib.asynccontextmanager
    async def first() -> AsyncIterator[None]:
        yield
        await asyncio.sleep(0.001)  # says goodbye to somebody
        order.append("left")

    @contextlib.asynccontextmanager
    async def hanging() -> AsyncIterator[None]:
        yield
        try:
            await until_cancelled()
        finally:
            order.append("cancelled")

    handlers, other = Handlers(lifespan=first), Handlers(lifespan=hanging)
    handlers.job("a")(nothing)
    other.job("b")(nothing)
    handlers.include(other)
    async with seen(database_url) as run:
        async with Worker(handlers, quick(database_url, shutdown_grace_seconds=0, query_timeout_seconds=2)) as worker:
            assert (await run.run("b"))["state"] == "succeeded"
        assert worker.status == 1
        [told] = run.log.find(events.INTERNAL_ERROR, where="lifespan")
        assert "hanging did not end" in str(told["exception"])
        assert await run.value("SELECT count(*) FROM processes") == 0
    assert order == ["cancelled", "left"]


async def test_a_lifespan_is_left_in_order_behind_a_drain_that_has_used_up_the_budget(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the handlers have left behind decides how it went."""
    order: list[str] = []

    async def use_it_up(self: Drain, deadline: float) -> None:
        await asyncio.sleep(max(deadline - local_seconds(), 0))

    monkeypatch.setattr(Drain, "_finish_writing", use_it_up)

    @contextlib.asynccontextmanager
    async def client() -> AsyncIterator[None]:
        yield
        await asyncio.sleep(0.001)
        order.append("left")

    handlers, started, leave = Handlers(lifespan=client), asyncio.Event(), asyncio.Event()

    @handlers.job("deaf")
    async def deaf(job: Job[object]) -> None:
        started.set()
        await deaf_until(leave)

    async with seen(database_url) as run:
        async with Worker(handlers, quick(database_url, shutdown_grace_seconds=0, query_timeout_seconds=0.5)) as worker:
            await run.enqueue("deaf")
            await started.wait()
        leave.set()
        assert (worker.status, order) == (75, ["left"])
        assert run.log.find(events.INTERNAL_ERROR) == []


async def test_a_lifespan_that_swallows_the_end_of_its_time_is_named_as_well(database_url: str) -> None:
    @contextlib.asynccontextmanager
    async def swallowing() -> AsyncIterator[None]:
        yield
        with contextlib.suppress(asyncio.CancelledError):
            await until_cancelled()

    handlers = Handlers(lifespan=swallowing)
    handlers.job("a")(nothing)
    with listening() as log:
        async with Worker(handlers, quick(database_url, shutdown_grace_seconds=0, query_timeout_seconds=0.5)) as worker:
            pass
    assert worker.status == 1
    [told] = log.find(events.INTERNAL_ERROR, where="lifespan")
    assert "swallowing did not end" in str(told["exception"])


async def test_a_second_request_to_stop_takes_the_grace_from_a_lifespan_that_is_ending(database_url: str) -> None:
    ending = asyncio.Event()

    @contextlib.asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        yield
        ending.set()
        await until_cancelled(600)

    handlers = Handlers(lifespan=slow)
    handlers.job("a")(nothing)
    worker = Worker(handlers, quick(database_url, shutdown_grace_seconds=600, query_timeout_seconds=0.5))
    await worker.start()
    worker.request_stop("signal")
    async with asyncio.timeout(60):
        await ending.wait()
        worker.request_stop("signal")
        await worker.wait_stopped()
    assert worker.status == 1


async def test_a_stop_is_clean_whatever_a_lifespan_that_is_being_entered_makes_of_it(database_url: str) -> None:
    entering = asyncio.Event()

    @contextlib.asynccontextmanager
    async def converting() -> AsyncIterator[None]:
        try:
            entering.set()
            await until_cancelled()
        except asyncio.CancelledError:
            raise ConnectionError("gave up") from None
        yield

    handlers = Handlers(lifespan=converting)
    handlers.job("a")(nothing)
    worker = Worker(handlers, quick(database_url))
    async with asyncio.timeout(20):
        starting = asyncio.create_task(worker.start())
        await entering.wait()
        worker.request_stop("signal")
        await starting
        await worker.wait_stopped()
    assert worker.status == 0
