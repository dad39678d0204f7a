"""Effects and follow-ups that a handler records: committed with its completion, or not at all."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.inprocess import APPLIED, APPLY, TABLE, both_shapes, expire, quick, running, seen
from worker import (
    Handlers,
    Job,
    Retry,
    Worker,
    events,
)


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


async def test_an_argument_is_what_it_was_at_the_call(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        document = {"steps": [1]}
        job.effect("INSERT INTO documents VALUES ($1)", document)
        document["steps"].append(2)
        picture, thumbnail = bytearray(b"as it was"), memoryview(b"never copied")
        job.effect("INSERT INTO documents VALUES ($1, $2, $3)", {}, picture, thumbnail)
        picture[:] = b"painted over"

    async with running(database_url, handlers) as run:
        await run.connection.execute("CREATE TABLE documents (a jsonb, picture bytea, thumbnail bytea)")
        assert (await run.run("write"))["state"] == "succeeded"
        assert await run.value("SELECT a ->> 'steps' FROM documents WHERE picture IS NULL") == "[1]"
        assert await run.column("SELECT picture FROM documents WHERE a = '{}'") == [b"as it was"]
        assert await run.column("SELECT thumbnail FROM documents WHERE a = '{}'") == [b"never copied"]


async def test_what_is_recorded_after_the_handler_has_returned_is_refused(database_url: str) -> None:
    handlers, jobs = Handlers(), []

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        jobs.append(job)

    async with running(database_url, handlers) as run:
        assert (await run.run("write"))["state"] == "succeeded"
    with pytest.raises(RuntimeError, match="the handler has returned"):
        jobs[0].effect("SELECT 1")


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
        ((), "expects 1 argument"),
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
