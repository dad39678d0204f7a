"""The kinds that handlers are registered under: their payload types, their defaults, and kinds that nobody knows."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from tests.inprocess import connect, running
from worker import (
    Handlers,
    Job,
    events,
)


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


async def test_an_unknown_kind_is_put_back_with_a_delay_and_its_attempt(database_url: str) -> None:
    async with running(database_url, Handlers()) as run:
        id = await run.enqueue("from the future", max_attempts=1)
        await run.said(events.JOB_RELEASED, job_id=id, reason="unknown_kind")
        row = await run.row(id)
        assert (row["state"], row["attempts"], row["lease_owner"]) == ("ready", 0, None)
        assert 5 <= await run.value("SELECT extract(epoch FROM available_at - started_at)::float8 FROM jobs") < 60
        await run.said(events.UNKNOWN_KIND, kind="from the future", jobs=1)
