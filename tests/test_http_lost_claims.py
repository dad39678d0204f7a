"""A claim over HTTP that nobody is there to hear of, or that the database has not answered: its task goes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg

from tests.raw_requests import all_is_taken_in, frozen_backends, raw_request
from tests.serving import Served
from tests.waiting import await_for, wait_for
from worker.api.claims import Claims
from worker.api.outcomes import FINISH_SETTINGS, Outcomes
from worker.api.problems import Problem
from worker.domain import Backoff
from worker.lost_claims import MOST_OUTSTANDING
from worker.store import task_claiming, tasks
from worker.store.claiming import CLAIM_SETTINGS
from worker.store.connection import Database, Lane, SessionLimits


def test_a_client_that_leaves_while_its_claim_is_in_flight_gives_the_task_back(patient: Served, queue: str) -> None:
    served = patient
    id = served.add(queue=queue)
    with frozen_backends(served):
        with raw_request(served, "POST", "/api/tasks/next", {"processor": "p1", "queue": queue, "lease_seconds": 600}):
            all_is_taken_in(served)  # its statement hangs
        all_is_taken_in(served)
    released = served.process.wait_for_event("job_released", job_id=id)
    assert released["reason"] == "claim_lost"
    row = served.job(id)
    assert (row.state, row.attempts, row.lease_owner) == ("ready", 0, None)
    assert row.fence > 0
    assert served.failures(id) == []
    assert served.claimed(queue=queue)["attempt"] == 1


def test_a_claim_whose_answer_is_lost_on_the_way_from_the_database_goes_back(
    database_url: str, serve: Callable[..., Served], queue: str
) -> None:
    """The connection dies after the claim was committed and before its answer came: no client has heard of the task."""
    served = serve(database_url, WORKER_LEASE_SECONDS="60", WORKER_CLAIM_TIMEOUT_SECONDS="3")
    id = served.add(queue=queue)
    with psycopg.connect(served.database_url, autocommit=True) as db:
        db.execute(
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS"
            " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END $$;"
            " CREATE CONSTRAINT TRIGGER waits AFTER UPDATE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
            " WHEN (NEW.state = 'running' AND OLD.state = 'ready') EXECUTE FUNCTION wait(); SELECT pg_advisory_lock(7)"
        )
        answer = served.http.post("/api/tasks/next", json={"processor": "p1", "queue": queue, "lease_seconds": 600})
        assert answer.status_code == 503
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
        wait_for(lambda: db.execute(waiting).fetchone() == (1,))  # it is still to be committed
        db.execute("SELECT pg_advisory_unlock(7)")
    task = wait_for(lambda: served.claim(queue=queue), 30)
    assert (task["id"], task["attempt"]) == (id, 1)


async def test_tasks_of_a_lost_answer_are_found_by_their_requests(database_url: str) -> None:
    database = Database(database_url, environ={})
    lane = Lane(database, task_claiming.ROLE, settings=CLAIM_SETTINGS)
    connection = await lane.get()
    await connection.execute("INSERT INTO jobs (payload) SELECT '1' FROM generate_series(1, 3)")
    given: list[int] = []
    claims = Claims(database, lane, claim_timeout_seconds=20, limit_seconds=60, give_back=lambda task, owner: given.append(task.id))
    loop = asyncio.create_task(claims.run())
    try:
        held = []
        for request_id in (None, None, "mine"):
            grant = await claims.next(processor="p", queue="default", kinds=None, lease_seconds=60, request_id=request_id)
            assert grant is not None
            held.append(grant)
        rows = await connection.fetch("SELECT id, meta #>> '{http,request_id}' AS request FROM jobs ORDER BY id")
        lost = held[0].task
        [recovered] = await task_claiming.recover(connection, database, request_ids=[rows[0]["request"]])
        assert (recovered.id, recovered.fence, recovered.processor) == (lost.id, lost.fence, "p")
        assert await task_claiming.recover(connection, database, request_ids=[rows[0]["request"]]) == []
        states = await connection.fetch("SELECT state, attempts FROM jobs ORDER BY id")
        assert [tuple(row) for row in states] == [("ready", 0), ("running", 1), ("running", 1)]
        held[1].refuse()
        assert given == [held[1].task.id]
    finally:
        loop.cancel()
        await lane.close(1)


async def test_while_three_claims_have_no_answer_and_may_still_commit_nothing_more_is_claimed(database_url: str) -> None:
    """As while a synchronous standby is away: each keeps a session in the server, which nobody can end."""
    limits = SessionLimits(statement_timeout_seconds=300, lock_timeout_seconds=300, idle_in_transaction_seconds=300)
    database = Database(database_url, limits=limits, environ={})
    lane = Lane(database, task_claiming.ROLE, settings=CLAIM_SETTINGS)
    claims = Claims(database, lane, claim_timeout_seconds=1, limit_seconds=30, give_back=lambda task, owner: None)

    async def asked(request_id: str | None) -> str:
        try:
            grant = await claims.next(processor="p", queue="default", kinds=None, lease_seconds=600, request_id=request_id)
        except Problem as problem:
            return problem.code
        assert grant is not None
        return str(grant.task.id)

    with psycopg.connect(database_url, autocommit=True) as db:
        db.execute(
            "INSERT INTO jobs (payload) SELECT '1' FROM generate_series(1, 9); SELECT pg_advisory_lock(1);"
            " CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$;"
            " CREATE CONSTRAINT TRIGGER waits AFTER UPDATE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
            " WHEN (OLD.state = 'ready') EXECUTE FUNCTION wait()"
        )
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
        loop = asyncio.create_task(claims.run())
        try:
            answers = {await asked("mine")}

            async def all_wait() -> bool:
                answers.add(await asked(None))
                return db.execute(waiting).fetchone() == (MOST_OUTSTANDING,)

            await await_for(all_wait, 30)
            for request_id in (None, "mine", None, "other"):
                answers.add(await asked(request_id))
            assert answers == {"database_unavailable"}
            assert db.execute(waiting).fetchone() == (MOST_OUTSTANDING,)
            db.execute("SELECT pg_advisory_unlock(1)")
            await await_for(lambda: db.execute(waiting).fetchone() == (0,))

            async def claimed() -> str | None:
                answer = await asked("mine")
                return None if answer == "database_unavailable" else answer

            mine = await await_for(claimed, 30)

            async def is_alone() -> bool:
                answers.add(await asked("mine"))  # what nobody can ask for again goes back before, once it is over
                return db.execute("SELECT id::text, attempts FROM jobs WHERE state = 'running'").fetchall() == [(mine, 1)]

            await await_for(is_alone, 30)
            assert answers == {"database_unavailable", mine}
            assert db.execute("SELECT count(*) FROM jobs WHERE state = 'ready' AND attempts = 0").fetchone() == (8,)
        finally:
            loop.cancel()
            await lane.close(1)


async def test_a_task_that_cannot_be_given_back_at_once_is_given_back_later(database_url: str) -> None:
    """The first tries meet a lock for longer than they wait for one."""
    database = Database(database_url, environ={})
    claiming, finishing = (
        Lane(database, task_claiming.ROLE, settings=CLAIM_SETTINGS),
        Lane(database, tasks.FINISH_ROLE, settings=FINISH_SETTINGS),
    )
    outcomes = Outcomes(database, finishing, backoff=Backoff(1, 1), statement_seconds=20, limit_seconds=60)
    claims = Claims(database, claiming, claim_timeout_seconds=20, limit_seconds=60, give_back=outcomes.give_back)
    loops = [asyncio.create_task(one.run()) for one in (claims, outcomes)]
    try:
        with psycopg.connect(database_url, autocommit=True) as db:
            db.execute("INSERT INTO jobs (payload) VALUES ('1')")
            grant = await claims.next(processor="p", queue="default", kinds=None, lease_seconds=600, request_id=None)
            assert grant is not None
            with psycopg.connect(database_url) as holder:
                holder.execute("SELECT FROM jobs FOR UPDATE")
                grant.refuse()
                tries: set[object] = set()

                def several() -> bool:
                    waiting = "SELECT query_start FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s"
                    tries.update(db.execute(waiting, [db.info.dbname]).fetchall())
                    return len(tries) >= 2

                await await_for(several, 60)
            await await_for(lambda: db.execute("SELECT state, attempts FROM jobs").fetchone() == ("ready", 0), 30)
    finally:
        for loop in loops:
            loop.cancel()
        for lane in (claiming, finishing):
            await lane.close(1)
