"""Slots are produced under the lease, and under none that has ended; each with its mark in one transaction."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta

import pytest

from tests.slots import Instance, another
from tests.waiting import await_for
from worker.generation import wish
from worker.store import leases
from worker.store.generating import Production

# In these tests a lock is held for as long as the test takes, whatever the machine does meanwhile.
PATIENT = "SET lock_timeout = '60s'; SET statement_timeout = '60s'"


async def waits(looking: Instance, other: Instance) -> bool:
    """Whether the session of the other waits for a lock."""
    asked = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)"
    return bool(await looking.db.fetchval(asked, other.db.get_server_pid()))


@pytest.mark.parametrize(
    "end",
    [
        "UPDATE leases SET expires_at = clock_timestamp() - interval '1 millisecond'",
        "UPDATE leases SET released_at = clock_timestamp()",
        "UPDATE leases SET fence = fence + 1",
        "UPDATE leases SET holder = 'another'",
        "DELETE FROM leases",
    ],
)
async def test_who_has_no_live_lease_under_this_fence_produces_nothing(instance: Instance, end: str) -> None:
    """H2."""
    await instance.age(5)
    before = await instance.status()
    await instance.db.execute(end)
    assert await instance.produce() == Production("lost", 0, 0, 0, None, None)
    assert await instance.slots() == []
    assert (await instance.status()).last_slot_at == before.last_slot_at


async def test_a_lease_that_expires_while_its_row_is_waited_for_produces_nothing(instance: Instance) -> None:
    other = await another(instance)
    await instance.age(5)
    await instance.db.execute(PATIENT)
    await instance.db.execute("UPDATE leases SET expires_at = clock_timestamp() + interval '3 seconds'")
    locking = other.db.transaction()
    await locking.start()
    await other.db.execute("SELECT FROM leases FOR NO KEY UPDATE")
    producing = asyncio.create_task(instance.produce())
    await await_for(lambda: waits(other, instance))

    async def over() -> bool:
        return bool(await other.db.fetchval("SELECT expires_at < clock_timestamp() FROM leases"))

    await await_for(over)
    assert not producing.done()
    await locking.rollback()
    assert (await producing).outcome == "lost"
    await other.db.close()


async def test_a_production_in_flight_holds_up_release_and_take_over(instance: Instance, database_url: str) -> None:
    """H9: whoever acquires the lease next finds the slots of the one before."""
    await instance.age(5)
    await instance.db.execute(PATIENT)
    slow = await another(instance)
    in_flight = slow.db.transaction()
    await in_flight.start()
    assert (await slow.produce()).produced > 0
    releasing = asyncio.create_task(
        leases.let_go(instance.db, instance.database, resource="generator", holder="test", fence=instance.fence)
    )
    await await_for(lambda: waits(slow, instance))
    assert not releasing.done()
    await in_flight.commit()
    assert await releasing
    await slow.db.close()


async def test_two_who_believe_they_lead_produce_each_slot_once(instance: Instance) -> None:
    """H2: the same fence from several connections at once, as a leader with two clocks would."""
    await instance.start(wish(rate=1000))
    await instance.age(1)  # so many that each finds some, however fast they are
    others = [await another(instance) for _ in range(4)]
    for one in others:
        await one.db.execute(PATIENT)

    async def hammer(one: Instance) -> int:
        return sum([(await one.produce(most=7)).produced for _ in range(50)])

    produced = await asyncio.gather(*(hammer(one) for one in others))
    slots = await instance.slots()
    assert len(slots) == len(set(slots)) == sum(produced) > 100
    assert {later - earlier for earlier, later in itertools.pairwise(sorted(slots))} == {timedelta(milliseconds=1)}
    for one in others:
        await one.db.close()


async def test_the_mark_and_the_jobs_are_one_transaction(instance: Instance) -> None:
    """H4."""
    await instance.age(5)
    before = await instance.status()
    transaction = instance.db.transaction()
    await transaction.start()
    assert (await instance.produce()).produced > 0
    await transaction.rollback()
    assert await instance.slots() == []
    assert (await instance.status()).last_slot_at == before.last_slot_at
