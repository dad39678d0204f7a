"""Leases of jobs, as processes live them: held and renewed whatever a handler does."""

from __future__ import annotations

import itertools
import statistics
import time

import pytest
from psycopg import sql

from tests.waiting import wait_for, wait_while
from tests.workplace import LEASE_SECONDS, TEXTBOOK, Workplace, both_shapes

# Counts what the keeper sends: calls, and the leases in each.
COUNT_RENEWALS = """
CREATE TABLE renewals (at timestamptz NOT NULL DEFAULT clock_timestamp(), leases int NOT NULL);
CREATE FUNCTION count_renewals() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('application_name') LIKE '% leases' THEN
        INSERT INTO renewals (leases) SELECT count(*) FROM changed;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER count_renewals AFTER UPDATE ON jobs REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION count_renewals();
"""


def test_the_time_limits_of_every_session_stay_below_the_lease(workplace: Workplace) -> None:
    """Whatever the role's defaults are (K8): the server ends what this process cannot."""
    name = sql.Identifier(workplace.db.info.dbname)
    for setting in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
        workplace.db.execute(sql.SQL("ALTER DATABASE {} SET {} = 0").format(name, sql.Identifier(setting)))
    workplace.daemon(WORKER_QUERY_TIMEOUT_SECONDS="60")
    id = workplace.add("limits")
    T = LEASE_SECONDS * 1000
    assert workplace.wait_for_state(id, "succeeded").result == {
        "statement_timeout": T / 2,
        "lock_timeout": int(T / 6),
        "idle_in_transaction_session_timeout": int(T / 3),
    }


@pytest.mark.parametrize(
    ("kind", "shape"), [("block", {}), ("spin", {}), ("block", TEXTBOOK)], ids=["block", "spin", "block-textbook"]
)
def test_a_handler_that_blocks_the_loop_costs_no_lease(workplace: Workplace, shape: dict[str, str], kind: str) -> None:
    """C1: two lease lengths long, and a second daemon stands by for whatever expires."""
    lease_seconds = 5.0
    daemon = workplace.daemon(**shape, WORKERS="6", WORKER_LEASE_SECONDS=f"{lease_seconds:g}")
    neighbours = [workplace.add("nap", {"seconds": 0.3}) for _ in range(5)]
    wait_for(lambda: len(workplace.notes("start")) == 5)
    blocking = workplace.add(kind, {"seconds": 2 * lease_seconds + 1})
    workplace.wait_for_notes("start", workplace.job(blocking).idempotency_key)
    other = workplace.daemon(**shape)
    workplace.wait_for_state(blocking, "succeeded", timeout_seconds=40)
    workplace.wait_until_all("succeeded")
    assert {workplace.job(id).attempts for id in (blocking, *neighbours)} == {1}
    assert len(workplace.notes("start")) == 6
    (blocked,) = [event for event in daemon.find("loop_blocked") if f"in {kind}" in event["stack"]]
    assert kind in blocked["kind"]
    assert other.find("lease_expired") == daemon.find("lease_expired") == []
    workplace.healthy()


def test_a_commit_does_not_wait_for_a_blocked_loop(workplace: Workplace) -> None:
    """What has finished is written by the rights thread while a handler blocks the other one."""
    workplace.daemon(WORKER_LEASE_SECONDS="20")
    first = workplace.add("gated", {"gate": "gate"})
    workplace.wait_for_notes("start")
    with workplace.lock(first):  # its completion has to wait: the loop is blocked by then
        workplace.open_gate()
        workplace.wait_for_notes("end")
        blocking = workplace.add("block", {"seconds": 8})
        workplace.wait_for_notes("start", workplace.job(blocking).idempotency_key)
    written_at = workplace.wait_for_state(first, "succeeded").completed_at
    free_at = workplace.wait_for_state(blocking, "succeeded").completed_at
    assert (free_at - written_at).total_seconds() > 1, "it was written once the loop was free again"


@both_shapes
def test_a_healthy_job_longer_than_every_limit_is_never_rescued(workplace: Workplace, shape: dict[str, str]) -> None:
    """C8: with a second daemon that would."""
    daemons = [workplace.daemon(**shape, WORKER_LEASE_SECONDS="4") for _ in range(2)]
    id = workplace.add("nap", {"seconds": 9})
    row = workplace.wait_for_state(id, "succeeded", timeout_seconds=30)
    assert row.attempts == 1
    assert [event for daemon in daemons for event in daemon.find("lease_expired")] == []


@both_shapes
def test_somebody_elses_row_lock_costs_that_job_alone(workplace: Workplace, shape: dict[str, str]) -> None:
    """C13, C15: the other renewals go on, at most one of them at a time; the locked job stops by its own clock."""
    lease_seconds = 6.0
    daemon = workplace.daemon(**shape, WORKER_LEASE_SECONDS=f"{lease_seconds:g}")
    workplace.db.execute(COUNT_RENEWALS)
    began = time.monotonic()
    locked = workplace.add("checking", key="locked")
    others = [workplace.add("nap", {"seconds": 2 * lease_seconds}) for _ in range(3)]
    workplace.wait_for_notes("start", count=4)
    with workplace.lock(locked):
        workplace.wait_for_notes("told:lease_untrusted", "locked")
        daemon.wait_for_event("job_abandoned", job_id=locked, reason="lease_untrusted")
        wait_while(lambda: len(workplace.backends("leases", "active")) <= 1, lease_seconds / 3)
    for id in others:
        row = workplace.wait_for_state(id, "succeeded", timeout_seconds=30)
        assert row.attempts == 1
    # Free again, it is reaped and runs.
    workplace.wait_for_notes("start", "locked", count=2)
    # While one row is locked the others are renewed up to five times as often, not in a flood.
    renewals = workplace.value("SELECT count(*) FROM renewals")
    assert renewals <= 5 * (time.monotonic() - began) / (lease_seconds / 3)


def test_one_failed_renewal_is_followed_by_the_next(workplace: Workplace) -> None:
    """C14: a renewal that lost its connection kills neither the job nor the loop."""
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="12", WORKER_RENEW_SECONDS="2")
    id = workplace.add("gated", {"gate": "gate"})
    workplace.wait_for_notes("start")
    for _ in range(4):
        before = workplace.job(id).lease_until
        wait_for(lambda: workplace.terminate("leases") == 1)
        wait_for(lambda before=before: workplace.job(id).lease_until > before)  # type: ignore[misc]
    workplace.open_gate()
    row = workplace.wait_for_state(id, "succeeded")
    assert row.attempts == 1
    assert daemon.find("job_abandoned") == []


def test_a_time_out_stops_an_async_handler(workplace: Workplace) -> None:
    """C16: nothing of it happens afterwards."""
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="30")
    id = workplace.add("slow", {"seconds": 60}, key="slow", max_attempts=1)
    row = workplace.wait_for_state(id, "dead")
    assert row.last_error == "TimeoutError: not done after 0.5 s"
    assert [failure.outcome for failure in workplace.failures(id)] == ["timeout"]
    daemon.wait_for_event("job_dead", job_id=id, error_type="TimeoutError")
    assert daemon.stop() == 0  # 75, if it had gone on
    assert [note.word for note in workplace.notes()] == ["start", "told:timeout"]
    assert workplace.ledger() == {}


def test_a_thread_past_its_time_out_keeps_its_slot_and_commits_nothing(workplace: Workplace) -> None:
    """C16: a thread cannot be stopped. Its outcome is decided without it, its slot is taken until it really ends."""
    workplace.daemon(WORKERS="1", WORKER_LEASE_SECONDS="30")
    id = workplace.add("slow_thread", {"seconds": 6}, key="slow", max_attempts=2)
    workplace.wait_for_state(id, "ready")
    assert workplace.notes("end", "slow") == []
    next = workplace.add("nap", key="next")
    workplace.wait_for_state(id, "dead")
    workplace.wait_for_state(next, "succeeded")
    workplace.wait_for_notes("end", "slow", count=2, timeout_seconds=20)
    notes = [note for note in workplace.notes() if note.key == "slow"]
    assert [(note.word, note.attempt) for note in notes] == [("start", 1), ("end", 1), ("start", 2), ("end", 2)]
    runs = [(start.at_seconds, end.at_seconds) for start, end in zip(notes[::2], notes[1::2], strict=True)]
    began = workplace.notes("start", "next")[0].at_seconds
    assert not any(start < began < end for start, end in runs)
    assert [failure.outcome for failure in workplace.failures(id)] == ["timeout", "timeout"]
    assert workplace.ledger() == {next: 1}


def test_a_thousand_sleeping_jobs_are_renewed_by_one_statement_an_interval(workplace: Workplace) -> None:
    lease_seconds = 4.0
    workplace.daemon(WORKERS="1000", WORKER_LOG_LEVEL="warning", ready=False, WORKER_LEASE_SECONDS=f"{lease_seconds:g}")
    wait_for(lambda: workplace.backends("leases"), 20)
    ids = workplace.add_many(1000, "nap", {"seconds": 3 * lease_seconds})
    wait_for(lambda: workplace.states() == {"running": 1000})
    workplace.db.execute(COUNT_RENEWALS)
    workplace.wait_until_all("succeeded", 40)
    assert workplace.value("SELECT max(attempts) FROM jobs") == 1
    assert workplace.ledger() == dict.fromkeys(ids, 1)
    full = workplace.ask("SELECT at FROM renewals WHERE leases = 1000 ORDER BY at")
    assert len(full) >= 5
    gaps = [(after.at - before.at).total_seconds() for before, after in itertools.pairwise(full)]
    assert 0.8 * lease_seconds / 3 < statistics.median(gaps) < 1.5 * lease_seconds / 3, gaps


def test_concurrent_workers_never_hold_the_same_live_lease(workplace: Workplace) -> None:
    """Guarantee 1, and 13: three daemons in both shapes fight for 600 jobs; a trigger watches every claim."""
    workplace.db.execute("""
        CREATE TABLE claims (id bigint, fence bigint, was text, until timestamptz, at timestamptz DEFAULT clock_timestamp());
        CREATE FUNCTION watch_claims() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO claims VALUES (NEW.id, NEW.fence, OLD.state, OLD.lease_until);
            RETURN NULL;
        END $$;
        CREATE TRIGGER watch_claims AFTER UPDATE ON jobs FOR EACH ROW
            WHEN (NEW.fence <> OLD.fence) EXECUTE FUNCTION watch_claims();
    """)
    ids = workplace.add_many(600, "gated", {"gate": "gate"})
    for shape in ({}, {}, TEXTBOOK):
        workplace.daemon(**shape, WORKERS="8", WORKER_LEASE_SECONDS="12", ready=False)
    workplace.wait_for_notes("start", count=3 * 8, timeout_seconds=30)  # the fight begins with all of them
    workplace.open_gate()
    workplace.wait_until_all("succeeded", 40)
    assert workplace.ledger() == dict.fromkeys(ids, 1)
    assert workplace.ask("SELECT * FROM claims WHERE was <> 'ready' OR until IS NOT NULL") == []
    assert workplace.value("SELECT count(DISTINCT fence) = count(*) AND count(*) = 600 FROM claims")
    assert len({note.pid for note in workplace.notes("start")}) == 3
