"""Our tables below any name, beside anything that is called like them, and twice in one database."""

from __future__ import annotations

import pytest

from tests.every_ending import everything, everything_works
from tests.inprocess import quick, running, seen
from tests.roles import role, url_as
from tests.servers import Server, execute
from tests.waiting import await_for
from worker import Worker
from worker.store.connection import Database
from worker.store.schema import migrate


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
