"""The order of claims: priority before age, queues in turn, and nothing passed over for good."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.claims import add, noting
from tests.inprocess import SHAPES, both_shapes, connect, quick, running, seen
from tests.waiting import await_for
from worker import Handlers, Job, Worker
from worker.domain import ClaimedJob
from worker.store import claiming


@both_shapes
async def test_higher_priority_first_then_the_older_then_the_lower_id(database_url: str, shape: dict[str, Any]) -> None:
    handlers, started = noting()
    async with seen(database_url) as run:
        await add(run, "new", later_seconds=60)
        await add(run, "low", priority=-5)
        await add(run, "old", 3)
        await add(run, "twin-a")  # the same moment as old1, but written later
        await add(run, "high", 2, priority=32_767, later_seconds=120)
        await run.connection.execute(
            "UPDATE jobs SET available_at = (SELECT min(available_at) FROM jobs) WHERE idempotency_key = 'twin-a1'"
        )
        await run.connection.execute(
            "UPDATE jobs SET available_at = (SELECT min(available_at) FROM jobs) WHERE idempotency_key = 'old1'"
        )
        async with Worker(handlers, quick(database_url, workers=1, **shape)):
            await await_for(lambda: len(started) == 8)
    assert started == ["high1", "high2", "old1", "twin-a1", "old2", "old3", "new1", "low1"]


async def test_a_new_priority_overtakes_a_backlog(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strictly: as soon as a survey has seen it, behind what was claimed by then."""
    monkeypatch.setattr("worker.places.SURVEY_SHARE", 1e9)  # each round is a survey
    monkeypatch.setattr("worker.places.SURVEY_PAUSE_SECONDS", 0.0)
    handlers, started = Handlers(), []

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        started.append(job.key)
        if len(started) == 5:
            await add(run, "urgent", 3, priority=9)

    async with seen(database_url) as run:
        await add(run, "backlog", 400)
        async with Worker(handlers, quick(database_url, workers=1, **SHAPES["single"])):
            await await_for(lambda: len([key for key in started if key.startswith("urgent")]) == 3)
    places = [place for place, key in enumerate(started) if key.startswith("urgent")]
    assert places[0] <= 7
    assert places[-1] == places[0] + 2


async def test_no_place_behind_is_asked_while_one_before_has_more(database_url: str) -> None:
    """Twenty slots are no step of the ladder of limits: one statement takes ten, and so does the next."""
    handlers, all_in, go = Handlers(), asyncio.Barrier(21), asyncio.Event()

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        if not go.is_set():
            await all_in.wait()
            await go.wait()

    async with seen(database_url) as run:
        await add(run, "low", 100)
        await add(run, "high", 100, priority=1)
        async with Worker(handlers, quick(database_url, workers=20)):
            await all_in.wait()
            assert await run.column("SELECT DISTINCT priority FROM jobs WHERE state = 'running'") == [1]
            go.set()


async def test_a_stream_of_notifications_does_not_hide_a_new_priority(database_url: str) -> None:
    """Every round is told of a job that it finds behind its cursor; the table is surveyed all the same."""
    handlers, started = noting()
    async with running(database_url, handlers) as run, seen(database_url) as other:

        async def hungry() -> bool:
            return bool(await run.value("SELECT hungry FROM processes"))

        await await_for(hungry)

        async def stream() -> None:
            for number in range(100_000):
                await add(other, f"stream{number}-", later_seconds=number / 1_000)

        streaming = asyncio.create_task(stream())
        try:
            await await_for(lambda: len(started) > 200, 30)
            await add(run, "urgent", priority=9)
            await await_for(lambda: "urgent1" in started, 30)
            assert not streaming.done()
        finally:
            streaming.cancel()
            await asyncio.wait({streaming})


async def test_low_priorities_wait_for_as_long_as_higher_ones_come_in(database_url: str) -> None:
    """G7. The documented rule is strict: priority before age, however long the wait."""
    handlers, started = Handlers(), []

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        started.append(job.key)
        if len(started) < 60:
            await add(run, f"high{len(started)}-", priority=5)

    async with seen(database_url) as run:
        await add(run, "low")
        await add(run, "high", 2, priority=5)
        async with Worker(handlers, quick(database_url, workers=1, **SHAPES["single"])):
            await await_for(lambda: "low1" in started)
    assert started[-1] == "low1"
    assert len(started) >= 60


async def test_several_queues_are_served_in_turn(database_url: str) -> None:
    """G8: a thousand jobs of one queue do not hide those of another."""
    handlers, started = noting()
    async with seen(database_url) as run:
        await add(run, "flood", 1_000, queue="a")
        await add(run, "few", 10, queue="b", later_seconds=3_000)
        await add(run, "other", queue="not ours")
        async with Worker(handlers, quick(database_url, workers=1, queues="a,b", **SHAPES["single"])):
            await await_for(lambda: len([key for key in started if key.startswith("few")]) == 10, 30)
        few = [place for place, key in enumerate(started) if key.startswith("few")]
        assert few[-1] < 60
        assert await run.value("SELECT state FROM jobs WHERE queue = 'not ours'") == "ready"


@both_shapes
async def test_jobs_that_cannot_be_run_now_hide_none_behind_them(database_url: str, shape: dict[str, Any]) -> None:
    """G8: suspects, of which one runs at a time; kinds that nobody here knows; rows that somebody else has locked."""
    handlers, started = Handlers(), []
    go = asyncio.Event()

    @handlers.job("suspect")
    async def suspect(job: Job[object]) -> None:
        started.append(job.key)
        await go.wait()

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        started.append(job.key)

    other = await connect(database_url)
    try:
        async with seen(database_url) as run, other.transaction():
            await run.connection.execute(
                "INSERT INTO jobs (kind, payload, crashes, idempotency_key, available_at)"
                " SELECT kind, '1', crashes, kind || n, now() - interval '2 hours' FROM generate_series(1, 300) AS n,"
                " (VALUES ('suspect', 1), ('unknown', 0), ('locked', 0)) AS v (kind, crashes)"
            )
            await other.execute("SELECT FROM jobs WHERE kind = 'locked' FOR UPDATE")
            await add(run, "behind", 20)
            async with Worker(handlers, quick(database_url, workers=2, **shape)):
                await await_for(lambda: sum(key.startswith("behind") for key in started) == 20, 30)
                assert sum(key.startswith("suspect") for key in started) == 1
                go.set()
                await await_for(lambda: sum(key.startswith("suspect") for key in started) == 300, 60)
            assert await run.value("SELECT max(attempts) FROM jobs WHERE kind = 'unknown'") == 0
            assert set(await run.column("SELECT state FROM jobs WHERE kind IN ('unknown', 'locked')")) == {"ready"}
    finally:
        await other.close()


async def test_a_job_of_the_future_is_run_when_it_is_due_and_not_before(database_url: str) -> None:
    handlers, _ = noting()
    async with running(database_url, handlers, poll_seconds=30) as run:
        id = await run.enqueue("note", delay_seconds=0.4)
        row = await run.ended(id)
        assert 0 <= (row["started_at"] - row["available_at"]).total_seconds() < 10  # and not at the next poll


async def test_priorities_that_were_used_once_are_not_asked_for_for_ever(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers, started = noting()
    asked: list[int] = []
    original = claiming.claim

    async def counted(*arguments: Any, **options: Any) -> list[ClaimedJob]:
        asked.append(options["priority"])
        return await original(*arguments, **options)

    monkeypatch.setattr("worker.store.claiming.claim", counted)
    async with running(database_url, handlers) as run:
        await run.connection.execute(
            "INSERT INTO jobs (kind, payload, priority) SELECT 'note', '{}', n FROM generate_series(1, 500) AS n"
        )
        await await_for(lambda: len(started) == 500, 60)
        await await_for(lambda: set(asked[-20:]) == {0}, 30)
