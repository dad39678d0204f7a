"""The claimer's rounds: what it asks for beside a suspect, and while claims without an answer may still commit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from typing import Any

import pytest

from tests.inprocess import connect, nothing, quick, running, seen
from tests.waiting import await_for, until_cancelled
from worker import Handlers, Job, Worker
from worker.clock import local_seconds
from worker.holding import Holdings
from worker.lost_claims import MOST_OUTSTANDING, LostClaims, is_over
from worker.places import Place
from worker.store import claiming, sessions
from worker.store.connection import ConnectFailed, Connection, Database, SessionLimits, read_moments_as_microseconds
from worker.store.sessions import Backend

OWNER = "test-00000000"


async def test_the_round_that_finds_a_suspect_claims_nothing_ahead_of_free_slots(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 8: who waits in the process while a suspect runs would go down with it."""
    monkeypatch.setattr("worker.places.SURVEY_SHARE", 1e9)  # each round looks for suspects
    monkeypatch.setattr("worker.places.SURVEY_PAUSE_SECONDS", 0.0)
    handlers, leave = Handlers(), asyncio.Event()

    @handlers.job("hold")
    async def hold(job: Job[object]) -> None:
        await leave.wait()

    async with running(database_url, handlers, workers=2) as run:
        assert run.worker.parts is not None
        claimer, pool = run.worker.parts.claimer, run.worker.parts.pool
        # Nobody tells it anything: what one is told of is looked for without a survey.
        await run.connection.execute("ALTER TABLE jobs DISABLE TRIGGER jobs_wake")
        monkeypatch.setattr(claimer, "wake", lambda **_: None)
        passed_at = claimer.passed_at
        await await_for(lambda: claimer.passed_at > passed_at)
        claimer._demand._slot_seconds = 0.0001  # as if jobs had been quick lately
        assert claimer._demand.jobs() > 100
        await run.connection.execute(
            "INSERT INTO jobs (kind, payload, crashes) SELECT 'hold', 'null', CASE n WHEN 1 THEN 1 ELSE 0 END"
            " FROM generate_series(1, 30) AS n"
        )
        await await_for(lambda: pool.busy() == 2, 30)
        assert pool.suspect_runs()
        assert await run.value("SELECT count(*) FROM jobs WHERE state = 'running'") == 2
        leave.set()

        async def over() -> bool:
            return bool(await run.value("SELECT count(*) FROM jobs WHERE state = 'succeeded'") == 30)

        await await_for(over, 30)


async def test_no_claim_is_sent_and_none_is_left_unawaited_while_too_many_may_still_commit(database_url: str) -> None:
    async with running(database_url, Handlers()) as run:
        assert run.worker.parts is not None
        claimer = run.worker.parts.claimer
        await run.enqueue("unknown", queue="other")
        claimer._lost._lost = [(None, local_seconds() + 3600)] * MOST_OUTSTANDING
        with pytest.raises(ConnectionError, match="may still commit"):
            await claimer._claim_place(run.connection, Place("other", 0), 1)
        gc.collect()  # a coroutine that nobody awaits says so here
        claimer._lost._lost.clear()
        assert await run.value("SELECT state FROM jobs") == "ready"


async def test_behind_a_pooler_a_claim_may_commit_for_as_long_as_the_role_lets_a_statement_run(database_url: str) -> None:
    """Guarantee 9: whoever looks too early never looks again."""
    limits = SessionLimits.of(lease_seconds=300, query_timeout_seconds=60)
    database = Database(database_url, environ={}, limits=limits, pooler=True)
    async with seen(database_url) as run:
        assert not await is_over(run.connection, database, None, local_seconds() - 30, limit_seconds=2)
        assert await is_over(run.connection, database, None, local_seconds() - 61, limit_seconds=2)


async def test_a_job_of_a_lost_claim_that_somebody_locks_holds_up_nobody_and_goes_back_behind_the_lock(database_url: str) -> None:
    """Guarantee 9, beside an operator who takes his time."""
    database = Database(database_url, environ={})
    async with seen(database_url) as run:
        ids = [await run.enqueue("any") for _ in range(2)]
        claims = await database.connect("claim", settings=claiming.CLAIM_SETTINGS)
        operator = await connect(database_url)
        try:
            await read_moments_as_microseconds(claims)
            lost = LostClaims(database, owner=OWNER, holdings=Holdings(), limit_seconds=2)
            about: dict[str, Any] = {
                "queue": "default",
                "priority": 0,
                "limit": 3,
                "owner": OWNER,
                "lease_seconds": 3600,
                "payload_bytes": 1000,
            }
            await claiming.claim(claims, database, **about)
            with contextlib.suppress(ConnectionError), lost.watching(claims):
                raise ConnectionError("its answer was lost")
            claims.terminate()
            backend = claims.backend
            assert backend is not None
            await await_for(lambda: over(run.connection, backend), 20)
            async with operator.transaction():
                await operator.execute("SELECT FROM jobs WHERE id = $1 FOR UPDATE", ids[0])
                await lost.give_back(run.connection)
                assert [(await run.row(id))["state"] for id in ids] == ["running", "ready"]
                assert lost.outstanding
            await lost.give_back(run.connection)
            assert [(await run.row(id))["attempts"] for id in ids] == [0, 0]
            assert [(await run.row(id))["state"] for id in ids] == ["ready", "ready"]
            assert not lost.outstanding
        finally:
            claims.terminate()
            await operator.close()


@pytest.mark.parametrize("refusals", [0, 2], ids=["", "in the middle of a failover"])
async def test_a_claim_that_is_broken_off_between_its_answer_and_its_turn_costs_nothing(
    database_url: str, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """Its session would live on beside the drain, which waits until what the claim may still do is over."""
    claim, answered = claiming.claim, asyncio.Event()
    really_connect = Database.connect
    refused: Counter[str] = Counter()

    async def refuse_at_first(self: Database, role: str, **more: Any) -> Connection:
        refused[role] += 1
        if role == "release" and refused[role] <= refusals:
            raise ConnectFailed("not now", sqlstate="57P03", refused=False)
        return await really_connect(self, role, **more)

    monkeypatch.setattr(Database, "connect", refuse_at_first)

    async def answer_late(*about: Any, **more: Any) -> Any:
        jobs = await claim(*about, **more)
        if jobs:
            answered.set()
            await until_cancelled()
        return jobs

    monkeypatch.setattr(claiming, "claim", answer_late)
    handlers = Handlers()
    handlers.job("any")(nothing)
    async with seen(database_url) as run:
        worker = Worker(handlers, quick(database_url, shutdown_grace_seconds=0, query_timeout_seconds=2, claim_timeout_seconds=15))
        await worker.start()
        id = await run.enqueue("any")
        await answered.wait()
        worker.request_stop("test")
        await worker.wait_stopped()
        assert worker.status == 0
        assert ((await run.row(id))["state"], (await run.row(id))["attempts"]) == ("ready", 0)
        assert await run.value("SELECT count(*) FROM processes") == 0


async def over(connection: Connection, backend: Backend) -> bool:
    return not await sessions.lives(connection, backend)
