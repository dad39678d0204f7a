"""How a daemon stops: which signals it hears, and what becomes of the jobs that it runs, waits for and claims."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.processes import Daemon, below_a_namespace, environment, process_1_of
from tests.stopping import CLAIM_IN_FLIGHT, PATIENT, SLACK_SECONDS, SLOW_CLAIMS, stopped
from tests.waiting import any_moment, wait_for
from tests.workplace import POLL_NEVER, VARIABLES, Workplace, both_shapes


@both_shapes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_lets_running_jobs_finish_and_starts_none(
    workplace: Workplace, shape: dict[str, str], number: signal.Signals
) -> None:
    """E1, E15, guarantee 5."""
    daemon = workplace.daemon(**shape, **PATIENT, WORKERS="3", WORKER_SHUTDOWN_GRACE_SECONDS="60")
    running = [workplace.add("gated", {"gate": "gate"}) for _ in range(3)]
    workplace.wait_for_notes("start", count=3)
    waiting = workplace.add_many(50, "nap")
    daemon.signal(number)
    daemon.wait_for_event("shutdown_started")
    workplace.open_gate()
    began = time.monotonic()
    assert daemon.wait() == 0
    assert time.monotonic() - began < SLACK_SECONDS
    assert len(workplace.notes("start")) == 3
    assert {workplace.job(id).state for id in running} == {"succeeded"}
    assert workplace.states() == {"succeeded": 3, "ready": 50}
    assert {workplace.job(id).attempts for id in waiting} == {0}
    assert [event["event"] for event in daemon.events][-1] == "shutdown_complete"
    assert daemon.find("shutdown_complete", status=0)
    assert workplace.ask("SELECT id FROM processes") == []
    assert list(workplace.directory.glob("*.health")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_idle_daemon_stops_at_once(workplace: Workplace, number: signal.Signals) -> None:
    status, seconds = stopped(workplace.daemon(**PATIENT, WORKER_SHUTDOWN_GRACE_SECONDS="60"), number)
    assert status == 0
    assert seconds < SLACK_SECONDS


@both_shapes
def test_a_deploy_costs_a_job_nothing(workplace: Workplace, shape: dict[str, str]) -> None:
    """D1, guarantee 7: the attempt comes back, the place is kept, an idle process elsewhere is woken."""
    old = workplace.daemon(**shape, **PATIENT, **POLL_NEVER, WORKER_SHUTDOWN_GRACE_SECONDS="0.2")
    id = workplace.add("gated", {"gate": "gate"}, key="deployed", max_attempts=1)
    workplace.wait_for_notes("start")
    before = workplace.job(id)
    new = workplace.daemon(**shape, **PATIENT, **POLL_NEVER)
    workplace.wait_until_only_notifications_wake(2)
    status, seconds = stopped(old)
    assert status == 0
    assert seconds < 0.2 + SLACK_SECONDS
    workplace.wait_for_notes("start", count=2)
    first, second = workplace.notes("start")
    assert (first.attempt, second.attempt) == (1, 1)
    assert first.fence < second.fence
    assert workplace.notes("told:shutdown")
    assert old.find("job_released", job_id=id, reason="shutdown")
    workplace.open_gate()
    row = workplace.wait_for_state(id, "succeeded")
    assert (row.attempts, row.available_at) == (1, before.available_at)
    assert workplace.failures(id) == []
    assert new.stop() == 0


def test_renewals_go_on_during_the_grace(workplace: Workplace) -> None:
    """A job that needs two leases of it keeps its own, whoever else stands by."""
    lease_seconds = 4
    old = workplace.daemon(WORKER_LEASE_SECONDS=str(lease_seconds), WORKER_SHUTDOWN_GRACE_SECONDS="60")
    id = workplace.add("nap", {"seconds": 2.5 * lease_seconds})
    workplace.wait_for_notes("start")
    new = workplace.daemon()
    assert old.stop() == 0
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("succeeded", 1)
    assert new.find("lease_expired") == []


@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGTERM),
    ],
    ids=["TERM TERM", "INT INT", "TERM INT TERM TERM"],
)
def test_a_second_signal_skips_the_grace(workplace: Workplace, signals: tuple[signal.Signals, ...]) -> None:
    """E2: jobs are released first; a third is harmless."""
    daemon = workplace.daemon(**PATIENT, WORKER_SHUTDOWN_GRACE_SECONDS="60")
    id = workplace.add("nap", {"seconds": 60})
    workplace.wait_for_notes("start")
    daemon.signal(signals[0])
    daemon.wait_for_event("shutdown_started")
    assert workplace.job(id).state == "running"
    began, moments = time.monotonic(), random.Random(2)
    for number in signals[1:]:
        with contextlib.suppress(ProcessLookupError):
            daemon.signal(number)
        any_moment(moments, 0.05)
    assert daemon.wait() == 0
    assert time.monotonic() - began < SLACK_SECONDS
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("ready", 0)


def test_a_hang_up_that_nohup_ignores_stays_ignored(workplace: Workplace) -> None:
    command = ("nohup", sys.executable, "-m", "worker", "run")
    variables = environment(workplace.directory, DATABASE_URL=workplace.url, **VARIABLES | PATIENT)
    daemon = Daemon(command, variables, workplace.directory, "nohup")
    try:
        daemon.wait_for_event("daemon_ready", 20)
        daemon.signal(signal.SIGHUP)
        workplace.wait_for_state(workplace.add("nap", {"seconds": 0.3}), "succeeded")
        assert daemon.stop() == 0
        assert [event["reason"] for event in daemon.find("shutdown_started")] == ["signal"]
        assert workplace.states() == {"succeeded": 1}
    finally:
        daemon.kill()


SIGNALLED = """
import asyncio, contextlib, pathlib, signal
from worker import Handlers

@contextlib.asynccontextmanager
async def resources():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, pathlib.Path("heard").touch)
    yield

handlers = Handlers(lifespan=resources)

@handlers.job("nothing")
async def nothing(job):
    pass
"""


def test_other_signals_reach_whoever_handles_them(workplace: Workplace) -> None:
    (workplace.directory / "signalled.py").write_text(SIGNALLED)
    daemon = workplace.daemon(WORKER_HANDLERS="signalled:handlers")
    daemon.signal(signal.SIGUSR1)
    wait_for((workplace.directory / "heard").exists)
    assert daemon.stop() == 0


def test_a_job_that_fails_during_the_grace_is_recorded(workplace: Workplace) -> None:
    """D12."""
    daemon = workplace.daemon(**PATIENT, WORKER_SHUTDOWN_GRACE_SECONDS="60", WORKER_BACKOFF_BASE_SECONDS="30")
    id = workplace.add("fail", {"gate": "gate"})
    workplace.wait_for_notes("start")
    daemon.signal(signal.SIGTERM)
    daemon.wait_for_event("shutdown_started")
    workplace.open_gate()
    assert daemon.wait() == 0
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("ready", 1)
    assert row.last_error.startswith("ValueError: ")
    assert workplace.value("SELECT available_at > started_at + interval '10 seconds' FROM jobs")
    assert len(workplace.failures(id)) == 1


def test_a_job_cancelled_while_its_worker_drains_ends_promptly(workplace: Workplace) -> None:
    """D14: and the drain with it."""
    daemon = workplace.daemon(**PATIENT, WORKER_SHUTDOWN_GRACE_SECONDS="60")
    id = workplace.add("nap", {"seconds": 60})
    workplace.wait_for_notes("start")
    daemon.signal(signal.SIGTERM)
    daemon.wait_for_event("shutdown_started")
    began = time.monotonic()
    assert workplace.value("SELECT cancel_job(%s)", id) == "cancelled"
    assert daemon.wait() == 0
    assert time.monotonic() - began < SLACK_SECONDS
    assert workplace.notes("told:cancelled")
    assert workplace.job(id).state == "cancelled"
    assert daemon.find("job_abandoned", job_id=id, reason="cancelled")


@both_shapes
def test_a_stop_starts_no_new_work_after_a_claim_that_committed_meanwhile(workplace: Workplace, shape: dict[str, str]) -> None:
    """E7, the moment itself: the signal comes while the claim is in flight."""
    workplace.db.execute(SLOW_CLAIMS)
    daemon = workplace.daemon(**shape, **PATIENT, WORKER_CLAIM_TIMEOUT_SECONDS="6")
    id = workplace.add("nap", max_attempts=1)
    wait_for(lambda: workplace.value(CLAIM_IN_FLIGHT))
    daemon.signal(signal.SIGTERM)
    daemon.wait_for_event("shutdown_started")
    workplace.db.execute("INSERT INTO claims_may_end DEFAULT VALUES")
    assert daemon.wait() == 0
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("ready", 0)
    assert row.fence > 0
    assert workplace.notes() == []
    assert daemon.find("job_released", job_id=id, reason="not_started")


@both_shapes
def test_a_signal_at_any_moment_leaves_no_job_claimed_without_a_runner(workplace: Workplace, shape: dict[str, str]) -> None:
    """E7: the rows are looked at right after the exit. Short jobs, and long ones that have to be released."""
    rounds = random.Random(7)
    for _ in range(12):
        daemon = workplace.daemon(**shape, **PATIENT, WORKER_SHUTDOWN_GRACE_SECONDS="0.1")
        ids = [workplace.add("nap", {"seconds": seconds}) for seconds in (0, 0.02, 30)]
        any_moment(rounds, 0.06)
        assert daemon.stop() == 0
        rows = [workplace.job(id) for id in ids]
        assert all((row.state, row.attempts) in (("ready", 0), ("succeeded", 1)) for row in rows), rows
        workplace.db.execute("TRUNCATE jobs")


def test_a_lone_daemon_as_process_1_stops_like_any_other(workplace: Workplace) -> None:
    """E8: process 1 ignores every signal that it has no handler for."""
    command = (*below_a_namespace(), sys.executable, "-m", "worker", "run")
    variables = environment(workplace.directory, DATABASE_URL=workplace.url, **VARIABLES | PATIENT)
    outer = Daemon(command, variables, workplace.directory, "process-1")
    try:
        outer.wait_for_event("daemon_ready", 20, pid=1)
        running = workplace.add("nap", {"seconds": 1})
        workplace.wait_for_notes("start")
        os.kill(process_1_of(outer), signal.SIGTERM)
        assert outer.wait() == 0
    finally:
        outer.kill()
    assert workplace.job(running).state == "succeeded"


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_handlers_child_process_is_left_alone_by_a_stop(workplace: Workplace, whole_group: bool) -> None:
    """E9: it ends by itself; when the whole group is signalled, the handler learns what became of it."""
    daemon = workplace.daemon(**PATIENT, WORKER_SHUTDOWN_GRACE_SECONDS="60")
    id = workplace.add("child", {"seconds": 60 if whole_group else 4})
    workplace.wait_for_notes("start")
    wait_for(lambda: Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text())
    if whole_group:
        os.killpg(daemon.pid, signal.SIGTERM)
    else:
        daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    row = workplace.job(id)
    assert (row.state, row.result) == ("succeeded", {"status": -signal.SIGTERM if whole_group else 0})
