"""Servers and disks that answer late or never: every wait has its own limit, and nobody waits for what is somebody else's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import psycopg
import pytest

from tests.connecting import connected
from tests.inprocess import quick, running, seen
from tests.test_health import beat
from tests.waiting import await_for, until_cancelled, wait_for
from worker import Handlers, Job, Worker, reaching, reaper
from worker.api.claims import Claims
from worker.api.problems import Problem
from worker.clock import local_seconds
from worker.health import HealthFile, Heartbeat, read_verdicts
from worker.retention import Retention
from worker.store import pruning, standbys, task_claiming
from worker.store.claiming import CLAIM_SETTINGS
from worker.store.connection import Connection, Database, Lane, SessionLimits, read_moments_as_microseconds
from worker.store.schema import LOCK_MIGRATION

# --- the disk


class SlowDisk(HealthFile):
    """Writes while its gate is open."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "test-12345678")
        self.gate = threading.Event()
        self.begun = 0

    def write(self, beat: Heartbeat) -> bool:
        self.begun += 1
        return self.gate.wait(60) and super().write(beat)


def test_while_the_disk_does_not_answer_one_write_waits_for_it_and_the_newest_heartbeat_follows(tmp_path: Path) -> None:
    file = SlowDisk(tmp_path)
    for age_seconds in (300, 200, 100):
        file.write_soon(beat(written_at_seconds=local_seconds() - age_seconds))
        wait_for(lambda: file.begun)
    assert (file.begun, read_verdicts(tmp_path)) == (1, [])
    file.write_soon(beat(written_at_seconds=local_seconds()))
    file.gate.set()
    wait_for(lambda: [verdict.text for verdict in read_verdicts(tmp_path)] == ["ok"])
    file.remove()
    assert list(tmp_path.iterdir()) == []
    assert file.begun == 2


def test_the_end_of_a_process_waits_for_no_disk(tmp_path: Path) -> None:
    file = SlowDisk(tmp_path)
    file.write_soon(beat())
    wait_for(lambda: file.begun)
    file.remove()
    assert not file.gate.is_set()
    file.gate.set()


async def test_a_disk_that_does_not_answer_stops_no_renewal(database_url: str, tmp_path: Path) -> None:
    handlers = Handlers()
    file = SlowDisk(tmp_path)
    file.gate.set()
    ends: list[object] = []

    @handlers.job("long")
    async def long(job: Job[object]) -> None:
        file.gate.clear()
        begun = file.begun
        await await_for(lambda: file.begun > begun)

        async def was_renewed() -> bool:
            ends.append(await run.value("SELECT lease_until FROM jobs WHERE id = $1", job.id))
            return len(set(ends)) > 4

        await await_for(was_renewed, 30)

    settings = quick(database_url, lease_seconds=20, renew_seconds=0.5)
    async with seen(database_url) as run, Worker(handlers, settings, health_file=lambda _: file):
        try:
            row = await run.run("long")
            assert (row["state"], row["attempts"]) == ("succeeded", 1)
        finally:
            file.gate.set()


# --- the server


async def test_a_reaper_whose_new_connection_says_nothing_takes_another_one(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Connection] = []

    async def ask(connection: Connection) -> None:
        asked.append(connection)
        await (until_cancelled() if len(asked) == 1 else read_moments_as_microseconds(connection))

    monkeypatch.setattr(reaper, "read_moments_as_microseconds", ask)
    async with running(database_url, Handlers(), query_timeout_seconds=0.3) as run:
        await run.connection.execute(
            "INSERT INTO jobs (payload, state, attempts, max_attempts, lease_owner, lease_until)"
            " VALUES ('1', 'running', 1, 1, 'gone', now() - interval '1 hour')"
        )
        assert await run.all_ended() == {"dead": 1}
    assert asked[0] is not asked[1]


async def test_each_statement_of_the_retention_has_its_own_limit(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them, each within the limit, take longer than it together."""

    def slowly(prune: Callable[..., Awaitable[pruning.PruneStep]]) -> Callable[..., Awaitable[pruning.PruneStep]]:
        async def turn(connection: Connection, database: Database, **options: object) -> pruning.PruneStep:
            await connection.execute("SELECT pg_sleep(2)")
            return await prune(connection, database, **options)

        return turn

    for name in ("prune_jobs", "prune_ledger", "prune_leases"):
        monkeypatch.setattr(pruning, name, slowly(getattr(pruning, name)))
    limits = SessionLimits(statement_timeout_seconds=60, lock_timeout_seconds=60, idle_in_transaction_seconds=60)
    async with connected(database_url, limits=limits) as connection:
        await connection.execute("INSERT INTO job_effects VALUES ('old', 1, 1, now() - interval '1 hour')")
        await Retention(
            Database(database_url, environ={}),
            retention_seconds=1,
            dead_retention_seconds=1,
            ledger_retention_seconds=1,
            statement_seconds=5,
        ).step(connection)
        assert await connection.fetchval("SELECT count(*) FROM job_effects") == 0


async def test_a_migration_at_the_start_of_a_process_does_not_wait_without_end(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaching, "SCHEMA_SECONDS", 0.5)
    database = Database(empty_database_url, environ={})
    async with connected(empty_database_url) as other:
        async with other.transaction():
            await other.execute(LOCK_MIGRATION, "public")
            with pytest.raises(TimeoutError):
                await reaching.apply_schema(database)
        assert await other.fetchval("SELECT to_regclass('public.jobs') IS NULL")
        monkeypatch.undo()
        await reaching.apply_schema(database)
        assert await other.fetchval("SELECT to_regclass('public.jobs') IS NOT NULL")


async def test_a_locked_task_of_a_lost_answer_holds_up_no_claim_and_goes_back_later(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(database_url, environ={})
    lane = Lane(database, task_claiming.ROLE, settings=CLAIM_SETTINGS)
    claims = Claims(database, lane, claim_timeout_seconds=20, limit_seconds=60, give_back=lambda task, owner: None)
    believed = []

    def believe(connection: Connection) -> None:
        believed.append(connection)
        if len(believed) == 1:
            raise ConnectionError("the answer is lost")

    async def claimed() -> tuple[int, int] | None:
        try:
            grant = await claims.next(processor="p", queue="default", kinds=None, lease_seconds=600, request_id=None)
        except Problem as problem:
            refused.append(problem)
            return None
        return None if grant is None else (grant.task.id, grant.task.attempt)

    refused: list[Problem] = []
    monkeypatch.setattr(standbys, "believe", believe)
    loop = asyncio.create_task(claims.run())
    try:
        with psycopg.connect(database_url, autocommit=True) as db:
            db.execute("INSERT INTO jobs (payload) VALUES ('1')")
            [[locked]] = db.execute("SELECT id FROM jobs").fetchall()
            assert await claimed() is None
            assert len(refused) == 1
            assert db.execute("SELECT state FROM jobs").fetchall() == [("running",)]
            with psycopg.connect(database_url) as holder:
                holder.execute("SELECT FROM jobs FOR UPDATE")
                for _ in range(3):
                    [[free]] = db.execute("INSERT INTO jobs (payload) VALUES ('1') RETURNING id").fetchall()
                    assert await await_for(claimed) == (free, 1)
            assert len(refused) == 1, "somebody waited for the lock"
            assert await await_for(claimed) == (locked, 1)
    finally:
        loop.cancel()
        await lane.close(1)
