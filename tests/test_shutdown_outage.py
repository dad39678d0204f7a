"""A stop while the database is away or mute: it ends in its budget, and its status says what was left."""

from __future__ import annotations

import pytest

from tests.stopping import BUDGET_SECONDS, CLAIM_IN_FLIGHT, SLACK_SECONDS, SLOW_CLAIMS, stopped
from tests.waiting import wait_for
from tests.workplace import LEASE_SECONDS, POLL_NEVER, Workplace, both_shapes, frozen


@both_shapes
def test_a_stop_during_an_outage_ends_in_its_budget_and_says_what_was_left(workplace: Workplace, shape: dict[str, str]) -> None:
    """A9: finished, but not written. They run again, once."""
    daemon = workplace.daemon(**shape, WORKERS="10")
    ids = [workplace.add("gated", {"gate": "gate"}) for _ in range(10)]
    workplace.wait_for_notes("start", count=10)
    with workplace.outage():
        workplace.open_gate()
        workplace.wait_for_notes("end", count=10)
        status, seconds = stopped(daemon)
    assert status == 75
    assert seconds < BUDGET_SECONDS + SLACK_SECONDS / 2
    assert {event["job_id"] for event in daemon.find("completion_deferred") if "job_id" in event} == set(ids)
    workplace.daemon(**shape)
    workplace.wait_until_all("succeeded")
    assert workplace.ledger() == dict.fromkeys(ids, 1)
    assert {workplace.job(id).attempts for id in ids} == {2}


def test_running_jobs_of_an_outage_cannot_be_released_and_the_status_says_so(workplace: Workplace) -> None:
    daemon = workplace.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="0.5", WORKER_LEASE_SECONDS="6")
    id = workplace.add("nap", {"seconds": 60})
    workplace.wait_for_notes("start")
    with workplace.outage():
        status, seconds = stopped(daemon)
    assert status == 75
    assert seconds < 0.5 + 0.6 + 2 + SLACK_SECONDS / 2
    assert workplace.job(id).state == "running"


def test_an_idle_daemon_stops_during_an_outage(workplace: Workplace) -> None:
    daemon = workplace.daemon(**POLL_NEVER)
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
    workplace = private_workplace
    daemon = workplace.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="0.5", WORKER_LEASE_SECONDS="4")
    if jobs != "none":
        id = workplace.add("gated", {"gate": "gate"})
        workplace.wait_for_notes("start")
    postmaster = workplace.value("SELECT pg_read_file('postmaster.pid')").split()[0]
    with frozen([*workplace.backends(), *([int(postmaster)] if frozen_too else [])]):
        if jobs == "finished":
            workplace.open_gate()
            workplace.wait_for_notes("end")
        status, seconds = stopped(daemon)
    assert seconds < 0.5 + 0.4 + 2 + SLACK_SECONDS / 2
    left = "none" if jobs == "none" else workplace.job(id).state
    # A frozen claim may take jobs once it thaws.
    unsure = any("may still take jobs" in event["error"] for event in daemon.find("claim_failed"))
    assert status == (75 if left == "running" or unsure else 0)
    assert left in {"none": ("none",), "finished": ("running", "succeeded"), "running": ("running", "ready")}[jobs]


@pytest.mark.parametrize("claim_seconds", ["1", "15"])
def test_a_claim_that_may_still_take_jobs_is_told_by_the_status(private_workplace: Workplace, claim_seconds: str) -> None:
    """Nothing is held, but its server process stands still before its COMMIT; it may be waited for longer than a stop may take."""
    workplace = private_workplace
    workplace.db.execute(SLOW_CLAIMS)
    patient = {"WORKER_LEASE_SECONDS": "40", "WORKER_LEASE_MARGIN_SECONDS": "2"} if claim_seconds == "15" else {}
    daemon = workplace.daemon(**patient, WORKER_CLAIM_TIMEOUT_SECONDS=claim_seconds, WORKER_SHUTDOWN_GRACE_SECONDS="0.1")
    postmaster = workplace.value("SELECT pg_read_file('postmaster.pid')").split()[0]
    workplace.add("nap")
    wait_for(lambda: workplace.value(CLAIM_IN_FLIGHT))
    with frozen([*workplace.backends(), int(postmaster)]):
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
    wait_for(lambda: workplace.value(CLAIM_IN_FLIGHT))
    with frozen(workplace.backends("claim", "active")):
        assert stopped(daemon)[0] == 75
        assert workplace.value("SELECT extract(epoch FROM max(expires_at) - now())::float8 FROM processes") > LEASE_SECONDS
