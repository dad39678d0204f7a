"""Enqueueing: in the caller's own transaction, whatever connection it is, and refused by name."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta, timezone

import asyncpg
import psycopg
import pytest

from tests.enqueued import COUNT, row_of
from worker.store import schema
from worker.store.bulk import enqueue_many
from worker.store.enqueueing import Enqueued, enqueue
from worker.store.finished import wait


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


async def test_one_mebibyte_as_stored_is_allowed(connection: asyncpg.Connection) -> None:
    """A jsonb string takes its bytes and a few for the header."""
    job = await enqueue(connection, "message", "x" * (1_048_576 - 12))
    assert job.created
    with pytest.raises(ValueError, match=r"^payload: 1 MiB \(1,048,576 bytes\) as stored is allowed, this has 1,048,5"):
        await enqueue(connection, "message", "x" * (1_048_576 - 8))


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
