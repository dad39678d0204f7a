"""What keeps a Worker from starting, and that nothing of it is left behind then."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from tests.inprocess import listening, quick
from tests.servers import Server
from tests.waiting import await_for
from worker import Handlers, Settings, Worker, events
from worker.errors import ConfigError, DatabaseUnavailable


async def _nothing_is_left(threads: set[threading.Thread]) -> None:
    await await_for(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    await await_for(lambda: set(threading.enumerate()) <= threads)


async def test_a_database_that_is_away_past_the_wait_raises_and_leaves_nothing_behind() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"postgresql://u:hunter2secret@127.0.0.1:{nobody.getsockname()[1]}/d"
        threads = set(threading.enumerate())
        with pytest.raises(DatabaseUnavailable, match=r"no database within 0\.3 s") as refused:
            async with Worker(Handlers(), quick(url, connect_wait_seconds=0.3)):
                raise AssertionError("not reached")
    assert "hunter2secret" not in str(refused.value)
    await _nothing_is_left(threads)


async def test_a_database_without_the_schema_raises_and_leaves_nothing_behind(empty_database_url: str) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match="migrate"):
        async with Worker(Handlers(), quick(empty_database_url)):
            raise AssertionError("not reached")
    await _nothing_is_left(threads)


async def test_a_database_that_is_not_there_is_refused_at_once(server: Server, database_url: str) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no_such_database"):
        async with Worker(Handlers(), quick(database_url.replace(database_url.split("/")[3].split("?")[0], "no_such_database"))):
            raise AssertionError("not reached")
    await _nothing_is_left(threads)


async def test_cancelled_while_it_waits_for_the_database_it_ends() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        worker = Worker(Handlers(), quick(f"postgresql://u@127.0.0.1:{nobody.getsockname()[1]}/d"))
        threads = set(threading.enumerate())
        with listening() as log:
            starting = asyncio.create_task(worker.start())
            await await_for(lambda: log.find(events.DATABASE_LOST))
        starting.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await starting
    await _nothing_is_left(threads)


def test_settings_that_do_not_fit_together_are_refused_before_anything_is_started(database_url: str) -> None:
    with pytest.raises(ConfigError, match="WORKER_RENEW_SECONDS"):
        Settings(database_url=database_url, lease_seconds=3, renew_seconds=3)
