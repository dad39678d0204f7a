"""Leases, as processes live them: renewals, loss, fencing, the reaper. Leases here are 2 s, of a real server and real daemons."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from datetime import datetime

import pytest
from psycopg import sql

from tests.waiting import wait_for
from tests.workplace import LEASE_SECONDS, TEXTBOOK, Workplace, both_shapes, frozen

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
    """C1: three lease lengths long, and a second daemon stands by for whatever expires."""
    daemon = workplace.daemon(**shape, WORKERS="6")
    neighbours = [workplace.add("nap", {"seconds": 0.3}) for _ in range(5)]
    wait_for(lambda: len(workplace.notes("start")) == 5)
    blocking = workplace.add(kind, {"seconds": 3 * LEASE_SECONDS})
    workplace.wait_for_notes("start", workplace.job(blocking).idempotency_key)
    other = workplace.daemon(**shape)
    workplace.wait_for_state(blocking, "succeeded")
    workplace.wait_until_all("succeeded")
    assert {workplace.job(id).attempts for id in (blocking, *neighbours)} == {1}
    assert len(workplace.notes("start")) == 6
    blocked = daemon.find("loop_blocked")
    assert len(blocked) == 1
    assert kind in blocked[0]["kind"]
    assert f"in {kind}" in blocked[0]["stack"]
    assert other.find("lease_expired") == daemon.find("lease_expired") == []
    workplace.healthy()


def test_a_commit_does_not_wait_for_a_blocked_loop(workplace: Workplace) -> None:
    """What has finished is written by the rights thread while a handler blocks the other one."""
    workplace.daemon()
    first = workplace.add("gated", {"gate": "gate"})
    workplace.wait_for_notes("start")
    with workplace.lock(first):  # its completion has to wait: the loop is blocked by then
        workplace.open_gate()
        workplace.wait_for_notes("end")
        blocking = workplace.add("block", {"seconds": 5})
        workplace.wait_for_notes("start", workplace.job(blocking).idempotency_key)
    workplace.wait_for_state(first, "succeeded")
    assert workplace.job(blocking).state == "running"
    workplace.wait_for_state(blocking, "succeeded")


@both_shapes
def test_a_frozen_worker_can_write_nothing_when_it_wakes(workplace: Workplace, shape: dict[str, str]) -> None:
    """C2, guarantee 3: its effect and its completion roll back together, and it goes on serving."""
    zombie = workplace.daemon(**shape)
    id = workplace.add("gated", {"gate": "gate"}, key="contested")
    workplace.wait_for_notes("start")
    with frozen([zombie.pid]):
        other = workplace.daemon(**shape)
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
        workplace.daemon(**shape)
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
    first = workplace.daemon(**shape, WORKERS="1", WORKER_LEASE_SECONDS="30")
    id = workplace.add(kind, {"gate": "gate-{attempt}"}, key="contested")
    workplace.wait_for_notes("start")
    workplace.db.execute("UPDATE jobs SET lease_until = now() - interval '1 second'")
    second = workplace.daemon(**shape)
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
    zombie = workplace.daemon()
    id = workplace.add("own", {"seconds": 0.4})
    workplace.wait_for_notes("start")
    wait_for(lambda: workplace.backends("pool", "idle in transaction"))
    with frozen([zombie.pid]):
        workplace.daemon()
        workplace.wait_for_state(id, "succeeded", timeout_seconds=15 * LEASE_SECONDS)
    zombie.wait_for_event("job_abandoned", job_id=id)
    workplace.healthy()


@both_shapes
@pytest.mark.parametrize("loss", ["expired", "taken"])
def test_a_handler_is_told_to_stop_when_its_lease_is_lost(workplace: Workplace, shape: dict[str, str], loss: str) -> None:
    """Guarantee 5: a renewal says that the lease is gone."""
    daemon = workplace.daemon(**shape, WORKER_REAP_SECONDS="300")
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
    workplace.daemon(WORKER_REAP_SECONDS="300", WORKER_LEASE_SECONDS="6")
    id = workplace.add(kind, {"gate": "gate"})
    workplace.wait_for_notes("start")
    workplace.db.execute("UPDATE jobs SET lease_until = now() - interval '1 hour'")
    workplace.open_gate()
    workplace.wait_for_state(id, "succeeded")
    assert workplace.ledger() == {id: 1}


def test_a_late_failure_counts_until_the_reaper_has_moved_the_row(workplace: Workplace) -> None:
    daemon = workplace.daemon(WORKER_REAP_SECONDS="300", WORKER_LEASE_SECONDS="6")
    id = workplace.add("fail", {"gate": "gate"}, max_attempts=1)
    workplace.wait_for_notes("start")
    workplace.db.execute("UPDATE jobs SET lease_until = now() - interval '1 hour'")
    workplace.open_gate()
    workplace.wait_for_state(id, "dead")
    daemon.wait_for_event("job_dead", job_id=id)


def test_a_late_snooze_counts_until_the_reaper_has_moved_the_row(workplace: Workplace) -> None:
    workplace.daemon(WORKER_REAP_SECONDS="300", WORKER_LEASE_SECONDS="30")
    id = workplace.add("snooze", {"gate": "gate"}, max_attempts=1)
    workplace.wait_for_notes("start")
    workplace.db.execute("UPDATE jobs SET lease_until = now() - interval '1 hour'")
    workplace.open_gate()
    assert workplace.wait_for_state(id, "ready").attempts == 0


@both_shapes
def test_a_late_release_counts_until_the_reaper_has_moved_the_row(workplace: Workplace, shape: dict[str, str]) -> None:
    """No renewal is due before the stop, so nobody has noticed that the lease is over."""
    daemon = workplace.daemon(**shape, WORKER_REAP_SECONDS="300", WORKER_LEASE_SECONDS="60", WORKER_SHUTDOWN_GRACE_SECONDS="0")
    id = workplace.add("gated", {"gate": "never"}, max_attempts=1)
    workplace.wait_for_notes("start")
    workplace.db.execute("UPDATE jobs SET lease_until = now() - interval '1 hour'")
    assert daemon.stop() == 0
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("ready", 0)
    assert daemon.find("job_released", job_id=id, reason="shutdown")


@both_shapes
def test_a_healthy_job_longer_than_every_limit_is_never_rescued(workplace: Workplace, shape: dict[str, str]) -> None:
    """C8: with a second daemon that would."""
    daemons = [workplace.daemon(**shape) for _ in range(2)]
    id = workplace.add("nap", {"seconds": 2.5 * LEASE_SECONDS})
    row = workplace.wait_for_state(id, "succeeded")
    assert row.attempts == 1
    assert [event for daemon in daemons for event in daemon.find("lease_expired")] == []


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
    rescuer = workplace.daemon(**shape, WORKERS="2")
    workplace.wait_for_notes("start", count=3)
    row = workplace.wait_for_state(id, "ready")
    assert workplace.value("SELECT clock_timestamp()") >= lease_until
    assert (row.attempts, row.crashes, row.lease_owner, row.lease_until) == (1, 1, None, None)
    expired = rescuer.wait_for_event("lease_expired", job_id=id)
    assert expired["outcome"] == "crashed"
    assert [failure.outcome for failure in workplace.failures(id)] == ["crashed"]
    workplace.open_gate()
    workplace.daemon(**shape)
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
    workplace.daemon()
    row = workplace.wait_for_state(id, "succeeded")
    assert row.attempts == 2


@both_shapes
def test_somebody_elses_row_lock_costs_that_job_alone(workplace: Workplace, shape: dict[str, str]) -> None:
    """C13, C15: the other renewals go on, at most one of them at a time; the locked job stops by its own clock."""
    daemon = workplace.daemon(**shape)
    workplace.db.execute(COUNT_RENEWALS)
    locked = workplace.add("checking", key="locked")
    others = [workplace.add("nap", {"seconds": 3 * LEASE_SECONDS}) for _ in range(3)]
    workplace.wait_for_notes("start", count=4)
    with workplace.lock(locked):
        workplace.wait_for_notes("told:lease_untrusted", "locked")
        daemon.wait_for_event("job_abandoned", job_id=locked, reason="lease_untrusted")
        until = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < until:
            assert len(workplace.backends("leases")) == 1
            time.sleep(0.1)
    for id in others:
        row = workplace.wait_for_state(id, "succeeded")
        assert row.attempts == 1
    # Free again, it is reaped and runs.
    workplace.wait_for_notes("start", "locked", count=2)
    # While one row is locked the others are renewed up to five times as often, not in a flood.
    most = 5 * 3 * LEASE_SECONDS / (LEASE_SECONDS / 3)
    assert workplace.value("SELECT count(*) FROM renewals") <= most


def test_one_failed_renewal_is_followed_by_the_next(workplace: Workplace) -> None:
    """C14: a renewal that lost its connection kills neither the job nor the loop."""
    daemon = workplace.daemon()
    id = workplace.add("nap", {"seconds": 2.5 * LEASE_SECONDS})
    workplace.wait_for_notes("start")
    for _ in range(4):
        before = workplace.job(id).lease_until
        assert workplace.terminate("leases") == 1
        wait_for(lambda before=before: workplace.job(id).lease_until > before)  # type: ignore[misc]
    row = workplace.wait_for_state(id, "succeeded")
    assert row.attempts == 1
    assert daemon.find("job_abandoned") == []


OTHER_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) {
    char text[32] = "";
    int file = open(getenv("SECONDS_AHEAD"), O_RDONLY);
    if (file >= 0 && read(file, text, sizeof text - 1) < 0) text[0] = 0;
    if (file >= 0) close(file);
    return atol(text);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += ahead();
    return answer;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    int answer = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return answer;
}
time_t time(time_t *here) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (here) *here = precise.tv_sec;
    return precise.tv_sec;
}
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="a clock of one's own needs Linux and a C compiler"
)
@pytest.mark.parametrize("seconds", [600, -600])
def test_a_wall_clock_that_is_wrong_or_jumps_changes_nothing(workplace: Workplace, seconds: int) -> None:
    """C12: wrong from the start, and again in the middle of a job; another process stands by for whatever would expire."""
    source, library, ahead = (workplace.directory / name for name in ("clock.c", "clock.so", "ahead"))
    source.write_text(OTHER_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    ahead.write_text(str(seconds))
    daemon = workplace.daemon(LD_PRELOAD=str(library), SECONDS_AHEAD=str(ahead), WORKER_LEASE_SECONDS="6")

    def seconds_ahead(event: dict[str, str]) -> float:
        now: datetime = workplace.value("SELECT now()")
        return (datetime.fromisoformat(event["timestamp"]) - now).total_seconds()

    assert seconds_ahead(daemon.find("daemon_ready")[0]) == pytest.approx(seconds, abs=120), "else its clock is ours"
    long = workplace.add("nap", {"seconds": 8})
    workplace.wait_for_notes("start")
    other = workplace.daemon(WORKER_QUEUES="another")
    later = workplace.value("SELECT id FROM enqueue_job('nap', '{}', run_at => now() + interval '3 seconds')")
    ahead.write_text(str(-seconds))
    assert workplace.wait_for_state(later, "succeeded").attempts == 1
    assert workplace.value("SELECT started_at >= available_at FROM jobs WHERE id = %s", later)
    assert workplace.wait_for_state(long, "succeeded").attempts == 1
    assert seconds_ahead(daemon.wait_for_event("job_succeeded", job_id=long)) == pytest.approx(-seconds, abs=120)
    assert daemon.find("job_abandoned") == other.find("lease_expired") == []
    workplace.healthy()


def test_a_time_out_stops_an_async_handler(workplace: Workplace) -> None:
    """C16: nothing of it happens afterwards."""
    daemon = workplace.daemon()
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
    workplace.daemon(WORKERS="1")
    id = workplace.add("slow_thread", {"seconds": 4}, key="slow", max_attempts=2)
    workplace.wait_for_state(id, "ready")
    assert workplace.notes("end", "slow") == []
    next = workplace.add("nap", key="next")
    workplace.wait_for_state(id, "dead")
    workplace.wait_for_state(next, "succeeded")
    workplace.wait_for_notes("end", "slow", count=2)
    notes = [note for note in workplace.notes() if note.key == "slow"]
    assert [(note.word, note.attempt) for note in notes] == [("start", 1), ("end", 1), ("start", 2), ("end", 2)]
    runs = [(start.at_seconds, end.at_seconds) for start, end in zip(notes[::2], notes[1::2], strict=True)]
    began = workplace.notes("start", "next")[0].at_seconds
    assert not any(start < began < end for start, end in runs)
    assert [failure.outcome for failure in workplace.failures(id)] == ["timeout", "timeout"]
    assert workplace.ledger() == {next: 1}


def test_a_thousand_sleeping_jobs_are_renewed_by_one_statement_an_interval(workplace: Workplace) -> None:
    workplace.daemon(WORKERS="1000", WORKER_LOG_LEVEL="warning", ready=False)
    wait_for(lambda: workplace.backends("leases"), 20)
    ids = workplace.add_many(1000, "nap", {"seconds": 4 * LEASE_SECONDS})
    wait_for(lambda: workplace.states() == {"running": 1000})
    workplace.db.execute(COUNT_RENEWALS)
    workplace.wait_until_all("succeeded", 30)
    assert workplace.value("SELECT max(attempts) FROM jobs") == 1
    assert workplace.ledger() == dict.fromkeys(ids, 1)
    full = workplace.ask("SELECT at FROM renewals WHERE leases = 1000 ORDER BY at")
    assert len(full) >= 5
    gaps = [(after.at - before.at).total_seconds() for before, after in itertools.pairwise(full)]
    assert 0.8 * LEASE_SECONDS / 3 < statistics.median(gaps) < 1.5 * LEASE_SECONDS / 3, gaps


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
        workplace.daemon(**shape, WORKERS="8", ready=False)
    workplace.wait_for_notes("start", count=3 * 8, timeout_seconds=30)  # the fight begins with all of them
    workplace.open_gate()
    workplace.wait_until_all("succeeded", 40)
    assert workplace.ledger() == dict.fromkeys(ids, 1)
    assert workplace.ask("SELECT * FROM claims WHERE was <> 'ready' OR until IS NOT NULL") == []
    assert workplace.value("SELECT count(DISTINCT fence) = count(*) AND count(*) = 600 FROM claims")
    assert len({note.pid for note in workplace.notes("start")}) == 3
