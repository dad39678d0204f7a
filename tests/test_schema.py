"""The schema applies whole or not at all, the same by psql and by `migrate`, and is verified before it is relied on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import asyncpg
import psycopg
import pytest

from tests.psql import ODD, apply_by_psql
from tests.roles import role
from tests.servers import Server, execute
from worker.errors import DatabaseUnavailable, SchemaError
from worker.store import schema

# Everything that schema.sql makes, as the server itself describes it; object ids are left out, names are kept.
CATALOG = """
SELECT 'table', c.relname, c.relkind::text, c.reloptions::text, c.relpersistence::text
FROM pg_class AS c WHERE c.relnamespace = %(schema)s::regnamespace
UNION ALL
SELECT 'column', c.relname || '.' || a.attname, format_type(a.atttypid, a.atttypmod),
    concat_ws(' ', a.attnotnull, a.attidentity, a.attnum, co.collname), pg_get_expr(d.adbin, d.adrelid)
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0
LEFT JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum
LEFT JOIN pg_collation AS co ON co.oid = a.attcollation
WHERE c.relnamespace = %(schema)s::regnamespace
UNION ALL
SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid), NULL
FROM pg_constraint WHERE connamespace = %(schema)s::regnamespace
UNION ALL
SELECT 'index', tablename, indexname, indexdef, NULL
FROM pg_indexes WHERE schemaname = %(name)s
UNION ALL
SELECT 'trigger', tgrelid::regclass::text, tgname, pg_get_triggerdef(oid), NULL
FROM pg_trigger
WHERE NOT tgisinternal AND tgrelid IN (SELECT oid FROM pg_class WHERE relnamespace = %(schema)s::regnamespace)
UNION ALL
SELECT 'function', proname, pg_get_function_identity_arguments(oid), pg_get_functiondef(oid), proconfig::text
FROM pg_proc WHERE pronamespace = %(schema)s::regnamespace
UNION ALL
SELECT 'version', version::text, NULL, NULL, NULL
FROM {schema}.schema_version
ORDER BY 1, 2, 3
"""


def catalog(dsn: str, name: str) -> list[tuple[object, ...]]:
    quoted = '"' + name.replace('"', '""') + '"'
    with psycopg.connect(dsn) as connection:
        text = CATALOG.replace("{schema}", quoted.replace("%", "%%"))
        return connection.execute(text, {"schema": quoted, "name": name}).fetchall()


@contextlib.asynccontextmanager
async def connected(dsn: str, **settings: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn, server_settings=settings)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.mark.parametrize("name", ["public", ODD])
async def test_migrate_gives_the_same_catalog_as_psql(server: Server, empty_database_url: str, name: str) -> None:
    with server.database() as other_url:
        for url in (empty_database_url, other_url):
            execute(url, "CREATE SCHEMA IF NOT EXISTS {}", name)
        by_psql = apply_by_psql(other_url, name)
        assert by_psql.returncode == 0, by_psql.stderr
        async with connected(empty_database_url) as connection:
            assert await schema.migrate(connection, name) is True
        expected = catalog(other_url, name)
        assert {row[0] for row in expected} == {"table", "column", "constraint", "index", "trigger", "function", "version"}
        assert catalog(empty_database_url, name) == expected


async def test_a_schema_made_by_psql_is_accepted_and_left_alone(empty_database_url: str) -> None:
    assert apply_by_psql(empty_database_url, "public").returncode == 0
    before = catalog(empty_database_url, "public")
    async with connected(empty_database_url) as connection:
        assert await schema.migrate(connection, "public") is False
        await schema.verify(connection, "public")
    assert catalog(empty_database_url, "public") == before


async def test_psql_twice_fails_whole_and_changes_nothing(empty_database_url: str) -> None:
    assert apply_by_psql(empty_database_url, "public").returncode == 0
    before = catalog(empty_database_url, "public")
    assert apply_by_psql(empty_database_url, "public").returncode != 0
    assert catalog(empty_database_url, "public") == before


async def test_five_processes_migrate_at_once_and_one_does_it(empty_database_url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connected(empty_database_url)) for _ in range(5)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(schema.migrate(connection, ODD)) for connection in connections]
        assert sorted(task.result() for task in tasks) == [False, False, False, False, True]
        await schema.verify(connections[0], ODD)


async def test_migrate_works_under_hostile_defaults_of_the_role(empty_database_url: str) -> None:
    hostile = {
        "search_path": "pg_catalog",
        "default_transaction_isolation": "serializable",
        "statement_timeout": "500ms",
        "TimeZone": "Pacific/Kiritimati",
    }
    async with connected(empty_database_url) as connection:
        for name, value in hostile.items():
            await connection.execute(f"SET {name} = '{value}'")
        assert await schema.migrate(connection, ODD) is True
        assert await connection.fetchval("SHOW statement_timeout") == "500ms"


async def test_functions_keep_their_schema_whatever_the_callers_path_and_decoys(empty_database_url: str) -> None:
    async with connected(empty_database_url) as connection:
        await schema.migrate(connection, ODD)
        await connection.execute(
            "CREATE TABLE public.jobs (id int); CREATE TABLE public.processes (id int);"
            "CREATE FUNCTION public.wake_workers(text) RETURNS void LANGUAGE sql AS 'SELECT 1/0'; SET search_path = public"
        )
        row = await connection.fetchrow('SELECT * FROM "Odd-""Name""".enqueue_job(\'message\', \'{}\')')
        assert (row["created"], row["state"]) == (True, "ready")
        assert await connection.fetchval("SELECT count(*) FROM public.jobs") == 0


async def test_a_half_foreign_database_is_refused_whole(empty_database_url: str) -> None:
    async with connected(empty_database_url) as connection:
        await connection.execute("CREATE TABLE jobs (id int); CREATE VIEW fences AS SELECT 1 AS one")
        with pytest.raises(SchemaError) as refusal:
            await schema.migrate(connection, "public")
        [line] = refusal.value.lines
        assert "already holds fences, jobs" in line
        assert await connection.fetchval("SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace") == 2


async def test_a_function_or_index_in_the_way_is_refused_whole(empty_database_url: str) -> None:
    async with connected(empty_database_url) as connection:
        await connection.execute("CREATE FUNCTION cancel_job(id bigint) RETURNS text LANGUAGE sql AS 'SELECT 1::text'")
        with pytest.raises(SchemaError, match="cancel_job"):
            await schema.migrate(connection, "public")
        assert await schema.read_version(connection, "public") is None


async def test_a_schema_version_table_of_somebody_else_is_not_taken_for_ours(empty_database_url: str) -> None:
    async with connected(empty_database_url) as connection:
        await connection.execute("CREATE TABLE schema_version (version text, script text)")
        assert await schema.read_version(connection, "public") is None
        with pytest.raises(SchemaError, match="schema_version"):
            await schema.migrate(connection, "public")


async def test_a_role_without_create_is_told_so(server: Server, empty_database_url: str) -> None:
    with role(server, empty_database_url) as guest:
        async with connected(empty_database_url) as connection:
            await connection.execute(f"REVOKE CREATE ON SCHEMA public FROM PUBLIC; SET ROLE {guest}")
            with pytest.raises(SchemaError, match=f"'{guest}' may not create it: CREATE on the database"):
                await schema.migrate(connection, "new_schema")
            with pytest.raises(SchemaError, match=f"'{guest}' may not create tables in it"):
                await schema.migrate(connection, "public")


async def test_an_older_version_is_upgraded_once_in_steps(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(empty_database_url) as connection, connected(empty_database_url) as rival:
        await schema.migrate(connection, ODD)
        monkeypatch.setattr(schema, "SCHEMA_VERSION", 3)
        monkeypatch.setattr(
            schema, "UPGRADES", ("ALTER TABLE jobs ADD COLUMN first text", "ALTER TABLE jobs ADD COLUMN second text")
        )
        with pytest.raises(SchemaError, match=r"has version 1, this program needs 3: run `worker migrate`"):
            await schema.verify(connection, ODD)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(schema.migrate(each, ODD)) for each in (connection, rival)]
        assert sorted(task.result() for task in tasks) == [False, True]
        assert await schema.read_version(connection, ODD) == 3
        await schema.verify(connection, ODD)
        columns = "SELECT count(*) FROM information_schema.columns WHERE table_schema = $1 AND column_name = ANY ($2)"
        assert await connection.fetchval(columns, ODD, ["first", "second"]) == 2


async def test_an_upgrade_that_fails_leaves_the_old_version(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(empty_database_url) as connection:
        await schema.migrate(connection, "public")
        monkeypatch.setattr(schema, "SCHEMA_VERSION", 3)
        monkeypatch.setattr(schema, "UPGRADES", ("ALTER TABLE jobs ADD COLUMN first text", "SELECT 1/0"))
        with pytest.raises(asyncpg.DivisionByZeroError):
            await schema.migrate(connection, "public")
        assert await schema.read_version(connection, "public") == 1
        columns = "SELECT count(*) FROM information_schema.columns WHERE table_name = 'jobs' AND column_name = 'first'"
        assert await connection.fetchval(columns) == 0


async def test_a_busy_table_makes_an_upgrade_give_up_and_say_so(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(schema, "UPGRADES", ("ALTER TABLE jobs ADD COLUMN first text",))
    async with connected(database_url) as reader, connected(database_url) as connection:
        async with reader.transaction():
            await reader.fetchval("SELECT count(*) FROM jobs")
            with pytest.raises(DatabaseUnavailable, match=r"in the way for 0.2 s; nothing was changed"):
                await schema.migrate(connection, "public", lock_timeout_seconds=0.2)
        assert await schema.read_version(connection, "public") == 1
        assert await schema.migrate(connection, "public") is True


async def test_a_newer_version_is_refused(database_url: str) -> None:
    async with connected(database_url) as connection:
        await connection.execute("INSERT INTO schema_version (version) VALUES (99)")
        for refuse in (schema.migrate, schema.verify):
            with pytest.raises(SchemaError, match="has version 99, this program knows only"):
                await refuse(connection, "public")


async def test_verify_names_each_missing_grant_and_part(server: Server, database_url: str) -> None:
    with role(server, database_url) as reader:
        async with connected(database_url) as connection:
            await connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {reader}; DROP TABLE fences CASCADE")
            await connection.execute(f"SET ROLE {reader}")
            with pytest.raises(SchemaError) as refusal:
                await schema.verify(connection, "public")
    lines = refusal.value.lines
    assert any("lacks UPDATE on the table jobs" in line for line in lines)
    assert any("lacks USAGE on the sequence fence_seq" in line for line in lines)
    assert [line for line in lines if "fences" in line] == ["schema 'public': the table fences is missing"]
    assert not any("SELECT" in line for line in lines)


async def test_verify_names_an_empty_database(empty_database_url: str) -> None:
    async with connected(empty_database_url) as connection:
        for name in ("public", "nowhere"):
            with pytest.raises(SchemaError, match="apply them with `worker migrate`"):
                await schema.verify(connection, name)


async def test_a_read_only_database_is_named_and_not_a_fault_of_the_schema(database_url: str) -> None:
    async with connected(database_url, default_transaction_read_only="on") as connection:
        for refuse in (schema.migrate, schema.verify):
            with pytest.raises(DatabaseUnavailable, match="read-only"):
                await refuse(connection, "public")


def test_what_counts_rows_never_ends_at_32_bits(database_url: str) -> None:
    """Sequences rise also by inserts that find their key taken; and whatever refers to such a number holds it."""
    with psycopg.connect(database_url) as connection:
        sequences = dict(connection.execute("SELECT sequencename, data_type::text FROM pg_sequences").fetchall())
        columns = connection.execute(
            "SELECT table_name || '.' || column_name, data_type FROM information_schema.columns"
            " WHERE table_schema = 'public' AND column_name ~ '^(id|job_id|fence|produced|skipped|next_slot)$'"
            " AND table_name NOT LIKE 'pg_%'"
        ).fetchall()
    assert set(sequences) >= {"fence_seq", "jobs_id_seq", "leases_id_seq"}
    assert set(sequences.values()) == {"bigint"}
    types = dict(columns)
    assert {"jobs.id", "job_failures.job_id", "job_effects.fence", "leases.fence", "fences.fence"} <= set(types)
    assert {name for name, kind in types.items() if kind != "bigint"} == {"processes.id"}
