"""`Leases`, when answers get lost or do not come: nobody is locked out by himself, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lease_blocks import Watched, hold_once
from tests.lease_rows import Db, is_free, is_live, row, take
from tests.ports import Proxy
from tests.waiting import await_for
from worker import Leases, lease_desk
from worker import leases as leases_module
from worker.errors import DatabaseUnavailable
from worker.lease_desk import Asking, LeaseDesk
from worker.lease_transport import DatabaseTransport
from worker.store.connection import Database


async def test_an_acquisition_whose_answer_was_lost_is_not_locked_out_by_itself(database_url: str, db: Db) -> None:
    """H11: the same request again gives the same fence, at once."""
    async with Proxy(database_url) as proxy, Leases(proxy.dsn) as leases:
        await hold_once(leases, "warm")
        proxy.lose_answers()
        waiting = asyncio.create_task(hold_once(leases, "nightly", ttl_seconds=30))
        await await_for(lambda: is_live(db, "nightly"))
        fence = row(db, "nightly").fence
        proxy.flow()
        started = time.monotonic()
        assert await waiting == fence
        assert time.monotonic() - started < 20
    assert is_free(db, "nightly")


async def test_who_is_cancelled_while_acquiring_leaves_no_lease_behind(database_url: str, db: Db) -> None:
    async with Proxy(database_url) as proxy, Leases(proxy.dsn) as leases:
        await hold_once(leases, "warm")
        # The answer is lost, and nobody waits for it any more.
        proxy.lose_answers()
        waiting = asyncio.create_task(hold_once(leases, "lost", ttl_seconds=60))
        await await_for(lambda: is_live(db, "lost"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        proxy.flow()
        await await_for(lambda: is_free(db, "lost"))
        # At any other moment.
        for turn in range(40):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(turn * 0.0002):
                    await hold_once(leases, f"turn-{turn}", ttl_seconds=60)
        await await_for(lambda: db.execute("SELECT count(*) FROM leases WHERE released_at IS NULL").fetchone()[0] == 0)


async def test_who_is_cancelled_while_another_has_the_lease_asks_no_more(database_url: str, db: Db) -> None:
    theirs, beside = take(db, "theirs"), take(db, "beside")
    watched = Watched(database_url)
    async with Leases(transport=lambda: watched) as leases:
        waiting, staying = (asyncio.create_task(hold_once(leases, name, wait_seconds=30)) for name in ("theirs", "beside"))
        await await_for(lambda: {"theirs", "beside"} <= set(watched.answered))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        asked = watched.answered.count("theirs")
        for name, lease in (("theirs", theirs), ("beside", beside)):
            db.execute("SELECT release_lease(%s, 'other', %s)", [name, lease.fence])
        # Whoever waits beside it has asked by then. At most one question was on its way, and its answer was given back.
        assert await staying > beside.fence
        assert watched.answered.count("theirs") <= asked + 1
        await await_for(lambda: is_free(db, "theirs"))


async def test_a_database_that_does_not_answer_is_said_after_a_while(database_url: str, db: Db) -> None:
    async with Proxy(database_url) as proxy, Leases(proxy.dsn) as leases:
        await hold_once(leases, "warm")
        proxy.go_mute()
        started = time.monotonic()
        with pytest.raises(DatabaseUnavailable, match="nightly"):
            await hold_once(leases, "nightly", ttl_seconds=60)
        assert time.monotonic() - started < 40
        proxy.flow()


async def test_without_a_connection_it_gives_up_after_the_time_for_opening_one_and_leaves_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that only its own pauses move: nothing was sent, so there is nothing to find out about, either."""
    now = 1_000.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(lease_desk, "local_seconds", lambda: now)
    monkeypatch.setattr(lease_desk, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    for limit, wait_seconds in ((3, 0.0), (7, 0.0), (3, 20.0)):
        asking = Asking(resource="nightly", holder="me", ttl_seconds=30, wait_seconds=wait_seconds, metadata=None)
        desk = LeaseDesk(DatabaseTransport(Database(f"postgresql://127.0.0.1:1/x?connect_timeout={limit}", environ={})))
        began = now
        with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1:1: "):
            await asyncio.create_task(desk.ask(asking))
        expected = max(limit, wait_seconds)
        assert expected - 0.001 <= now - began <= expected + 0.5
        before = now
        await desk.close(60)
        assert (now, asking.asked_at) == (before, None)


async def test_more_who_ask_at_once_than_there_are_connections_wait_for_their_turn(database_url: str, db: Db) -> None:
    watched = Watched(database_url)
    async with Leases(transport=lambda: watched) as leases, asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(hold_once(leases, f"name-{number}", ttl_seconds=30))
    assert len(watched.answered) >= 60
    assert watched.most_at_once <= 4
    assert db.execute("SELECT count(*) FROM leases WHERE released_at IS NOT NULL").fetchone()[0] == 60


async def test_a_release_that_is_not_answered_is_tried_again_behind_the_block(
    database_url: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Proxy(database_url) as proxy, Leases(proxy.dsn) as leases:
        monkeypatch.setattr(leases_module, "_RELEASE_SECONDS", 30)
        async with leases.hold("nightly", ttl_seconds=60):
            proxy.cut()
        assert is_free(db, "nightly")
        monkeypatch.setattr(leases_module, "_RELEASE_SECONDS", 1)
        async with asyncio.timeout(30):
            async with leases.hold("nightly", ttl_seconds=60):
                proxy.go_mute()
        assert is_live(db, "nightly")
        proxy.cut()
        proxy.flow()
        await await_for(lambda: is_free(db, "nightly"), 20)


async def test_who_leaves_leases_while_a_release_has_no_answer_leaves_nothing_at_work(database_url: str) -> None:
    is_over = asyncio.Event()

    async def holding(leases: Leases, proxy: Proxy) -> None:
        async with leases.hold("nightly", ttl_seconds=60):
            proxy.go_mute()
            is_over.set()

    async with Proxy(database_url) as proxy:
        async with Leases(proxy.dsn) as leases:
            task = asyncio.create_task(holding(leases, proxy))
            await is_over.wait()
            task.cancel()  # else it would wait a while itself
            with pytest.raises(asyncio.CancelledError):
                await task
        assert at_work(leases) == set()
        proxy.flow()


async def test_who_has_waited_long_enough_for_a_release_does_not_wait_again_to_leave_leases(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "_RELEASE_SECONDS", 0.1)
    async with Proxy(database_url) as proxy, Leases(proxy.dsn) as leases:
        async with leases.hold("nightly", ttl_seconds=60):
            proxy.go_mute()
        async with asyncio.timeout(20):
            await leases._in_thread(lambda desk: desk.close(60))


async def test_who_leaves_leases_while_a_question_has_no_answer_leaves_nothing_at_work(database_url: str, db: Db) -> None:
    """Nor does the desk begin then to find out what has become of the question."""
    async with Proxy(database_url) as proxy:
        async with Leases(proxy.dsn) as leases:
            await hold_once(leases, "warm")
            proxy.lose_answers()
            waiting = asyncio.create_task(hold_once(leases, "nightly", ttl_seconds=60))
            await await_for(lambda: is_live(db, "nightly"))
        assert at_work(leases) == set()
        with pytest.raises(RuntimeError, match="left meanwhile"):
            await waiting
        proxy.flow()


async def test_who_asks_while_leases_is_left_and_the_database_mute_is_told_and_not_cancelled(database_url: str) -> None:
    """The question ends with the thread. Its CancelledError is nobody's: a TaskGroup would swallow it."""
    async with Proxy(database_url) as proxy:
        async with Leases(proxy.dsn) as leases:
            await hold_once(leases, "warm")
            await await_for(lambda: not work_of(leases))
            proxy.go_mute()
            waiting = asyncio.create_task(hold_once(leases, "nightly", ttl_seconds=60))
            await await_for(lambda: work_of(leases))
        with pytest.raises(RuntimeError, match="left meanwhile"):
            await waiting
        proxy.flow()


def work_of(leases: Leases) -> list[object]:
    """What the desk is at."""
    assert leases._desk is not None
    return list(leases._desk._at_work)


def at_work(leases: Leases) -> set[asyncio.Task[Any]]:
    """What has not ended in the thread of the keeper."""
    assert leases._rights is not None
    return asyncio.all_tasks(leases._rights.loop)
