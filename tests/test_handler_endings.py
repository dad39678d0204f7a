"""The ways in which an attempt ends by itself: exceptions, retries, snoozes, discards; and who is told of a failure."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.inprocess import both_shapes, running
from tests.waiting import await_for, until_cancelled
from worker import (
    Discard,
    Handlers,
    Job,
    Retry,
    Snooze,
    events,
)

# --- ways to end


@both_shapes
async def test_an_exception_is_retried_until_the_attempts_are_used_up(database_url: str, shape: dict[str, Any]) -> None:
    handlers, attempts = Handlers(), []

    @handlers.job("fail")
    async def fail(job: Job[object]) -> None:
        attempts.append((job.attempt, job.fence))
        raise KeyError("no such thing")

    async with running(database_url, handlers, **shape) as run:
        id = await run.enqueue("fail", max_attempts=3)
        row = await run.ended(id)
        assert (row["state"], row["attempts"], row["last_error"]) == ("dead", 3, "KeyError: 'no such thing'")
        assert (row["lease_owner"], row["lease_until"]) == (None, None)
        assert [number for number, _ in attempts] == [1, 2, 3]
        fences = [fence for _, fence in attempts]
        assert fences == sorted(set(fences))
        failures = await run.connection.fetch("SELECT attempt, fence, outcome, worker, error FROM job_failures ORDER BY fence")
        assert [tuple(failure)[:3] for failure in failures] == [(n, f, "error") for n, f in attempts]
        assert {failure["worker"] for failure in failures} == {run.worker.id}
        assert all(Path(__file__).name in failure["error"] for failure in failures)
        await run.said(events.JOB_DEAD, job_id=id)
        assert len(run.log.find(events.JOB_FAILED, job_id=id)) == 2
        assert 0 <= run.log.find(events.JOB_FAILED)[0]["retry_in_seconds"] <= 0.02


async def test_snooze_uses_no_attempt_and_retry_and_discard_do(database_url: str) -> None:
    handlers, times = Handlers(), {}

    @handlers.job("snooze")
    async def snooze(job: Job[object]) -> None:
        times["snooze"] = times.get("snooze", 0) + 1
        if times["snooze"] < 4:
            raise Snooze(0.01)
        assert job.attempt == 1

    @handlers.job("retry")
    async def retry(job: Job[object]) -> None:
        raise Retry(3600, "come back later")

    @handlers.job("discard")
    async def discard(job: Job[object]) -> None:
        raise Discard("nobody wants this")

    async with running(database_url, handlers) as run:
        row = await run.run("snooze", max_attempts=1)
        assert (row["state"], row["attempts"], times["snooze"]) == ("succeeded", 1, 4)
        assert await run.value("SELECT count(*) FROM job_failures") == 0

        id = await run.enqueue("retry")
        await run.said(events.JOB_FAILED, job_id=id, retry_in_seconds=3600.0)
        row = await run.row(id)
        assert (row["state"], row["attempts"], row["last_error"]) == ("ready", 1, "Retry: come back later")
        assert 3600 <= (row["available_at"] - row["started_at"]).total_seconds() < 3660
        assert (await run.run("retry", max_attempts=1))["state"] == "dead"

        row = await run.run("discard", max_attempts=5)
        assert (row["state"], row["attempts"], row["last_error"]) == ("dead", 1, "Discard: nobody wants this")


@pytest.mark.parametrize(
    "odd",
    [-1, float("nan"), float("inf"), "soon", None, True, 10**400, timedelta(seconds=1), 30 * 86_400 + 1],
    ids=lambda value: str(value)[:20],
)
async def test_a_snooze_or_retry_with_an_odd_delay_is_an_ordinary_failure(database_url: str, odd: Any) -> None:
    handlers = Handlers()

    @handlers.job("odd")
    async def odd_(job: Job[object]) -> None:
        raise (Snooze if job.payload == "snooze" else Retry)(odd)

    async with running(database_url, handlers) as run:
        for exception in ("snooze", "retry"):
            row = await run.run("odd", exception, max_attempts=2)
            assert (row["state"], row["attempts"]) == ("dead", 2)
            assert f"{exception}: " in row["last_error"].lower()


@pytest.mark.parametrize("is_thread", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: SystemExit(3), "SystemExit"),
        (lambda: KeyboardInterrupt(), "KeyboardInterrupt"),
        (lambda: asyncio.CancelledError("mine"), "CancelledError"),
        (lambda: GeneratorExit(), "GeneratorExit"),
        (lambda: StopIteration(), "StopIteration"),
        (lambda: StopAsyncIteration(), "StopAsyncIteration"),
        (lambda: BaseExceptionGroup("both", [KeyboardInterrupt()]), "BaseExceptionGroup"),
        (lambda: TimeoutError("theirs"), "TimeoutError"),
        (lambda: RecursionError(), "RecursionError"),
        (lambda: MemoryError(), "MemoryError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_no_exception_harms_more_than_its_own_job(database_url: str, make: Any, name: str, is_thread: bool) -> None:
    handlers = Handlers()

    async def raise_async(job: Job[object]) -> None:
        if job.key == "guilty":
            raise make()

    def raise_sync(job: Job[object]) -> None:
        if job.key == "guilty":
            raise make()

    handlers.job("raise", timeout_seconds=5)(raise_sync if is_thread else raise_async)
    async with running(database_url, handlers, workers=1) as run:
        row = await run.run("raise", key="guilty", max_attempts=1)
        assert row["state"] == "dead"
        assert name in row["last_error"]
        assert await run.value("SELECT outcome FROM job_failures") == "error"
        assert (await run.run("raise"))["state"] == "succeeded"
        assert not run.worker.is_stopping


async def test_error_text_is_cleaned_cut_and_kept_for_the_last_twenty_failures(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("fail")
    async def fail(job: Job[object]) -> None:
        raise ValueError("NUL \x00, half \ud800, password=hunter2secret " + "é" * 1_000_000)

    async with running(database_url, handlers, backoff_base_seconds=0, workers=1) as run:
        row = await run.run("fail", max_attempts=25)
        assert row["attempts"] == 25
        assert len(row["last_error"]) == 1_000
        assert row["last_error"].startswith("ValueError: NUL \N{REPLACEMENT CHARACTER}, half ?, password=***")
        failures = await run.connection.fetch("SELECT attempt, octet_length(error) AS size, error FROM job_failures ORDER BY fence")
        assert [failure["attempt"] for failure in failures] == list(range(6, 26))
        assert max(failure["size"] for failure in failures) <= 8_192
        assert "hunter2secret" not in run.log.text


# --- failure hooks


async def test_failure_hooks_are_told_after_the_failure_is_written(database_url: str) -> None:
    handlers, other, told = Handlers(), Handlers(), []

    @handlers.on_failure
    async def first(job: Job[object], error: BaseException, will_retry: bool) -> None:
        state = await run.value("SELECT state FROM jobs WHERE id = $1", job.id)
        told.append((job.attempt, type(error).__name__, will_retry, state))

    @other.on_failure
    async def second(job: Job[object], error: BaseException, will_retry: bool) -> None:
        told.append("included")

    @handlers.job("fail", timeout_seconds=0.2)
    async def fail(job: Job[object]) -> None:
        if job.payload == "slow":
            await until_cancelled()
        if job.payload == "effect":
            job.effect("INSERT INTO no_such_table VALUES (1)")
            return
        raise ValueError("no")

    handlers.include(other)
    async with running(database_url, handlers, backoff_base_seconds=60) as run:
        id = await run.enqueue("fail", max_attempts=2)
        await await_for(lambda: len(told) == 2)
        await run.value("UPDATE jobs SET available_at = now() RETURNING id")
        assert (await run.ended(id))["state"] == "dead"
        await await_for(lambda: len(told) == 4)
        assert told == [(1, "ValueError", True, "ready"), "included", (2, "ValueError", False, "dead"), "included"]
        told.clear()
        await run.run("fail", "slow", max_attempts=1)
        await run.run("fail", "effect", max_attempts=1)
        await await_for(lambda: len(told) == 4)
        assert told[::2] == [(1, "TimeoutError", False, "dead"), (1, "UndefinedTableError", False, "dead")]


async def test_errors_of_failure_hooks_are_only_logged_and_a_slow_one_is_stopped(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.pool._FAILURE_HOOK_SECONDS", 0.1)
    handlers, told = Handlers(), []

    @handlers.on_failure
    async def broken(job: Job[object], error: BaseException, will_retry: bool) -> None:
        raise SystemExit(1) if job.payload == "exit" else KeyError("hook")

    @handlers.on_failure
    async def slow(job: Job[object], error: BaseException, will_retry: bool) -> None:
        await until_cancelled()

    @handlers.on_failure
    async def sound(job: Job[object], error: BaseException, will_retry: bool) -> None:
        told.append(job.id)

    @handlers.job("fail")
    async def fail(job: Job[object]) -> None:
        raise ValueError("no")

    async with running(database_url, handlers) as run:
        first = (await run.run("fail", max_attempts=1))["id"]
        await await_for(lambda: told == [first])
        said = run.log.find(events.INTERNAL_ERROR, where="on_failure")
        assert "KeyError" in said[0]["exception"]
        assert "TimeoutError" in said[1]["exception"]
        second = (await run.run("fail", "exit", max_attempts=1))["id"]
        await await_for(lambda: told == [first, second])
        assert not run.worker.is_stopping
        assert (await run.row(first))["state"] == "dead"


async def test_failure_hooks_are_told_of_an_unreadable_payload(database_url: str) -> None:
    """By then there is a job, but nothing to see in it."""
    handlers, told = Handlers(), []

    class Order(BaseModel):
        number: int

    @handlers.job("order", payload=Order)
    async def order(job: Job[Order]) -> None:
        raise AssertionError("not reached")

    @handlers.on_failure
    async def hook(job: Job[object], error: BaseException, will_retry: bool) -> None:
        told.append((job.id, job.kind, job.payload, type(error).__name__, will_retry))

    async with running(database_url, handlers) as run:
        id = (await run.run("order", "no object", max_attempts=1))["id"]
        await await_for(lambda: told == [(id, "order", None, "PayloadError", False)])
