"""Enqueueing: in the caller's own transaction, once a key, whatever connection it is, and refused by name."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone

import asyncpg
import psycopg
import pytest
import pytest_asyncio

from tests.servers import WAIT_FOR_US
from tests.waiting import await_for
from worker.new_job import new_job
from worker.store import bulk, enqueueing, schema
from worker.store.bulk import KeyVanished, enqueue_many, enqueue_part
from worker.store.enqueueing import Enqueued, enqueue
from worker.store.finished import wait

COUNT = "SELECT count(*) FROM jobs"


@pytest_asyncio.fixture
async def connection(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def row_of(connection: asyncpg.Connection, id: int) -> asyncpg.Record:
    return await connection.fetchrow("SELECT *, payload::text AS payload_text FROM jobs WHERE id = $1", id)


async def test_every_field_arrives_in_the_row(connection: asyncpg.Connection) -> None:
    at = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=timezone(timedelta(hours=2)))
    job = await enqueue(connection, "welcome", {"a": [1, "ü"]}, key="k", queue="mail", priority=-7, run_at=at, max_attempts=3)
    assert (job.created, job.state) == (True, "ready")
    row = await row_of(connection, job.id)
    assert json.loads(row["payload_text"]) == {"a": [1, "ü"]}
    assert (row["kind"], row["queue"], row["priority"], row["max_attempts"]) == ("welcome", "mail", -7, 3)
    assert (row["idempotency_key"], row["available_at"]) == ("k", at)


async def test_the_same_key_twice_is_one_job_and_tells_its_state(connection: asyncpg.Connection) -> None:
    first = await enqueue(connection, "message", {"message": "a"}, key="k")
    assert await enqueue(connection, "message", {"message": "b"}, key="k") == Enqueued(first.id, False, "ready")
    await connection.execute("UPDATE jobs SET state = 'dead', completed_at = now()")
    assert await enqueue(connection, "message", {"message": "c"}, key="k") == Enqueued(first.id, False, "dead")
    [again] = await enqueue_many(connection, [{"payload": 1, "key": "k"}])
    assert again == Enqueued(first.id, False, "dead")


async def test_a_delay_counts_from_now_in_every_time_zone(connection: asyncpg.Connection) -> None:
    for zone in ("Pacific/Kiritimati", "America/St_Johns"):
        await connection.execute(f"SET TimeZone = '{zone}'; SET DateStyle = 'German'")
        single = await enqueue(connection, "message", 1, delay_seconds=3600)
        [many] = await enqueue_many(connection, [{"payload": 1, "delay_seconds": 3600}])
        [moment] = await enqueue_many(connection, [{"payload": 1, "run_at": datetime.now(UTC) + timedelta(hours=1)}])
        for job in (single, many, moment):
            seconds = "SELECT extract(epoch FROM available_at - clock_timestamp()) FROM jobs WHERE id = $1"
            assert 3590 < await connection.fetchval(seconds, job.id) <= 3600


@pytest.mark.parametrize("codec", ["none", "python", "text", "binary"])
async def test_the_payload_is_an_object_whatever_the_callers_jsonb_codec(database_url: str, codec: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        if codec == "python":
            await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
        elif codec == "text":
            await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=str, decoder=str)
        elif codec == "binary":
            await connection.set_type_codec(
                "jsonb", schema="pg_catalog", format="binary", encoder=lambda v: b"\1" + v, decoder=lambda v: v[1:]
            )
        job = await enqueue(connection, "message", {"message": "x"})
        [other] = await enqueue_many(connection, [{"payload": {"message": "x"}}])
        for id in (job.id, other.id):
            kind = await connection.fetchval("SELECT jsonb_typeof(payload) FROM jobs WHERE id = $1", id)
            assert kind == "object"
        await connection.execute(
            "UPDATE jobs SET state = 'succeeded', completed_at = now(), result = '{\"big\": 9007199254740993}'"
        )
        assert (await wait(connection, job.id, timeout_seconds=5)).result == {"big": 9007199254740993}
    finally:
        await connection.close()


async def test_it_is_part_of_the_callers_transaction(connection: asyncpg.Connection) -> None:
    await connection.execute("BEGIN")
    await enqueue(connection, "message", 1, key="a")
    await enqueue_many(connection, [{"payload": 1}, {"payload": 2, "key": "b"}])
    assert await connection.fetchval(COUNT) == 3
    await connection.execute("ROLLBACK")
    assert await connection.fetchval(COUNT) == 0
    async with connection.transaction():
        await enqueue_many(connection, [{"payload": 1}])
    assert await connection.fetchval(COUNT) == 1


BAD_FIELDS = [
    ({"key": "x" * 513}, "key: 1 to 512 bytes"),
    ({"key": "é" * 257}, "key: 1 to 512 bytes"),
    ({"key": ""}, "key: 1 to 512 bytes"),
    ({"key": "auto:mine"}, 'key: "auto:" is reserved'),
    ({"key": "a\x00b"}, "key: contains a NUL"),
    ({"key": "\ud800"}, "key: contains an unpaired surrogate"),
    ({"key": 7}, "key: a string is needed"),
    ({"kind": ""}, "kind: 1 to 128 bytes"),
    ({"kind": "k" * 129}, "kind: 1 to 128 bytes"),
    ({"queue": "q\x00"}, "queue: contains a NUL"),
    ({"priority": 32_768}, "priority: -32768 to 32767"),
    ({"priority": "1"}, "priority: an integer is needed"),
    ({"priority": True}, "priority: an integer is needed"),
    ({"max_attempts": 0}, "max_attempts: 1 to"),
    ({"max_attempts": 2**31}, "max_attempts: 1 to"),
    ({"delay_seconds": -1}, "delay_seconds: 0 to"),
    ({"delay_seconds": float("nan")}, "delay_seconds: 0 to"),
    ({"delay_seconds": float("inf")}, "delay_seconds: 0 to"),
    ({"delay_seconds": 1, "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, "run_at, delay_seconds: give one of them"),
    ({"run_at": datetime(2030, 1, 1)}, "run_at: .* has no time zone"),  # noqa: DTZ001
    ({"run_at": "2030-01-01"}, "run_at: a datetime is needed"),
    ({"run_at": datetime.min.replace(tzinfo=timezone(timedelta(hours=2)))}, "run_at: .* out of range"),
    ({"payload": float("nan")}, "payload: NaN"),
    ({"payload": {"a": "x\x00y"}}, "payload: contains a NUL"),
    ({"payload": "\ud800"}, "payload: contains an unpaired surrogate"),
    ({"payload": {1, 2}}, "payload: set is not a JSON value"),
    ({"payload": "x" * 1_048_577}, "payload: 1 MiB"),
    ({"payload": [1] * 100_000}, "payload: 1 MiB"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS)
async def test_a_bad_field_is_refused_by_name_and_the_callers_transaction_goes_on(
    connection: asyncpg.Connection, fields: dict[str, object], message: str
) -> None:
    async with connection.transaction():
        await connection.execute("INSERT INTO jobs (payload) VALUES ('1')")
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            await enqueue(connection, **({"kind": "message", "payload": 1} | fields))
        with pytest.raises((TypeError, ValueError), match=f"^job 1: {message}"):
            await enqueue_many(connection, [{"payload": 1}, {"payload": 1} | fields])
        assert await connection.fetchval(COUNT) == 1


async def test_an_unknown_key_and_a_missing_payload_are_refused_by_number(connection: asyncpg.Connection) -> None:
    with pytest.raises(ValueError, match=r"^job 1: unknown key 'payloda': the keys are kind, payload, key"):
        await enqueue_many(connection, [{"payload": 1}, {"payload": 1, "payloda": 2}])
    with pytest.raises(ValueError, match=r"^job 0: payload: is required"):
        await enqueue_many(connection, [{"kind": "message"}])
    assert await connection.fetchval(COUNT) == 0


async def test_one_mebibyte_as_stored_is_allowed(connection: asyncpg.Connection) -> None:
    """A jsonb string takes its bytes and a few for the header."""
    job = await enqueue(connection, "message", "x" * (1_048_576 - 12))
    assert job.created
    with pytest.raises(ValueError, match=r"^payload: 1 MiB \(1,048,576 bytes\) as stored is allowed, this has 1,048,5"):
        await enqueue(connection, "message", "x" * (1_048_576 - 8))


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
        await await_for(lambda: rival.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))
        await rival.execute("COMMIT")
        with pytest.raises(KeyVanished, match=r"^lower$"):
            await writing
    finally:
        await rival.close()


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


async def test_ids_beyond_floats_stay_exact(connection: asyncpg.Connection) -> None:
    await connection.execute("ALTER TABLE jobs ALTER COLUMN id RESTART WITH 9007199254740993")
    assert (await enqueue(connection, "message", 1)).id == 9007199254740993
    assert [job.id for job in await enqueue_many(connection, [{"payload": 1}])] == [9007199254740994]


async def test_another_schema_is_another_queue(connection: asyncpg.Connection) -> None:
    await schema.migrate(connection, "Odd-Name")
    await enqueue(connection, "message", 1, key="k", schema="Odd-Name")
    [other] = await enqueue_many(connection, [{"payload": 1, "key": "k"}], schema="Odd-Name")
    assert not other.created
    assert await connection.fetchval('SELECT count(*) FROM "Odd-Name".jobs') == 1
    assert await connection.fetchval(COUNT) == 0


async def test_psycopg_enqueues_in_its_own_transaction_with_the_function(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        enqueue_by_sql = "SELECT id, created, state FROM enqueue_job('message', %s::jsonb, key => %s)"
        arguments = ['{"message": "hi"}', "welcome-1"]
        first = connection.execute(enqueue_by_sql, arguments).fetchone()
        again = connection.execute(enqueue_by_sql, arguments).fetchone()
        assert first is not None
        assert again == (first[0], False, "ready")
        connection.rollback()
        assert connection.execute(COUNT).fetchone() == (0,)


async def test_the_schema_refuses_by_sql_what_python_refuses_by_name(connection: asyncpg.Connection) -> None:
    for arguments, constraint in (
        (("k" * 129, "1", None), "jobs_kind_size"),
        (("message", "1", "x" * 513), "jobs_idempotency_key_size"),
        (("message", json.dumps("x" * 1_048_577), None), "jobs_payload_size"),
    ):
        with pytest.raises(asyncpg.CheckViolationError) as refusal:
            await connection.fetch("SELECT enqueue_job($1, $2::text::jsonb, $3)", *arguments)
        assert refusal.value.constraint_name == constraint
    with pytest.raises(asyncpg.PostgresError, match='"auto:" is reserved'):
        await connection.fetch("SELECT enqueue_job('message', '1', 'auto:1')")
    for argument in ("priority => 32768", "priority => -32769", "max_attempts => 0"):
        with pytest.raises(asyncpg.InvalidParameterValueError, match=argument.partition(" ")[0]):
            await connection.fetch(f"SELECT enqueue_job('message', '1', {argument})")
    edges = "priority => -32768, max_attempts => 1"
    assert await connection.fetchval(f"SELECT created FROM enqueue_job('message', '1', {edges})")


async def test_wait_returns_how_the_job_ended(connection: asyncpg.Connection, database_url: str) -> None:
    job = await enqueue(connection, "message", 1)

    async def end_it() -> None:
        other = await asyncpg.connect(database_url)
        await other.execute("UPDATE jobs SET state = 'dead', completed_at = now(), last_error = 'no' WHERE id = $1", job.id)
        await other.close()

    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(wait(connection, job.id, timeout_seconds=10))
        group.create_task(end_it())
    assert tuple(waiting.result()) == ("dead", None, "no")


async def test_wait_gives_up_in_time_and_knows_when_there_is_no_such_job(connection: asyncpg.Connection) -> None:
    job = await enqueue(connection, "message", 1)
    for timeout_seconds in (0, 0.2):
        with pytest.raises(TimeoutError, match=f"job {job.id} is still ready"):
            await wait(connection, job.id, timeout_seconds=timeout_seconds)
    with pytest.raises(LookupError, match="there is no job 999"):
        await wait(connection, 999, timeout_seconds=10)
