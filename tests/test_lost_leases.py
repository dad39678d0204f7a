"""Leases that processes lose, frozen, killed or unaware of it: they write nothing any more, and another one does the job."""

from __future__ import annotations

import os
import signal

import pytest

from tests.waiting import wait_for
from tests.workplace import Workplace, both_shapes, frozen

LONG = {"WORKER_LEASE_SECONDS": "60"}
"""So long that no lease of this daemon is lost by itself, and no renewal tells it of a loss meanwhile."""


@both_shapes
def test_a_frozen_worker_can_write_nothing_when_it_wakes(workplace: Workplace, shape: dict[str, str]) -> None:
    """C2, guarantee 3: its effect and its completion roll back together, and it goes on serving."""
    zombie = workplace.daemon(**shape)
    id = workplace.add("gated", {"gate": "gate"}, key="contested")
    workplace.wait_for_notes("start")
    with frozen([zombie.pid]):
        other = workplace.daemon(**shape, **LONG)
        # Its lease and its presence have lapsed: the other one may start.
        workplace.wait_for_notes("start", count=2)
        workplace.open_gate()
        done = workplace.wait_for_state(id, "succeeded")
    abandoned = zombie.wait_for_event("job_abandoned", job_id=id)
    assert abandoned["reason"] in ("lease_lost", "lease_untrusted")
    assert other.stop() == 0
    assert zombie.process.poll() is None
    assert len(zombie.find("job_abandoned")) == 1
    first, second = workplace.notes("start", "contested")
    assert first.fence < second.fence == done.fence == done.result["fence"]
    assert workplace.ledger() == {id: 1}
    assert workplace.ask("SELECT job_id, fence FROM job_effects") == [(id, second.fence)]
    workplace.healthy()


@both_shapes
def test_a_zombie_inside_its_own_transaction_can_write_nothing(workplace: Workplace, shape: dict[str, str]) -> None:
    zombie = workplace.daemon(**shape)
    id = workplace.add("own", {"gate": "gate"}, key="contested")
    workplace.wait_for_notes("start")
    with frozen([zombie.pid]):
        workplace.daemon(**shape, **LONG)
        workplace.wait_for_notes("start", count=2)
        workplace.open_gate()
        workplace.wait_for_state(id, "succeeded")
    zombie.wait_for_event("job_abandoned", job_id=id)
    assert workplace.ledger() == {id: 1}
    workplace.healthy()


@both_shapes
@pytest.mark.parametrize("kind", ["gated", "own", "fail"])
def test_a_worker_that_has_not_noticed_its_loss_can_write_nothing(workplace: Workplace, shape: dict[str, str], kind: str) -> None:
    """Guarantee 2: its trust has long to run, and its handler ends first. The fence alone refuses it; the row stays as it is."""
    first = workplace.daemon(**shape, WORKERS="1", **LONG)
    id = workplace.add(kind, {"gate": "gate-{attempt}"}, key="contested")
    workplace.wait_for_notes("start")
    workplace.db.execute("UPDATE jobs SET lease_until = now() - interval '1 second'")
    second = workplace.daemon(**shape, **LONG)
    workplace.wait_for_notes("start", count=2)
    taken = workplace.job(id)
    workplace.open_gate("gate-1")
    first.wait_for_event("job_abandoned", job_id=id, reason="lease_lost")
    row = workplace.job(id)
    assert (row.state, row.fence, row.lease_owner, row.attempts) == ("running", taken.fence, taken.lease_owner, 2)
    assert workplace.ledger() == {}
    assert [failure.outcome for failure in workplace.failures(id)] == ["lease_lost"]
    workplace.open_gate("gate-2")
    if kind == "fail":
        second.wait_for_event("job_failed", job_id=id, attempt=2)
    else:
        workplace.wait_for_state(id, "succeeded")
        assert workplace.ask("SELECT job_id, fence FROM ledger") == [(id, taken.fence)]


def test_a_transaction_left_open_by_a_frozen_worker_ends_before_its_job_is_lost(workplace: Workplace) -> None:
    """The row lock would keep the reaper away for ever; the server ends the session."""
    zombie = workplace.daemon(WORKER_LEASE_SECONDS="6")
    id = workplace.add("own", {"seconds": 1.5})
    workplace.wait_for_notes("start")
    wait_for(lambda: workplace.backends("pool", "idle in transaction"))
    with frozen([zombie.pid]):
        workplace.daemon(**LONG)
        workplace.wait_for_state(id, "succeeded", timeout_seconds=40)
    zombie.wait_for_event("job_abandoned", job_id=id)
    workplace.healthy()


@both_shapes
@pytest.mark.parametrize("loss", ["expired", "taken"])
def test_a_handler_is_told_to_stop_when_its_lease_is_lost(workplace: Workplace, shape: dict[str, str], loss: str) -> None:
    """Guarantee 5: a renewal says that the lease is gone."""
    daemon = workplace.daemon(**shape, WORKER_REAP_SECONDS="300", WORKER_LEASE_SECONDS="6")
    id = workplace.add("checking")
    workplace.wait_for_notes("start")
    if loss == "expired":
        workplace.db.execute("UPDATE jobs SET lease_until = now() - interval '1 second'")
    else:
        workplace.db.execute("UPDATE jobs SET fence = nextval('fence_seq'), lease_owner = 'somebody else'")
    workplace.wait_for_notes("told:lease_lost")  # not "lease_untrusted", as its own clock would tell it
    daemon.wait_for_event("job_abandoned", job_id=id, reason="lease_lost")
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("running", 1)
    workplace.healthy()


@pytest.mark.parametrize("kind", ["gated", "own"])
def test_a_late_completion_counts_until_the_reaper_has_moved_the_row(workplace: Workplace, kind: str) -> None:
    """C4, guarantee 2: owner and fence decide, not the time."""
    workplace.daemon(WORKER_REAP_SECONDS="300", **LONG)
    id = workplace.add(kind, {"gate": "gate"})
    workplace.wait_for_notes("start")
    workplace.db.execute("UPDATE jobs SET lease_until = now() - interval '1 hour'")
    workplace.open_gate()
    workplace.wait_for_state(id, "succeeded")
    assert workplace.ledger() == {id: 1}


def test_a_late_failure_counts_until_the_reaper_has_moved_the_row(workplace: Workplace) -> None:
    daemon = workplace.daemon(WORKER_REAP_SECONDS="300", **LONG)
    id = workplace.add("fail", {"gate": "gate"}, max_attempts=1)
    workplace.wait_for_notes("start")
    workplace.db.execute("UPDATE jobs SET lease_until = now() - interval '1 hour'")
    workplace.open_gate()
    workplace.wait_for_state(id, "dead")
    daemon.wait_for_event("job_dead", job_id=id)


def test_a_late_snooze_counts_until_the_reaper_has_moved_the_row(workplace: Workplace) -> None:
    workplace.daemon(WORKER_REAP_SECONDS="300", **LONG)
    id = workplace.add("snooze", {"gate": "gate"}, max_attempts=1)
    workplace.wait_for_notes("start")
    workplace.db.execute("UPDATE jobs SET lease_until = now() - interval '1 hour'")
    workplace.open_gate()
    assert workplace.wait_for_state(id, "ready").attempts == 0


@both_shapes
def test_a_late_release_counts_until_the_reaper_has_moved_the_row(workplace: Workplace, shape: dict[str, str]) -> None:
    """No renewal is due before the stop, so nobody has noticed that the lease is over."""
    daemon = workplace.daemon(**shape, WORKER_REAP_SECONDS="300", **LONG, WORKER_SHUTDOWN_GRACE_SECONDS="0")
    id = workplace.add("gated", {"gate": "never"}, max_attempts=1)
    workplace.wait_for_notes("start")
    workplace.db.execute("UPDATE jobs SET lease_until = now() - interval '1 hour'")
    assert daemon.stop() == 0
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("ready", 0)
    assert daemon.find("job_released", job_id=id, reason="shutdown")


@both_shapes
def test_a_crashed_workers_job_becomes_claimable_after_expiry(workplace: Workplace, shape: dict[str, str]) -> None:
    """And C11: while every slot of the others is taken, since the reaper is no job."""
    crashing = workplace.daemon(**shape)
    id = workplace.add("gated", {"gate": "gate"}, key="orphan")
    workplace.wait_for_notes("start", "orphan")
    crashing.kill()
    lease_until = workplace.job(id).lease_until
    for _ in range(2):
        workplace.add("nap", {"seconds": 60})
    rescuer = workplace.daemon(**shape, **LONG, WORKERS="2")
    workplace.wait_for_notes("start", count=3)
    row = workplace.wait_for_state(id, "ready")
    assert workplace.value("SELECT clock_timestamp()") >= lease_until
    assert (row.attempts, row.crashes, row.lease_owner, row.lease_until) == (1, 1, None, None)
    expired = rescuer.wait_for_event("lease_expired", job_id=id)
    assert expired["outcome"] == "crashed"
    assert [failure.outcome for failure in workplace.failures(id)] == ["crashed"]
    workplace.open_gate()
    workplace.daemon(**shape, **LONG)
    row = workplace.wait_for_state(id, "succeeded")
    assert row.attempts == 2
    assert row.fence > workplace.notes("start", "orphan")[0].fence


def test_a_worker_frozen_at_every_run_ends_its_job_dead(workplace: Workplace) -> None:
    """C9: rescue gives no attempt back."""
    id = workplace.add("gated", {"gate": "never"}, max_attempts=3)
    for run in range(1, 4):
        daemon = workplace.daemon(WORKER_LEASE_SECONDS="1")
        workplace.wait_for_notes("start", count=run)
        os.kill(daemon.pid, signal.SIGSTOP)
        reaper = workplace.daemon(WORKER_LEASE_SECONDS="1", WORKER_QUEUES="another")
        workplace.wait_for_state(id, "ready" if run < 3 else "dead")
        reaper.kill()
        daemon.kill()
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("dead", 3)
    assert row.last_error.startswith("worker lost: ")
    assert len(workplace.failures(id)) == 3


@pytest.mark.parametrize("gone", ["DELETE FROM processes", "TRUNCATE processes"])
def test_a_job_is_recovered_by_its_own_lease_alone(workplace: Workplace, gone: str) -> None:
    """C10: whatever happens to the registry of processes."""
    daemon = workplace.daemon()
    id = workplace.add("gated", {"gate": "gate"})
    workplace.wait_for_notes("start")
    workplace.db.execute(gone)
    # A living process comes back into it.
    wait_for(lambda: workplace.value("SELECT count(*) FROM processes"))
    workplace.db.execute(gone)
    daemon.kill()
    workplace.open_gate()
    workplace.daemon(**LONG)
    row = workplace.wait_for_state(id, "succeeded")
    assert row.attempts == 2
