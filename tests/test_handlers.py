"""What a handler sees and gives back, the kinds it is registered under, and what it is composed of."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from tests.inprocess import APPLIED, APPLY, TABLE, connect, quick, running, seen
from tests.waiting import await_for
from worker import (
    Handlers,
    Job,
    LeaseLost,
    Worker,
    events,
)

# --- what it sees


async def test_a_handler_sees_its_job(database_url: str) -> None:
    handlers, seen_jobs = Handlers(), []

    @handlers.job("look")
    async def look(job: Job[object]) -> None:
        seen_jobs.append(job)

    async with running(database_url, handlers, lease_seconds=30, job_timeout_seconds=7) as run:
        id = await run.enqueue("look", {"a": [1, None, "ü"]}, key="mine", queue="default", max_attempts=3)
        row = await run.ended(id)
    (job,) = seen_jobs
    assert (job.id, job.key, job.kind, job.queue) == (id, "mine", "look", "default")
    assert (job.attempt, job.max_attempts, job.fence) == (1, 3, row["fence"])
    assert job.payload == {"a": [1, None, "ü"]}
    assert job.resources is None
    assert job.cancel_reason is None
    assert repr(job) == f"<Job {id} look attempt 1 fence {row['fence']}>"


@pytest.mark.parametrize("payload", [None, [], "x", 7, True, {}, 0.5, [[[]]], "", 2**63, -(10**40), "\\u0000"], ids=repr)
async def test_every_json_payload_arrives_unchanged_and_goes_back_as_the_result(database_url: str, payload: object) -> None:
    handlers = Handlers()

    @handlers.job("echo")
    async def echo(job: Job[object]) -> object:
        return job.payload

    async with running(database_url, handlers) as run:
        row = await run.run("echo", payload)
    assert (row["state"], row["result"], type(row["result"])) == ("succeeded", payload, type(payload))


async def test_remaining_seconds_is_the_least_of_trust_and_time_out(database_url: str) -> None:
    handlers, remaining = Handlers(), {}

    @handlers.job("short", timeout_seconds=2)
    @handlers.job("long", timeout_seconds=500)
    async def measure(job: Job[object]) -> None:
        remaining[job.kind] = job.remaining_seconds()

    async with running(database_url, handlers, lease_seconds=20) as run:
        await run.run("short")
        await run.run("long")
    assert 0 < remaining["short"] <= 2
    assert 2 < remaining["long"] <= 18


async def test_ensure_lease_raises_unless_the_lease_is_trusted_that_long(database_url: str) -> None:
    handlers, heard = Handlers(), []

    @handlers.job("careful")
    async def careful(job: Job[object]) -> None:
        job.ensure_lease()
        job.ensure_lease(150)
        job.ensure_lease(-5)
        for seconds in (181, float("inf")):
            with pytest.raises(LeaseLost, match=r"trusted for 1[67]\d\."):
                job.ensure_lease(seconds)
            heard.append(seconds)

    async with running(database_url, handlers, lease_seconds=200) as run:
        assert (await run.run("careful"))["state"] == "succeeded"
    assert len(heard) == 2


async def test_a_lease_lost_raised_by_a_handler_that_still_has_it_is_a_failure(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("careful")
    async def careful(job: Job[object]) -> None:
        job.ensure_lease(1_000_000)

    async with running(database_url, handlers) as run:
        row = await run.run("careful", max_attempts=1)
    assert row["state"] == "dead"
    assert row["last_error"].startswith("LeaseLost: ")


async def test_job_log_carries_the_job(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("talk")
    async def talk(job: Job[object]) -> None:
        job.log.info("half way", percent=50)

    async with running(database_url, handlers) as run:
        id = await run.enqueue("talk")
        row = await run.ended(id)
        (said,) = [fields for name, fields in run.log.lines if name == "half way"]
    assert {**said, "fence": row["fence"]} == said
    assert (said["job_id"], said["kind"], said["attempt"], said["percent"]) == (id, "talk", 1, 50)


# --- results


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "result: "),
        ({"a": [float("inf")]}, "result: "),
        ("\ud800", "result: "),
        ("a\x00b", "result: "),
        ({1: 2}, "result: "),
        (object(), "result: "),
        ({1, 2}, "result: "),
        (datetime(2026, 1, 1, tzinfo=UTC), "result: "),
        ("x" * 1_100_000, "jobs_result_size"),
        ([0] * 3_000_000, "result"),
        (functools.reduce(lambda inner, _: [inner], range(199), []), None),
        (functools.reduce(lambda inner, _: [inner], range(200), []), "result: nested more than 200 levels deep"),
        (10**140_000, "result"),
    ],
    ids=["nan", "inf", "surrogate", "nul", "key", "object", "set", "date", "1 MiB", "16 MB", "deep", "too deep", "number"],
)
async def test_a_result_that_cannot_be_stored_is_an_ordinary_failure(database_url: str, value: object, said: str | None) -> None:
    handlers = Handlers()

    @handlers.job("give")
    async def give(job: Job[object]) -> object:
        job.effect(APPLY, job.key, job.fence)
        return value if job.key == "guilty" else 1

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        row = await run.run("give", key="guilty", max_attempts=1)
        if said is None:
            assert row["state"] == "succeeded"
            return
        assert row["state"] == "dead"
        assert said in row["last_error"]
        assert await run.column(APPLIED) == []
        assert (await run.run("give", key="next"))["state"] == "succeeded"


async def test_models_and_tuples_are_results_and_none_stores_nothing(database_url: str) -> None:
    handlers = Handlers()

    class Answer(BaseModel):
        at: datetime

    @handlers.job("model")
    async def model(job: Job[object]) -> object:
        return {"answers": (Answer(at=datetime(2026, 1, 2, tzinfo=UTC)),)}

    @handlers.job("nothing")
    async def nothing(job: Job[object]) -> None: ...

    async with running(database_url, handlers) as run:
        assert (await run.run("model"))["result"] == {"answers": [{"at": "2026-01-02T00:00:00Z"}]}
        id = await run.enqueue("nothing")
        await run.ended(id)
        assert await run.value("SELECT result IS NULL FROM jobs WHERE id = $1", id) is True


# --- payload types


class Order(BaseModel):
    number: int
    note: str = "none"

    @field_validator("number")
    @classmethod
    def positive(cls, number: int) -> int:
        if number < 0:
            raise ValueError("has to be positive")
        return number


async def test_a_payload_type_is_checked_and_given_to_the_handler(database_url: str) -> None:
    handlers, orders = Handlers(), []

    @handlers.job("order", payload=Order)
    async def order(job: Job[Order]) -> None:
        orders.append(job.payload)

    @handlers.job("numbers", payload=list[int])
    async def numbers(job: Job[list[int]]) -> int:
        return sum(job.payload)

    async with running(database_url, handlers) as run:
        await run.run("order", {"number": 3})
        assert (await run.run("numbers", [1, 2, 3]))["result"] == 6
    assert orders == [Order(number=3)]


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"number": "hunter2secret"}, "number: Input should be a valid integer"),
        ({"number": -1, "note": "hunter2secret"}, "number: Value error, has to be positive"),
        ({"note": "hunter2secret"}, "number: Field required"),
        ("hunter2secret", "payload: Input should be an object"),
        ({"number": 1, "note": {"hunter2secret": "hunter2secret"}}, "note: Input should be a valid string"),
    ],
)
async def test_a_payload_that_does_not_fit_is_retried_and_never_shown(database_url: str, payload: object, said: str) -> None:
    handlers = Handlers()

    @handlers.job("order", payload=Order)
    async def order(job: Job[Order]) -> None:
        raise AssertionError("not reached")

    async with running(database_url, handlers) as run:
        row = await run.run("order", payload, max_attempts=2)
        assert (row["state"], row["attempts"]) == ("dead", 2)
        assert row["last_error"].startswith(f"PayloadError: {said}")
        await run.said(events.JOB_DEAD)
        errors = await run.column("SELECT error FROM job_failures")
        assert len(errors) == 2
        assert "hunter2secret" not in row["last_error"] + "".join(errors) + run.log.text


async def test_the_defaults_of_a_kind_go_into_the_row_and_from_then_on_the_row_decides(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("order", payload=Order, queue="orders", priority=4, max_attempts=2)
    async def order(job: Job[Order]) -> None:
        raise ValueError("no")

    connection = await connect(database_url)
    try:
        plain = await order.enqueue(connection, Order(number=1))
        chosen = await order.enqueue(connection, Order(number=1), key="k", queue="default", priority=0, max_attempts=1)
        assert (await order.enqueue(connection, Order(number=9), key="k")) == (chosen.id, False, "ready")
        rows = await connection.fetch("SELECT queue, priority, max_attempts FROM jobs ORDER BY id")
        assert [tuple(row) for row in rows] == [("orders", 4, 2), ("default", 0, 1)]
        with pytest.raises(ValueError, match="number: ") as refused:
            await order.enqueue(connection, {"number": "hunter2secret"})  # type: ignore[arg-type]
        assert "hunter2secret" not in str(refused.value)
        await connection.execute("UPDATE jobs SET max_attempts = 3, queue = 'default' WHERE id = $1", plain.id)
    finally:
        await connection.close()
    async with running(database_url, handlers) as run:
        assert (await run.ended(plain.id))["attempts"] == 3
        assert (await run.ended(chosen.id))["attempts"] == 1


def test_a_kind_is_registered_once_and_with_options_that_can_be_meant() -> None:
    handlers, other = Handlers(), Handlers()

    @handlers.job("a")
    @other.job("a")
    async def a(job: Job[object]) -> None: ...

    with pytest.raises(ValueError, match="'a' is registered already"):
        handlers.job("a")
    with pytest.raises(ValueError, match="'a' is registered already"):
        handlers.include(other)
    refused = ({"timeout_seconds": 0}, {"timeout_seconds": float("nan")}, {"priority": 40_000}, {"max_attempts": 0}, {"queue": ""})
    for options in refused:
        with pytest.raises(ValueError, match=next(iter(options))):
            handlers.job("b", **options)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="kind"):
        handlers.job("x" * 129)
    assert list(handlers.kinds) == ["a"]


async def test_a_kind_can_still_be_called_as_a_function() -> None:
    handlers = Handlers()

    @handlers.job("double")
    async def double(job: Any) -> int:
        return 2 * int(job)

    assert await double(21) == 42  # type: ignore[misc]


# --- unknown kinds


async def test_an_unknown_kind_is_put_back_with_a_delay_and_its_attempt(database_url: str) -> None:
    async with running(database_url, Handlers()) as run:
        id = await run.enqueue("from the future", max_attempts=1)
        await run.said(events.JOB_RELEASED, job_id=id, reason="unknown_kind")
        row = await run.row(id)
        assert (row["state"], row["attempts"], row["lease_owner"]) == ("ready", 0, None)
        assert 5 <= await run.value("SELECT extract(epoch FROM available_at - started_at)::float8 FROM jobs") < 60
        assert run.log.find(events.UNKNOWN_KIND, kind="from the future", jobs=1)


# --- lifespans and composition


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
        await asyncio.sleep(0.2)
        order.append("end")

    async with seen(database_url) as run:
        id = await run.enqueue("use")
        async with Worker(handlers, quick(database_url)):
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
    handlers.job("a")(_nothing)
    other.job("b")(_nothing)
    handlers.include(other)
    async with seen(database_url) as run:
        await run.enqueue("a")
        with pytest.raises(OSError, match="no such service"):
            async with Worker(handlers, quick(database_url)):
                pass
        assert await run.value("SELECT state FROM jobs") == "ready"
        assert await run.value("SELECT count(*) FROM processes") == 0
    assert order == ["enter", "leave"]


async def _nothing(job: Job[object]) -> None: ...


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


# --- leaking nothing


async def test_nothing_is_said_about_payloads_results_and_arguments(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("quiet")
    async def quiet(job: Job[object]) -> object:
        job.effect("INSERT INTO applied (key, note) VALUES ($1, $2)", job.key, "hunter2secret")
        return job.payload

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        assert (await run.run("quiet", {"password": "hunter2secret"}))["state"] == "succeeded"
        await run.said(events.JOB_SUCCEEDED)
        assert "hunter2secret" not in run.log.text


async def test_handlers_leave_no_task_no_thread_and_no_warning_behind(database_url: str) -> None:
    handlers = Handlers()
    handlers.job("async")(_nothing)
    handlers.job("thread")(lambda job: None)
    before = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with running(database_url, handlers) as run:
            await run.run("async")
            await run.run("thread")
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await await_for(lambda: set(threading.enumerate()) <= before)
    assert logging.getLogger("worker").handlers == []
