"""What a handler sees of its job, what it gives back, and that nothing of it is shown or left behind."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import warnings
from datetime import UTC, datetime

import pytest
from pydantic import BaseModel

from tests.inprocess import APPLIED, APPLY, TABLE, nothing, running
from tests.waiting import await_for
from worker import (
    Handlers,
    Job,
    LeaseLost,
    events,
)


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


@pytest.mark.parametrize("kind", ["thread", "thread of a coroutine"])
async def test_a_thread_that_outlives_its_attempt_is_told_that_the_lease_is_gone(database_url: str, kind: str) -> None:
    """The trust in it would last for long, but another attempt holds the job."""
    handlers, told, is_second = Handlers(), threading.Event(), threading.Event()

    def work(job: Job[object]) -> None:
        if job.attempt == 1:
            assert is_second.wait(20)
            with pytest.raises(LeaseLost, match="the attempt has ended"):
                job.ensure_lease()
            told.set()
        else:
            job.ensure_lease()
            is_second.set()
            assert told.wait(20)

    handlers.job("thread", timeout_seconds=0.2 if kind == "thread" else 60)(work)

    @handlers.job("thread of a coroutine")
    async def works_in_a_thread(job: Job[object]) -> None:
        async with asyncio.timeout(0.2 if job.attempt == 1 else None):
            await asyncio.to_thread(work, job)

    async with running(database_url, handlers, lease_seconds=60) as run:
        id = await run.enqueue(kind)
        await await_for(told.is_set)
        await run.said(events.JOB_FAILED, job_id=id)


async def test_a_job_is_its_handlers_until_that_has_ended_also_behind_its_transaction(database_url: str) -> None:
    handlers, jobs = Handlers(), []

    @handlers.job("plain")
    async def plain(job: Job[object]) -> None:
        jobs.append(job)

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        async with job.transaction():
            job.ensure_lease(5)
        job.ensure_lease(5)
        assert job.remaining_seconds() > 5
        jobs.append(job)

    async with running(database_url, handlers, lease_seconds=60) as run:
        for kind in ("plain", "own"):
            assert (await run.run(kind))["state"] == "succeeded"
    assert len(jobs) == 2
    for job in jobs:
        with pytest.raises(LeaseLost, match="the attempt has ended"):
            job.ensure_lease()
        assert job.remaining_seconds() == 0


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

    # A machine that is busy with other things takes its time with 16 MB.
    async with running(database_url, handlers, lease_seconds=120, query_timeout_seconds=30) as run:
        await run.connection.execute(TABLE)
        row = await run.ended(await run.enqueue("give", key="guilty", max_attempts=1), timeout_seconds=60)
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
    handlers.job("async")(nothing)
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
