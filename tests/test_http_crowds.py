"""Many who claim and complete over HTTP at once: few statements serve them, and each of them is answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
import uvloop

from tests.raw_requests import all_is_taken_in, frozen_backends, raw_request, thaw
from tests.serving import Served
from tests.waiting import await_for, block_loop, until_cancelled, wait_for
from worker.api.claims import Claims
from worker.api.coalescing import QUEUE, Coalescer, Waiting
from worker.api.problems import Problem
from worker.store import task_claiming
from worker.store.claiming import CLAIM_SETTINGS
from worker.store.connection import Database, Lane


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


def answer_on(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the document that come on this connection."""
    answer = HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())


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


def transactions(served: Served, queue: str, state: str) -> int:
    """How many transactions have written these rows last."""
    [row] = served.ask("SELECT count(DISTINCT xmin::text)::int AS written FROM jobs WHERE queue = %s AND state = %s", queue, state)
    written: int = row.written
    return written


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
    monkeypatch.setattr(module, "SURVEY_SHARE", 0.0005)  # what is found is used for 100 s: no machine is so slow
    database = Database(database_url, environ={})
    lane = Lane(database, task_claiming.ROLE, settings=CLAIM_SETTINGS)
    connection = await lane.get()
    await connection.execute("INSERT INTO jobs (payload) SELECT '1' FROM generate_series(1, 20)")
    claims = Claims(database, lane, claim_timeout_seconds=20, limit_seconds=60, give_back=lambda task, owner: None)
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


async def test_a_task_whose_caller_is_cancelled_before_it_wakes_up_goes_back(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stay claimed for its whole lease, and nobody knew."""
    database = Database(database_url, environ={})
    lane = Lane(database, task_claiming.ROLE, settings=CLAIM_SETTINGS)
    connection = await lane.get()
    id = await connection.fetchval("INSERT INTO jobs (payload) VALUES ('1') RETURNING id")
    given_back: list[int] = []
    claims = Claims(
        database, lane, claim_timeout_seconds=20, limit_seconds=60, give_back=lambda task, owner: given_back.append(task.id)
    )
    loop = asyncio.create_task(claims.run())
    asked = asyncio.create_task(claims.next(processor="p", queue="default", kinds=None, lease_seconds=60, request_id=None))
    answer = Waiting.answer

    def answer_too_late(self: Waiting[Any, Any], what: Any) -> bool:
        told = answer(self, what)
        asked.cancel()
        return told

    monkeypatch.setattr(Waiting, "answer", answer_too_late)
    try:
        async with asyncio.timeout(30):
            await asyncio.wait({asked})
        assert asked.cancelled()
        assert given_back == [id]
    finally:
        loop.cancel()
        await lane.close(1)


# --- the line in which they wait


async def test_a_full_queue_is_refused_at_once_and_a_slow_answer_after_its_time() -> None:
    line: Coalescer[int, int] = Coalescer(lambda _: until_cancelled(), most=10, limit_seconds=6)
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


def test_an_answer_that_came_in_time_is_given_although_the_time_is_over_when_its_caller_wakes_up() -> None:
    async def race() -> str:
        async def work(batch: Sequence[Waiting[str, str]]) -> None:
            for one in batch:
                assert one.answer("answer")
            block_loop(2.1)  # this loop looks at its timers first then, at who has been answered afterwards

        line: Coalescer[str, str] = Coalescer(work, most=2, limit_seconds=2)
        loop = asyncio.create_task(line.run())
        try:
            return await line.ask("wish")
        finally:
            loop.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(race()) == "answer"


async def test_groups_take_turns_and_what_nobody_waits_for_is_left_out() -> None:
    batches: list[list[str]] = []

    async def work(batch: Any) -> None:
        batches.append([one.wish for one in batch])
        for one in batch:
            one.answer(one.wish)

    line: Coalescer[str, str] = Coalescer(work, most=2, limit_seconds=60, group_of=lambda wish: wish[0])
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
