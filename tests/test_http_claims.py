"""Claims over HTTP: one task for one request, one statement for many, and nothing lost when an answer or a client is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any

import httpx
import psycopg
import pytest

from tests.servers import PrivateCluster
from tests.serving import TOKEN, Served
from tests.waiting import await_for, until_cancelled, wait_for
from worker.api.claims import Claims
from worker.api.coalescing import QUEUE, Coalescer, Waiting
from worker.api.outcomes import FINISH_SETTINGS, Outcomes
from worker.api.problems import Problem
from worker.domain import Backoff
from worker.lost_claims import MOST_OUTSTANDING
from worker.store import task_claiming, tasks
from worker.store.claiming import CLAIM_SETTINGS
from worker.store.connection import Database, Lane, SessionLimits

# --- many requests, few statements


@pytest.fixture
def patient(private_cluster: Callable[..., PrivateCluster], serve: Callable[..., Served]) -> Served:
    """A server whose statements may take 2 s, on a database server of its own, whose processes may be frozen."""
    return serve(private_cluster().dsn, WORKER_LEASE_SECONDS="30", WORKER_QUERY_TIMEOUT_SECONDS="3")


def test_claims_that_wait_share_a_statement_and_completions_a_transaction(patient: Served, queue: str) -> None:
    served = patient
    for _ in range(200):
        served.add(queue=queue)
    with frozen_backends(served), contextlib.ExitStack() as connections:
        wishes = [{"processor": f"p{number}", "queue": queue, "lease_seconds": 60} for number in range(40)]
        asked = [connections.enter_context(raw_request(served, "POST", "/api/tasks/next", wish)) for wish in wishes]
        all_is_taken_in(served)  # and the first statement hangs
        thaw(served)
        claimed = [answer_on(one)[1] for one in asked]
    assert len({task["id"] for task in claimed}) == 40
    assert {task["processor"] for task in claimed} == {f"p{number}" for number in range(40)}
    assert transactions(served, queue, "running") <= 10
    with frozen_backends(served), contextlib.ExitStack() as connections:
        words = [(task["id"], {"processor": task["processor"], "fence": task["fence"]}) for task in claimed]
        told = [connections.enter_context(raw_request(served, "PUT", f"/api/tasks/{id}/complete", word)) for id, word in words]
        all_is_taken_in(served)
        thaw(served)
        assert {answer_on(one)[0] for one in told} == {202}
    assert transactions(served, queue, "succeeded") <= 10


def all_is_taken_in(served: Served) -> None:
    """What was sent to the server before, or that a client has gone, is known to it: its loop has gone round a few times since."""
    for _ in range(5):
        assert served.http.get("/healthz").status_code == 200


def answer_on(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the document that come on this connection."""
    answer = HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())


def transactions(served: Served, queue: str, state: str) -> int:
    """How many transactions have written these rows last."""
    [row] = served.ask("SELECT count(DISTINCT xmin::text)::int AS written FROM jobs WHERE queue = %s AND state = %s", queue, state)
    written: int = row.written
    return written


@contextlib.contextmanager
def frozen_backends(served: Served) -> Iterator[None]:
    """The server processes that work for claims and outcomes stand still."""
    served.claim(queue="none")
    served.http.put("/api/tasks/99999999/complete", json={"processor": "p", "fence": 1})
    for pid in backends(served):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        thaw(served)


def thaw(served: Served) -> None:
    for pid in backends(served):
        os.kill(pid, signal.SIGCONT)


def backends(served: Served) -> list[int]:
    rows = served.ask(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'reliable-worker http %%'"
    )
    return [row.pid for row in rows]


def test_many_clients_at_once_get_each_task_once(served: Served, queue: str) -> None:
    served.ask("INSERT INTO jobs (queue, kind, payload) SELECT %s, 'k', '1' FROM generate_series(1, 300) RETURNING id", queue)

    def work(number: int) -> list[tuple[int, int]]:
        done = []
        with httpx.Client(base_url=served.url, headers=served.http.headers, trust_env=False, timeout=20) as http:
            while (answer := http.post("/api/tasks/next", json={"processor": f"p{number}", "queue": queue})).status_code == 200:
                task = answer.json()
                body = {"processor": f"p{number}", "fence": task["fence"]}
                assert http.put(f"/api/tasks/{task['id']}/complete", json=body).status_code == 202
                done.append((task["id"], task["fence"]))
        return done

    with ThreadPoolExecutor(16) as threads:
        done = [one for part in threads.map(work, range(16)) for one in part]
    assert len(done) == 300
    assert len({id for id, _ in done}) == len({fence for _, fence in done}) == 300
    assert transactions(served, queue, "succeeded") < 300


def test_large_payloads_reach_all_who_wait(served: Served, queue: str) -> None:
    ids = [served.add(queue=queue, payload="x" * 1_000_000) for _ in range(24)]

    def claim(number: int) -> int:
        """A slow machine may take longer over so much than a claim may take: who is told that it is busy asks again."""
        task = wait_for(lambda: served.claim(f"p{number}", queue=queue, lease_seconds=60), 60)
        assert task is not None
        id: int = task["id"]
        return id

    with ThreadPoolExecutor(24) as threads:
        assert sorted(threads.map(claim, range(24))) == ids


async def test_a_full_queue_is_refused_at_once_and_a_slow_answer_after_its_time() -> None:
    line: Coalescer[int, int] = Coalescer(lambda _: until_cancelled(), most=10, limit_seconds=2)
    asked = [asyncio.create_task(line.ask(number)) for number in range(QUEUE)]
    await await_for(lambda: line._waiting == QUEUE)
    with pytest.raises(Problem) as refused:
        await line.ask(QUEUE)
    assert (refused.value.status_code, refused.value.code) == (503, "overloaded")
    assert not any(one.done() for one in asked)
    loop = asyncio.create_task(line.run())
    ended, _ = await asyncio.wait(asked, timeout=30)
    assert [str(one.exception()) for one in ended] == [str(refused.value)] * QUEUE
    assert not loop.done()
    loop.cancel()
    await asyncio.wait({loop})


async def test_groups_take_turns_and_what_nobody_waits_for_is_left_out() -> None:
    batches: list[list[str]] = []

    async def work(batch: Any) -> None:
        batches.append([one.wish for one in batch])
        for one in batch:
            one.answer(one.wish)

    line: Coalescer[str, str] = Coalescer(work, most=2, limit_seconds=5, group_of=lambda wish: wish[0])
    asked = [asyncio.create_task(line.ask(wish)) for wish in ("a1", "a2", "a3", "b1", "a4", "a5", "c1")]
    await await_for(lambda: line._waiting == len(asked))
    asked[3].cancel()
    async with asyncio.timeout(30):
        await asyncio.wait({asked[3]})
        loop = asyncio.create_task(line.run())
        await asyncio.wait(asked)
        loop.cancel()
        await asyncio.wait({loop})
    assert batches == [["a1", "a2"], ["c1"], ["a3", "a4"], ["a5"]]


async def test_an_answer_that_nobody_waits_for_is_told_so() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    one: Waiting[str, int] = Waiting("wish", future)
    future.cancel()
    assert one.answer(1) is False


# --- the same request again


def test_a_repeated_request_gets_the_same_task_while_its_lease_lives(served: Served, queue: str) -> None:
    for _ in range(3):
        served.add(queue=queue)
    wish: dict[str, Any] = {"queue": queue, "request_id": "r1", "lease_seconds": 60}
    first, second = served.claimed(**wish), served.claimed(**wish)
    assert (first["id"], first["fence"], first["attempt"]) == (second["id"], second["fence"], second["attempt"])
    assert second["expires_in_ms"] <= first["expires_in_ms"]
    assert served.claimed(**wish | {"request_id": "r2"})["id"] != first["id"]
    assert served.claimed("p2", **wish)["id"] != first["id"]


def test_a_request_whose_task_is_over_claims_anew(served: Served, queue: str) -> None:
    for _ in range(3):
        served.add(queue=queue)
    wish: dict[str, Any] = {"queue": queue, "request_id": "r1"}
    first = served.claimed(**wish)
    served.tell("complete", first)
    second = served.claimed(**wish)
    assert second["id"] != first["id"]
    served.lapse(second["id"])
    assert served.claimed(**wish)["id"] not in (first["id"], second["id"])


def test_equal_requests_at_the_same_moment_get_one_task(served: Served, queue: str) -> None:
    for _ in range(20):
        served.add(queue=queue)
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(served.claimed, queue=queue, request_id="same", lease_seconds=60) for _ in range(8)]
        claimed = [one.result() for one in asked]
    assert len({(task["id"], task["fence"]) for task in claimed}) == 1
    assert [row.state for row in served.ask("SELECT state FROM jobs WHERE queue = %s AND state <> 'ready'", queue)] == ["running"]


def test_equal_requests_to_two_servers_get_one_task(database_url: str, serve: Callable[..., Served]) -> None:
    servers = [serve(database_url), serve(database_url)]
    rounds = 15
    for _ in range(rounds * 4):
        servers[0].add()
    with ThreadPoolExecutor(8) as threads:
        for number in range(rounds):
            wish = {"request_id": f"r{number}", "lease_seconds": 60}
            asked = [threads.submit(servers[turn % 2].claimed, **wish) for turn in range(8)]
            assert len({(one.result()["id"], one.result()["fence"]) for one in asked}) == 1
    assert servers[0].ask("SELECT count(*)::int AS held FROM jobs WHERE state = 'running'")[0].held == rounds


def test_a_lost_answer_and_a_repeated_request_give_the_same_fence(served: Served, queue: str) -> None:
    """The proxy between has eaten the answer; the server noticed nothing."""
    served.add(queue=queue)
    served.add(queue=queue)
    wish = {"processor": "p1", "queue": queue, "request_id": "eaten", "lease_seconds": 60}
    with raw_request(served, "POST", "/api/tasks/next", wish) as connection:
        wait_for(lambda: served.ask("SELECT FROM jobs WHERE queue = %s AND state = 'running'", queue))
        wait_for(lambda: connection.recv(1, socket.MSG_PEEK))  # it is answered, and nobody has read it
    [lost] = served.ask("SELECT id, fence FROM jobs WHERE queue = %s AND state = 'running'", queue)
    again = served.claimed(queue=queue, request_id="eaten", lease_seconds=60)
    assert (again["id"], again["fence"]) == (lost.id, lost.fence)


@contextlib.contextmanager
def raw_request(served: Served, method: str, path: str, body: object) -> Iterator[socket.socket]:
    """A request sent by hand on a connection that is closed at the end of the block."""
    text = json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(head.encode() + text)
        yield connection


# --- nobody is there to take it


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


def test_a_claim_whose_answer_is_lost_on_the_way_from_the_database_goes_back(served: Served, queue: str) -> None:
    """The connection dies after the claim was committed and before its answer came: no client has heard of the task."""
    id = served.add(queue=queue)
    with psycopg.connect(served.database_url, autocommit=True) as db:
        db.execute(
            "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(2); RETURN NULL; END $$;"
            " CREATE CONSTRAINT TRIGGER dies AFTER UPDATE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
            f" WHEN (NEW.id = {id} AND NEW.state = 'running' AND NEW.attempts = 1 AND OLD.state = 'ready') EXECUTE FUNCTION die()"
        )
        try:
            answer = served.http.post("/api/tasks/next", json={"processor": "p1", "queue": queue, "lease_seconds": 600})
            assert answer.status_code == 503
        finally:
            db.execute("DROP TRIGGER dies ON jobs; DROP FUNCTION die()")
    task = wait_for(lambda: served.claim(queue=queue))
    assert (task["id"], task["attempt"]) == (id, 1)


async def test_tasks_of_a_lost_answer_are_found_by_their_requests(database_url: str) -> None:
    database = Database(database_url, environ={})
    lane = Lane(database, task_claiming.ROLE, settings=CLAIM_SETTINGS)
    connection = await lane.get()
    await connection.execute("INSERT INTO jobs (payload) SELECT '1' FROM generate_series(1, 3)")
    given: list[int] = []
    claims = Claims(database, lane, claim_timeout_seconds=2, limit_seconds=5, give_back=lambda task, owner: given.append(task.id))
    loop = asyncio.create_task(claims.run())
    try:
        held = []
        for request_id in (None, None, "mine"):
            grant = await claims.next(processor="p", queue="default", kinds=None, lease_seconds=60, request_id=request_id)
            assert grant is not None
            held.append(grant)
        rows = await connection.fetch("SELECT id, meta #>> '{http,request_id}' AS request FROM jobs ORDER BY id")
        lost = held[0].task
        assert await task_claiming.recover(connection, database, request_ids=[rows[0]["request"]]) == [(lost.id, lost.fence)]
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

            mine = await await_for(claimed)

            async def is_alone() -> bool:
                answers.add(await asked("mine"))  # what nobody can ask for again goes back before, once it is over
                return db.execute("SELECT id::text, attempts FROM jobs WHERE state = 'running'").fetchall() == [(mine, 1)]

            await await_for(is_alone)
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
    outcomes = Outcomes(database, finishing, backoff=Backoff(1, 1), statement_seconds=2, limit_seconds=5)
    claims = Claims(database, claiming, claim_timeout_seconds=2, limit_seconds=5, give_back=outcomes.give_back)
    loops = [asyncio.create_task(one.run()) for one in (claims, outcomes)]
    try:
        with psycopg.connect(database_url, autocommit=True) as db:
            db.execute("INSERT INTO jobs (payload) VALUES ('1')")
            grant = await claims.next(processor="p", queue="default", kinds=None, lease_seconds=60, request_id=None)
            assert grant is not None
            with psycopg.connect(database_url) as holder:
                holder.execute("SELECT FROM jobs FOR UPDATE")
                grant.refuse()
                tries: set[object] = set()

                def several() -> bool:
                    waiting = "SELECT query_start FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s"
                    tries.update(db.execute(waiting, [db.info.dbname]).fetchall())
                    return len(tries) >= 2

                await await_for(several)
            await await_for(lambda: db.execute("SELECT state, attempts FROM jobs").fetchone() == ("ready", 0), 10)
    finally:
        for loop in loops:
            loop.cancel()
        for lane in (claiming, finishing):
            await lane.close(1)


# --- suspects


def test_a_suspect_is_given_to_a_remote_worker_one_at_a_time(served: Served, queue: str) -> None:
    suspects = [served.add(queue=queue, crashes=1) for _ in range(3)]
    ordinary = served.add(queue=queue)
    first, second = (served.claimed(f"{queue} 1", queue=queue, lease_seconds=60) for _ in range(2))
    assert (first["id"], second["id"]) == (suspects[0], ordinary)
    assert served.claim(f"{queue} 1", queue=queue) is None
    assert served.claimed(f"{queue} 2", queue=queue, lease_seconds=60)["id"] == suspects[1]
    served.tell("complete", first)
    assert served.claimed(f"{queue} 1", queue=queue)["id"] == suspects[2]


def test_suspects_of_other_kinds_are_left_alone(served: Served, queue: str) -> None:
    served.add("other", queue=queue, crashes=1)
    mine = served.add("mine", queue=queue, crashes=1)
    assert served.claimed(f"{queue} 1", queue=queue, kinds=["mine"])["id"] == mine


# --- surveys


async def test_where_surveys_are_slow_claims_go_on_from_where_they_were(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an old snapshot each look from the start of the index is slow; then it comes only before the answer "none"."""
    from worker.api import claims as module

    surveys: Counter[str] = Counter()
    survey = module.claiming.survey

    async def slow(connection: Any, database: Any, queues: Any) -> Any:
        surveys["asked"] += 1
        await asyncio.sleep(0.05)
        return await survey(connection, database, queues)

    monkeypatch.setattr(module.claiming, "survey", slow)
    database = Database(database_url, environ={})
    lane = Lane(database, task_claiming.ROLE, settings=CLAIM_SETTINGS)
    connection = await lane.get()
    await connection.execute("INSERT INTO jobs (payload) SELECT '1' FROM generate_series(1, 20)")
    claims = Claims(database, lane, claim_timeout_seconds=2, limit_seconds=5, give_back=lambda task, owner: None)
    loop = asyncio.create_task(claims.run())

    async def next_id() -> int | None:
        grant = await claims.next(processor="p", queue="default", kinds=None, lease_seconds=60, request_id=None)
        return None if grant is None else grant.task.id

    try:
        assert [await next_id() for _ in range(20)] == list(range(1, 21))
        assert surveys["asked"] == 1
        await connection.execute("INSERT INTO jobs (payload, available_at) VALUES ('1', now() - interval '1 hour')")
        assert await next_id() == 21
        assert surveys["asked"] == 2
        assert await next_id() is None
        assert surveys["asked"] == 3
    finally:
        loop.cancel()
        await lane.close(1)
