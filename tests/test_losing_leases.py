"""`Leases`: a block whose lease is lost or no longer trusted is stopped, and told; its end releases nothing that is not its own."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tests.inprocess import listening
from tests.lease_blocks import hold_once, loses
from tests.lease_rows import Db, is_free, is_live, row, steal
from tests.ports import Proxy
from tests.waiting import await_for, until_cancelled, wait_for
from worker import LeaseLost, Leases, events
from worker.lease_transport import DatabaseTransport
from worker.leases import HeldLease
from worker.store.connection import Database


async def test_a_lost_lease_cancels_the_block_and_surfaces_as_lease_lost(leases: Leases, db: Db) -> None:
    with loses("'nightly': lease_lost") as loss:
        async with leases.hold("nightly", ttl_seconds=9) as held:
            steal(db, "nightly")
            try:
                await until_cancelled()
            finally:
                with pytest.raises(LeaseLost):
                    held.ensure_lease()
                assert held.remaining_seconds() == 0
    assert loss.value.reason == "lease_lost"
    assert isinstance(loss.value.__cause__, asyncio.CancelledError)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert row(db, "nightly").holder == "other"
    assert is_live(db, "nightly"), "the new holder's lease is not released"


async def test_the_block_is_cancelled_before_the_lease_can_pass_on_when_nothing_is_heard(database_url: str, db: Db) -> None:
    """K10, H2: the route goes mute; nobody tells, and the local clock decides."""
    async with Proxy(database_url) as proxy, Leases(proxy.dsn, holder="me") as leases:
        with loses() as loss:
            async with leases.hold("nightly", ttl_seconds=10) as held:
                proxy.go_mute()
                try:
                    await until_cancelled()
                finally:
                    assert held.remaining_seconds() == 0
                    assert is_live(db, "nightly"), "cancelled too late: the lease could have passed on"
        assert loss.value.reason == "lease_untrusted"
        proxy.flow()


async def test_an_outage_shorter_than_the_trust_costs_nothing(database_url: str, db: Db) -> None:
    with listening() as log:
        async with Proxy(database_url) as proxy, Leases(proxy.dsn) as leases, leases.hold("nightly", ttl_seconds=12) as held:
            proxy.go_mute()
            proxy.cut()
            await await_for(lambda: log.find(events.DATABASE_LOST))
            held.ensure_lease()
            lost = row(db, "nightly")
            proxy.cut()
            proxy.flow()
            await await_for(lambda: log.find(events.DATABASE_RESTORED))
            await await_for(lambda: row(db, "nightly").renewed_at not in (None, lost.renewed_at), 30)
            held.ensure_lease(1)
            assert row(db, "nightly").fence == held.fence == lost.fence
        assert is_free(db, "nightly")


async def test_a_block_that_ends_by_its_own_exception_surfaces_it(leases: Leases, db: Db) -> None:
    with pytest.raises(ValueError, match="mine"):
        async with leases.hold("nightly", ttl_seconds=60):
            raise ValueError("mine")
    assert is_free(db, "nightly")
    with pytest.raises(ValueError, match="mine"):
        await fail_when_cancelled(leases, db)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def fail_when_cancelled(leases: Leases, db: Db) -> None:
    async with leases.hold("nightly", ttl_seconds=3):
        steal(db, "nightly")
        try:
            await until_cancelled()
        except asyncio.CancelledError:
            raise ValueError("mine") from None


async def test_a_block_that_ends_as_if_nothing_had_happened_is_told_of_the_loss(leases: Leases, db: Db) -> None:
    with loses():
        async with leases.hold("nightly", ttl_seconds=3):
            steal(db, "nightly")
            with contextlib.suppress(asyncio.CancelledError):
                await until_cancelled()
    with loses():
        async with leases.hold("busy", ttl_seconds=3) as held:
            steal(db, "busy")
            wait_for(lambda: held.remaining_seconds() == 0)  # the loop does not turn: nobody can be cancelled
    await hold_once(leases, "another")  # nor is anybody afterwards


@pytest.mark.parametrize("is_lost_too", [False, True])
async def test_a_cancellation_from_outside_stays_one(leases: Leases, db: Db, is_lost_too: bool) -> None:
    entered: asyncio.Future[HeldLease] = asyncio.get_running_loop().create_future()

    async def holding() -> None:
        async with leases.hold("nightly", ttl_seconds=3) as held:
            entered.set_result(held)
            await until_cancelled()

    task = asyncio.create_task(holding())
    held = await entered
    if is_lost_too:
        steal(db, "nightly")
        wait_for(lambda: held.remaining_seconds() == 0)  # the keeper has learnt of it, and this loop has not turned yet
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_live(db, "nightly") == is_lost_too, "its own is released, that of the next holder is not"


async def test_a_time_out_around_the_block_stays_one(leases: Leases, db: Db) -> None:
    async def holding() -> None:
        async with asyncio.timeout(None) as limit, leases.hold("nightly", ttl_seconds=60):
            limit.reschedule(asyncio.get_running_loop().time())
            await until_cancelled()

    with pytest.raises(TimeoutError):
        await holding()
    assert is_free(db, "nightly")


async def test_blocks_inside_each_other_are_lost_one_by_one(leases: Leases, db: Db) -> None:
    async with leases.hold("outer", ttl_seconds=60) as outer:
        with loses("inner"):
            async with leases.hold("inner", ttl_seconds=3):
                steal(db, "inner")
                await until_cancelled()
        outer.ensure_lease()
        await hold_once(leases, "another")  # nobody is cancelled for it
    with loses("outer"):
        async with leases.hold("outer", ttl_seconds=3), leases.hold("innermost", ttl_seconds=60):
            steal(db, "outer")
            await until_cancelled()
    assert is_free(db, "innermost")


async def test_the_release_waits_until_the_block_has_really_ended(leases: Leases, db: Db) -> None:
    """H9: what cleans up after a cancellation is protected as well."""
    task_holds = asyncio.Event()

    async def holding() -> None:
        async with leases.hold("nightly", ttl_seconds=4):
            task_holds.set()
            try:
                await until_cancelled()
            finally:
                for _ in range(4):  # longer than its term
                    before = row(db, "nightly").renewed_at
                    await await_for(lambda: row(db, "nightly").renewed_at != before)  # noqa: B023
                    assert is_live(db, "nightly")

    task = asyncio.create_task(holding())
    await task_holds.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert row(db, "nightly").released_at is not None


async def test_what_goes_on_behind_the_block_has_no_lease_any_more(database_url: str, db: Db) -> None:
    """A thread that nobody has awaited, say. From before the release is sent: then another may have it."""
    remaining: list[float] = []

    class Releasing(DatabaseTransport):
        async def release(self, **terms: Any) -> Any:
            remaining.append(held.remaining_seconds())
            return await super().release(**terms)

    transport = Releasing(Database(database_url, environ={}))
    async with Leases(transport=lambda: transport) as leases:
        async with leases.hold("nightly", ttl_seconds=60) as held:
            remaining.append(held.remaining_seconds())
        with pytest.raises(LeaseLost, match="its block has ended") as loss:
            held.ensure_lease()
    assert loss.value.reason == "lease_lost"
    assert remaining[0] > 0
    assert remaining[1:] == [0]
    assert row(db, "nightly").released_at is not None


async def test_leaving_leases_first_tells_the_blocks_that_are_left(database_url: str, db: Db) -> None:
    leases = Leases(database_url)
    entered = asyncio.Event()

    async def holding() -> None:
        async with leases.hold("nightly", ttl_seconds=5):
            entered.set()
            await until_cancelled()

    async with leases:
        task = asyncio.create_task(holding())
        await entered.wait()
    with pytest.raises(LeaseLost) as loss:
        await task
    assert loss.value.reason == "lease_untrusted"
