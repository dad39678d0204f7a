"""The slots of the generator in the database: each once, in its time, or skipped and counted; and what is refused."""

from __future__ import annotations

import itertools
import random
from datetime import timedelta

import asyncpg
import pytest

from tests.slots import EPOCH, Instance, another
from worker.clock import local_seconds
from worker.generation import MOST_EVERY_SECONDS, wish
from worker.new_job import new_job


async def test_slots_are_multiples_of_the_spacing_by_the_databases_clock(instance: Instance) -> None:
    await instance.age(4.5)
    before = await instance.db.fetchval("SELECT clock_timestamp()")
    made = await instance.produce()
    after = await instance.db.fetchval("SELECT clock_timestamp()")
    assert (made.outcome, made.skipped, made.failed, made.error) == ("produced", 0, 0, None)
    slots = await instance.slots()
    assert len(slots) == made.produced
    assert made.produced in instance.since_aged()
    assert all((slot - EPOCH) % timedelta(seconds=1) == timedelta(0) for slot in slots)
    assert {later - earlier for earlier, later in itertools.pairwise(slots)} == {timedelta(seconds=1)}
    assert before - timedelta(seconds=1) < slots[-1] <= after


async def test_a_slot_is_never_due_before_its_time_nor_twice(instance: Instance) -> None:
    """H8: a timer that fires early finds nothing due, and learns how long it has to wait."""
    await instance.start(wish(every=86_400))
    await instance.age(86_400)
    assert (await instance.produce()).produced == 1
    [slot] = await instance.slots()
    for _ in range(3):
        before = await instance.db.fetchval("SELECT clock_timestamp()")
        early = await instance.produce()
        after = await instance.db.fetchval("SELECT clock_timestamp()")
        assert (early.outcome, early.produced) == ("not_due", 0)
        assert early.next_in_seconds is not None
        wait_seconds = [(slot - now).total_seconds() + 86_400 for now in (after, before)]
        assert wait_seconds[0] - 0.01 < early.next_in_seconds < wait_seconds[1] + 0.01
    assert await instance.slots() == [slot]


async def test_slots_up_to_a_minute_late_are_made_up_for_and_older_ones_are_skipped_and_counted(instance: Instance) -> None:
    """H5."""
    await instance.age(600)
    before = await instance.db.fetchval("SELECT clock_timestamp()")
    made = await instance.produce()
    assert made.produced in (60, 61)
    assert made.produced + made.skipped in instance.since_aged()
    status = await instance.status()
    assert (status.produced, status.skipped) == (made.produced, made.skipped)
    assert (await instance.slots())[0] >= before - timedelta(seconds=60)


@pytest.mark.parametrize("every_seconds", [90, 3600, 86_400, MOST_EVERY_SECONDS])
async def test_the_newest_slot_is_produced_however_late_it_is(instance: Instance, every_seconds: float) -> None:
    """H5, the same rule: the nightly job runs after an outage, once."""
    await instance.start(wish(every=every_seconds))
    await instance.age(every_seconds * 3)
    mark, before = await instance.db.fetchrow("SELECT last_slot_at, clock_timestamp() FROM generators")
    made = await instance.produce()
    after = await instance.db.fetchval("SELECT clock_timestamp()")
    spacing = timedelta(seconds=every_seconds)
    # Three, unless the next has come since the row was aged.
    due = {(moment - EPOCH) // spacing - (mark - EPOCH) // spacing for moment in (before, after)}
    assert made.produced == 1
    assert made.produced + made.skipped in due
    again = await instance.produce()
    assert (again.outcome, again.skipped) in (("not_due", 0), ("produced", 0)), "one that is there already would be skipped"


async def test_a_clock_that_was_put_back_repeats_no_slot(instance: Instance) -> None:
    """H8: the mark is ahead of the clock then."""
    await instance.age(-30)
    waiting = await instance.produce()
    assert (waiting.outcome, waiting.produced) == ("not_due", 0)
    assert waiting.next_in_seconds is not None
    assert -instance.seconds_since() - 0.01 < waiting.next_in_seconds <= 31


async def test_a_slot_whose_job_is_there_already_is_skipped(instance: Instance) -> None:
    """Somebody has put the mark back: the key keeps what was produced from being produced again."""
    await instance.age(10)
    first = await instance.produce()
    await instance.age(20)
    second = await instance.produce()
    assert second.produced + second.skipped in instance.since_aged()
    assert second.skipped in (first.produced, first.produced + 1)
    assert len(set(await instance.slots())) == first.produced + second.produced


async def test_many_slots_are_produced_in_bounded_transactions(instance: Instance) -> None:
    await instance.start(wish(rate=1000))
    await instance.age(2)
    made = [await instance.produce(most=300) for _ in range(3)]
    assert [one.produced for one in made] == [300, 300, 300]
    assert made[-1].next_in_seconds == 0
    slots = await instance.slots()
    assert {later - earlier for earlier, later in itertools.pairwise(slots)} == {timedelta(milliseconds=1)}


async def test_large_payloads_are_not_put_into_one_transaction_by_the_thousand(instance: Instance) -> None:
    payload = random.Random(1).randbytes(500_000).hex()  # which does not compress to much less than 500 kB
    await instance.start(wish(rate=1000, job=new_job("large", payload)))
    await instance.age(1)
    assert (await instance.produce()).produced < 10


@pytest.mark.parametrize("rate", [3, 7, 1 / 7, 999, 10_000])
async def test_a_rate_that_no_microsecond_divides_keeps_its_pace(instance: Instance, rate: float) -> None:
    asked_at = local_seconds()
    status = await instance.start(wish(rate=rate))
    assert status.rate == pytest.approx(rate)
    seconds = 1000 / rate
    await instance.age(seconds)
    made = await instance.produce(late_seconds=seconds * 2, most=2000)
    more = rate * (local_seconds() - asked_at)  # time goes on while it is asked
    assert 990 <= made.produced <= 1010 + more


@pytest.mark.parametrize(
    "refusal",
    [
        "ALTER TABLE jobs ADD CONSTRAINT refused CHECK (kind <> 'bad')",
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON jobs FOR EACH ROW WHEN (NEW.kind = 'bad') EXECUTE FUNCTION refuse()""",
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM 1 / 0; RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON jobs DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (NEW.kind = 'bad') EXECUTE FUNCTION refuse()""",
    ],
    ids=["check", "trigger", "deferred"],
)
async def test_a_slot_whose_job_is_refused_is_counted_and_not_tried_again(instance: Instance, refusal: str) -> None:
    """H6."""
    await instance.db.execute(refusal)
    await instance.start(wish(job=new_job("bad", {})))
    await instance.age(3)
    made = await instance.produce()
    assert (made.outcome, made.produced) == ("produced", 0)
    assert made.failed in instance.since_aged()
    assert made.error is not None
    later = (await instance.produce()).failed  # of slots that have come since, if any
    assert made.failed + later in instance.since_aged()
    status = await instance.status()
    assert (status.failed, status.last_error) == (made.failed + later, made.error)
    await instance.start(wish(job=new_job("good", {})))
    await instance.age(1)
    assert (await instance.produce()).produced in instance.since_aged()
    assert (await instance.status()).last_error is None


async def test_a_lock_in_the_way_costs_no_slot(instance: Instance) -> None:
    other = await another(instance)
    await instance.age(3)
    locking = other.db.transaction()
    await locking.start()
    await other.db.execute("LOCK TABLE jobs IN SHARE MODE")
    with pytest.raises(asyncpg.LockNotAvailableError):
        await instance.produce()
    await locking.rollback()
    assert (await instance.produce()).produced in instance.since_aged()
    assert (await instance.status()).failed == 0
    await other.db.close()
