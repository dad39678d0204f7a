"""Answers of COMMIT that are lost: what was applied counts once, what was not is made again, and neither is assumed."""

from __future__ import annotations

import psycopg
import pytest

from tests.servers import commits_wait_for_a_standby
from tests.waiting import wait_for
from tests.workplace import TEXTBOOK, Workplace, both_shapes, frozen


def lose_answer(workplace: Workplace, role: str, wait_event: str, *, by: str = "pg_terminate_backend") -> None:
    """End the session of this role, or its wait, in the middle of its COMMIT."""
    waiting = """
        SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s AND wait_event = %s
        AND (query ~ '^COMMIT' OR query ~ '(done|settled) AS')
    """
    (row,) = wait_for(lambda: workplace.ask(waiting, f"% {role}", wait_event))
    workplace.ask(f"SELECT {by}(%s)", row.pid)


def test_a_claim_that_was_committed_but_not_answered_is_given_back(private_workplace: Workplace) -> None:
    """Guarantee 9: as soon as it is over, long before its leases expire, attempt refunded."""
    workplace = private_workplace
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="30", WORKER_CLAIM_TIMEOUT_SECONDS="1")
    waiting = "SELECT pid FROM pg_stat_activity WHERE application_name ~ 'claim$' AND wait_event = 'SyncRep' AND query ~ 'due AS'"
    with commits_wait_for_a_standby(workplace.url):
        ids = workplace.add_many(3, "nap")
        wait_for(lambda: workplace.ask(waiting))
        failed_before = len(daemon.find("claim_failed"))  # what it said of its hunger may have had no answer either
        wait_for(lambda: len(daemon.find("claim_failed")) > failed_before)
    released = wait_for(lambda: daemon.find("job_released", reason="claim_lost"))
    assert {event["job_id"] for event in released} <= set(ids)
    for id in ids:
        assert workplace.wait_for_state(id, "succeeded").attempts == 1
    assert workplace.ledger() == dict.fromkeys(ids, 1)


DELETING = {"WORKER_RETENTION_SECONDS": "0"}
LOOKING_UP = "SELECT pid FROM pg_stat_activity WHERE state = 'active' AND query ~ 'proof AS'"


@pytest.mark.parametrize("shape", [{}, TEXTBOOK, DELETING], ids=["batches", "textbook", "deleting"])
@pytest.mark.parametrize(("kind", "role"), [("gated", "commit"), ("own", "pool"), ("gated_plain", "commit")])
def test_a_commit_that_was_applied_but_not_answered_counts_once(
    private_workplace: Workplace, shape: dict[str, str], kind: str, role: str
) -> None:
    """K1, guarantee 9: looked up, neither repeated nor forgotten."""
    workplace = private_workplace
    daemon = workplace.daemon(**shape, WORKER_LEASE_SECONDS="12", WORKER_QUERY_TIMEOUT_SECONDS="3")
    id = workplace.add(kind, {"gate": "gate"}, key="answered")
    workplace.wait_for_notes("start")
    with commits_wait_for_a_standby(workplace.url):
        workplace.open_gate()
        lose_answer(workplace, role, "SyncRep")
        wait_for(lambda: workplace.states()["running"] == 0)
        # It is looked up, and nobody may believe it yet: the primary alone has it.
        wait_for(lambda: workplace.ask(LOOKING_UP))
        assert daemon.find("job_succeeded", job_id=id) == []
    daemon.wait_for_event("job_succeeded", job_id=id)
    assert workplace.states() == ({} if shape is DELETING else {"succeeded": 1})
    assert len(workplace.notes("start")) == 1
    assert workplace.ledger() == ({} if kind == "gated_plain" else {id: 1})
    assert daemon.find("job_failed") == daemon.find("job_abandoned") == []
    workplace.healthy()


@pytest.mark.parametrize(("kind", "role"), [("gated", "commit"), ("own", "pool"), ("gated_plain", "commit")])
def test_a_commit_whose_wait_for_a_standby_was_cut_short_is_not_believed(
    private_workplace: Workplace, kind: str, role: str
) -> None:
    """Somebody cancels it: the server answers as always, with a warning, which the role does not care to see."""
    workplace = private_workplace
    workplace.db.execute("ALTER DATABASE postgres SET client_min_messages = 'error'")
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="12", WORKER_QUERY_TIMEOUT_SECONDS="3")
    id = workplace.add(kind, {"gate": "gate"}, key="cut-short")
    workplace.wait_for_notes("start")
    with commits_wait_for_a_standby(workplace.url):
        workplace.open_gate()
        lose_answer(workplace, role, "SyncRep", by="pg_cancel_backend")
        wait_for(lambda: workplace.states()["running"] == 0)
        # It is looked up, and so is nobody's success before the standby is there.
        wait_for(lambda: workplace.ask(LOOKING_UP))
        assert daemon.find("job_succeeded", job_id=id) == []
    daemon.wait_for_event("job_succeeded", job_id=id)
    assert len(workplace.notes("start")) == 1
    assert daemon.find("job_failed") == daemon.find("job_abandoned") == []
    workplace.healthy()


@both_shapes
def test_a_failure_that_was_written_but_not_answered_counts_once(private_workplace: Workplace, shape: dict[str, str]) -> None:
    """K1 on the other statement that ends an attempt."""
    workplace = private_workplace
    long = {"WORKER_LEASE_SECONDS": "12", "WORKER_QUERY_TIMEOUT_SECONDS": "3", "WORKER_BACKOFF_BASE_SECONDS": "60"}
    daemon = workplace.daemon(**shape, **long)
    id = workplace.add("fail", {"gate": "gate"})
    workplace.wait_for_notes("start")
    with commits_wait_for_a_standby(workplace.url):
        workplace.open_gate()
        lose_answer(workplace, "commit", "SyncRep")
    daemon.wait_for_event("job_failed", job_id=id)
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("ready", 1)
    assert len(workplace.failures(id)) == len(daemon.find("job_failed")) == 1
    assert daemon.find("job_abandoned") == []


@both_shapes
@pytest.mark.parametrize(("kind", "role", "attempts"), [("deferred", "commit", 1), ("own_deferred", "pool", 2)])
def test_a_commit_that_was_rolled_back_and_not_answered_is_made_again(
    workplace: Workplace, shape: dict[str, str], kind: str, role: str, attempts: int
) -> None:
    """K2: the same error at the client, the opposite truth. Recorded effects are written again without running the handler; a
    transaction of the handler's own is its attempt's failure."""
    workplace.db.execute("ALTER FUNCTION wait_for_gate() SET lock_timeout = 0")
    daemon = workplace.daemon(**shape, WORKER_LEASE_SECONDS="60", WORKER_QUERY_TIMEOUT_SECONDS="20")
    with psycopg.connect(workplace.url, autocommit=True) as gatekeeper:
        gatekeeper.execute("SELECT pg_advisory_lock(4711)")
        id = workplace.add(kind, key="rolled-back")
        lose_answer(workplace, role, "advisory")
        gatekeeper.execute("SELECT pg_advisory_unlock(4711)")
    row = workplace.wait_for_state(id, "succeeded")
    assert row.attempts == len(workplace.notes("start")) == attempts
    assert workplace.ledger("deferred_ledger") == {id: 1}
    daemon.wait_for_event("job_succeeded", job_id=id)


def test_a_frozen_commit_is_looked_up_when_it_has_ended(private_workplace: Workplace) -> None:
    """K4 on the committer: its session may still commit, so nothing is decided before."""
    workplace = private_workplace
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="12")
    workplace.healthy()
    id = workplace.add("gated", {"gate": "gate"}, key="frozen")
    workplace.wait_for_notes("start", "frozen")
    with frozen(workplace.backends("commit")):
        workplace.open_gate()
        # As soon as a statement takes too long, on a new connection.
        workplace.wait_for_state(id, "succeeded")
    daemon.wait_for_event("job_succeeded", job_id=id)
    assert workplace.job(id).attempts == 1
    assert workplace.ledger()[id] == 1
    workplace.healthy()
