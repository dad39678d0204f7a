"""Cursors of claims, and the stragglers that come to stand before them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.claims import ADD, OWNER, add, claim, noting, session
from tests.inprocess import SHAPES, both_shapes, quick, running, seen
from tests.waiting import await_for, until_cancelled
from worker import Handlers, Job, Worker, events
from worker.domain import ClaimedJob
from worker.store import claiming
from worker.store.claiming import START, Cursor
from worker.store.connection import Connection


async def test_a_claim_starts_behind_its_cursor(database_url: str) -> None:
    async with seen(database_url) as run, session(database_url, claiming.CLAIM_SETTINGS) as (connection, database):
        await add(run, "job", 5)
        first = await claim(connection, database, 3)
        await run.connection.execute("UPDATE jobs SET state = 'ready', lease_owner = NULL, lease_until = NULL")
        cursor = Cursor(first[-1].available_at, first[-1].id)
        assert [job.key for job in await claim(connection, database, 10, cursor=cursor)] == ["job4", "job5"]
        ranges = await claiming.survey(connection, database, ["default"])
        assert [(range.priority, range.first.id) for range in ranges] == [(0, first[0].id)], "the survey finds who is before it"
        assert [job.key for job in await claim(connection, database, 10, cursor=START)] == ["job1", "job2", "job3"]


@both_shapes
async def test_whoever_comes_to_stand_before_the_cursor_is_found(database_url: str, shape: dict[str, Any]) -> None:
    """A transaction that commits late, a row that was locked in passing, a job that was released."""
    handlers, started = noting()
    async with seen(database_url) as late, seen(database_url) as locker, running(database_url, handlers, **shape) as run:
        for other in (late, locker):  # they wait in their transactions for as long as the jobs take
            await other.connection.execute("SET idle_in_transaction_session_timeout = 0")
        async with late.connection.transaction():
            await add(late, "late")
            async with locker.connection.transaction():
                await add(run, "locked")
                await locker.connection.execute("SELECT FROM jobs WHERE idempotency_key = 'locked1' FOR UPDATE")
                await add(run, "job", 50, later_seconds=60)
                await await_for(lambda: len([key for key in started if key.startswith("job")]) == 50)
        await await_for(lambda: {"late1", "locked1"} <= set(started))
        await run.ended(await run.value("SELECT id FROM jobs WHERE idempotency_key = 'job25'"))
        await run.connection.execute(
            "UPDATE jobs SET state = 'ready', completed_at = NULL, attempts = 0 WHERE idempotency_key = 'job25'"
        )
        await await_for(lambda: started.count("job25") == 2)


async def test_the_claimer_moves_its_cursor_on(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, started = noting()
    cursors: list[Cursor] = []
    original = claiming.claim

    async def noted(*arguments: Any, **options: Any) -> list[ClaimedJob]:
        cursors.append(options["cursor"])
        return await original(*arguments, **options)

    monkeypatch.setattr("worker.store.claiming.claim", noted)
    async with seen(database_url) as run:
        await add(run, "job", 100)
        async with Worker(handlers, quick(database_url, workers=1, **SHAPES["single"])):
            await await_for(lambda: len(started) == 100)
    assert sum(cursor != START for cursor in cursors) > 90
    assert cursors == sorted(cursors)


async def test_a_released_job_keeps_its_place(database_url: str) -> None:
    handlers, started = Handlers(), []

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        started.append(job.key)
        if len(started) == 1:
            await until_cancelled()

    async with seen(database_url) as run:
        await add(run, "job", 3)
        async with Worker(handlers, quick(database_url, workers=1, shutdown_grace_seconds=0)):
            await await_for(lambda: started)
        assert run.log.find(events.JOB_RELEASED, reason="shutdown")
        async with Worker(handlers, quick(database_url, workers=1)):
            await await_for(lambda: len(started) == 4)
    assert started == ["job1", "job1", "job2", "job3"]


async def test_a_recovery_that_arrives_late_leaves_what_was_claimed_meanwhile(database_url: str) -> None:
    """Its connection was given up half open, and the process has gone on: what it claimed since is held, and no orphan."""
    asked, delivered = asyncio.Event(), asyncio.Event()

    class Late:
        """Holds back the statement itself."""

        def __init__(self, connection: Connection) -> None:
            self.fetchval = connection.fetchval
            self._fetch = connection.fetch

        async def fetch(self, *arguments: object) -> object:
            asked.set()
            await delivered.wait()
            return await self._fetch(*arguments)

    about = {"queue": "default", "priority": 0, "limit": 1, "owner": OWNER, "lease_seconds": 30, "payload_bytes": 1000}
    async with (
        session(database_url, claiming.CLAIM_SETTINGS) as (connection, database),
        session(database_url, claiming.CLAIM_SETTINGS) as (other, _),
    ):
        await connection.execute(ADD, "late", "default", 0, 0.0, 2)
        [orphan] = await claiming.claim(connection, database, **about)
        recovering = asyncio.create_task(claiming.recover(Late(other), database, owner=OWNER, held=[]))
        await asked.wait()
        [younger] = await claiming.claim(connection, database, **about)
        delivered.set()
        assert [job.id for job in await recovering] == [orphan.id]
        states = dict(await connection.fetch("SELECT id, state FROM jobs"))
        assert states == {orphan.id: "ready", younger.id: "running"}
