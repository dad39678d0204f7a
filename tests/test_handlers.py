"""What a handler may do, and what becomes of its job when it does something else."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel, field_validator

from tests.inprocess import SHAPES, Run, connect, quick, running, seen
from tests.processes import await_for
from worker import (
    Discard,
    EffectAlreadyApplied,
    Handlers,
    Job,
    LeaseLost,
    Retry,
    Snooze,
    Worker,
    events,
    owntransaction,
)

TABLE = "CREATE TABLE applied (key text, fence bigint, note text)"
APPLY = "INSERT INTO applied (key, fence) VALUES ($1, $2)"
APPLIED = "SELECT key FROM applied ORDER BY key"

both_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


async def expire(run: Run, id: int) -> None:
    """What the reaper does when another process has taken the job away meanwhile: owner and fence move on."""
    sql = "UPDATE jobs SET fence = nextval('fence_seq'), lease_owner = 'somebody-else' WHERE id = $1 AND state = 'running'"
    assert await run.connection.execute(sql, id) == "UPDATE 1"


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
    assert 1.5 < remaining["short"] <= 2
    assert 16 < remaining["long"] <= 18


async def test_ensure_lease_raises_unless_the_lease_is_trusted_that_long(database_url: str) -> None:
    handlers, heard = Handlers(), []

    @handlers.job("careful")
    async def careful(job: Job[object]) -> None:
        job.ensure_lease()
        job.ensure_lease(15)
        job.ensure_lease(-5)
        for seconds in (19, float("inf")):
            with pytest.raises(LeaseLost, match="trusted for 17"):
                job.ensure_lease(seconds)
            heard.append(seconds)

    async with running(database_url, handlers, lease_seconds=20) as run:
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


# --- effects


@both_shapes
async def test_effects_are_committed_with_the_completion_in_the_order_they_were_recorded(
    database_url: str, shape: dict[str, Any]
) -> None:
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[object]) -> str:
        job.effect("INSERT INTO applied VALUES ($1, 1)", job.key)
        job.effect("UPDATE applied SET fence = fence * 10 WHERE key = $1", job.key)
        job.effect("WITH n AS (SELECT 5 AS n) UPDATE applied SET fence = fence + n FROM n WHERE key = $1", job.key)
        job.effect("INSERT INTO applied SELECT 'copy', fence FROM applied WHERE key = $1;", job.key)
        job.effect("DELETE FROM applied WHERE key = $1", job.key)
        job.effect("SELECT set_config('app.tenant', $1, true)", "left")
        return "done"

    async with running(database_url, handlers, **shape) as run:
        await run.connection.execute(TABLE)
        row = await run.run("write", key="k")
        assert (row["state"], row["result"]) == ("succeeded", "done")
        assert [tuple(one) for one in await run.connection.fetch("SELECT key, fence FROM applied")] == [("copy", 15)]
        xmin = await run.value("SELECT xmin::text FROM applied")
        assert xmin == await run.value("SELECT xmin::text FROM jobs WHERE idempotency_key = 'k'"), "not one transaction"
        assert await run.value("SELECT job_id FROM job_effects WHERE idempotency_key = 'k'") == row["id"]


async def test_dicts_and_lists_go_to_json_columns_and_text_stays_json(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        for value in ({"a": [1, {"b": None}]}, ["x", 2], '{"text": "is JSON already"}'):
            job.effect("INSERT INTO documents VALUES ($1, $2)", value, value)
        job.effect("INSERT INTO documents VALUES ($1, NULL)", None)
        job.effect("INSERT INTO lists VALUES ($1, $2, $3)", ["a", None], date(2026, 2, 3), timedelta(seconds=5))

    async with running(database_url, handlers) as run:
        await run.connection.execute("CREATE TABLE documents (a jsonb, b json); CREATE TABLE lists (a text[], b date, c interval)")
        assert (await run.run("write"))["state"] == "succeeded"
        kinds = await run.column("SELECT jsonb_typeof(a) FROM documents")
        assert kinds == ["object", "array", "object", None]
        assert await run.value("SELECT a ->> 'text' FROM documents OFFSET 2 LIMIT 1") == "is JSON already"
        assert await run.value("SELECT a FROM lists") == ["a", None]


async def test_a_statement_that_is_no_effect_is_refused_at_the_call(database_url: str) -> None:
    handlers, refused = Handlers(), []

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        for sql in ("COMMIT", "SET search_path = x", "INSERT INTO applied VALUES ('a'); COMMIT", "", "CALL p()", "LISTEN x"):
            try:
                job.effect(sql)
            except ValueError as error:
                refused.append(str(error))
        job.effect(APPLY, job.key, job.fence)

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        assert (await run.run("write", key="k"))["state"] == "succeeded"
        assert await run.column(APPLIED) == ["k"]
    assert len(refused) == 6
    assert "COMMIT" in refused[0]
    assert "job.transaction()" in refused[0]


@both_shapes
async def test_a_failing_effect_is_reported_with_its_number_its_head_and_the_line_of_the_call(
    database_url: str, shape: dict[str, Any]
) -> None:
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        job.effect(APPLY, job.key, job.fence)
        job.effect(f"INSERT INTO no_such_table\n     VALUES ($1, '{'x' * 100}')", job.key)  # this line

    line = next(number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# this line" in text)
    async with running(database_url, handlers, **shape) as run:
        await run.connection.execute(TABLE)
        row = await run.run("write", max_attempts=2)
        assert row["state"] == "dead"
        assert row["attempts"] == 2
        assert "effect 2 (INSERT INTO no_such_table VALUES ($1, 'xxx" in row["last_error"]
        assert f"at {__file__}:{line}: " in row["last_error"]
        assert '"no_such_table" does not exist' in row["last_error"]
        assert row["last_error"].startswith("UndefinedTableError: ")
        assert await run.column(APPLIED) == [], "the first effect was committed without the second"
        assert await run.value("SELECT count(*) FROM job_effects") == 0
        dead = await run.said(events.JOB_DEAD)
        assert dead["error_type"] == "UndefinedTableError"


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("the shop is closed",), "invalid input"),
        ((object(),), "invalid input"),
        ((Odd(),), ""),
        ((2**70,), "invalid input"),
        ((1, 2), "expects 1 argument"),
        ((), "there is no parameter $1"),
    ],
    ids=["wrong type, and a word that sounds like a lost connection", "no type", "unprintable", "too large", "too many", "too few"],
)
@both_shapes
async def test_an_argument_that_cannot_be_sent_is_that_jobs_failure_and_nobody_elses(
    database_url: str, shape: dict[str, Any], arguments: tuple[object, ...], said: str
) -> None:
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        job.effect("INSERT INTO numbers VALUES ($1)", *(arguments if job.key == "guilty" else (1,)))

    async with seen(database_url) as run:
        await run.connection.execute("CREATE TABLE numbers (n bigint)")
        guilty = await run.enqueue("write", key="guilty", max_attempts=1)
        innocent = [await run.enqueue("write") for _ in range(5)]
        async with Worker(handlers, quick(database_url, **shape)) as worker:
            row = await run.ended(guilty)
            assert row["state"] == "dead"
            assert said in row["last_error"]
            assert "effect 1" in row["last_error"]
            for id in innocent:
                assert (await run.ended(id))["state"] == "succeeded"
            assert not worker.is_stopping
        assert await run.value("SELECT count(*) FROM numbers") == 5


async def test_effects_are_dropped_unless_the_handler_returns(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        job.effect(APPLY, job.key, job.fence)
        job.enqueue("other", {}, key="follow-up")
        if job.attempt == 1:
            raise ValueError("not yet")
        if job.attempt == 2:
            raise Retry(0)

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        row = await run.run("write", key="k")
        assert (row["state"], row["attempts"]) == ("succeeded", 3)
        assert await run.column("SELECT fence FROM applied") == [row["fence"]]
        assert await run.value("SELECT count(*) FROM jobs WHERE idempotency_key = 'follow-up'") == 1


@both_shapes
async def test_a_follow_up_is_enqueued_with_the_completion_or_not_at_all(database_url: str, shape: dict[str, Any]) -> None:
    handlers = Handlers()

    class Next(BaseModel):
        n: int

    @handlers.job("next", payload=Next, queue="elsewhere", priority=7, max_attempts=2)
    async def next_(job: Job[Next]) -> None: ...

    @handlers.job("first")
    async def first(job: Job[object]) -> None:
        job.enqueue(next_, Next(n=1), key=f"{job.key}-next")  # type: ignore[misc]
        job.enqueue("plain", {"a": 1}, key=f"{job.key}-plain", delay_seconds=3600, priority=-3)
        job.enqueue("plain", None)
        if job.payload == "fail":
            job.effect("INSERT INTO no_such_table VALUES (1)")

    async with running(database_url, handlers, **shape) as run:
        await run.run("first", "fail", key="bad", max_attempts=1)
        assert await run.value("SELECT count(*) FROM jobs") == 1
        await run.run("first", key="good")
        rows = await run.connection.fetch(
            "SELECT idempotency_key, kind, queue, priority, max_attempts, payload,"
            " available_at > now() + interval '50 minutes' AS later"
            " FROM jobs WHERE kind IN ('next', 'plain') ORDER BY id"
        )
        assert tuple(rows[0]) == ("good-next", "next", "elsewhere", 7, 2, '{"n": 1}', False)
        assert tuple(rows[1]) == ("good-plain", "plain", "default", -3, 5, '{"a": 1}', True)
        assert rows[2]["idempotency_key"].startswith("auto:")
        assert await run.value("SELECT count(*) FROM job_effects WHERE idempotency_key = 'good'") == 1


async def test_a_follow_up_whose_key_exists_is_left_as_it_is(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("first")
    async def first(job: Job[object]) -> None:
        job.enqueue("other", "new", key="taken")

    async with running(database_url, handlers) as run:
        taken = await run.enqueue("other", "old", key="taken", queue="elsewhere")
        assert (await run.run("first"))["state"] == "succeeded"
        assert (await run.row(taken))["payload"] == '"old"'


async def test_what_cannot_be_enqueued_is_refused_at_the_call(database_url: str) -> None:
    handlers, refused = Handlers(), []

    class Strict(BaseModel):
        n: int

    @handlers.job("strict", payload=Strict)
    async def strict(job: Job[Strict]) -> None: ...

    @handlers.job("first")
    async def first(job: Job[object]) -> None:
        for kind, payload, options in (
            ("other", float("nan"), {}),
            ("other", {"a": object()}, {}),
            ("", {}, {}),
            ("other", {}, {"key": "auto:mine"}),
            ("other", {}, {"priority": 70_000}),
            ("other", {}, {"run_at": datetime(2026, 1, 1)}),  # noqa: DTZ001
            ("other", {}, {"run_at": datetime(2026, 1, 1, tzinfo=UTC), "delay_seconds": 1}),
            ("other", {}, {"delay_seconds": -1}),
            ("other", {}, {"max_attempts": 0}),
            (strict, {"n": "secret"}, {}),
        ):
            try:
                job.enqueue(kind, payload, **options)  # type: ignore[arg-type]
            except (ValueError, TypeError) as error:
                refused.append(str(error))

    async with running(database_url, handlers) as run:
        assert (await run.run("first"))["state"] == "succeeded"
        assert await run.value("SELECT count(*) FROM jobs") == 1
    assert len(refused) == 10
    assert "secret" not in refused[-1]


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
        assert all("test_handlers.py" in failure["error"] for failure in failures)
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
        assert 3590 < (row["available_at"] - row["started_at"]).total_seconds() < 3601
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


# --- time-outs


async def test_an_async_handler_is_cancelled_at_its_time_out(database_url: str) -> None:
    handlers, ran_on, reasons = Handlers(), [], []

    @handlers.job("slow", timeout_seconds=0.2)
    async def slow(job: Job[object]) -> None:
        try:
            await asyncio.sleep(3)
            ran_on.append(job)
        finally:
            reasons.append(job.cancel_reason)

    async with running(database_url, handlers) as run:
        row = await run.run("slow", max_attempts=2)
        assert (row["state"], row["attempts"]) == ("dead", 2)
        assert row["last_error"] == "TimeoutError: not done after 0.2 s"
        assert await run.column("SELECT outcome FROM job_failures") == ["timeout", "timeout"]
        assert await run.value("SELECT max(extract(epoch FROM completed_at - started_at)) FROM jobs") < 1.5
    assert ran_on == []
    assert reasons == ["timeout", "timeout"]


async def test_a_handler_that_swallows_its_cancellation_has_timed_out_all_the_same(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("stubborn", timeout_seconds=0.2)
    async def stubborn(job: Job[object]) -> str:
        job.effect(APPLY, job.key, job.fence)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3)
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
            await asyncio.sleep(3)
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
        until = time.monotonic() + 10  # not for ever, or a failed test would not end
        while not release.is_set() and time.monotonic() < until:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)

    @handlers.job("next")
    async def next_(job: Job[object]) -> None:
        assert release.is_set()

    async with running(database_url, handlers, workers=1, lease_seconds=2) as run:
        await run.run("deaf", max_attempts=1)
        id = await run.enqueue("next")
        for _ in range(3):  # it is claimed no sooner, whatever is asked meanwhile
            assert run.worker.parts is not None
            assert run.worker.parts.pool.free() == 0
            assert (await run.row(id))["state"] == "ready"
            await asyncio.sleep(0.05)
        release.set()
        assert (await run.ended(id))["state"] == "succeeded"


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


async def test_the_time_of_a_thread_starts_when_it_does(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("thread", timeout_seconds=0.5)
    def thread(job: Job[object]) -> None:
        time.sleep(0.2)

    async with running(database_url, handlers, workers=2) as run:
        ids = [await run.enqueue("thread", max_attempts=1) for _ in range(8)]
        for id in ids:  # the last one waits longer than its time-out
            assert (await run.ended(id))["state"] == "succeeded"


async def test_plain_functions_run_in_threads_of_their_own_with_the_context_of_nobody_else(database_url: str) -> None:
    handlers, names = Handlers(), set()
    together = threading.Barrier(3, timeout=5)

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
    handlers, found = Handlers(), []
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")

    @handlers.job("tenant")
    async def of_a_tenant(job: Job[object]) -> None:
        found.append(tenant.get())
        tenant.set(f"tenant of {job.id}")
        await asyncio.sleep(0)

    async with running(database_url, handlers, workers=1) as run:
        for id in [await run.enqueue("tenant") for _ in range(10)]:
            await run.ended(id)
    assert found == ["none"] * 10


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


# --- the handler's own transaction


@both_shapes
async def test_a_transaction_completes_the_job_as_it_commits(database_url: str, shape: dict[str, Any]) -> None:
    handlers, states = Handlers(), []

    @handlers.job("own")
    async def own(job: Job[object]) -> str:
        async with job.transaction() as tx:
            await tx.execute(APPLY, job.key, job.fence)
            count = await tx.fetchval("SELECT count(*) FROM applied")
            job.result = {"count": count, "key": job.key}
            states.append(await outside.fetchval("SELECT state FROM jobs WHERE id = $1", job.id))
        states.append(await outside.fetchval("SELECT state FROM jobs WHERE id = $1", job.id))
        return "the result of the transaction stands"

    outside = await connect(database_url)
    try:
        async with running(database_url, handlers, **shape) as run:
            await run.connection.execute(TABLE)
            id = await run.enqueue("own", key="k")
            row = await run.ended(id)
            await run.said(events.JOB_SUCCEEDED, job_id=id)
            assert row["state"] == "succeeded"
            assert row["result"] == {"count": 1, "key": "k"}
            assert await run.column("SELECT fence FROM job_effects WHERE idempotency_key = 'k'") == [row["fence"]]
            assert await run.value("SELECT count(*) FROM open_transactions") == 0
    finally:
        await outside.close()
    assert states == ["running", "succeeded"]


async def test_an_exception_inside_the_transaction_rolls_everything_back_and_is_the_outcome(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        async with job.transaction() as tx:
            await tx.execute(APPLY, job.key, job.fence)
            match job.payload:
                case "error":
                    raise ValueError("half way")
                case "snooze":
                    raise Snooze(3600)
                case "discard":
                    raise Discard("no")
                case "sql":
                    await tx.execute("INSERT INTO no_such_table VALUES (1)")
                case "sql, ignored":
                    with contextlib.suppress(Exception):
                        await tx.execute("INSERT INTO no_such_table VALUES (1)")
                case "exit":
                    sys.exit(3)
                case "deferred":
                    await tx.execute("INSERT INTO checked VALUES (1), (1)")
                case "result":
                    job.result = float("nan")

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        await run.connection.execute("CREATE TABLE checked (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        for payload, said in (
            ("error", "ValueError: half way"),
            ("discard", "Discard: no"),
            ("sql", '"no_such_table" does not exist'),
            ("sql, ignored", "transaction is aborted"),
            ("exit", "SystemExit: 3"),
            ("deferred", "checked_n_key"),
            ("result", "result: NaN"),
        ):
            row = await run.run("own", payload, max_attempts=1)
            assert (row["state"], row["attempts"]) == ("dead", 1)
            assert said in row["last_error"]
        id = await run.enqueue("own", "snooze")
        await run.said(events.JOB_SNOOZED, job_id=id)
        row = await run.row(id)
        assert (row["state"], row["attempts"], row["completed_at"]) == ("ready", 0, None)
        assert await run.column(APPLIED) == []
        assert await run.value("SELECT count(*) FROM job_effects") == 0
        assert (await run.run("own", "fine"))["state"] == "succeeded"


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN", "COMMIT AND CHAIN"])
@pytest.mark.parametrize("swallows", [False, True], ids=["", "and ignores errors"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["", "and goes on"])
async def test_ending_the_transaction_by_hand_is_an_error_of_the_attempt_and_applies_nothing(
    database_url: str, ending: str, swallows: bool, goes_on: bool
) -> None:
    handlers = Handlers()

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        async with job.transaction() as tx:
            await tx.execute(APPLY, job.key, 1)
            with contextlib.suppress(Exception) if swallows else contextlib.nullcontext():
                await tx.execute(ending)
            if goes_on:
                with contextlib.suppress(Exception) if swallows else contextlib.nullcontext():
                    await tx.execute(APPLY, job.key, 2)

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        row = await run.run("own", max_attempts=1)
        assert row["state"] == "dead"
        assert "by hand" in row["last_error"]
        assert await run.column(APPLIED) == []
        assert await run.value("SELECT count(*) FROM job_effects") == 0
        assert await run.value("SELECT count(*) FROM open_transactions") == 0


async def test_savepoints_inside_the_transaction_are_the_handlers_own(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        async with job.transaction() as tx:
            try:
                async with tx.transaction():
                    await tx.execute(APPLY, "undone", 1)
                    await tx.execute("SELECT 1 / 0")
            except asyncpg.DivisionByZeroError:
                pass
            await tx.execute(APPLY, job.key, job.fence)

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        assert (await run.run("own", key="kept"))["state"] == "succeeded"
        assert await run.column(APPLIED) == ["kept"]


async def test_what_fails_after_the_commit_is_logged_and_changes_nothing(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        async with job.transaction() as tx:
            await tx.execute(APPLY, job.key, job.fence)
        raise ValueError("too late")

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        row = await run.run("own", key="k")
        said = await run.said(events.HANDLER_FAILED_AFTER_COMMIT, job_id=row["id"])
        assert "ValueError: too late" in said["exception"]
        await run.said(events.JOB_SUCCEEDED, job_id=row["id"])
        row = await run.row(row["id"])
        assert (row["state"], row["attempts"], row["last_error"]) == ("succeeded", 1, None)
        assert await run.column(APPLIED) == ["k"]
        assert await run.value("SELECT count(*) FROM job_failures") == 0


@pytest.mark.parametrize("key", [None, "chosen"])
@pytest.mark.parametrize("commits", [True, False])
async def test_a_lost_answer_to_the_commit_is_resolved_where_rows_are_deleted_too(
    database_url: str, monkeypatch: pytest.MonkeyPatch, key: str | None, commits: bool
) -> None:
    """RETENTION 0: the row is gone if it committed. A generated key has no ledger row to prove it; that it is gone does."""
    handlers, heard = Handlers(), []
    real = owntransaction._commit

    async def loses_the_answer(connection: Any, transaction: Any) -> BaseException | None:
        if heard:
            return await real(connection, transaction)
        if commits:
            await real(connection, transaction)
        connection.terminate()
        return ConnectionResetError("the answer is lost")

    monkeypatch.setattr(owntransaction, "_commit", loses_the_answer)

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        try:
            async with job.transaction() as tx:
                await tx.execute(APPLY, job.key, job.fence)
        except BaseException as error:
            heard.append(type(error).__name__)
            raise
        heard.append("committed")

    async with running(database_url, handlers, retention_seconds=0) as run:
        await run.connection.execute(TABLE)
        await run.enqueue("own", key=key)
        await run.said(events.JOB_SUCCEEDED)
        assert await run.value("SELECT count(*) FROM applied") == 1
        assert await run.value("SELECT count(*) FROM jobs") == 0
    assert heard == (["committed"] if commits else ["ConnectionResetError", "committed"])


@both_shapes
async def test_entering_the_transaction_without_the_lease_raises_lease_lost(database_url: str, shape: dict[str, Any]) -> None:
    handlers, raised = Handlers(), []

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        await expire(run, job.id)
        try:
            async with job.transaction() as tx:
                await tx.execute(APPLY, job.key, job.fence)
        except LeaseLost as error:
            raised.append(str(error))
            raise

    async with running(database_url, handlers, **shape) as run:
        await run.connection.execute(TABLE)
        id = await run.enqueue("own")
        said = await run.said(events.JOB_ABANDONED, job_id=id)
        assert said["reason"] == "lease_lost"
        row = await run.row(id)
        assert (row["state"], row["lease_owner"]) == ("running", "somebody-else")
        assert await run.column(APPLIED) == []
        assert await run.value("SELECT count(*) FROM job_failures") == 0
    assert len(raised) == 1


@both_shapes
async def test_effects_of_an_attempt_that_lost_its_lease_are_not_applied(database_url: str, shape: dict[str, Any]) -> None:
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[object]) -> str:
        job.effect(APPLY, job.key, job.fence)
        if job.key == "stolen":
            await expire(run, job.id)
        return "mine"

    async with running(database_url, handlers, **shape) as run:
        await run.connection.execute(TABLE)
        id = await run.enqueue("write", key="stolen")
        await run.said(events.JOB_ABANDONED, job_id=id, reason="lease_lost")
        assert (await run.row(id))["lease_owner"] == "somebody-else"
        await run.run("write", key="kept")
        assert await run.column(APPLIED) == ["kept"]


async def test_a_key_applied_before_raises_in_the_transaction_and_ends_the_job_as_succeeded(database_url: str) -> None:
    handlers, raised = Handlers(), []

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        try:
            async with job.transaction() as tx:
                await tx.execute(APPLY, job.key, job.fence)
        except EffectAlreadyApplied as error:
            raised.append(str(error))
            if job.payload == "fail":
                raise ValueError("should not have happened") from error
            raise

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        await run.connection.execute("INSERT INTO job_effects VALUES ('k', 1, 1), ('f', 1, 1)")
        id = await run.enqueue("own", key="k")
        row = await run.ended(id)
        assert (row["state"], row["result"]) == ("succeeded", None)
        await run.said(events.EFFECT_ALREADY_APPLIED, job_id=id, key="k")
        assert (await run.run("own", "fail", key="f", max_attempts=1))["last_error"] == "ValueError: should not have happened"
        assert await run.column(APPLIED) == []
    assert "'k'" in raised[0]


async def test_misuse_of_transaction_effect_and_connection_is_a_runtime_error(database_url: str) -> None:
    handlers, tried = Handlers(), []

    async def refused(what: str, entering: contextlib.AbstractAsyncContextManager[Any]) -> None:
        with pytest.raises(RuntimeError) as caught:
            async with entering:
                pass
        tried.append((what, str(caught.value)))

    @handlers.job("both")
    async def both(job: Job[object]) -> None:
        job.effect(APPLY, job.key, job.fence)
        await refused("effect, then transaction", job.transaction())

    @handlers.job("inside")
    async def inside(job: Job[object]) -> None:
        async with job.connection():
            await refused("transaction while connection is held", job.transaction())
        async with job.transaction() as tx:
            with pytest.raises(RuntimeError, match="run the statement on `tx`"):
                job.effect(APPLY, job.key, job.fence)
            with pytest.raises(RuntimeError, match="run the statement on `tx`"):
                job.enqueue("other", {})
            await refused("connection inside transaction", job.connection())
            await refused("transaction inside transaction", job.transaction())
            await tx.execute(APPLY, job.key, job.fence)
        await refused("transaction twice", job.transaction())

    @handlers.job("thread")
    def thread(job: Job[object]) -> None:
        async def enter(what: str) -> None:
            await refused(what, getattr(job, what)())

        asyncio.run(enter("transaction"))
        asyncio.run(enter("connection"))

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        for kind in ("both", "inside", "thread"):
            row = await run.run(kind, max_attempts=1)
            assert row["state"] == "succeeded", row["last_error"]
        assert len(await run.column(APPLIED)) == 2
    assert len(tried) == 7


async def test_a_connection_reads_outside_the_fence_also_after_the_transaction(database_url: str) -> None:
    handlers, read = Handlers(), []

    @handlers.job("read")
    async def read_(job: Job[object]) -> None:
        async with job.connection() as c:
            read.append(await c.fetchval("SELECT state FROM jobs WHERE id = $1", job.id))
        async with job.transaction():
            pass
        async with job.connection() as c:
            read.append(await c.fetchval("SELECT state FROM jobs WHERE id = $1", job.id))

    async with running(database_url, handlers) as run:
        id = await run.enqueue("read")
        await run.said(events.JOB_SUCCEEDED, job_id=id)
        assert run.log.find(events.HANDLER_FAILED_AFTER_COMMIT) == []
    assert read == ["running", "succeeded"]


async def test_a_session_changed_on_a_connection_is_clean_for_the_next_borrower(database_url: str) -> None:
    handlers, found = Handlers(), []

    @handlers.job("read")
    async def read(job: Job[object]) -> None:
        async with job.connection() as c:
            found.append((await c.fetchval("SHOW search_path"), await c.fetchval("SELECT pg_try_advisory_lock(7)")))
            await c.execute("SET search_path = odd")
            await c.execute("BEGIN")

    async with running(database_url, handlers, workers=1) as run:
        await run.run("read")
        await run.run("read")
        assert await run.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
    assert found == [('"$user", public', True)] * 2


async def test_handlers_that_hold_every_connection_starve_neither_renewals_nor_completions(database_url: str) -> None:
    handlers, all_hold = Handlers(), asyncio.Barrier(3)

    @handlers.job("hold")
    async def hold(job: Job[object]) -> None:
        async with job.connection() as c:
            await all_hold.wait()  # two jobs, and the test
            await c.fetchval("SELECT 1")
            await held.wait()

    @handlers.job("starve")
    async def starve(job: Job[object]) -> None:
        async with job.connection():
            pass

    held = asyncio.Event()
    async with running(database_url, handlers, pool_size=2, query_timeout_seconds=0.3, lease_seconds=1) as run:
        ids = [await run.enqueue("hold", max_attempts=1) for _ in range(2)]
        await all_hold.wait()
        row = await run.run("starve", max_attempts=1)
        assert row["last_error"].startswith("TimeoutError")
        until = (await run.row(ids[0]))["lease_until"]

        async def renewed() -> bool:
            return bool((await run.row(ids[0]))["lease_until"] > until)

        await await_for(renewed)
        held.set()
        for id in ids:
            assert (await run.ended(id))["state"] == "succeeded"


# --- being told to stop


async def test_cancelling_a_running_job_stops_its_handler_and_applies_nothing(database_url: str) -> None:
    handlers, reasons = Handlers(), []
    started = asyncio.Event()

    @handlers.job("long")
    async def long(job: Job[object]) -> None:
        job.effect(APPLY, job.key, job.fence)
        started.set()
        try:
            await asyncio.sleep(60)
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
        deadline = time.monotonic() + 20
        while job.cancel_reason is None and time.monotonic() < deadline:
            time.sleep(0.01)
        reasons.append(job.cancel_reason)
        with pytest.raises(LeaseLost):
            job.ensure_lease()

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        id = await run.enqueue("long")
        await await_for(started.is_set)
        await run.value("SELECT cancel_job($1)", id)
        await run.said(events.JOB_ABANDONED, job_id=id, reason="cancelled")
        await await_for(lambda: reasons)
        assert await run.column(APPLIED) == []
        assert (await run.row(id))["state"] == "cancelled"
    assert reasons == ["cancelled"]


async def test_a_handler_is_told_when_another_process_has_taken_its_job(database_url: str) -> None:
    handlers, reasons, started = Handlers(), [], asyncio.Event()

    @handlers.job("long")
    async def long(job: Job[object]) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            reasons.append(job.cancel_reason)

    async with running(database_url, handlers, lease_seconds=1) as run:
        id = await run.enqueue("long")
        await started.wait()
        await expire(run, id)
        await run.said(events.JOB_ABANDONED, job_id=id, reason="lease_lost")
    assert reasons == ["lease_lost"]


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


def test_registering_is_checked() -> None:
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
        assert 4 < await run.value("SELECT extract(epoch FROM available_at - now())::float8 FROM jobs") <= 5
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
            await asyncio.sleep(5)
        if job.payload == "effect":
            job.effect("INSERT INTO no_such_table VALUES (1)")
            return
        raise ValueError("no")

    handlers.include(other)
    async with running(database_url, handlers, backoff_base_seconds=0.3) as run:
        await run.run("fail", max_attempts=2)
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
        await asyncio.sleep(30)

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

    @handlers.job("order", payload=Order)
    async def order(job: Job[Order]) -> None:
        raise AssertionError("not reached")

    @handlers.on_failure
    async def hook(job: Job[object], error: BaseException, will_retry: bool) -> None:
        told.append((job.id, job.kind, job.payload, type(error).__name__, will_retry))

    async with running(database_url, handlers) as run:
        id = (await run.run("order", "no object", max_attempts=1))["id"]
        await await_for(lambda: told == [(id, "order", None, "PayloadError", False)])


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
