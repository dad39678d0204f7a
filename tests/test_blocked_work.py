"""What is locked, refused or away holds up nobody else: the committer's neighbours, the keeper's renewals, the other processes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from tests.inprocess import Run, running
from tests.waiting import await_for
from worker import Handlers, Job

SHAPES = pytest.mark.parametrize("batch", [300, 1], ids=["batches", "textbook"])


@contextlib.asynccontextmanager
async def another(dsn: str) -> AsyncIterator[Any]:
    """Somebody else's session, with no limits of ours."""
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        connection.terminate()


def make_handlers() -> Handlers:
    handlers = Handlers()

    @handlers.job("quick")
    async def quick(job: Job[object]) -> None:
        pass

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        job.effect("INSERT INTO notes (key) VALUES ($1)", job.key)

    @handlers.job("raise")
    async def raise_(job: Job[Any]) -> None:
        job.effect("INSERT INTO notes (key) SELECT fail($1)", job.payload)

    @handlers.job("end")
    async def end(job: Job[object]) -> None:
        job.effect("INSERT INTO notes (key) SELECT pg_terminate_backend(pg_backend_pid())::text")

    return handlers


async def prepare(run: Run) -> None:
    await run.connection.execute(
        "CREATE TABLE notes (key text);"
        "CREATE FUNCTION fail(code text) RETURNS text LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = code; END $$"
    )


async def add(run: Run, kind: str, jobs: int, payload: str = "{}", max_attempts: int = 5) -> None:
    await run.connection.execute(
        "INSERT INTO jobs (kind, payload, max_attempts) SELECT $1, $2::text::jsonb, $3 FROM generate_series(1, $4::int)",
        kind,
        payload,
        max_attempts,
        jobs,
    )


async def ended(run: Run, kind: str, state: str = "succeeded") -> int:
    return int(await run.value("SELECT count(*) FROM jobs WHERE kind = $1 AND state = $2", kind, state))


@SHAPES
async def test_a_locked_table_of_one_effect_holds_up_no_other_job(database_url: str, batch: int) -> None:
    async with running(database_url, make_handlers(), workers=10, commit_batch=batch) as run, another(run.dsn) as other:
        await prepare(run)
        transaction = other.transaction()
        await transaction.start()
        await other.execute("LOCK TABLE notes")
        await add(run, "note", 100)
        await add(run, "quick", 200)

        async def others_are_done() -> bool:
            return await ended(run, "quick") == 200

        await await_for(others_are_done, 30)
        assert await ended(run, "note") == 0
        await transaction.rollback()

        async def all_are_done() -> bool:
            return await ended(run, "note") == 100

        await await_for(all_are_done, 30)
        assert await run.value("SELECT count(*) FROM notes") == 100


@SHAPES
async def test_a_locked_row_of_one_finished_job_holds_up_no_other_job(database_url: str, batch: int) -> None:
    handlers = make_handlers()

    @handlers.job("locked")
    async def locked(job: Job[object]) -> None:
        await other.execute("SELECT FROM jobs WHERE id = $1 FOR UPDATE", job.id)

    async with running(database_url, handlers, workers=10, commit_batch=batch) as run, another(run.dsn) as other:
        transaction = other.transaction()
        await transaction.start()
        await add(run, "locked", 1)
        await add(run, "quick", 2_000 if batch > 1 else 200)

        async def others_are_done() -> bool:
            return await run.value("SELECT count(*) FROM jobs WHERE kind = 'quick' AND state <> 'succeeded'") == 0

        await await_for(others_are_done, 30)
        assert await ended(run, "locked") == 0
        await transaction.rollback()

        async def all_are_done() -> bool:
            return await ended(run, "locked") == 1

        await await_for(all_are_done, 10)


@SHAPES
@pytest.mark.parametrize("code", ["58P01", "53100", "XX000", "57P03", "08006"])
async def test_an_effect_that_always_raises_what_an_outage_raises_is_its_own_failure(
    database_url: str, code: str, batch: int
) -> None:
    async with running(database_url, make_handlers(), commit_batch=batch) as run:
        await prepare(run)
        await add(run, "note", 5)
        await add(run, "raise", 1, f'"{code}"', max_attempts=1)

        async def dead() -> bool:
            return await ended(run, "raise", "dead") == 1

        await await_for(dead, 60)
        assert "effect 1" in await run.value("SELECT last_error FROM jobs WHERE kind = 'raise'")

        async def neighbours_are_done() -> bool:
            return await ended(run, "note") == 5

        await await_for(neighbours_are_done, 10)


async def test_an_effect_that_ends_its_connection_each_time_is_its_own_failure(database_url: str) -> None:
    async with running(database_url, make_handlers()) as run:
        await prepare(run)
        await add(run, "end", 1, max_attempts=1)
        await add(run, "note", 5)

        async def over() -> bool:
            return await ended(run, "end", "dead") == 1 and await ended(run, "note") == 5

        await await_for(over, 80)


async def test_a_locked_presence_keeps_no_lease_from_being_renewed(database_url: str) -> None:
    handlers = make_handlers()

    @handlers.job("wait")
    async def wait(job: Job[object]) -> None:
        locks = "SELECT FROM processes FOR UPDATE"
        transaction = other.transaction()
        await transaction.start()
        await other.execute(locks)
        first = job._held.trusted_until

        def renewed_twice() -> bool:
            return job._held.trusted_until > first + 3

        await await_for(renewed_twice, 20)
        await transaction.rollback()

    async with running(database_url, handlers, lease_seconds=6, job_timeout_seconds=60) as run, another(run.dsn) as other:
        row = await run.ended(await run.enqueue("wait", max_attempts=1), 30)
        assert (row["state"], row["attempts"]) == ("succeeded", 1)


async def test_jobs_claimed_ahead_of_quick_ones_do_not_wait_behind_slow_ones(database_url: str) -> None:
    handlers = make_handlers()

    @handlers.job("slow")
    async def slow(job: Job[object]) -> None:
        await await_for(is_given_back, 15)

    async def is_given_back() -> bool:
        return bool(await run.value("SELECT count(*) = 2 FROM jobs WHERE kind = 'slow' AND state = 'running'"))

    async with running(database_url, handlers, workers=2) as run:
        await add(run, "quick", 3_000)
        await add(run, "slow", 30)

        async def over() -> bool:
            return await ended(run, "slow") > 0

        await await_for(over, 20)


@pytest.mark.parametrize("end", ["SELECT pg_terminate_backend(pg_backend_pid())", None], ids=["by itself", "from outside"])
async def test_a_transaction_whose_session_is_gone_protects_its_handler_no_longer(database_url: str, end: str | None) -> None:
    handlers, reasons = Handlers(), []

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        try:
            async with job.transaction() as tx:
                pid = await tx.fetchval("SELECT pg_backend_pid()")
                if end is not None:
                    await tx.execute(end)
                await run.value("SELECT pg_terminate_backend($1)", pid)
                await run.value("UPDATE jobs SET lease_until = now() - interval '1 second' WHERE id = $1 RETURNING id", job.id)
                await await_for(lambda: job.cancel_reason, 20)
        finally:
            reasons.append(job.cancel_reason)

    async with running(database_url, handlers, lease_seconds=2, job_timeout_seconds=60) as run:
        row = await run.run("own", max_attempts=1)
        assert row["state"] == "dead"
        assert "stay_in_transaction" not in row["last_error"]
        assert await await_for(lambda: reasons)
        if end is None:
            assert reasons[0] in ("lease_lost", "lease_untrusted")


async def test_work_that_cannot_be_written_stops_the_claims_and_is_written_later(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.committer.BACKLOG", 50)

    async def refuse(*_arguments: object, **_keywords: object) -> None:
        raise ConnectionError("no connection for commits")

    async with running(database_url, make_handlers(), workers=4) as run:
        await run.run("quick")
        with monkeypatch.context() as outage:
            outage.setattr("worker.store.settling.complete", refuse)
            await add(run, "quick", 5_000)
            held: list[int] = []

            async def stands_still() -> bool:
                held.append(await run.value("SELECT count(*) FROM jobs WHERE state = 'running'"))
                return len(held) > 20 and held[-1] == held[-20] > 50

            await await_for(stands_still, 20)
            assert held[-1] < 50 + 4 * 300

        async def all_done() -> bool:
            return await ended(run, "quick") == 5_001

        await await_for(all_done, 30)
