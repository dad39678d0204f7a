"""Callers that enqueue the same keys at the same time: one job a key, and nobody is aborted or waits in a circle."""

from __future__ import annotations

import asyncio

import asyncpg
import psycopg
import pytest

from tests.servers import WAIT_FOR_US
from tests.waiting import await_for
from worker.new_job import new_job
from worker.store import bulk
from worker.store.bulk import KeyVanished, enqueue_many, enqueue_part
from worker.store.enqueueing import Enqueued, enqueue


async def test_rival_inserts_of_one_key_abort_nobody(database_url: str) -> None:
    """G21: fifty callers, each with other writes in its transaction; one job, and all of them commit."""

    async def caller(number: int, bulk: bool) -> Enqueued:
        connection = await asyncpg.connect(database_url)
        try:
            async with connection.transaction():
                await connection.execute("INSERT INTO processed_messages VALUES ($1, 'other write')", str(number))
                if bulk:
                    [answer] = await enqueue_many(connection, [{"payload": number, "key": "k"}])
                else:
                    answer = await enqueue(connection, "message", number, key="k")
                return answer
        finally:
            await connection.close()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(caller(number, number % 2 == 0)) for number in range(50)]
    answers = [task.result() for task in tasks]
    assert sum(answer.created for answer in answers) == 1
    assert len({answer.id for answer in answers}) == 1
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM processed_messages").fetchone() == (50,)


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("rival_commits", [True, False])
async def test_one_row_comes_back_whether_the_rival_in_flight_commits_or_rolls_back(
    database_url: str, connection: asyncpg.Connection, rival_commits: bool, bulk: bool
) -> None:
    async def ours() -> Enqueued:
        if bulk:
            [answer] = await enqueue_many(connection, [{"payload": 2, "key": "k"}])
            return answer
        return await enqueue(connection, "message", 2, key="k")

    rival = await asyncpg.connect(database_url)
    try:
        await rival.execute("BEGIN")
        theirs = await enqueue(rival, "message", 1, key="k")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(ours())
            await await_for(lambda: rival.fetchval(WAIT_FOR_US))
            await rival.execute("COMMIT" if rival_commits else "ROLLBACK")
        assert task.result().created is not rival_commits
        assert (task.result().id == theirs.id) is rival_commits
    finally:
        await rival.close()


async def test_two_bulk_callers_with_the_same_keys_in_opposite_order_never_deadlock(database_url: str) -> None:
    keys = [f"k{number:04}" for number in range(1_500)]

    async def caller(order: list[str]) -> int:
        connection = await asyncpg.connect(database_url)
        try:
            return sum(job.created for job in await enqueue_many(connection, [{"payload": 1, "key": key} for key in order]))
        finally:
            await connection.close()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(caller(order)) for order in (keys, keys[::-1]) * 3]
    assert sum(task.result() for task in tasks) == len(keys)


async def test_a_key_that_comes_and_goes_meanwhile_closes_no_circle_of_callers(
    connection: asyncpg.Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lower key is committed under one caller's eyes and deleted before he looks; then a second caller inserts both keys."""
    jobs = [{"payload": 1, "key": "lower"}, {"payload": 1, "key": "upper"}]
    first, rival = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    second: asyncio.Task[list[Enqueued]] | None = None
    find = bulk._find

    async def waits(caller: asyncpg.Connection) -> bool:
        asked = "SELECT count(*) FROM pg_locks WHERE pid = $1 AND NOT granted"
        return bool(await rival.fetchval(asked, caller.get_server_pid()))

    async def find_late(asking: asyncpg.Connection, keys: list[str], schema: str) -> dict[str, Enqueued]:
        nonlocal second
        if second is None:
            await rival.execute("DELETE FROM jobs")
            second = asyncio.create_task(enqueue_many(connection, jobs))
            await await_for(lambda: waits(connection))
        return await find(asking, keys, schema)

    monkeypatch.setattr(bulk, "_find", find_late)
    try:
        async with asyncio.timeout(20):
            await rival.execute("BEGIN")
            await enqueue_many(rival, jobs[:1])
            enqueueing = asyncio.create_task(enqueue_many(first, jobs))
            await await_for(lambda: waits(first))
            await rival.execute("COMMIT")
            answers = await enqueueing
            assert second is not None
            assert [answer.created for answer in await second] == [True, True]
        assert answers == [answer._replace(created=False) for answer in second.result()]
        assert await connection.fetchval("SELECT count(*) FROM jobs") == 2
    finally:
        await first.close()
        await rival.close()


async def test_a_part_of_a_transaction_says_what_came_and_went_and_writes_no_savepoint(
    connection: asyncpg.Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [new_job("message", 1, key=key) for key in ("lower", "upper")]
    async with connection.transaction():
        assert [answer.created for answer in await enqueue_part(connection, jobs[:1])] == [True]
        assert [answer.created for answer in await enqueue_part(connection, jobs)] == [False, True]
    assert await connection.fetchval("SELECT count(DISTINCT xmin::text) FROM jobs") == 1
    await connection.execute("DELETE FROM jobs")

    async def nothing(*_: object) -> dict[str, Enqueued]:
        return {}

    monkeypatch.setattr(bulk, "_find", nothing)
    rival = await asyncpg.connect(database_url)
    try:
        await rival.execute("BEGIN")
        await enqueue(rival, "message", 1, key="lower")
        writing = asyncio.create_task(enqueue_part(connection, jobs))
        await await_for(lambda: rival.fetchval(WAIT_FOR_US))
        await rival.execute("COMMIT")
        with pytest.raises(KeyVanished, match=r"^lower$"):
            await writing
    finally:
        await rival.close()
