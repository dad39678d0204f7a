"""The transaction of a handler's own: fenced, whole, and the end of its job."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import asyncpg
import pytest

from tests.inprocess import APPLIED, APPLY, TABLE, both_shapes, connect, expire, running
from tests.waiting import await_for
from worker import (
    Discard,
    EffectAlreadyApplied,
    Handlers,
    Job,
    LeaseLost,
    Snooze,
    events,
    owntransaction,
)


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


async def test_what_rolled_the_transaction_back_is_the_outcome_also_if_the_handler_catches_it(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("own")
    async def own(job: Job[object]) -> str:
        with contextlib.suppress(Exception):
            async with job.transaction() as tx:
                await tx.execute(APPLY, job.key, job.fence)
                match job.payload:
                    case "error":
                        raise ValueError("card refused")
                    case "snooze":
                        raise Snooze(3600)
                    case "deferred":
                        await tx.execute("INSERT INTO checked VALUES (1), (1)")
        return "all is well"

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        await run.connection.execute("CREATE TABLE checked (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        for payload, said in (("error", "ValueError: card refused"), ("deferred", "checked_n_key")):
            row = await run.run("own", payload, max_attempts=1)
            assert (row["state"], row["result"]) == ("dead", None)
            assert said in row["last_error"]
        await run.said(events.JOB_SNOOZED, job_id=await run.enqueue("own", "snooze"))
        assert await run.column(APPLIED) == []


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

    @handlers.job("first")
    async def first(job: Job[object]) -> None: ...

    async with running(database_url, handlers, lease_seconds=600, **shape) as run:
        await run.connection.execute(TABLE)
        # The first beat of the keeper is over by then, and the next one is far: it would tell the handler before.
        await run.run("first")
        await await_for(lambda: run.value("SELECT count(*) FROM processes"))
        id = await run.enqueue("own")
        said = await run.said(events.JOB_ABANDONED, job_id=id)
        assert said["reason"] == "lease_lost"
        row = await run.row(id)
        assert (row["state"], row["lease_owner"]) == ("running", "somebody-else")
        assert await run.column(APPLIED) == []
        assert await run.value("SELECT count(*) FROM job_failures") == 0
    assert len(raised) == 1


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
