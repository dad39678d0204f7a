"""Running out of time: a COMMIT and our own statements are never cancelled, a handler's slow query is."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from tests.connecting import connected, database
from tests.ports import Proxy
from tests.servers import Server
from tests.waiting import await_for
from worker.store.connection import Lane

GATE = """
CREATE TABLE gated (); CREATE FUNCTION wait_for_gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM
pg_advisory_xact_lock(1); RETURN NULL; END $$; CREATE CONSTRAINT TRIGGER gated AFTER INSERT ON gated DEFERRABLE INITIALLY
DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_for_gate(); SELECT pg_advisory_lock(1);
"""
"""A COMMIT after an insert into `gated` waits for as long as this session keeps the lock."""
NO_LIMITS = "SET statement_timeout = 0; SET lock_timeout = 0"


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_commit_that_takes_too_long_loses_its_connection_and_is_not_cancelled(empty_database_url: str, loop: object) -> None:
    async def body() -> None:
        async with Proxy(empty_database_url) as proxy, connected(empty_database_url) as other:
            await other.execute(GATE)
            connection = await database(proxy.dsn).connect("test")
            await connection.execute(NO_LIMITS)
            await connection.execute("BEGIN")
            await connection.execute("INSERT INTO gated DEFAULT VALUES")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await connection.execute("COMMIT")
            await await_for(connection.is_closed)
            await other.execute("SELECT pg_advisory_unlock(1)")
            # It was left in peace, and so it comes to its end.
            await await_for(lambda: other.fetchval("SELECT count(*) = 1 FROM gated"))
            assert proxy.accepted == 1

    loop(body())  # type: ignore[operator]


async def test_nothing_on_a_lane_is_cancelled(server: Server) -> None:
    async with Proxy(server.dsn) as proxy, connected(server.dsn) as other:
        lane = Lane(database(proxy.dsn), f"lane {proxy.port}")
        connection = await lane.get()
        await connection.execute(NO_LIMITS)
        pid = connection.get_server_pid()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.execute("SELECT pg_sleep(60)")
        await await_for(connection.is_closed)
        lane.drop()
        # The next connection comes second: no cancel request went between.
        assert await (await lane.get()).fetchval("SELECT 1") == 1
        assert proxy.accepted == 2
        asleep = "SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'PgSleep'"
        await await_for(lambda: other.fetchval(asleep, pid))
        await other.execute(f"SELECT pg_terminate_backend({pid})")
        await lane.close(1)


async def test_a_slow_query_of_a_handler_is_cancelled_and_its_connection_goes_on(server: Server) -> None:
    async with Proxy(server.dsn) as proxy:
        pool = database(proxy.dsn).pool(1)
        async with pool.acquire(timeout_seconds=20) as connection:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await connection.execute("SELECT pg_sleep(2)")
            assert await connection.fetchval("SELECT 1") == 1
        assert proxy.accepted == 2
        await pool.close(1)
