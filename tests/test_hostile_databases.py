"""Databases and roles that are not as one would have set them up oneself: the same work, done right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.commands import worker
from tests.inprocess import Run, both_shapes, quick, running, seen
from tests.roles import role, url_as
from tests.servers import Server, execute
from tests.waiting import await_for
from worker import Handlers, Job, Worker, enqueue, enqueue_many, events
from worker.store.connection import Database
from worker.store.schema import migrate

MakeUser = Callable[..., str]


def everything() -> Handlers:
    """A handler for each way in which a job can end; an effect goes to a table of the user's, found by its own name or not."""
    handlers = Handlers()

    @handlers.job("effect")
    async def effect(job: Job[object]) -> str:
        job.effect("INSERT INTO public.ledger VALUES ($1, $2)", job.key, job.fence)
        job.enqueue("own", {}, key=f"{job.key}-next")
        return "done"

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        async with job.transaction() as tx:
            await tx.execute("INSERT INTO public.ledger VALUES ($1, $2)", job.key, job.fence)
            job.result = await tx.fetchval("SHOW transaction_isolation")

    @handlers.job("fail")
    async def fail(job: Job[object]) -> None:
        raise ValueError("no")

    return handlers


async def everything_works(run: Run, jobs: int = 1) -> None:
    """Jobs of each kind end as they should, each at its first attempt, with one effect each."""
    for number in range(jobs):
        await run.enqueue("effect", key=f"effect{number}")
        await run.enqueue("fail", key=f"fail{number}", max_attempts=2)
    for number in range(jobs):
        for key, wanted in (
            (f"effect{number}", ("succeeded", 1)),
            (f"effect{number}-next", ("succeeded", 1)),
            (f"fail{number}", ("dead", 2)),
        ):
            row = await run.ended(await _id_of(run, key))
            assert (row["state"], row["attempts"]) == wanted, row["last_error"]
    assert await run.value("SELECT count(*) FROM public.ledger") == 2 * jobs
    assert await run.value("SELECT count(DISTINCT key) FROM public.ledger") == 2 * jobs


async def _id_of(run: Run, key: str) -> int:
    table = '"' + run.schema.replace('"', '""') + '".jobs'

    async def find() -> Any:
        return await run.value(f"SELECT id FROM {table} WHERE idempotency_key = $1", key)

    return int(await await_for(find))


@pytest.fixture
def user(server: Server, database_url: str) -> Iterator[MakeUser]:
    """`user(setting=value, …)`: the URL for a fresh role that may do what a daemon does and carries these settings."""
    with role(server, database_url) as name:

        def make(**settings: str) -> str:
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                for setting, value in settings.items():
                    statement = psycopg.sql.SQL("ALTER ROLE {} SET {} = {}")
                    connection.execute(statement.format(psycopg.sql.Identifier(name), psycopg.sql.Identifier(setting), value))
            execute(database_url, "CREATE TABLE IF NOT EXISTS public.ledger (key text, fence bigint)")
            execute(database_url, "GRANT ALL ON ALL TABLES IN SCHEMA public TO {}", name)
            execute(database_url, "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {}", name)
            return url_as(name, database_url)

        yield make


# --- the role's defaults


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@both_shapes
async def test_the_roles_isolation_level_breaks_no_claim_and_no_commit(
    user: MakeUser, database_url: str, level: str, shape: dict[str, Any]
) -> None:
    """G11."""
    url = user(default_transaction_isolation=level)
    async with seen(database_url) as run:
        async with Worker(everything(), quick(url, **shape)), Worker(everything(), quick(url, **shape)):
            await everything_works(run, 40)
        assert await run.column("SELECT DISTINCT result #>> '{}' FROM jobs WHERE kind = 'own'") == ["read committed"]
        assert run.log.find(events.CLAIM_FAILED) == []


@pytest.mark.parametrize(
    "limits",
    [
        {"statement_timeout": "100ms"},
        {"lock_timeout": "1ms"},
        {"idle_in_transaction_session_timeout": "50ms"},
        {"idle_session_timeout": "100ms"},
        {"transaction_timeout": "500ms"},
        {"default_transaction_deferrable": "on", "default_transaction_isolation": "serializable"},
        {
            "standard_conforming_strings": "off",
            "bytea_output": "escape",
            "DateStyle": "German",
            "IntervalStyle": "postgres_verbose",
        },
        {"search_path": "", "row_security": "on", "extra_float_digits": "-5", "xmloption": "document"},
    ],
    ids=lambda limits: next(iter(limits)),
)
async def test_time_limits_and_formats_of_the_role_are_not_ours(
    server: Server, user: MakeUser, database_url: str, limits: dict[str, str]
) -> None:
    """G12: each alone."""
    if "transaction_timeout" in limits and int(server.version.split(".")[0]) < 17:
        pytest.skip("transaction_timeout needs PostgreSQL 17")
    async with seen(database_url) as run, Worker(everything(), quick(user(**limits), poll_seconds=5)):
        await everything_works(run)

        async def hungry() -> bool:
            return bool(await run.value("SELECT hungry FROM processes"))

        async def idle_for_longer_than_the_limits() -> bool:
            idle = (
                "SELECT clock_timestamp() - state_change > interval '0.7 second' FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE '% listen'"
            )
            return bool(await run.value(idle))

        await await_for(hungry)
        await await_for(idle_for_longer_than_the_limits)
        assert run.log.find(events.LISTENER_LOST) == []
        row = await run.run("effect", key="later")
        assert row["attempts"] == 1


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "America/St_Johns"])
async def test_moments_are_right_to_the_second_whatever_the_time_zones(
    user: MakeUser, database_url: str, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G19: the role's, the process's and the caller's."""
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    url = user(timezone=zone)
    moments = {
        "offset": datetime(2030, 6, 1, 12, 0, 0, tzinfo=timezone(timedelta(hours=2))),
        "utc": datetime(2030, 6, 1, 10, 0, 0, tzinfo=UTC),
    }
    connection = await Database(url, environ={}).connect("test")
    try:
        for key, moment in moments.items():
            await enqueue(connection, "effect", {}, key=key, run_at=moment)
        with pytest.raises(ValueError, match="run_at"):
            await enqueue(connection, "effect", {}, run_at=datetime(2030, 6, 1))  # noqa: DTZ001
        await enqueue_many(connection, [{"payload": {}, "key": "many", "run_at": moments["offset"]}])
        await enqueue(connection, "effect", {}, key="delayed", delay_seconds=3600)
    finally:
        connection.terminate()
    async with seen(database_url) as run, Worker(everything(), quick(url)):
        epochs = await run.column(
            "SELECT DISTINCT extract(epoch FROM available_at)::bigint FROM jobs WHERE idempotency_key <> 'delayed'"
        )
        assert epochs == [int(moments["utc"].timestamp())]
        delay = await run.value(
            "SELECT extract(epoch FROM available_at - now())::float8 FROM jobs WHERE idempotency_key = 'delayed'"
        )
        assert 3_590 < delay <= 3_600
        row = await run.run("fail", max_attempts=1)
        for column in ("started_at", "completed_at"):
            assert abs((row[column] - await run.value("SELECT now()")).total_seconds()) < 5
        failed_at = await run.value("SELECT extract(epoch FROM now() - failed_at)::float8 FROM job_failures")
        assert 0 <= failed_at < 5


# --- names


async def install(url: str, schema: str) -> None:
    connection = await Database(url, schema=schema, environ={}).connect("test")
    try:
        quoted = '"' + schema.replace('"', '""') + '"'
        await connection.execute(
            f"CREATE SCHEMA IF NOT EXISTS {quoted}; CREATE TABLE IF NOT EXISTS public.ledger (key text, fence bigint)"
        )
        await migrate(connection, schema)
    finally:
        connection.terminate()


DECOYS = """
CREATE TABLE public.jobs (id bigint, state text);
INSERT INTO public.jobs VALUES (1, 'decoy');
CREATE TABLE public.processes (id text);
CREATE TABLE public.job_effects (idempotency_key text);
CREATE FUNCTION public.wake_workers(text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'decoy'; END $$;
CREATE FUNCTION public.wake_channel() RETURNS text LANGUAGE sql AS $$ SELECT 'decoy' $$;
CREATE FUNCTION public.enqueue_job(text, jsonb) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'decoy'; END $$;
CREATE FUNCTION public.now() RETURNS timestamptz LANGUAGE sql AS $$ SELECT timestamptz '1999-01-01' $$;
"""


@pytest.mark.parametrize("search_path", ["", "public", "decoys, public"], ids=["empty", "public", "decoys first"])
async def test_an_odd_schema_works_beside_decoys_whatever_the_search_path(
    server: Server, empty_database_url: str, search_path: str
) -> None:
    """G14."""
    name = 'Odd-"Name'
    await install(empty_database_url, name)
    async with seen(empty_database_url, schema=name) as run:
        await run.connection.execute(DECOYS)
        await run.connection.execute("CREATE SCHEMA decoys; CREATE TABLE decoys.jobs (id bigint)")
        with role(server, empty_database_url) as user:
            execute(server.dsn, f"ALTER ROLE {{}} SET search_path = {search_path or repr('')}", user)
            for schema in (name, "public", "decoys"):
                execute(empty_database_url, "GRANT USAGE ON SCHEMA {} TO {}", schema, user)
                execute(empty_database_url, "GRANT ALL ON ALL TABLES IN SCHEMA {} TO {}", schema, user)
                execute(empty_database_url, "GRANT ALL ON ALL SEQUENCES IN SCHEMA {} TO {}", schema, user)
            async with Worker(everything(), quick(url_as(user, empty_database_url), schema_name=name)):
                await everything_works(run)
        assert await run.column("SELECT state FROM public.jobs") == ["decoy"]
        assert await run.value("SELECT count(*) FROM decoys.jobs") + await run.value("SELECT count(*) FROM public.job_effects") == 0


async def test_two_installs_in_one_database_neither_wake_nor_see_each_other(database_url: str) -> None:
    """G14: the channel belongs to the schema."""
    await install(database_url, "other")
    async with (
        seen(database_url) as ours,
        running(database_url, everything(), schema="other", poll_seconds=60) as theirs,
        Worker(everything(), quick(database_url, poll_seconds=60)),
    ):

        async def both_hungry() -> bool:
            return bool(
                await ours.value("SELECT bool_and(hungry) FROM (TABLE public.processes UNION ALL TABLE other.processes) AS p")
            )

        await await_for(both_hungry)
        channels: list[str] = []
        for schema in ("public", "other"):
            channel = await ours.value(f"SELECT {schema}.wake_channel()")
            await ours.connection.add_listener(channel, lambda _connection, _pid, heard, _payload: channels.append(heard))
        row = await theirs.run("own", key="theirs")
        assert row["id"] == 1
        await ours.value("SELECT 1")
        assert set(channels) == {await ours.value("SELECT other.wake_channel()")}
        assert await ours.value("SELECT count(*) FROM public.jobs") == 0
        assert (await ours.run("own", key="ours"))["id"] == 1
        assert await ours.column("SELECT key FROM ledger ORDER BY key") == ["ours", "theirs"]
        assert await ours.value("SELECT count(*) FROM other.processes") == 1
        assert await ours.value("SELECT count(*) FROM public.processes") == 1


# --- numbers


@both_shapes
async def test_ids_and_fences_beyond_32_bits_work_everywhere(database_url: str, shape: dict[str, Any]) -> None:
    """G2."""
    big = 3_000_000_000
    handlers, started = everything(), []

    @handlers.job("long")
    async def long(job: Job[object]) -> None:
        started.append(job.id)
        await asyncio.sleep(60)

    async with seen(database_url) as run:
        await run.connection.execute(f"ALTER TABLE jobs ALTER id RESTART WITH {big}; ALTER SEQUENCE fence_seq RESTART WITH {big}")
        await run.connection.execute("CREATE TABLE ledger (key text, fence bigint)")
        async with Worker(handlers, quick(database_url, lease_seconds=1, shutdown_grace_seconds=0, **shape)):
            await everything_works(run)
            assert await run.value("SELECT min(fence) FROM ledger") >= big
            long_one = await run.enqueue("long")
            assert long_one > big
            await await_for(lambda: long_one in started)
            until = (await run.row(long_one))["lease_until"]

            async def renewed() -> bool:
                return bool((await run.row(long_one))["lease_until"] > until)

            await await_for(renewed)
            cancelled = await run.enqueue("long")
            await await_for(lambda: cancelled in started)
            assert await run.value("SELECT cancel_job($1)", cancelled) == "cancelled"
            await run.said(events.JOB_ABANDONED, job_id=cancelled, reason="cancelled")
            dead = await _id_of(run, "fail0")
            assert await run.value("SELECT retry_job($1)", dead) == "ready"
            assert (await run.ended(dead))["state"] == "dead"
            assert await run.value("SELECT check_fence('resource', $1)", big + 1) is True
        row = await run.row(long_one)
        assert (row["state"], row["attempts"]) == ("ready", 0)
        assert row["fence"] > big


# --- rows


ODD_ROWS = r"""
INSERT INTO jobs (idempotency_key, kind, payload, available_at, created_at, max_attempts) VALUES
    ('long ago', 'echo', '1', '-infinity', '-infinity', 1),
    ('bc', 'echo', '2', '4000-01-01 BC', '4000-01-01 BC', 1),
    ('far', 'echo', '3', '294000-01-01', 'infinity', 1),
    ('never', 'echo', '4', 'infinity', '294000-01-01', 1),
    ('digits', 'echo', repeat('9', 5000)::jsonb, now(), now(), 1),
    ('fraction', 'echo', ('0.' || repeat('9', 5000))::jsonb, now(), now(), 1),
    ('beyond floats', 'echo', '1e400', now(), now(), 1),
    ('half beyond floats', 'echo', ('1' || repeat('0', 400) || '.5')::jsonb, now(), now(), 1),
    ('next to nothing', 'echo', '1e-5000', now(), now(), 1),
    ('deep', 'echo', (repeat('[', 4000) || repeat(']', 4000))::jsonb, now(), now(), 1),
    (E'key\n\x1b[31m\u202e\u0001', 'echo', '6', now(), now(), 1),
    ('kind', E'kind\n\x1b[31m {} %s \\', '7', now(), now(), 1),
    ('null', 'echo', 'null', now(), now(), 1);
INSERT INTO jobs (idempotency_key, payload, state, completed_at, started_at, available_at) VALUES
    ('done never', '1', 'succeeded', 'infinity', '-infinity', 'infinity'),
    ('done once', '1', 'succeeded', '-infinity', 'infinity', '-infinity'),
    ('done lately', '1', 'succeeded', now(), '-infinity', now()),
    ('done without a start', '1', 'succeeded', now(), NULL, now()),
    ('dead', '1', 'dead', 'infinity', NULL, now());
INSERT INTO jobs (idempotency_key, payload, state, lease_owner, lease_until, started_at) VALUES
    ('held for ever', '1', 'running', 'nobody', 'infinity', 'infinity'),
    ('held long ago', '1', 'running', 'nobody', '-infinity', '-infinity');
INSERT INTO job_failures (job_id, fence, attempt, worker, failed_at, outcome, error)
    SELECT id, -1, 2147483647, 'w', 'infinity', 'error', E'\x1b[31m' FROM jobs;
INSERT INTO job_effects (idempotency_key, job_id, fence, committed_at) VALUES ('x', 1, 1, 'infinity'), ('y', 1, 1, '-infinity');
INSERT INTO processes (id, name, hostname, pid, version, queues, slots, started_at, seen_at, expires_at, health) VALUES
    ('odd', E'\x1b[31m', 'h', -1, '', ARRAY[]::text[], -1, 'infinity', '-infinity', 'infinity', '[]'),
    ('odder', 'n', 'h', 0, 'v', ARRAY[NULL, ''], 0, '-infinity', 'infinity', 'infinity', '{"kinds": [1, null, {}, "k"]}');
"""


async def test_rows_that_nobody_would_write_harm_neither_their_neighbours_nor_whoever_looks(
    database_url: str, tmp_path: Path
) -> None:
    """I14: moments, numbers and texts that are legal in SQL and that no Python can hold, or no terminal should."""
    handlers = everything()

    @handlers.job("echo")
    async def echo(job: Job[object]) -> object:
        return job.payload

    async def look() -> None:
        for command in ("stats", "stats --json", "jobs list", "jobs list --json", "jobs show 5 --json"):
            result = await asyncio.to_thread(worker, *command.split(), directory=tmp_path, DATABASE_URL=database_url)
            assert (result.returncode, result.stderr) == (0, ""), command
            if "--json" in command:
                json.loads(result.stdout, parse_int=str)
            assert "\x1b[31m" not in result.stdout

    async with seen(database_url) as run:
        await run.connection.execute("CREATE TABLE ledger (key text, fence bigint)")
        await run.connection.execute(ODD_ROWS)
        await look()
        async with Worker(handlers, quick(database_url, retention_seconds=3600, ledger_retention_seconds=3600)):
            await everything_works(run)

            async def all_ended() -> bool:
                waiting = "state = 'ready' AND kind = 'echo' AND available_at <= now()"
                return not await run.value(f"SELECT count(*) FROM jobs WHERE {waiting}")

            await await_for(all_ended)
        for event in (events.CLAIM_FAILED, events.REAPER_FAILED, events.RENEW_FAILED, events.INTERNAL_ERROR):
            assert {said.get("error_type") for said in run.log.find(event)} <= {"TimeoutError"}  # a busy machine
        await look()
        states = dict(await run.connection.fetch("SELECT idempotency_key, state FROM jobs"))
    assert states["null"] == states["long ago"] == states["bc"] == states["beyond floats"] == "succeeded"
    assert states["digits"] == states["deep"] == states["half beyond floats"] == "dead"
    assert states["far"] == states["never"] == "ready"


# --- transactions


async def test_no_transaction_is_open_while_a_handler_thinks(database_url: str) -> None:
    """G13: unless the handler has opened it itself."""
    handlers, thinking, go = Handlers(), asyncio.Event(), asyncio.Event()

    @handlers.job("think")
    async def think(job: Job[object]) -> None:
        job.effect("INSERT INTO ledger VALUES ($1, 1)", job.key)
        async with job.connection() as c:
            await c.fetchval("SELECT 1")
        thinking.set()
        await go.wait()
        job.effect("INSERT INTO ledger VALUES ($1, 2)", job.key)

    async with running(database_url, handlers) as run:
        await run.connection.execute("CREATE TABLE ledger (key text, fence bigint)")
        id = await run.enqueue("think")
        await thinking.wait()
        for _ in range(10):
            open_ones = await run.connection.fetch(
                "SELECT application_name, state, query FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid()"
                " AND (state LIKE 'idle in transaction%' OR backend_xmin IS NOT NULL AND state <> 'active')"
            )
            assert [dict(row) for row in open_ones] == []
            await asyncio.sleep(0.02)
        go.set()
        assert (await run.ended(id))["state"] == "succeeded"
        assert await run.value("SELECT count(*) FROM ledger") == 2
