"""A session is of one kind whatever the role, the database and the DSN say; behind a pooler it is left as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator

import asyncpg
import pytest

from tests import roles
from tests.connecting import connected, database, with_options
from tests.roles import url_as
from tests.servers import Server, execute
from worker.store.connection import SessionLimits

HOSTILE = {
    "TimeZone": "Asia/Tokyo",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "standard_conforming_strings": "off",
    "statement_timeout": "1ms",
    "lock_timeout": "1ms",
    "idle_in_transaction_session_timeout": "1ms",
    "idle_session_timeout": "1ms",
    "jit": "on",
    "client_min_messages": "error",
}


@pytest.fixture
def role(server: Server, empty_database_url: str) -> Iterator[str]:
    with roles.role(server, empty_database_url) as name:
        yield name


async def test_a_session_is_the_same_whatever_the_roles_defaults(empty_database_url: str, role: str) -> None:
    for name, value in HOSTILE.items():
        execute(empty_database_url, f"ALTER ROLE {{}} SET {name} = '{value}'", role)
    execute(empty_database_url, "ALTER ROLE {} SET search_path = 'mine'", role)
    limits = SessionLimits.of(lease_seconds=3, query_timeout_seconds=2)
    async with connected(url_as(role, empty_database_url), limits=limits) as connection:
        found = {name: await connection.fetchval(f"SHOW {name}") for name in (*HOSTILE, "search_path")}
    assert found == {
        "TimeZone": "UTC",
        "default_transaction_isolation": "read committed",
        "default_transaction_deferrable": "off",
        "standard_conforming_strings": "on",
        "statement_timeout": "1500ms",
        "lock_timeout": "500ms",
        "idle_in_transaction_session_timeout": "1s",
        "idle_session_timeout": "0",
        "jit": "off",
        "client_min_messages": "notice",
        # The user's SQL needs it as the role has it; ours names its schema.
        "search_path": "mine",
    }


async def test_options_of_the_dsn_are_honoured_below_our_own_limits(server: Server) -> None:
    dsn = with_options(server.dsn, "options=-csearch_path%3Dx%20-cstatement_timeout%3D7s")
    async with connected(dsn) as connection:
        assert await connection.fetchval("SHOW search_path") == "x"
        assert await connection.fetchval("SHOW statement_timeout") == "3s"


async def test_a_role_may_have_limits_and_settings_of_its_own(server: Server) -> None:
    connection = await database(server.dsn).connect(
        "claim", statement_timeout_seconds=0.25, settings={"plan_cache_mode": "force_generic_plan"}
    )
    assert await connection.fetchval("SHOW statement_timeout") == "250ms"
    assert await connection.fetchval("SHOW plan_cache_mode") == "force_generic_plan"
    assert await connection.fetchval("SHOW application_name") == "reliable-worker claim"
    await connection.close()


async def test_the_dsns_application_name_comes_first(server: Server) -> None:
    async with connected(with_options(server.dsn, "application_name=billing")) as connection:
        assert await connection.fetchval("SHOW application_name") == "billing test"


async def test_behind_a_pooler_nothing_is_set_and_nothing_prepared(empty_database_url: str, role: str) -> None:
    execute(empty_database_url, "ALTER ROLE {} SET statement_timeout = '12s'", role)
    async with connected(url_as(role, empty_database_url), pooler=True) as connection:
        assert await connection.fetchval("SHOW statement_timeout") == "12s"
        for _ in range(3):
            assert await connection.fetchval("SELECT $1::int", 1) == 1
        assert await connection.fetchval("SELECT count(*) FROM pg_prepared_statements WHERE name <> ''") == 0


async def test_json_parameters_take_values_and_text(server: Server) -> None:
    async with connected(server.dsn) as connection:
        for kind in ("json", "jsonb"):
            for value in ({"ä": [1, None]}, [1, {"x": 2**70}], '{"a": 1}', "null", True, 1.5):
                back = await connection.fetchval(f"SELECT $1::{kind}", value)
                assert isinstance(back, str)
                assert json.loads(back) == (json.loads(value) if isinstance(value, str) else value)
            assert await connection.fetchval(f"SELECT $1::{kind} IS NULL", None)
            with pytest.raises(asyncpg.DataError):
                await connection.fetchval(f"SELECT $1::{kind}", {"x": float("nan")})


def test_sql_names_the_schema_quoted_and_is_the_same_text_each_time() -> None:
    named = database("host=h", schema='my "jobs"')
    template = "SELECT {schema}.f('{}')"
    assert named.sql(template) == 'SELECT "my ""jobs""".f(\'{}\')'
    assert named.sql(template) is named.sql(template)
