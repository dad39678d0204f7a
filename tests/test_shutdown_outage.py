"""A stop while the database is away or mute: it ends in its budget, and its status says what was left."""

from __future__ import annotations

import pytest

from tests.processes import Daemon
from tests.stopping import (
    BUDGET_SECONDS,
    LONG_LEASE,
    PATIENT,
    SLACK_SECONDS,
    SLOW_CLAIMS,
    frozen_in_a_claim,
    leases_are_over,
    stopped,
)
from tests.workplace import LEASE_SECONDS, POLL_NEVER, Workplace, both_shapes, frozen


@both_shapes
def test_a_stop_during_an_outage_ends_in_its_budget_and_says_what_was_left(workplace: Workplace, shape: dict[str, str]) -> None:
    """A9: finished, but not written. They run again, once."""
    daemon = workplace.daemon(**shape, **LONG_LEASE, WORKERS="10")
    ids = [workplace.add("gated", {"gate": "gate"}) for _ in range(10)]
    workplace.wait_for_notes("start", count=10)
    with workplace.outage():
        workplace.open_gate()
        workplace.wait_for_notes("end", count=10)
        status, seconds = stopped(daemon)
    assert status == 75
    assert seconds < BUDGET_SECONDS + SLACK_SECONDS / 2
    assert {event["job_id"] for event in daemon.find("completion_deferred") if "job_id" in event} == set(ids)
    leases_are_over(workplace)
    workplace.daemon(**shape, **PATIENT)
    workplace.wait_until_all("succeeded")
    assert workplace.ledger() == dict.fromkeys(ids, 1)
    assert {workplace.job(id).attempts for id in ids} == {2}


def test_running_jobs_of_an_outage_cannot_be_released_and_the_status_says_so(workplace: Workplace) -> None:
    daemon = workplace.daemon(**LONG_LEASE, WORKER_SHUTDOWN_GRACE_SECONDS="0.5")
    id = workplace.add("nap", {"seconds": 60})
    workplace.wait_for_notes("start")
    with workplace.outage():
        status, seconds = stopped(daemon)
    assert status == 75
    assert seconds < 0.5 + BUDGET_SECONDS + SLACK_SECONDS / 2
    assert workplace.job(id).state == "running"


def test_an_idle_daemon_stops_during_an_outage(workplace: Workplace) -> None:
    daemon = workplace.daemon(**LONG_LEASE, **POLL_NEVER)
    workplace.wait_until_only_notifications_wake()  # or a look that the outage cuts off may have taken a job, for all it knows
    with workplace.outage():
        daemon.wait_for_event("database_lost")
        status, seconds = stopped(daemon)
    assert status == 0
    assert seconds < BUDGET_SECONDS + SLACK_SECONDS / 2


@pytest.mark.parametrize("jobs", ["none", "finished", "running"])
@pytest.mark.parametrize("frozen_too", ["", "postmaster"])
def test_a_server_that_has_gone_mute_cannot_keep_the_process(private_workplace: Workplace, jobs: str, frozen_too: str) -> None:
    """E6: every connection of the daemon is frozen; the status is 0 only if nothing was left behind."""
    for number in range(3):
        status, expected, daemon = stopped_by_a_mute_server(private_workplace, jobs, frozen_too, f"mute-{number}")
        # In the last fractions of the budget it is ended by force: a machine may stand still just then, but not each time.
        if not daemon.find("internal_error", where="end of the process"):
            break
    assert status == expected


def stopped_by_a_mute_server(workplace: Workplace, jobs: str, frozen_too: str, key: str) -> tuple[int, int, Daemon]:
    """The exit status, what it should be, and the daemon that was stopped."""
    daemon = workplace.daemon(**LONG_LEASE, WORKER_SHUTDOWN_GRACE_SECONDS="0.5")
    if jobs != "none":
        id = workplace.add("gated", {"gate": key}, key=key)
        workplace.wait_for_notes("start", key)
    postmaster = workplace.value("SELECT pg_read_file('postmaster.pid')").split()[0]
    with frozen([*workplace.backends(), *([int(postmaster)] if frozen_too else [])]):
        if jobs == "finished":
            workplace.open_gate(key)
            workplace.wait_for_notes("end", key)
        status, seconds = stopped(daemon)
        left = "none" if jobs == "none" else workplace.job(id).state
    assert seconds < 0.5 + BUDGET_SECONDS + SLACK_SECONDS / 2
    # A frozen claim may take jobs once it thaws.
    unsure = any("may still take jobs" in event["error"] for event in daemon.find("claim_failed"))
    assert left in {"none": ("none",), "finished": ("running", "succeeded"), "running": ("running", "ready")}[jobs]
    return status, 75 if left == "running" or unsure else 0, daemon


@pytest.mark.parametrize("claim_seconds", ["1", "15"])
def test_a_claim_that_may_still_take_jobs_is_told_by_the_status(private_workplace: Workplace, claim_seconds: str) -> None:
    """Nothing is held, but its server process stands still before its COMMIT; it may be waited for longer than a stop may take."""
    workplace = private_workplace
    workplace.db.execute(SLOW_CLAIMS)
    patient = claim_seconds == "15"
    lease = {"WORKER_LEASE_SECONDS": "40", "WORKER_LEASE_MARGIN_SECONDS": "2"} if patient else LONG_LEASE
    daemon = workplace.daemon(**lease, WORKER_CLAIM_TIMEOUT_SECONDS=claim_seconds, WORKER_SHUTDOWN_GRACE_SECONDS="0.1")
    postmaster = workplace.value("SELECT pg_read_file('postmaster.pid')").split()[0]
    workplace.add("nap")
    with frozen_in_a_claim(workplace, lambda: [*workplace.backends(), int(postmaster)]):
        status, seconds = stopped(daemon)
    assert status == 75
    assert seconds < 0.1 + (2 + 2 * 1 if patient else BUDGET_SECONDS) + SLACK_SECONDS / 2
    assert workplace.notes() == []


def test_the_presence_of_a_process_outlives_what_a_claim_may_still_take(private_workplace: Workplace) -> None:
    """It stands still while its process stops, and might commit afterwards: its jobs would be lost then, and nobody has crashed."""
    workplace = private_workplace
    workplace.db.execute(SLOW_CLAIMS)
    daemon = workplace.daemon(WORKER_CLAIM_TIMEOUT_SECONDS="1", WORKER_SHUTDOWN_GRACE_SECONDS="0.1")
    workplace.add("nap")
    with frozen_in_a_claim(workplace, lambda: workplace.backends("claim", "active")):
        assert stopped(daemon)[0] == 75
        assert workplace.value("SELECT extract(epoch FROM max(expires_at) - now())::float8 FROM processes") > LEASE_SECONDS
