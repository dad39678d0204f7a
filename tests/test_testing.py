"""worker.testing: an application's own tests run its jobs in-process, with everything that production does."""

from __future__ import annotations

import asyncio

import pytest

from tests.inprocess import connect, seen
from tests.waiting import until_cancelled
from worker import Handlers, Job, Retry, Snooze, enqueue
from worker.errors import ConfigError
from worker.testing import drain, run_job

handlers = Handlers()


@handlers.job("greet")
async def greet(job: Job[object]) -> str:
    job.effect("INSERT INTO greeted VALUES ($1)", job.key)
    return f"hello {job.payload}"


@handlers.job("fail")
async def fail(job: Job[object]) -> None:
    raise ValueError(f"attempt {job.attempt}")


@handlers.job("at the second try")
async def second(job: Job[object]) -> int:
    if job.attempt == 1:
        raise ValueError("not yet")
    return job.attempt


async def test_run_job_returns_state_result_and_error(database_url: str) -> None:
    async with seen(database_url) as run:
        await run.connection.execute("CREATE TABLE greeted (key text)")
        finished = await run_job(handlers, "greet", "you", dsn=database_url, key="k")
        assert finished == ("succeeded", "hello you", None)
        assert await run.column("SELECT key FROM greeted") == ["k"]
        assert await run.value("SELECT count(*) FROM processes") == 0


async def test_run_job_makes_one_attempt_unless_told_otherwise(database_url: str) -> None:
    assert await run_job(handlers, "fail", None, dsn=database_url) == ("dead", None, "ValueError: attempt 1")
    assert await run_job(handlers, "fail", None, dsn=database_url, max_attempts=3) == ("dead", None, "ValueError: attempt 3")
    assert (await run_job(handlers, "at the second try", None, dsn=database_url, max_attempts=2)).result == 2


async def test_run_job_says_that_the_schema_is_missing_and_what_to_do(empty_database_url: str) -> None:
    with pytest.raises(ConfigError, match="worker migrate"):
        await run_job(handlers, "greet", "you", dsn=empty_database_url)


async def test_run_job_touches_no_other_job(database_url: str) -> None:
    async with seen(database_url) as run:
        other = await run.enqueue("fail")
        await run_job(handlers, "fail", None, dsn=database_url)
        assert (await run.row(other))["state"] == "ready"


async def test_run_job_raises_time_out_and_leaves_by_the_drain(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_SHUTDOWN_GRACE_SECONDS", "0.1")
    handlers, reasons = Handlers(), []

    @handlers.job("long")
    async def long(job: Job[object]) -> None:
        try:
            await until_cancelled()
        finally:
            reasons.append(job.cancel_reason)

    async with seen(database_url) as run:
        with pytest.raises(TimeoutError):
            await run_job(handlers, "long", None, dsn=database_url, timeout_seconds=3)
        assert await run.value("SELECT state FROM jobs") == "ready"
        assert await run.value("SELECT attempts FROM jobs") == 0
    assert reasons == ["shutdown"]


async def test_run_job_refuses_what_cannot_be_enqueued(database_url: str) -> None:
    with pytest.raises(ValueError, match="payload"):
        await run_job(handlers, "greet", float("nan"), dsn=database_url)


async def test_run_job_refuses_a_kind_that_these_handlers_do_not_know_at_once(database_url: str) -> None:
    async with seen(database_url) as run:
        with pytest.raises(LookupError, match="'greeet' is none of these handlers: at the second try, fail, greet"):
            await run_job(handlers, "greeet", "you", dsn=database_url)
        assert await run.value("SELECT count(*) FROM jobs") == 0


async def test_drain_runs_everything_to_its_end_retries_included(database_url: str) -> None:
    handlers, times = Handlers(), {}

    @handlers.job("work")
    async def work(job: Job[object]) -> None:
        times[job.key] = times.get(job.key, 0) + 1
        if job.payload == "follow" and times[job.key] == 1:
            job.enqueue("work", None, key="follow-up")
        if job.payload == "fail":
            raise ValueError("no")
        if job.payload == "retry" and job.attempt < 3:
            raise Retry(0.2)
        if job.payload == "snooze" and times[job.key] < 3:
            raise Snooze(0.1)

    connection = await connect(database_url)
    try:
        for name in ("fine", "fail", "retry", "snooze", "follow"):
            await enqueue(connection, "work", name, key=name, max_attempts=3)
        await enqueue(connection, "work", None, key="tomorrow", delay_seconds=86_400)
        await enqueue(connection, "nobody knows", None, key="unknown")
        await enqueue(connection, "work", None, key="elsewhere", queue="elsewhere")
        await drain(handlers, database_url)
        states = {row[0]: row[1] for row in await connection.fetch("SELECT idempotency_key, state FROM jobs")}
    finally:
        await connection.close()
    assert times == {"fine": 1, "fail": 3, "retry": 3, "snooze": 3, "follow": 1, "follow-up": 1}
    assert states == {
        **dict.fromkeys(("fine", "retry", "snooze", "follow", "follow-up"), "succeeded"),
        "fail": "dead",
        **dict.fromkeys(("tomorrow", "unknown", "elsewhere"), "ready"),
    }


async def test_drain_returns_at_once_when_there_is_nothing(database_url: str) -> None:
    async with asyncio.timeout(30):
        await drain(handlers, database_url)
