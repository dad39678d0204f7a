"""A lane is one connection of a loop's own: kept while it is sound and in use, replaced when it is not, closed in time."""

from __future__ import annotations

import asyncio

import pytest

from tests.connecting import connected, database
from tests.ports import Proxy
from tests.servers import Server
from tests.waiting import await_for
from worker.store.connection import ConnectFailed, Lane


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
    idle, listening = Lane(database(server.dsn), "a", idle_seconds=0.05), Lane(database(server.dsn), "b", idle_seconds=None)
    first, second = await idle.get(), await listening.get()
    await await_for(first.is_closed)
    assert not second.is_closed()
    assert not (await idle.get()).is_closed()
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
