"""The pool of the handlers: no more connections than asked for, none lost, each handed on clean."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.connecting import connected, database
from tests.servers import Server, execute, with_database
from tests.waiting import await_for
from worker.store.connection import ConnectFailed, Connection, is_unavailable
from worker.store.shared_pool import ping

CONNECTIONS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE $1
"""


async def test_a_pool_opens_what_is_needed_and_no_more(empty_database_url: str) -> None:
    pool = database(empty_database_url).pool(2)
    async with connected(empty_database_url) as other:
        assert await other.fetchval(CONNECTIONS, "% pool") == 0
        async with pool.acquire(timeout_seconds=20), pool.acquire(timeout_seconds=20):
            assert await other.fetchval(CONNECTIONS, "% pool") == 2
            with pytest.raises(TimeoutError):
                async with pool.acquire(timeout_seconds=0.05):
                    raise AssertionError("a third connection of two")
        await pool.close(1)


async def test_a_connection_comes_back_clean(server: Server) -> None:
    pool = database(server.dsn).pool(1)
    async with pool.acquire(timeout_seconds=20) as connection:
        pid = connection.get_server_pid()
        await connection.execute("SET statement_timeout = '99s'; SET search_path = 'elsewhere'; LISTEN something")
        await connection.execute("SELECT pg_advisory_lock(42)")
        await connection.execute("BEGIN")
    async with pool.acquire(timeout_seconds=20) as connection:
        assert connection.get_server_pid() == pid
        assert not connection.is_in_transaction()
        assert await connection.fetchval("SHOW statement_timeout") == "3s"
        assert await connection.fetchval("SHOW search_path") != "elsewhere"
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert await connection.fetchval(held) == 0
        assert await connection.fetch("SELECT pg_listening_channels()") == []
    await pool.close(1)


@pytest.mark.parametrize("noticed_by", ["a borrower", "somebody else"])
async def test_a_connection_to_a_server_that_takes_no_writes_any_more_is_not_handed_on(
    empty_database_url: str, noticed_by: str
) -> None:
    """A primary that was demoted and keeps its connections: behind the same address there is another one by now."""
    name, server = urlsplit(empty_database_url).path[1:], with_database(empty_database_url, "template1")
    execute(server, "ALTER DATABASE {} SET default_transaction_read_only = on", name)
    pool = database(empty_database_url).pool(2)
    async with pool.acquire(timeout_seconds=20) as one, pool.acquire(timeout_seconds=20):
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            await ping(one)
    execute(server, "ALTER DATABASE {} RESET default_transaction_read_only", name)
    if noticed_by == "a borrower":
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            async with pool.acquire(timeout_seconds=20) as one:
                await one.execute("CREATE TABLE t ()")
    else:
        pool.doubt()
    async with pool.acquire(timeout_seconds=20) as one, pool.acquire(timeout_seconds=20) as other:
        await ping(one)
        await ping(other)
    await pool.close(1)


async def test_a_connection_that_dies_while_it_is_asked_costs_its_borrower_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reset by a network that has forgotten it: then the pool's loan is void, too."""

    async def die(connection: Connection) -> None:
        await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    pool = database(server.dsn).pool(2)
    async with pool.acquire(timeout_seconds=20) as one, pool.acquire(timeout_seconds=20) as other:
        pids = {one.get_server_pid(), other.get_server_pid()}
    pool.doubt()
    monkeypatch.setattr("worker.store.shared_pool.ping", die)
    async with pool.acquire(timeout_seconds=20) as one, pool.acquire(timeout_seconds=20) as other:
        assert pids.isdisjoint({one.get_server_pid(), other.get_server_pid()})
    await pool.close(1)


@pytest.mark.parametrize("sqlstate", ["XX000", "53400", "25006"])
async def test_what_a_borrowers_own_statement_says_costs_nobody_a_connection(empty_database_url: str, sqlstate: str) -> None:
    """It may be about the server or about that statement; only the server can tell."""
    pool = database(empty_database_url).pool(2)
    async with pool.acquire(timeout_seconds=20) as one, pool.acquire(timeout_seconds=20) as other:
        pids = {one.get_server_pid(), other.get_server_pid()}
    for _ in range(10):
        with pytest.raises(asyncpg.PostgresError):
            async with pool.acquire(timeout_seconds=20) as one:
                await one.execute(f"DO $$ BEGIN RAISE 'said so' USING ERRCODE = '{sqlstate}'; END $$")
    async with pool.acquire(timeout_seconds=20) as one, pool.acquire(timeout_seconds=20) as other:
        assert {one.get_server_pid(), other.get_server_pid()} == pids
    await pool.close(1)


async def test_no_slot_is_lost_to_cancelled_waiters(empty_database_url: str) -> None:
    pool = database(empty_database_url).pool(4)

    async def use() -> None:
        async with pool.acquire(timeout_seconds=30) as connection:
            await connection.fetchval("SELECT pg_sleep(0.001)")

    for round_ in range(200):
        users = [asyncio.create_task(use()) for _ in range(6)]
        for _ in range(round_ % 7):
            await asyncio.sleep(0)  # so that each round cancels at another point
        for user in users[round_ % 3 :]:
            user.cancel()
        await asyncio.wait(users)
        assert all(user.cancelled() or user.exception() is None for user in users)
    async with contextlib.AsyncExitStack() as stack:
        four = [await stack.enter_async_context(pool.acquire(timeout_seconds=30)) for _ in range(4)]
        assert [await connection.fetchval("SELECT 1") for connection in four] == [1, 1, 1, 1]

        async def there_are_four() -> bool:
            return bool(await four[0].fetchval(CONNECTIONS, "% pool") == 4)

        await await_for(there_are_four)  # those that were dropped end at the server a moment later
    await pool.close(1)


async def test_a_connection_that_dies_in_use_costs_its_user_only(server: Server) -> None:
    pool = database(server.dsn).pool(1)
    with pytest.raises(asyncpg.PostgresError) as failed:
        async with pool.acquire(timeout_seconds=20) as connection:
            await connection.fetchval("SELECT pg_terminate_backend(pg_backend_pid())")
    assert is_unavailable(failed.value)
    async with pool.acquire(timeout_seconds=20) as connection:
        await connection.close()
    async with pool.acquire(timeout_seconds=20) as connection:
        assert await connection.fetchval("SELECT 1") == 1
    await pool.close(1)


async def test_a_pool_recovers_from_failures_to_connect(server: Server, closed_port: int) -> None:
    database_ = database(f"host=127.0.0.1 port={closed_port} user=me")
    pool = database_.pool(1)
    for _ in range(3):
        with pytest.raises(ConnectFailed):
            async with pool.acquire(timeout_seconds=20):
                raise AssertionError("there is nobody")
    database_.target = database(server.dsn).target
    async with pool.acquire(timeout_seconds=20) as connection:
        assert await connection.fetchval("SELECT 1") == 1
    await pool.close(1)


async def test_an_old_connection_is_not_handed_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.store.shared_pool.MAX_AGE_SECONDS", -1)
    pool = database(server.dsn).pool(1)
    pids = set()
    for _ in range(2):
        async with pool.acquire(timeout_seconds=20) as connection:
            pids.add(connection.get_server_pid())
    assert len(pids) == 2
    await pool.close(1)


async def test_closing_a_pool_ends_in_time_with_a_connection_out(server: Server) -> None:
    pool = database(server.dsn).pool(2)
    async with pool.acquire(timeout_seconds=20) as connection:
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
    async with pool.acquire(timeout_seconds=20) as connection:
        await connection.execute("SET search_path = 'somebody_elses'")
        await connection.execute("BEGIN")
    async with pool.acquire(timeout_seconds=20) as connection:
        assert not connection.is_in_transaction()
        assert await connection.fetchval("SHOW search_path") == "somebody_elses"
    await pool.close(1)
