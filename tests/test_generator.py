"""The generator as processes: one of many produces, and hand-overs of every sort cost no slot and repeat none."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.generators import CALM, LEASE_SECONDS, Fleet, Route, frozen_between_slots
from tests.waiting import any_moment, wait_for
from tests.workplace import frozen

# --- who produces


def test_one_of_several_instances_produces_and_the_others_stand_by(fleet: Fleet) -> None:
    leader = fleet.lead("--rate", "10", **CALM)
    others = [fleet.stand_by(**CALM) for _ in range(2)]
    fleet.wait_for_more(15)
    fleet.each_slot_once(0.1, late_seconds=2)
    assert [bool(one.find("generator_produced")) for one in (leader, *others)] == [True, False, False]
    rows = fleet.db.execute("SELECT kind, queue, payload, max_attempts FROM jobs").fetchall()
    assert {(row.kind, row.queue, row.max_attempts) for row in rows} == {("sleep", "default", 5)}
    assert {tuple(row.payload) for row in rows} == {("sleep_duration_seconds",)}
    assert {row.payload["sleep_duration_seconds"] for row in rows} <= set(range(1, 11))


def test_by_default_it_produces_one_job_a_second(fleet: Fleet) -> None:
    fleet.lead()
    fleet.wait_for_more(3)
    fleet.each_slot_once(1, late_seconds=2)


def test_a_periodic_job_of_ones_own_kind(fleet: Fleet) -> None:
    fleet.lead("--kind", "nightly", "--payload", '{"a": 1}', "--every", "0.2")
    fleet.wait_for_more(3)
    fleet.each_slot_once(0.2, late_seconds=2)
    rows = fleet.db.execute("SELECT DISTINCT kind, payload FROM jobs").fetchall()
    assert [(row.kind, row.payload) for row in rows] == [("nightly", {"a": 1})]


def test_a_thousand_jobs_a_second_share_transactions(fleet: Fleet) -> None:
    leader = fleet.lead("--rate", "1000", **CALM)
    fleet.wait_for_more(3000)
    fleet.each_slot_once(0.001)

    def told() -> list[int]:
        return [event["jobs"] for event in leader.find("generator_produced")]

    wait_for(lambda: sum(told()) >= 3000)
    assert sum(told()) > 10 * len(told())
    slots = fleet.slots()  # it goes on meanwhile
    assert len(slots) == round((slots[-1][0] - slots[0][0]).total_seconds() * 1000) + 1


# --- hand-overs


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_leaders_that_are_killed_or_stopped_at_random_cost_no_slot(fleet: Fleet) -> None:
    """H1: each slot once, late by no more than a lease and a second."""
    rate = 20
    fleet.lead("--rate", f"{rate}")
    for _ in range(2):
        fleet.stand_by()
    choices = random.Random(4)
    for _ in range(20):
        how = choices.choice((signal.SIGKILL, signal.SIGTERM))
        leader = fleet.leader()
        any_moment(choices, 0.3)  # of some slots
        leader.signal(how)
        assert leader.wait() == (-how if how is signal.SIGKILL else 0)
        fleet.instances.remove(leader)
        fleet.run()
        fleet.wait_for_more()
    fleet.each_slot_once(1 / rate, late_seconds=LEASE_SECONDS + 1)


def test_after_a_release_another_instance_goes_on_at_once(fleet: Fleet) -> None:
    """The default lease: nobody waits for its 30 s."""
    leader = fleet.lead("--rate", "20", WORKER_LEASE_SECONDS="30")
    other = fleet.stand_by(WORKER_LEASE_SECONDS="30")
    fleet.wait_for_more()
    assert leader.stop() == 0
    assert leader.find("generator_released")
    other.wait_for_event("generator_leader", 20)
    fleet.wait_for_more()
    fleet.each_slot_once(0.05, late_seconds=3)


def test_a_leader_that_was_frozen_produces_nothing_when_it_wakes(fleet: Fleet) -> None:
    """H2: STOP across slots, another takes over, CONT; then the other way round."""
    lease = {"WORKER_LEASE_SECONDS": f"{3 * LEASE_SECONDS:g}"}
    one, two = fleet.lead("--rate", "10", **lease), fleet.stand_by(**lease)
    for leader, other in ((one, two), (two, one), (one, two)):
        fleet.wait_for_more(3)
        times_led = len(other.find("generator_leader"))
        with frozen_between_slots(fleet, leader):
            wait_for(lambda: len(other.find("generator_leader")) > times_led)  # noqa: B023
            fleet.wait_for_more(5)
            said = len(leader.find("generator_produced"))
            lost = len(leader.find("generator_lost"))
        wait_for(lambda: len(leader.find("generator_lost")) > lost)  # noqa: B023
        leader.wait_for_event("generator_standby", holder=fleet.holder)
        fleet.wait_for_more(3)
        assert len(leader.find("generator_produced")) == said
    fleet.each_slot_once(0.1, late_seconds=3 * LEASE_SECONDS + 1)
    fences = [event["fence"] for one in fleet.instances for event in one.find("generator_leader")]
    assert len(fences) == len(set(fences)) == 4


def test_a_leader_whose_lease_was_taken_away_learns_it_at_its_next_slot(fleet: Fleet) -> None:
    """Long before a renewal would tell it, after 20 s."""
    leader = fleet.lead("--rate", "5", WORKER_LEASE_SECONDS="60")
    fleet.wait_for_more()
    fleet.db.execute("UPDATE leases SET holder = 'another', fence = nextval('fence_seq')")
    assert leader.wait_for_event("generator_lost")["reason"] == "lease_lost"
    produced = fleet.produced()
    leader.wait_for_event("generator_standby", holder="another")
    assert fleet.produced() == produced


def test_a_leader_cut_off_from_the_database_stops_by_its_own_clock_before_another_leads(fleet: Fleet) -> None:
    """H2: only its route is cut."""
    with Route(fleet.url) as route:
        leader = fleet.lead("--rate", "10", DATABASE_URL=route.url, WORKER_LEASE_SECONDS="5")
        other = fleet.stand_by(WORKER_LEASE_SECONDS="5")
        fleet.wait_for_more(3)
        route.cut()
        lost = leader.wait_for_event("generator_lost", 20)
        assert lost["reason"] == "lease_untrusted"
        taken = other.wait_for_event("generator_leader", 20)
        assert lost["timestamp"] < taken["timestamp"]
        fleet.wait_for_more(3)
        route.mend()
        leader.wait_for_event("generator_standby", 20)
    fleet.each_slot_once(0.1, late_seconds=6)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_marks_and_jobs_agree_however_often_a_leader_is_killed_around_a_slot(fleet: Fleet) -> None:
    """H4: 50 kills; the lease is freed by hand each time, so that nobody waits for it."""
    choices = random.Random(1)
    fleet.run("--rate", "200")
    for _ in range(50):
        fleet.run()
        leader = fleet.leader()
        any_moment(choices, 0.05)  # of ten slots
        leader.kill()
        fleet.instances.remove(leader)
        fleet.db.execute("UPDATE leases SET released_at = clock_timestamp() WHERE resource = 'generator'")
    fleet.wait_for_more()
    for one in fleet.instances:
        one.kill()
    fleet.each_slot_once(0.005)
    last = max(moment for moment, _ in fleet.slots())
    assert fleet.value("SELECT last_slot_at FROM generators") == last


# --- time


def test_after_down_time_recent_slots_are_made_up_for_and_old_ones_are_skipped(fleet: Fleet) -> None:
    """H5: all instances were away for ten slots, then for ten minutes."""
    lease = CALM | {"WORKER_LEASE_SECONDS": "25"}  # slots are made up for within two leases, and at least a minute
    assert fleet.lead("--every", "1", **lease).stop() == 0
    fleet.db.execute("UPDATE generators SET last_slot_at = now() - interval '10 seconds'; DELETE FROM jobs")
    second = fleet.lead(**lease)
    wait_for(lambda: fleet.produced() >= 10)
    assert not second.find("generator_skipped")
    assert second.stop() == 0
    aged_at = time.monotonic()
    fleet.db.execute("UPDATE generators SET last_slot_at = now() - interval '10 minutes'; DELETE FROM jobs")
    third = fleet.lead(**lease)
    skipped = third.wait_for_event("generator_skipped")
    assert 539 <= skipped["slots"] <= 541 + time.monotonic() - aged_at
    assert fleet.value("SELECT skipped FROM generators") == skipped["slots"]
    wait_for(lambda: fleet.produced() >= 60)
    assert skipped["slots"] + fleet.produced() <= 601 + time.monotonic() - aged_at


def test_a_generator_held_up_for_longer_than_a_slot_keeps_the_spacing(fleet: Fleet) -> None:
    """H8: blocked until the next slot is 1.5 slots late, and still the leader."""
    leader = fleet.lead("--rate", "5", **CALM)
    overdue = "SELECT clock_timestamp() > last_slot_at + 2.5 * interval '0.2 second' FROM generators"
    for _ in range(3):
        fleet.wait_for_more(2)
        with frozen([leader.pid]):
            wait_for(lambda: fleet.value(overdue))
    fleet.wait_for_more(2)
    fleet.each_slot_once(0.2, late_seconds=2)
    assert len(leader.find("generator_leader")) == 1
