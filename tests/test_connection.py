"""Connections: one kind of session whatever the role, bounded in time, and never a COMMIT cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit

import asyncpg
import pytest
import uvloop

from tests.connecting import connected, database
from tests.ports import Port, Proxy
from tests.roles import PASSWORD, url_as
from tests.servers import Server, execute, with_database
from tests.waiting import await_for
from worker.store.connection import (
    ConnectFailed,
    Lane,
    SessionLimits,
    is_unavailable,
    safe_text,
    sqlstate,
)

CONNECTIONS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE $1
"""


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        # Bound and not listening: nobody else gets it, and it refuses.
        yield bound.getsockname()[1]


@pytest.fixture
def role(server: Server) -> Iterator[str]:
    name = f"role_{uuid.uuid4().hex[:12]}"
    execute(server.dsn, f"CREATE ROLE {{}} LOGIN SUPERUSER PASSWORD '{PASSWORD}'", name)
    yield name
    execute(server.dsn, "DROP ROLE {}", name)


def with_options(dsn: str, options: str) -> str:
    return dsn + ("&" if "?" in dsn else "?") + options


# --- sessions

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


# --- getting there


async def test_a_silent_host_does_not_use_up_the_time_of_the_next(server: Server) -> None:
    async with Port() as silent, Proxy(server.dsn) as proxy:
        dsn = proxy.dsn.replace("host=127.0.0.1", "host=127.0.0.1,127.0.0.1")
        dsn = dsn.replace(f"port={proxy.port}", f"port={silent.port},{proxy.port}")
        async with connected(dsn, connect_timeout_seconds=3.0) as connection:
            assert await connection.fetchval("SELECT 1") == 1


async def test_a_refusing_host_is_passed_over(server: Server, closed_port: int) -> None:
    async with Proxy(server.dsn) as proxy:
        dsn = proxy.dsn.replace("host=127.0.0.1", "host=127.0.0.1,127.0.0.1")
        async with connected(dsn.replace("port=", f"port={closed_port},")) as connection:
            assert await connection.fetchval("SELECT 1") == 1


@pytest.mark.parametrize("wanted", ["any", "primary", "read-write", "prefer-standby"])
async def test_a_primary_serves_whoever_does_not_insist_on_a_standby(server: Server, wanted: str) -> None:
    async with connected(with_options(server.dsn, f"target_session_attrs={wanted}")) as connection:
        assert await connection.fetchval("SELECT 1") == 1


async def test_a_primary_that_became_read_only_is_not_read_write(empty_database_url: str) -> None:
    name = urlsplit(empty_database_url).path[1:]
    execute(empty_database_url, "ALTER DATABASE {} SET default_transaction_read_only = on", name)
    async with connected(empty_database_url) as connection:
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError) as refused:
            await connection.execute("CREATE TABLE t ()")
    assert is_unavailable(refused.value)
    with pytest.raises(ConnectFailed, match="not what target_session_attrs asks for"):
        await database(with_options(empty_database_url, "target_session_attrs=read-write")).connect("test")


async def test_a_failure_to_connect_says_where_to_and_why_in_time(server: Server, closed_port: int) -> None:
    async with Port() as silent:
        dsn = f"host=127.0.0.1,127.0.0.1 port={closed_port},{silent.port} dbname=app user=me password=hidden-word"
        with pytest.raises(ConnectFailed) as failed:
            async with asyncio.timeout(30):
                await database(dsn, connect_timeout_seconds=0.3).connect("test")
    text = str(failed.value)
    assert 'database "app"' in text
    assert f"127.0.0.1:{closed_port}: " in text
    assert f"127.0.0.1:{silent.port}: timed out" in text
    assert "hidden-word" not in f"{text} {failed.value.__cause__!r}"
    assert is_unavailable(failed.value)
    assert not failed.value.refused


async def test_what_waiting_will_not_mend_is_told_apart(server: Server, empty_database_url: str) -> None:
    with pytest.raises(ConnectFailed) as failed:
        await database(with_database(server.dsn, "not_there")).connect("test")
    assert (failed.value.refused, sqlstate(failed.value)) == (True, "3D000")
    name = urlsplit(empty_database_url).path[1:]
    execute(server.dsn, "ALTER DATABASE {} ALLOW_CONNECTIONS false", name)
    with pytest.raises(ConnectFailed) as failed:
        await database(empty_database_url).connect("test")
    assert (failed.value.refused, sqlstate(failed.value)) == (False, "55000")
    assert is_unavailable(failed.value)


@pytest.mark.parametrize("host", ["not-there.invalid", "x" * 70 + ".invalid", "a..b"])
async def test_a_host_that_cannot_be_found_is_a_failure_to_connect(host: str) -> None:
    with pytest.raises(ConnectFailed, match=host):
        await database(f"host={host} user=me").connect("test")


def test_a_vanished_peer_is_noticed_on_both_loops(server: Server) -> None:
    async def keepalive() -> tuple[int, ...]:
        async with Proxy(server.dsn) as proxy, connected(f"{proxy.dsn} keepalives_idle=42") as connection:
            stream = connection._transport.get_extra_info("socket")
            return (
                stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            )

    if sys.platform != "linux":
        pytest.skip("the names of these options are Linux's")
    assert asyncio.run(keepalive()) == uvloop.run(keepalive()) == (1, 42, 30_000)


# --- never a COMMIT cancelled

SLOW_COMMIT = """
CREATE TABLE slow (); CREATE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM
pg_sleep(0.5); RETURN NULL; END $$; CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON slow DEFERRABLE INITIALLY
DEFERRED FOR EACH ROW EXECUTE FUNCTION sleep();
"""


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_commit_that_takes_too_long_loses_its_connection_and_is_not_cancelled(empty_database_url: str, loop: object) -> None:
    async def body() -> None:
        async with Proxy(empty_database_url) as proxy, connected(empty_database_url) as other:
            await other.execute(SLOW_COMMIT)
            connection = await database(proxy.dsn).connect("test")
            await connection.execute("BEGIN")
            await connection.execute("INSERT INTO slow DEFAULT VALUES")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await connection.execute("COMMIT")
            await await_for(connection.is_closed)
            # It was left in peace, and so it came to its end.
            await await_for(lambda: other.fetchval("SELECT count(*) = 1 FROM slow"))
            assert proxy.accepted == 1

    loop(body())  # type: ignore[operator]


async def test_nothing_on_a_lane_is_cancelled(server: Server) -> None:
    async with Proxy(server.dsn) as proxy, connected(server.dsn) as other:
        lane = Lane(database(proxy.dsn), f"lane {proxy.port}")
        connection = await lane.get()
        pid = connection.get_server_pid()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.execute("SELECT pg_sleep(2)")
        await await_for(connection.is_closed)
        alive = "SELECT count(*) = {} FROM pg_stat_activity WHERE pid = $1 AND state = 'active'"
        assert await other.fetchval(alive.format(1), pid)
        lane.drop()
        # The next connection comes second: no cancel request went between.
        assert await (await lane.get()).fetchval("SELECT 1") == 1
        assert proxy.accepted == 2
        await lane.close(1)


async def test_a_slow_query_of_a_handler_is_cancelled_and_its_connection_goes_on(server: Server) -> None:
    async with Proxy(server.dsn) as proxy:
        pool = database(proxy.dsn).pool(1)
        async with pool.acquire(timeout_seconds=2) as connection:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await connection.execute("SELECT pg_sleep(2)")
            assert await connection.fetchval("SELECT 1") == 1
        assert proxy.accepted == 2
        await pool.close(1)


# --- lanes


async def test_a_lane_keeps_its_connection_and_replaces_a_dead_one(server: Server) -> None:
    lane = Lane(database(server.dsn), "keep")
    first = await lane.get()
    assert await lane.get() is first
    async with connected(server.dsn) as other:
        await other.execute(f"SELECT pg_terminate_backend({first.get_server_pid()})")
    await await_for(first.is_closed)
    second = await lane.get()
    assert await second.fetchval("SELECT 1") == 1
    await lane.close(1)
    assert second.is_closed()


async def test_a_lane_replaces_an_old_connection(server: Server) -> None:
    lane = Lane(database(server.dsn), "keep", max_age_seconds=0)
    first = await lane.get()
    second = await lane.get()
    assert first.is_closed()
    assert await second.fetchval("SELECT 1") == 1
    await lane.close(1)


async def test_a_lane_closes_when_it_is_idle_unless_it_waits_on_purpose(server: Server) -> None:
    idle, listening = (
        Lane(database(server.dsn), "a", idle_seconds=0.05),
        Lane(database(server.dsn), "b", idle_seconds=None),
    )
    first, second = await idle.get(), await listening.get()
    await await_for(first.is_closed)
    assert not second.is_closed()
    assert await (await idle.get()).fetchval("SELECT 1") == 1
    await idle.close(1)
    await listening.close(1)


async def test_closing_a_lane_ends_in_time_with_a_mute_server(server: Server) -> None:
    async with Proxy(server.dsn) as proxy:
        lane = Lane(database(proxy.dsn), "mute")
        connection = await lane.get()
        proxy.go_mute()
        async with asyncio.timeout(20):
            await lane.close(0.1)
        assert connection.is_closed()
        lane = Lane(database(proxy.dsn, connect_timeout_seconds=0.1), "mute")
        with pytest.raises(ConnectFailed, match="timed out"):
            await lane.get()
        await lane.close(0.1)


# --- the pool


async def test_a_pool_opens_what_is_needed_and_no_more(empty_database_url: str) -> None:
    pool = database(empty_database_url).pool(2)
    async with connected(empty_database_url) as other:
        assert await other.fetchval(CONNECTIONS, "% pool") == 0
        async with pool.acquire(timeout_seconds=2), pool.acquire(timeout_seconds=2):
            assert await other.fetchval(CONNECTIONS, "% pool") == 2
            with pytest.raises(TimeoutError):
                async with pool.acquire(timeout_seconds=0.05):
                    raise AssertionError("a third connection of two")
        await pool.close(1)


async def test_a_connection_comes_back_clean(server: Server) -> None:
    pool = database(server.dsn).pool(1)
    async with pool.acquire(timeout_seconds=2) as connection:
        pid = connection.get_server_pid()
        await connection.execute("SET statement_timeout = '99s'; SET search_path = 'elsewhere'; LISTEN something")
        await connection.execute("SELECT pg_advisory_lock(42)")
        await connection.execute("BEGIN")
    async with pool.acquire(timeout_seconds=2) as connection:
        assert connection.get_server_pid() == pid
        assert not connection.is_in_transaction()
        assert await connection.fetchval("SHOW statement_timeout") == "3s"
        assert await connection.fetchval("SHOW search_path") != "elsewhere"
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert await connection.fetchval(held) == 0
        assert await connection.fetch("SELECT pg_listening_channels()") == []
    await pool.close(1)


async def test_no_slot_is_lost_to_cancelled_waiters(empty_database_url: str) -> None:
    pool = database(empty_database_url).pool(4)

    async def use() -> None:
        async with pool.acquire(timeout_seconds=5) as connection:
            await connection.fetchval("SELECT pg_sleep(0.001)")

    for round_ in range(200):
        users = [asyncio.create_task(use()) for _ in range(6)]
        for _ in range(round_ % 7):
            await asyncio.sleep(0)
        for user in users[round_ % 3 :]:
            user.cancel()
        await asyncio.wait(users)
    async with contextlib.AsyncExitStack() as stack:
        four = [await stack.enter_async_context(pool.acquire(timeout_seconds=5)) for _ in range(4)]
        assert [await connection.fetchval("SELECT 1") for connection in four] == [1, 1, 1, 1]
        assert await four[0].fetchval(CONNECTIONS, "% pool") == 4
    await pool.close(1)


async def test_a_connection_that_dies_in_use_costs_its_user_only(server: Server) -> None:
    pool = database(server.dsn).pool(1)
    with pytest.raises(asyncpg.PostgresError) as failed:
        async with pool.acquire(timeout_seconds=2) as connection:
            await connection.fetchval("SELECT pg_terminate_backend(pg_backend_pid())")
    assert is_unavailable(failed.value)
    async with pool.acquire(timeout_seconds=2) as connection:
        await connection.close()
    async with pool.acquire(timeout_seconds=2) as connection:
        assert await connection.fetchval("SELECT 1") == 1
    await pool.close(1)


async def test_a_pool_recovers_from_failures_to_connect(server: Server, closed_port: int) -> None:
    database_ = database(f"host=127.0.0.1 port={closed_port} user=me")
    pool = database_.pool(1)
    for _ in range(3):
        with pytest.raises(ConnectFailed):
            async with pool.acquire(timeout_seconds=2):
                raise AssertionError("there is nobody")
    database_.target = database(server.dsn).target
    async with pool.acquire(timeout_seconds=2) as connection:
        assert await connection.fetchval("SELECT 1") == 1
    await pool.close(1)


async def test_an_old_connection_is_not_handed_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.store.shared_pool.MAX_AGE_SECONDS", -1)
    pool = database(server.dsn).pool(1)
    pids = set()
    for _ in range(2):
        async with pool.acquire(timeout_seconds=2) as connection:
            pids.add(connection.get_server_pid())
    assert len(pids) == 2
    await pool.close(1)


async def test_closing_a_pool_ends_in_time_with_a_connection_out(server: Server) -> None:
    pool = database(server.dsn).pool(2)
    async with pool.acquire(timeout_seconds=2) as connection:
        async with asyncio.timeout(20):
            await pool.close(0.05)
        with pytest.raises(asyncpg.InterfaceError) as failed:
            await connection.fetchval("SELECT 1")
        assert is_unavailable(failed.value)
    with pytest.raises(asyncpg.InterfaceError, match="closed"):
        async with pool.acquire(timeout_seconds=1):
            raise AssertionError("the pool is closed")
    await pool.close(0.05)


async def test_behind_a_pooler_a_pooled_connection_is_only_rolled_back(server: Server) -> None:
    pool = database(server.dsn, pooler=True).pool(1)
    async with pool.acquire(timeout_seconds=2) as connection:
        await connection.execute("SET search_path = 'somebody_elses'")
        await connection.execute("BEGIN")
    async with pool.acquire(timeout_seconds=2) as connection:
        assert not connection.is_in_transaction()
        assert await connection.fetchval("SHOW search_path") == "somebody_elses"
    await pool.close(1)


# --- what errors mean


def server_error(code: str) -> asyncpg.PostgresError:
    return asyncpg.PostgresError.new({"C": code, "M": "message"})


@pytest.mark.parametrize(
    ("error", "unavailable"),
    [
        *((server_error(code), True) for code in ("08006", "25006", "53300", "57P01", "58030", "XX000")),
        *((server_error(code), False) for code in ("23505", "40001", "42601", "55P03", "57014", "RW001")),
        (asyncpg.InterfaceError("connection is closed"), True),
        (asyncpg.InterfaceError("cannot perform operation: another operation is in progress"), False),
        (ConnectFailed("no", sqlstate="28P01", refused=True), True),
        (TimeoutError(), True),
        (OSError(), True),
        (ValueError("closed"), False),
    ],
    ids=str,
)
def test_only_an_absent_database_is_waited_for(error: Exception, unavailable: bool) -> None:
    assert is_unavailable(error) is unavailable


async def test_the_text_of_an_error_shows_no_row_and_no_secret(empty_database_url: str) -> None:
    async with connected(empty_database_url) as connection:
        await connection.execute("CREATE TABLE t (payload text CHECK (payload = 'no'))")
        with pytest.raises(asyncpg.CheckViolationError) as failed:
            await connection.execute("INSERT INTO t VALUES ('a payload')")
    assert "violates check constraint" in safe_text(failed.value)
    assert "a payload" not in safe_text(failed.value)
    assert safe_text(ValueError("postgresql://u:hidden@h")) == "postgresql://u:***@h"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\x00b\ud800c"), "a\ufffdb\ufffdc"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("x" * 2000), "x" * 1000),
        (Unspeakable(), "(its message cannot be read)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_text_of_an_error_can_always_be_stored(error: Exception, text: str) -> None:
    assert safe_text(error) == text
