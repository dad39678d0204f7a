"""The database goes away, comes back, answers late, or loses its connections. It costs time, never a job."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.waiting import wait_for
from tests.workplace import Workplace, both_shapes


@both_shapes
def test_a_daemon_outlives_an_outage(workplace: Workplace, shape: dict[str, str]) -> None:
    """A2, longer than a lease: it stops what it runs in time, and works again when the database is back."""
    daemon = workplace.daemon(**shape, WORKER_LEASE_SECONDS="8", WORKER_QUERY_TIMEOUT_SECONDS="3")
    running = [workplace.add("gated", {"gate": "gate"}) for _ in range(4)]
    workplace.wait_for_notes("start", count=4)
    waiting = workplace.add_many(20, "nap")
    with workplace.outage():
        left_seconds = workplace.value(
            "SELECT extract(epoch FROM min(lease_until) - clock_timestamp())::float8 FROM jobs WHERE state = 'running'"
        )
        answered_at = time.monotonic()
        # Guarantee 5: the handlers are stopped before their leases can be taken.
        told = workplace.wait_for_notes("told:lease_untrusted", count=4)
        assert max(note.at_seconds for note in told) < answered_at + left_seconds
        workplace.wait_until_leases_are_over()
    workplace.open_gate()
    workplace.wait_until_all("succeeded")
    assert workplace.ledger() == dict.fromkeys([*running, *waiting], 1)
    assert {workplace.job(id).attempts for id in running} == {2}
    daemon.wait_for_event("database_restored")
    assert len(daemon.find("database_lost")) == 1
    # A few lines for each loop, not one for each try.
    assert sum(event["level"] == "warning" for event in daemon.events) < 25
    assert daemon.process.poll() is None
    workplace.healthy()


def test_an_outage_shorter_than_the_trust_costs_nothing(workplace: Workplace) -> None:
    """Guarantee 12: what has finished meanwhile is kept, renewed and written afterwards."""
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="12")
    running = workplace.add("nap", {"seconds": 4})
    finishing = [workplace.add("gated", {"gate": "gate"}) for _ in range(3)]
    workplace.wait_for_notes("start", count=4)
    with workplace.outage():
        workplace.open_gate()
        workplace.wait_for_notes("end", count=3)
        daemon.wait_for_event("completion_deferred")
    workplace.wait_until_all("succeeded")
    ids = [running, *finishing]
    assert workplace.ledger() == dict.fromkeys(ids, 1)
    assert {workplace.job(id).attempts for id in ids} == {1}


@both_shapes
def test_a_crash_of_the_server_loses_no_job(private_workplace: Workplace, shape: dict[str, str]) -> None:
    """K9: all its processes end at once, and it recovers from its log."""
    workplace = private_workplace
    daemon = workplace.daemon(**shape)
    workplace.add_many(200, "nap", {"seconds": 0.02})
    workplace.wait_for_notes("end", count=40, timeout_seconds=20)
    os.kill(wait_for(lambda: workplace.backends("claim"))[0], signal.SIGKILL)
    workplace.reconnect()
    workplace.wait_until_all("succeeded", 30)
    assert set(workplace.ledger().values()) == {1}
    assert len(workplace.ledger()) == 200
    assert daemon.process.poll() is None


@pytest.mark.parametrize("role", ["claim", "commit", "leases", "reaper", "listen"])
def test_each_loop_replaces_its_own_dead_connection(workplace: Workplace, role: str) -> None:
    """A3, guarantee 11: the others keep theirs."""
    # A statement that takes a little longer costs no connection, and a renewal does not take long to come.
    workplace.daemon(WORKER_LEASE_SECONDS="30", WORKER_RENEW_SECONDS="2", WORKER_QUERY_TIMEOUT_SECONDS="10")
    workplace.healthy()
    wait_for(lambda: len(workplace.backends()) == 5)
    others = {name: workplace.backends(name) for name in ("claim", "commit", "leases", "reaper", "listen") if name != role}
    (dead,) = workplace.backends(role)
    assert workplace.terminate(role) == 1
    workplace.healthy()
    wait_for(lambda: [pid for pid in workplace.backends(role) if pid != dead])
    assert {name: workplace.backends(name) for name in others} == others
    # It works, and not only is there: a job whose process died is reaped, a long one is renewed.
    workplace.db.execute("""
        INSERT INTO jobs (kind, payload, state, attempts, lease_owner, lease_until)
        VALUES ('nap', '{}', 'running', 1, 'nobody', now() + interval '100 milliseconds')
    """)
    long = workplace.add("gated", {"gate": "gate"})
    until = workplace.wait_for_state(long, "running").lease_until
    wait_for(lambda: workplace.job(long).lease_until > until)
    workplace.open_gate()
    assert workplace.wait_for_state(long, "succeeded").attempts == 1
    workplace.wait_until_all("succeeded")


# --- the shared connections ----------------------------------------------------------------------------------------------------


def test_handlers_that_keep_every_pooled_connection_starve_no_renewal(workplace: Workplace) -> None:
    """A13: the smallest pool, handlers that sit on its connections for two leases in turn; the loops have their own."""
    workplace.daemon(WORKERS="8", WORKER_POOL_SIZE="2", WORKER_QUERY_TIMEOUT_SECONDS="20", WORKER_LEASE_SECONDS="5")
    ids = [workplace.add("reading", {"seconds": 2.5}) for _ in range(8)]
    workplace.wait_for_notes("start", count=8)
    other = workplace.daemon()
    workplace.wait_until_all("succeeded", 40)
    assert {workplace.job(id).attempts for id in ids} == {1}
    assert workplace.ledger() == dict.fromkeys(ids, 1)
    assert other.find("lease_expired") == []


def test_no_pooled_connection_is_lost_by_cancelling_who_waits_for_it(workplace: Workplace) -> None:
    """A12: sixty handlers cancelled while they hold one or wait for one; the pool is whole afterwards."""
    workplace.daemon(WORKERS="20", WORKER_POOL_SIZE="4", WORKER_QUERY_TIMEOUT_SECONDS="20", WORKER_LEASE_SECONDS="30")
    for round in range(3):
        ids = [workplace.add("reading", {"seconds": 30}) for _ in range(20)]
        workplace.wait_for_notes("start", count=20 * (round + 1))
        for id in ids:
            workplace.ask("SELECT cancel_job(%s)", id)
        workplace.wait_for_notes("told:cancelled", count=20 * (round + 1))
    ids = [workplace.add("reading", {"seconds": 4}) for _ in range(4)]
    for id in ids:
        workplace.wait_for_state(id, "succeeded")
    starts = [note.at_seconds for note in workplace.notes("start")[-4:]]
    ends = [note.at_seconds for note in workplace.notes("end")[-4:]]
    assert max(starts) < min(ends)
    wait_for(lambda: len(workplace.backends("pool")) <= 4)
