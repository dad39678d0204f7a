"""Enqueueing many jobs in one call: in the order given, all or none, in few statements."""

from __future__ import annotations

import random

import asyncpg
import pytest

from tests.enqueued import COUNT, row_of
from worker.store import bulk, enqueueing
from worker.store.bulk import enqueue_many
from worker.store.enqueueing import enqueue


async def test_an_unknown_key_and_a_missing_payload_are_refused_by_number(connection: asyncpg.Connection) -> None:
    with pytest.raises(ValueError, match=r"^job 1: unknown key 'payloda': the keys are kind, payload, key"):
        await enqueue_many(connection, [{"payload": 1}, {"payload": 1, "payloda": 2}])
    with pytest.raises(ValueError, match=r"^job 0: payload: is required"):
        await enqueue_many(connection, [{"kind": "message"}])
    assert await connection.fetchval(COUNT) == 0


async def test_many_come_back_in_the_order_given_and_run_in_it(connection: asyncpg.Connection) -> None:
    keys = [f"key-{number:05}" for number in range(2_500)]
    random.Random(7).shuffle(keys)
    answers = await enqueue_many(connection, [{"payload": place, "key": key} for place, key in enumerate(keys)])
    assert all(answer.created for answer in answers)
    stored = {row["id"]: row["idempotency_key"] for row in await connection.fetch("SELECT id, idempotency_key FROM jobs")}
    assert [stored[answer.id] for answer in answers] == keys
    in_turn = await connection.fetch("SELECT idempotency_key AS key FROM jobs ORDER BY available_at, id")
    assert [row["key"] for row in in_turn] == keys
    assert await connection.fetchval("SELECT bool_and(available_at <= clock_timestamp()) FROM jobs")


async def test_a_key_twice_in_one_call_is_one_job_with_the_first_payload(connection: asyncpg.Connection) -> None:
    answers = await enqueue_many(
        connection, [{"payload": 1, "key": "b"}, {"payload": 2, "key": "a"}, {"payload": 3, "key": "b"}, {"payload": 4}]
    )
    assert [answer.created for answer in answers] == [True, True, False, True]
    assert answers[0].id == answers[2].id
    assert (await row_of(connection, answers[0].id))["payload_text"] == "1"


async def test_forty_thousand_go_in_one_call(connection: asyncpg.Connection) -> None:
    answers = await enqueue_many(connection, ({"payload": number} for number in range(40_000)))
    assert len({answer.id for answer in answers}) == 40_000
    assert await connection.fetchval(COUNT) == 40_000


async def test_nothing_of_many_is_left_when_the_server_refuses_a_later_chunk(connection: asyncpg.Connection) -> None:
    await connection.execute("ALTER TABLE jobs ADD CONSTRAINT no_last CHECK (payload <> '1499')")
    jobs = [{"payload": number, "key": f"{number:06}"} for number in range(1_500)]
    with pytest.raises(asyncpg.CheckViolationError):
        await enqueue_many(connection, jobs)
    assert await connection.fetchval(COUNT) == 0
    # In a transaction begun by hand, which asyncpg's own savepoints would refuse.
    await connection.execute("BEGIN")
    await enqueue(connection, "message", 1, key="before")
    with pytest.raises(asyncpg.CheckViolationError):
        await enqueue_many(connection, jobs)
    await connection.execute("COMMIT")
    assert await connection.fetchval(COUNT) == 1


async def test_many_keys_of_the_callers_are_one_statement_a_chunk_and_one_subtransaction_in_all(
    connection: asyncpg.Connection,
) -> None:
    """More than 64 in a transaction would slow down every snapshot that anybody takes meanwhile."""
    jobs = [{"payload": number, "key": f"k{number:04}"} for number in range(3 * bulk.CHUNK_JOBS)]
    await enqueue_many(connection, [{"payload": 0, "key": "before"}])  # asyncpg looks up the types of a new statement
    said: list[str] = []
    for created in (True, False):
        said.clear()
        async with connection.transaction():
            with connection.query_logger(lambda query: said.append(query.query)):
                answers = await enqueue_many(connection, jobs)
        assert {answer.created for answer in answers} == {created}
        assert [query.split()[0] for query in said] == ["SAVEPOINT", "SELECT", "WITH", "WITH", "WITH", "RELEASE"]
    writers = "SELECT count(DISTINCT xmin::text) FROM jobs WHERE idempotency_key <> 'before'"
    assert await connection.fetchval(writers) == 1


async def test_a_plan_made_for_an_empty_table_compares_no_row_with_each_key(connection: asyncpg.Connection) -> None:
    """It is kept while the table grows: so would be what it costs."""
    await connection.execute("SET plan_cache_mode = force_generic_plan")
    arguments = (["a", "b"], [0, 1], 0, ["1", "2"], "message", "default", 0, None, 0.0, 5)
    insert = enqueueing.in_schema(bulk.INSERT_MANY_ALIKE + bulk._NEW_ONES_AND_OLD, "public")
    for text, values in ((insert, arguments), (enqueueing.in_schema(bulk.FIND_BY_KEYS, "public"), arguments[:1])):
        plan = "\n".join(row[0] for row in await connection.fetch(f"EXPLAIN (COSTS OFF) {text}", *values))
        assert "jobs" in plan
        assert "Join Filter" not in plan, plan
        assert "ANY" not in plan, plan


async def test_keys_that_are_there_keep_their_jobs_beside_new_ones(connection: asyncpg.Connection) -> None:
    there = await enqueue_many(connection, [{"payload": 1, "key": f"k{number:02}"} for number in range(0, 40, 2)])
    await connection.execute("UPDATE jobs SET state = 'dead', completed_at = now() WHERE idempotency_key = 'k04'")
    answers = await enqueue_many(connection, [{"payload": 2, "key": f"k{number:02}"} for number in range(40)])
    assert [answer.created for answer in answers] == [number % 2 == 1 for number in range(40)]
    assert [answer.id for answer in answers[::2]] == [answer.id for answer in there]
    assert [answer.state for answer in answers] == ["dead" if number == 4 else "ready" for number in range(40)]


@pytest.mark.parametrize("fields", ["payload", ["payload"], None, 7])
async def test_what_is_no_mapping_is_refused_by_number(connection: asyncpg.Connection, fields: object) -> None:
    with pytest.raises(TypeError, match=rf"^job 1: a mapping is needed, not {type(fields).__name__}"):
        await enqueue_many(connection, [{"payload": 1}, fields])  # type: ignore[list-item]
    assert await connection.fetchval(COUNT) == 0
