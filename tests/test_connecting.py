"""Connecting: the hosts one after the other, each in its time; a failure says where, why, and whether waiting will help."""

from __future__ import annotations

import asyncio
import socket
import sys
from urllib.parse import urlsplit

import asyncpg
import pytest
import uvloop

from tests.connecting import connected, database, with_options
from tests.ports import Port, Proxy
from tests.servers import Server, execute, with_database
from worker.store.connection import ConnectFailed, is_unavailable, sqlstate


async def test_a_silent_host_does_not_use_up_the_time_of_the_next(server: Server) -> None:
    async with Port() as silent, Proxy(server.dsn) as proxy:
        dsn = proxy.dsn.replace("host=127.0.0.1", "host=127.0.0.1,127.0.0.1")
        dsn = dsn.replace(f"port={proxy.port}", f"port={silent.port},{proxy.port}")
        async with connected(dsn, connect_timeout_seconds=6.0) as connection:
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
