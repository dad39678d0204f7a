"""Claims over HTTP that have no answer when the server stops: what they take goes back, or is named."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest

from tests.inprocess import Log, listening
from tests.raw_requests import raw_request
from tests.serving import Served
from tests.waiting import await_for, wait_for
from worker import events
from worker.api.auth import Tokens
from worker.api.claims import Grant
from worker.api.hosts import NoPool
from worker.api.problems import Problem
from worker.api.state import Api, make_api
from worker.settings import load_settings
from worker.store.connection import ConnectFailed, Connection, Database
from worker.store.tasks import Task

PATIENT = {"WORKER_LEASE_SECONDS": "600", "WORKER_CLAIM_TIMEOUT_SECONDS": "30", "WORKER_QUERY_TIMEOUT_SECONDS": "30"}
HOLD_UP = """
    CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS
        $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER waits AFTER UPDATE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
        WHEN (NEW.state = 'running' AND OLD.state = 'ready') EXECUTE FUNCTION wait();
    SELECT pg_advisory_lock(7)
"""
"""From now on a claim waits at its COMMIT, for a lock that we have."""
LET_GO = "SELECT pg_advisory_unlock(7)"
COMMITTING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
CLAIMING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%http claim'"
JOBS = "SELECT state, attempts FROM jobs"


# --- the processes


@pytest.mark.parametrize("stops", [["SIGTERM"], ["SIGTERM", "SIGTERM"]], ids=["the grace is over", "a second signal"])
def test_a_claim_in_flight_goes_back_when_the_server_stops(
    database_url: str, serve: Callable[..., Served], stops: list[str]
) -> None:
    served = serve(database_url, **PATIENT, WORKER_SHUTDOWN_GRACE_SECONDS="600" if stops[1:] else "1")
    ends_amidst_a_claim(served, stops)


def test_a_claim_in_flight_goes_back_when_the_pool_beside_it_has_ended(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(
        database_url,
        *("--serve", "127.0.0.1:0"),
        command="run",
        **PATIENT,
        WORKER_QUEUES="elsewhere",
        WORKER_SHUTDOWN_GRACE_SECONDS="600",
    )
    wait_for(lambda: served.http.get("/readyz").status_code == 200, 30)
    ends_amidst_a_claim(served, ["SIGTERM"])


def ends_amidst_a_claim(served: Served, stops: list[str]) -> None:
    """Nothing is answered any more when the claim is committed; its job goes back all the same."""
    id = served.add()
    served.db.execute(HOLD_UP)
    with raw_request(served, "POST", "/api/tasks/next", {"processor": "p1", "lease_seconds": 600}):
        wait_for(lambda: served.ask(COMMITTING))
        for number, name in enumerate(stops):
            if number:
                served.process.wait_for_event("shutdown_started")
            served.process.signal(signal.Signals[name])
        served.process.wait_for_event("http_stopped", 30)
        served.ask(LET_GO)
        assert served.process.wait(30) == 0
    wait_for(lambda: not served.ask(COMMITTING))
    assert (served.job(id).state, served.job(id).attempts) == ("ready", 0)
    assert served.process.find("job_released", job_id=id, reason="claim_lost")
    assert served.process.find("claim_failed") == []


# --- the parts


@contextlib.asynccontextmanager
async def claiming(database_url: str, **settings: str) -> AsyncIterator[tuple[Api, psycopg.Connection, asyncio.Task[Grant | None]]]:
    """The parts of a server at work, our own way to the database, and a claim of the only job that waits at its COMMIT."""
    api = make_api(load_settings({"DATABASE_URL": database_url, **PATIENT, **settings}), Tokens([]), NoPool())
    loops = asyncio.create_task(api.run())
    asking = api.claims.next(processor="p", queue="default", kinds=None, lease_seconds=600, request_id=None)
    try:
        with psycopg.connect(database_url, autocommit=True) as db:
            db.execute("INSERT INTO jobs (payload) VALUES ('1')")
            db.execute(HOLD_UP)
            claim = asyncio.create_task(asking)
            await await_for(lambda: db.execute(COMMITTING).fetchall())
            yield api, db, claim
            claim.cancel()
    finally:
        loops.cancel()
        await asyncio.wait({loops})
        await api.close()


def said(log: Log) -> list[str]:
    return [name for name in log.names() if name in (events.JOB_RELEASED.name, events.CLAIM_FAILED.name)]


async def test_a_claim_without_an_answer_is_given_up_at_the_end_and_goes_back_once_it_is_over(database_url: str) -> None:
    with listening() as log:
        async with claiming(database_url) as (api, db, _):
            [(first,)] = db.execute(CLAIMING).fetchall()
            ending = asyncio.create_task(api.finish(6))
            # Another session looks whether it is over.
            await await_for(lambda: {pid for (pid,) in db.execute(CLAIMING).fetchall()} - {first})
            db.execute(LET_GO)
            assert await ending
            assert db.execute(JOBS).fetchall() == [("ready", 0)]
        assert said(log) == ["job_released"]


@pytest.mark.parametrize("refusals", [0, 3], ids=["", "in the middle of a failover"])
async def test_a_claim_whose_answer_was_lost_before_the_end_goes_back(
    database_url: str, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """Nobody has asked for anything since."""
    connect, refused = Database.connect, 0

    async def refuse_at_first(self: Database, role: str, **more: Any) -> Connection:
        nonlocal refused
        refused += 1
        if refused <= refusals:
            raise ConnectFailed("not now", sqlstate="57P03", refused=False)
        return await connect(self, role, **more)

    with listening() as log:
        async with claiming(database_url, WORKER_CLAIM_TIMEOUT_SECONDS="0.5") as (api, db, claim):
            with pytest.raises(Problem):
                await claim
            db.execute(LET_GO)
            await await_for(lambda: db.execute(JOBS).fetchall() == [("running", 1)])
            monkeypatch.setattr(Database, "connect", refuse_at_first)
            assert await api.finish(60)
            assert refused > refusals
            assert db.execute(JOBS).fetchall() == [("ready", 0)]
        assert said(log) == ["job_released"]


async def test_a_claim_that_may_still_commit_after_the_end_is_named(database_url: str) -> None:
    with listening() as log:
        async with claiming(database_url) as (api, db, _):
            assert not await asyncio.wait_for(api.finish(0.5), 20)
            [failed] = log.find(events.CLAIM_FAILED)
            assert "left to lease expiry" in failed["error"]
            db.execute(LET_GO)
            await await_for(lambda: db.execute(JOBS).fetchall() == [("running", 1)])
        assert said(log) == ["claim_failed"]


async def test_what_is_still_on_its_way_back_at_the_end_is_named() -> None:
    nothing: dict[str, Any] = dict.fromkeys(Task._fields)
    task = Task(**nothing | {"id": 7, "kind": "resize", "queue": "images", "fence": 9, "attempt": 2, "expires_in_ms": 600_000})
    api = make_api(load_settings({"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}), Tokens([]), NoPool())
    with listening() as log:
        loops = asyncio.create_task(api.run())
        try:
            api.outcomes.give_back(task, "http:p")
            assert not await asyncio.wait_for(api.finish(0.5), 20)
        finally:
            loops.cancel()
            await asyncio.wait({loops})
            await api.close()
        [left] = log.find(events.COMPLETION_DEFERRED, job_id=7)
    assert (left["kind"], left["queue"], left["attempt"], left["fence"]) == ("resize", "images", 2, 9)
    assert "left to lease expiry" in left["error"]
