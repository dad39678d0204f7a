"""The slots of the generator in the database: each once, under the lease, with its mark; and the wishes that it keeps."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from tests.waiting import await_for
from worker.clock import local_seconds
from worker.generation import MOST_EVERY_SECONDS, NOTHING, Wish, rate_of, wish
from worker.new_job import new_job
from worker.store import generating, leases
from worker.store.connection import Database
from worker.store.generating import Production

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Instance:
    """A connection that believes it has the lease."""

    def __init__(self, database: Database, connection: Any) -> None:
        self.database = database
        self.db = connection
        self.holder = "test"
        self.fence = 0
        self._aged = (0.0, 0.0)

    async def acquire(self, ttl_seconds: float = 60) -> None:
        taken = await leases.take(self.db, self.database, resource=generating.NAME, holder=self.holder, ttl_seconds=ttl_seconds)
        assert isinstance(taken, leases.Grant)
        self.fence = taken.fence

    async def start(self, wish: Wish = NOTHING) -> generating.GeneratorStatus:
        return await generating.start(self.db, self.database, wish)

    async def produce(self, *, late_seconds: float = 60, most: int = 1000) -> Production:
        return await generating.produce(
            self.db, self.database, holder=self.holder, fence=self.fence, late_seconds=late_seconds, most=most
        )

    async def status(self) -> generating.GeneratorStatus:
        return await generating.status(self.db, self.database)

    async def age(self, seconds: float) -> None:
        """As if the last slot had been settled so many seconds ago."""
        self._aged = (seconds, local_seconds())
        await self.db.execute("UPDATE generators SET last_slot_at = now() - $1 * interval '1 second'", seconds)

    def seconds_since(self) -> float:
        """By now: time goes on while the test runs."""
        seconds, at = self._aged
        return seconds + local_seconds() - at

    def since_aged(self) -> range:
        """How many slots a second apart there can be since then."""
        return range(int(self._aged[0]), int(self.seconds_since()) + 2)

    async def slots(self) -> list[datetime]:
        """The moments of all slots that have a job, in order."""
        rows = await self.db.fetch("SELECT idempotency_key AS key FROM jobs ORDER BY id")
        return [slot_of(row["key"]) for row in rows]


def slot_of(key: str) -> datetime:
    name, _, moment = key.partition(":")
    assert name == "generator"
    return datetime.fromisoformat(moment)


@pytest.fixture
async def instance(database_url: str) -> AsyncIterator[Instance]:
    """It has the lease, and the generator is started with a slot a second."""
    database = Database(database_url)
    connection = await database.connect("test")
    one = Instance(database, connection)
    await one.acquire()
    await one.start()
    yield one
    await connection.close()


async def due(instance: Instance) -> Production:
    """What is produced as soon as a slot is due."""

    async def produced() -> Production | None:
        made = await instance.produce()
        return made if made.produced else None

    made = await await_for(produced)
    assert made is not None
    return made


async def another(instance: Instance) -> Instance:
    other = Instance(instance.database, await instance.database.connect("test"))
    other.fence = instance.fence
    return other


# --- which slots


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
    await instance.start(wish(every=3600))
    await instance.age(3600)
    assert (await instance.produce()).produced == 1
    [slot] = await instance.slots()
    for _ in range(3):
        before = await instance.db.fetchval("SELECT clock_timestamp()")
        early = await instance.produce()
        after = await instance.db.fetchval("SELECT clock_timestamp()")
        assert (early.outcome, early.produced) == ("not_due", 0)
        assert early.next_in_seconds is not None
        wait_seconds = [(slot - now).total_seconds() + 3600 for now in (after, before)]
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
    made = await instance.produce()
    assert (made.produced, made.skipped) == (1, 2)
    assert (await instance.produce()).outcome == "not_due"


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
    assert second.produced in (9, 10, 11)
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


# --- under the lease


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
    await instance.db.execute("UPDATE leases SET expires_at = clock_timestamp() + interval '0.3 second'")
    locking = other.db.transaction()
    await locking.start()
    await other.db.execute("SELECT FROM leases FOR NO KEY UPDATE")
    producing = asyncio.create_task(instance.produce())
    await other.db.execute("SELECT pg_sleep(0.4)")
    assert not producing.done()
    await locking.rollback()
    assert (await producing).outcome == "lost"
    await other.db.close()


async def test_a_production_in_flight_holds_up_release_and_take_over(instance: Instance, database_url: str) -> None:
    """H9: whoever acquires the lease next finds the slots of the one before."""
    await instance.age(5)
    slow = await another(instance)
    in_flight = slow.db.transaction()
    await in_flight.start()
    assert (await slow.produce()).produced > 0
    releasing = asyncio.create_task(
        leases.let_go(instance.db, instance.database, resource="generator", holder="test", fence=instance.fence)
    )

    async def waits() -> bool:
        asked = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)"
        return bool(await slow.db.fetchval(asked, instance.db.get_server_pid()))

    await await_for(waits)
    assert not releasing.done()
    await in_flight.commit()
    assert await releasing
    await slow.db.close()


async def test_two_who_believe_they_lead_produce_each_slot_once(instance: Instance) -> None:
    """H2: the same fence from several connections at once, as a leader with two clocks would."""
    await instance.start(wish(rate=1000))
    others = [await another(instance) for _ in range(4)]

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


# --- what is refused


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


# --- what is wanted


async def test_before_anybody_has_started_it_it_is_stopped(database_url: str) -> None:
    database = Database(database_url)
    connection = await database.connect("test")
    one = Instance(database, connection)
    status = await one.status()
    assert (status.state, status.holder, status.fence, status.rate, status.produced) == ("STOPPED", None, None, 1.0, 0)
    assert (status.kind, status.min_seconds, status.max_seconds, status.every_seconds) == ("sleep", 1, 10, 1)
    await one.acquire()
    assert (await one.produce()).outcome == "stopped"
    # The first instance starts it; a wish to stop that came before stays.
    assert (await generating.prepare(connection, database, NOTHING)).state == "STARTED"
    await connection.execute("DELETE FROM generators")
    assert (await generating.stop(connection, database)).state == "STOPPED"
    assert (await generating.prepare(connection, database, wish(rate=5))).state == "STOPPED"
    assert (await one.status()).rate == 5
    await connection.close()


async def test_nothing_is_produced_once_a_stop_has_committed_nor_made_up_for_after_it(instance: Instance) -> None:
    await instance.age(5)
    await generating.stop(instance.db, instance.database)
    assert (await instance.produce()).outcome == "stopped"
    await instance.age(30)
    status = await instance.start()
    assert status.state == "STARTED"
    made = await due(instance)
    assert made.produced in (1, 2)
    assert made.skipped == 0


async def test_a_start_of_what_is_started_loses_no_slot(instance: Instance) -> None:
    await instance.age(5)
    await instance.start(wish(min=2))
    assert (await instance.produce()).produced in instance.since_aged()


async def test_a_new_spacing_counts_from_its_beginning(instance: Instance) -> None:
    """The slots of a minute ago that the new rate would have had are not due in hindsight."""
    await instance.age(50)
    before = await instance.db.fetchval("SELECT clock_timestamp()")
    await instance.start(wish(rate=1000))
    await due(instance)
    assert (await instance.slots())[0] >= before


async def test_keys_never_repeat_whatever_is_changed(instance: Instance) -> None:
    for one in (wish(rate=500), wish(rate=1000), wish(job=new_job("other", {})), wish(rate=500, min=1), wish(rate=1000)):
        await instance.start(one)
        made = [await due(instance) for _ in range(5)]
        assert {some.skipped for some in made} == {0}
    slots = await instance.slots()
    assert slots == sorted(set(slots))
    status = await instance.status()
    assert status.produced == len(slots) >= 5 * 5


@pytest.mark.parametrize(
    ("least", "most", "whole"), [(1, 10, True), (0, 0, True), (3, 3, True), (0.5, 0.75, False), (0.0001, 0.0002, False)]
)
async def test_pauses_are_random_within_their_bounds(instance: Instance, least: float, most: float, whole: bool) -> None:
    await instance.start(wish(rate=1000, min=least, max=most))
    await instance.age(1)
    assert (await instance.produce()).produced > 900
    rows = await instance.db.fetch("SELECT DISTINCT payload ->> 'sleep_duration_seconds' AS pause FROM jobs WHERE kind = 'sleep'")
    pauses = [float(row["pause"]) for row in rows]
    assert least <= min(pauses) <= max(pauses) <= most
    assert all(pause == int(pause) for pause in pauses) == whole
    if whole:
        assert len(pauses) == most - least + 1


async def test_a_kind_of_ones_own_replaces_pauses_and_pauses_replace_it(instance: Instance) -> None:
    job = new_job("nightly", {"deep": [1, None]})
    status = await instance.start(wish(every=0.01, job=job))
    assert (status.kind, status.min_seconds, status.max_seconds, status.rate) == ("nightly", None, None, 100)
    await instance.age(0.1)
    await instance.produce()
    row = await instance.db.fetchrow("SELECT DISTINCT kind, payload FROM jobs")
    assert (row["kind"], row["payload"]) == ("nightly", '{"deep": [1, null]}')
    status = await instance.start(wish(min=2))
    assert (status.kind, status.min_seconds, status.max_seconds, status.rate) == ("sleep", 2, 10, 100)


async def test_a_bound_that_does_not_fit_the_other_is_refused_and_nothing_has_changed(instance: Instance) -> None:
    before = await instance.status()
    with pytest.raises(ValueError, match=r"^min, max: "):
        await instance.start(wish(min=20, rate=5))
    after = await instance.status()
    assert (after.rate, after.min_seconds, after.max_seconds) == (before.rate, before.min_seconds, before.max_seconds)


async def test_a_payload_beyond_the_limit_is_refused(instance: Instance) -> None:
    with pytest.raises(ValueError, match=r"^payload: 1 MiB"):
        await instance.start(wish(job=new_job("large", ["x" * 1_048_576])))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rate": 0}, "rate: "),
        ({"rate": -1}, "rate: "),
        ({"rate": 10_001}, "rate: "),
        ({"rate": float("nan")}, "rate: "),
        ({"rate": float("inf")}, "rate: "),
        ({"every": 0}, "every: "),
        ({"every": 0.00009}, "every: "),
        ({"every": 2_592_001}, "every: "),
        ({"rate": 1, "every": 1}, "rate, every: "),
        ({"min": -1}, "min: "),
        ({"max": 86_401}, "max: "),
        ({"min": 5, "max": 4}, "min: 5 is more than max, 4"),
        ({"min": 5, "job": new_job("other", {})}, "kind: "),
    ],
)
def test_a_wish_that_cannot_be_meant_is_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        wish(**arguments)


@pytest.mark.parametrize("rate", [0.1, 1, 3, 7, 49, 1000 / 3, 10_000])
def test_a_rate_is_shown_as_it_was_given(rate: float) -> None:
    assert rate_of(wish(rate=rate).every_seconds or 0) == pytest.approx(rate, rel=1e-11)
    assert rate_of(1 / 49) == 49
