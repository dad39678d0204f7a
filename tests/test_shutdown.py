"""How a daemon ends: signals, the grace, the budget, and what its exit status says about the work it held."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import psycopg
import pytest

from tests.processes import Daemon, below_a_namespace, environment, process_1_of
from tests.waiting import wait_for
from tests.workplace import LEASE_SECONDS, POLL_NEVER, VARIABLES, Workplace, both_shapes, frozen

# What a stop may take after the grace, with the settings of the workplace: margin + 2 query time-outs.
BUDGET_SECONDS = LEASE_SECONDS / 10 + 2 * 1
# What a loaded machine may add to any of it: far less than what would be waited for wrongly.
SLACK_SECONDS = 3.0


def stopped(daemon: Daemon, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
    """Send the signal; exit status, and the seconds until it ended."""
    began = time.monotonic()
    daemon.signal(number)
    status = daemon.wait()
    return status, time.monotonic() - began


@both_shapes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_lets_running_jobs_finish_and_starts_none(
    workplace: Workplace, shape: dict[str, str], number: signal.Signals
) -> None:
    """E1, E15, guarantee 5."""
    daemon = workplace.daemon(**shape, WORKERS="3", WORKER_SHUTDOWN_GRACE_SECONDS="20")
    running = [workplace.add("nap", {"seconds": 1}) for _ in range(3)]
    workplace.wait_for_notes("start", count=3)
    waiting = workplace.add_many(50, "nap")
    status, seconds = stopped(daemon, number)
    assert status == 0
    assert seconds < 1 + SLACK_SECONDS
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
    status, seconds = stopped(workplace.daemon(), number)
    assert status == 0
    assert seconds < SLACK_SECONDS


@both_shapes
def test_a_deploy_costs_a_job_nothing(workplace: Workplace, shape: dict[str, str]) -> None:
    """D1, guarantee 7: the attempt comes back, the place is kept, an idle process elsewhere is woken."""
    old = workplace.daemon(**shape, **POLL_NEVER, WORKER_SHUTDOWN_GRACE_SECONDS="0.2")
    id = workplace.add("gated", {"gate": "gate"}, key="deployed", max_attempts=1)
    workplace.wait_for_notes("start")
    before = workplace.job(id)
    new = workplace.daemon(**shape, **POLL_NEVER)
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
    old = workplace.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="20")
    id = workplace.add("nap", {"seconds": 2.5 * LEASE_SECONDS})
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
    daemon = workplace.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="60")
    id = workplace.add("nap", {"seconds": 60})
    workplace.wait_for_notes("start")
    daemon.signal(signals[0])
    daemon.wait_for_event("shutdown_started")
    assert workplace.job(id).state == "running"
    began = time.monotonic()
    for number in signals[1:]:
        with contextlib.suppress(ProcessLookupError):
            daemon.signal(number)
        time.sleep(0.02)
    assert daemon.wait() == 0
    assert time.monotonic() - began < SLACK_SECONDS
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("ready", 0)


@pytest.mark.parametrize("kind", ["block", "spin", "deaf", "thread"])
def test_a_handler_that_does_not_end_cannot_keep_the_process(workplace: Workplace, kind: str) -> None:
    """E3, E4: gone within grace and budget, with 75; what it left is recovered by its lease, and commits once."""
    daemon = workplace.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="1")
    id = workplace.add(kind, {"seconds": 60})
    workplace.wait_for_notes("start")
    status, seconds = stopped(daemon)
    assert status == 75
    assert 1 <= seconds < 1 + BUDGET_SECONDS + SLACK_SECONDS / 2
    assert daemon.find("job_abandoned", job_id=id, reason="deaf_handler")
    assert daemon.find("shutdown_complete", status=75)
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("running", 1)
    workplace.db.execute("""UPDATE jobs SET payload = '{"seconds": 0}'""")
    workplace.daemon()
    assert workplace.wait_for_state(id, "succeeded").attempts == 2
    assert workplace.ledger() == {id: 1}


def test_a_loop_blocked_past_the_grace_still_releases_its_neighbours(workplace: Workplace) -> None:
    """The grace counts from the signal, not from when the loop comes round to it."""
    daemon = workplace.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="2")
    neighbour = workplace.add("nap", {"seconds": 60}, max_attempts=1)
    workplace.wait_for_notes("start")
    blocking = workplace.add("block", {"seconds": 2.7})
    workplace.wait_for_notes("start", count=2)
    status, seconds = stopped(daemon)
    assert status == 0
    assert seconds < 2 + BUDGET_SECONDS
    assert workplace.job(blocking).state == "succeeded"
    row = workplace.job(neighbour)
    assert (row.state, row.attempts) == ("ready", 0)


@pytest.mark.parametrize("priority", [0, 1], ids=["one claim", "two claims"])
def test_a_loop_blocked_for_good_costs_its_neighbours_nothing(workplace: Workplace, priority: int) -> None:
    """Guarantees 7 and 8: whoever only waits behind it is released, started or not, its claim answered or not; what blocks it has
    lost its lease, which is no crash."""
    daemon = workplace.daemon(WORKERS="6", WORKER_SHUTDOWN_GRACE_SECONDS="0.5")
    running = [workplace.add("nap", {"seconds": 60}, max_attempts=1) for _ in range(2)]
    workplace.wait_for_notes("start", count=2)
    # Due in a while: by then both places are known, and the higher priority is claimed first.
    rows = workplace.ask(
        "INSERT INTO jobs (kind, payload, priority, max_attempts, available_at)"
        """ SELECT kind, '{"seconds": 60}', priority, 2, now() + interval '1.5 seconds'"""
        " FROM (VALUES ('block', %s), ('nap', 0), ('nap', 0)) AS new (kind, priority) RETURNING id",
        priority,
    )
    blocking, *waiting = [row.id for row in rows]
    workplace.wait_for_state(waiting[-1], "running")
    workplace.wait_for_notes("start", count=3)
    status, seconds = stopped(daemon)
    assert status == 75
    assert seconds < 0.5 + BUDGET_SECONDS + SLACK_SECONDS / 2
    for id in [*running, *waiting]:
        row = workplace.job(id)
        assert (row.state, row.attempts) == ("ready", 0)
        (said,) = daemon.find("job_released", job_id=id)
        unstarted = ("not_started", "claim_lost") if priority else ("not_started",)
        assert said["reason"] in (("shutdown",) if id in running else unstarted)
    assert [event["job_id"] for event in daemon.find("job_abandoned")] == [blocking]
    assert [note.word for note in workplace.notes()] == ["start"] * 3
    reaping = workplace.daemon(WORKER_QUEUES="another")
    row = workplace.wait_for_state(blocking, "ready")
    assert (row.attempts, row.crashes) == (1, 0)
    assert [failure.outcome for failure in workplace.failures(blocking)] == ["lease_lost"]
    assert reaping.stop() == 0


@pytest.mark.parametrize("kind", ["deaf", "thread"])
def test_a_handler_that_refused_to_end_is_no_crash(workplace: Workplace, kind: str) -> None:
    """Its job makes nobody careful, and waits for nobody: it lost its lease."""
    daemon = workplace.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="0.1")
    id = workplace.add(kind, {"seconds": 60})
    workplace.wait_for_notes("start")
    assert daemon.stop() == 75
    workplace.daemon(WORKER_QUEUES="another")
    assert workplace.wait_for_state(id, "ready").crashes == 0


def test_a_thread_behind_a_handler_that_was_released_does_not_keep_the_process(workplace: Workplace) -> None:
    """asyncio.to_thread: the handler can be cancelled, the thread cannot. Nothing is left to lease expiry."""
    daemon = workplace.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="0.2")
    id = workplace.add("to_thread", {"seconds": 60})
    workplace.wait_for_notes("start")
    status, seconds = stopped(daemon)
    assert status == 0
    assert seconds < 0.2 + 2 * SLACK_SECONDS
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("ready", 0)


def test_a_thread_that_a_library_has_left_behind_changes_nothing(workplace: Workplace) -> None:
    """The interpreter would wait for it as it ends."""
    daemon = workplace.daemon()
    workplace.wait_for_state(workplace.add("library_thread", {"seconds": 60}), "succeeded")
    status, seconds = stopped(daemon)
    assert status == 0
    assert seconds < 2 * SLACK_SECONDS
    assert daemon.find("shutdown_complete", status=0)


def test_an_exit_in_a_task_of_a_handler_is_that_jobs_failure(workplace: Workplace) -> None:
    """asyncio lets SystemExit end the loop; the daemon goes on, and still hears a signal while its loop is blocked."""
    daemon = workplace.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="0.2")
    neighbour = workplace.add("gated", {"gate": "gate"})
    workplace.wait_for_notes("start")
    id = workplace.add("exit_in_child", max_attempts=1)
    row = workplace.wait_for_state(id, "dead")
    assert row.last_error.startswith("SystemExit: 3")
    assert daemon.find("internal_error", where="event loop")
    workplace.open_gate()
    workplace.wait_for_state(neighbour, "succeeded")
    workplace.add("block", {"seconds": 60})
    workplace.wait_for_notes("start", count=2)
    status, seconds = stopped(daemon)
    assert status == 75
    assert seconds < 0.2 + BUDGET_SECONDS + SLACK_SECONDS / 2


def test_a_hang_up_that_nohup_ignores_stays_ignored(workplace: Workplace) -> None:
    command = ("nohup", sys.executable, "-m", "worker", "run")
    variables = environment(workplace.directory, DATABASE_URL=workplace.url, **VARIABLES)
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
    daemon = workplace.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="10", WORKER_BACKOFF_BASE_SECONDS="30")
    id = workplace.add("fail", {"gate": "gate"})
    workplace.wait_for_notes("start")
    daemon.signal(signal.SIGTERM)
    daemon.wait_for_event("shutdown_started")
    workplace.open_gate()
    assert daemon.wait() == 0
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("ready", 1)
    assert row.last_error.startswith("ValueError: ")
    assert workplace.value("SELECT available_at > now() + interval '10 seconds' FROM jobs")
    assert len(workplace.failures(id)) == 1


def test_a_job_cancelled_while_its_worker_drains_ends_promptly(workplace: Workplace) -> None:
    """D14: and the drain with it."""
    daemon = workplace.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="60", WORKER_LEASE_SECONDS="30")
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


SLOW_CLAIMS = """
CREATE FUNCTION slow_claims() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.4); RETURN NULL; END $$;
CREATE TRIGGER slow_claims AFTER UPDATE ON jobs FOR EACH ROW WHEN (OLD.state = 'ready' AND NEW.state = 'running')
    EXECUTE FUNCTION slow_claims();
"""
# It has taken a row, and sleeps before its COMMIT (a lock on the table would be seen of an empty claim as well).
CLAIM_IN_FLIGHT = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"


@both_shapes
def test_a_stop_starts_no_new_work_after_a_claim_that_committed_meanwhile(workplace: Workplace, shape: dict[str, str]) -> None:
    """E7, the moment itself: the signal comes while the claim is in flight."""
    workplace.db.execute(SLOW_CLAIMS)
    daemon = workplace.daemon(**shape, WORKER_CLAIM_TIMEOUT_SECONDS="1")
    id = workplace.add("nap", max_attempts=1)
    wait_for(lambda: workplace.value(CLAIM_IN_FLIGHT))
    assert daemon.stop() == 0
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
        daemon = workplace.daemon(**shape, WORKER_SHUTDOWN_GRACE_SECONDS="0.1")
        ids = [workplace.add("nap", {"seconds": seconds}) for seconds in (0, 0.02, 30)]
        time.sleep(rounds.uniform(0, 0.06))
        assert daemon.stop() == 0
        rows = [workplace.job(id) for id in ids]
        assert all((row.state, row.attempts) in (("ready", 0), ("succeeded", 1)) for row in rows), rows
        workplace.db.execute("TRUNCATE jobs")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_while_the_handlers_are_imported_is_clean(workplace: Workplace, number: signal.Signals) -> None:
    """Nothing is held yet."""
    slow = "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(60)\n"
    (workplace.directory / "slow_to_import.py").write_text(slow)
    daemon = workplace.daemon(WORKER_HANDLERS="slow_to_import:handlers", ready=False)
    wait_for((workplace.directory / "importing").exists)
    assert stopped(daemon, number) == (0, pytest.approx(0, abs=SLACK_SECONDS))
    assert daemon.stderr == ""
    assert daemon.find("shutdown_complete", status=0)


def test_a_stop_while_the_handlers_are_imported_stops_the_private_server(workplace: Workplace, data_dir: Path) -> None:
    """And a module that catches everything does not outlive it."""
    slow = """
import pathlib, time
pathlib.Path('importing').touch()
try:
    time.sleep(60)
except BaseException:
    pass
from tests.handlers_for_tests import handlers
"""
    (workplace.directory / "slow_to_import.py").write_text(slow)
    arguments = ("--embedded", "--data-dir", str(data_dir))
    daemon = workplace.daemon(*arguments, WORKER_HANDLERS="slow_to_import:handlers", ready=False)
    wait_for((workplace.directory / "importing").exists, 30)
    assert daemon.stop() == 0
    assert daemon.find("daemon_started") == []
    assert not (data_dir / "postgresql" / "postmaster.pid").exists()


def test_a_stop_while_the_schema_waits_for_a_lock_is_clean(workplace: Workplace) -> None:
    """`--migrate` runs before the first claim: nothing is held."""
    with psycopg.connect(workplace.url) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('reliable-worker schema public', 0))")
        daemon = workplace.daemon("--migrate", ready=False)
        wait_for(lambda: workplace.backends("migrate", "active"))
        status, seconds = stopped(daemon)
        other.rollback()
    assert status == 0
    assert seconds < SLACK_SECONDS
    assert daemon.find("shutdown_complete", status=0)


def test_a_lone_daemon_as_process_1_stops_like_any_other(workplace: Workplace) -> None:
    """E8: process 1 ignores every signal that it has no handler for."""
    command = (*below_a_namespace(), sys.executable, "-m", "worker", "run")
    variables = environment(workplace.directory, DATABASE_URL=workplace.url, **VARIABLES)
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
    daemon = workplace.daemon()
    id = workplace.add("child", {"seconds": 1})
    workplace.wait_for_notes("start")
    wait_for(lambda: Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text())
    if whole_group:
        os.killpg(daemon.pid, signal.SIGTERM)
    else:
        daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    row = workplace.job(id)
    assert (row.state, row.result) == ("succeeded", {"status": -signal.SIGTERM if whole_group else 0})


# --- with the database away ----------------------------------------------------------------------------------------------------


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
    daemon = workplace.daemon()
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


def test_a_claim_that_may_still_take_jobs_is_told_by_the_status(private_workplace: Workplace) -> None:
    """Nothing is held, but its server process stands still before its COMMIT."""
    workplace = private_workplace
    workplace.db.execute(SLOW_CLAIMS)
    daemon = workplace.daemon(WORKER_CLAIM_TIMEOUT_SECONDS="1", WORKER_SHUTDOWN_GRACE_SECONDS="0.1")
    postmaster = workplace.value("SELECT pg_read_file('postmaster.pid')").split()[0]
    workplace.add("nap")
    wait_for(lambda: workplace.value(CLAIM_IN_FLIGHT))
    with frozen([*workplace.backends(), int(postmaster)]):
        status, seconds = stopped(daemon)
    assert status == 75
    assert seconds < 0.1 + BUDGET_SECONDS + SLACK_SECONDS / 2
    assert workplace.notes() == []


# --- exit status ---------------------------------------------------------------------------------------------------------------


def test_a_stop_before_the_database_was_reached_is_clean(workplace: Workplace) -> None:
    daemon = workplace.daemon(DATABASE_URL="postgresql://127.0.0.1:1/nowhere", ready=False)
    daemon.wait_for_event("database_lost")
    status, seconds = stopped(daemon)
    assert status == 0
    assert seconds < SLACK_SECONDS


def test_a_stop_while_a_host_does_not_answer_is_clean(workplace: Workplace) -> None:
    """A connection that is being made is let go, whatever time it has."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"postgresql://127.0.0.1:{mute.getsockname()[1]}/nowhere"
        daemon = workplace.daemon(DATABASE_URL=url, WORKER_CONNECT_TIMEOUT_SECONDS="60", ready=False)
        mute.settimeout(20)
        with mute.accept()[0]:
            status, seconds = stopped(daemon)
    assert status == 0
    assert seconds < SLACK_SECONDS


@pytest.mark.parametrize(
    ("variables", "status", "says"),
    [
        ({"WORKERS": "4x"}, 78, "WORKERS"),
        ({"WORKER_RENEW_SECONDS": "2"}, 78, "WORKER_RENEW_SECONDS"),
        ({"WORKER_HANDLERS": "no_such_module:handlers"}, 78, "no_such_module"),
        ({"WORKER_HANDLERS": "tests.handlers_for_tests:gate"}, 78, "worker.Handlers"),
        ({"WORKER_RUNTIME_DIR": "/proc/nowhere"}, 78, "WORKER_RUNTIME_DIR"),
        ({"DATABASE_URL": "postgresql://127.0.0.1:1/nowhere", "WORKER_CONNECT_WAIT_SECONDS": "0.5"}, 69, "127.0.0.1"),
        ({"BROKEN_FOR_TEST": "worker.reaper:Reaper._pass"}, 1, "a bug for the test"),
        ({"BROKEN_FOR_TEST": "worker.claimer:Claimer._round"}, 1, "a bug for the test"),
        ({"BROKEN_FOR_TEST": "worker.keeper:Keeper._beat"}, 1, "a bug for the test"),
        ({"BROKEN_FOR_TEST": "worker.listener:Listener._listen"}, 1, "a bug for the test"),
    ],
    ids=lambda value: "-".join(value) + "=" + "-".join(value.values())[-24:] if isinstance(value, dict) else None,
)
def test_the_exit_status_tells_why(workplace: Workplace, variables: dict[str, str], status: int, says: str) -> None:
    """E10. All that is said about it is one JSON object a line on standard output."""
    daemon = workplace.daemon(ready=False, **variables)
    assert daemon.wait(20) == status
    errors = [event for event in daemon.events if event["level"] in ("error", "warning")]
    assert any(says in str(event) for event in errors), daemon.events


def test_wrong_usage_is_status_2(workplace: Workplace) -> None:
    assert workplace.daemon("--no-such-option", ready=False).wait() == 2


@pytest.mark.parametrize("where", ["committer:Committer._write", "pool:Pool._start", "attempt:Attempt._outcome"])
def test_a_bug_ends_the_process_in_order(workplace: Workplace, where: str) -> None:
    """Guarantee 6: status 1, and the jobs it held are there for the next one."""
    waiting = [workplace.add("nap", max_attempts=2) for _ in range(3)]
    daemon = workplace.daemon(ready=False, BROKEN_FOR_TEST=f"worker.{where}", WORKER_SHUTDOWN_GRACE_SECONDS="0.2")
    assert daemon.wait(20) == 1
    assert any("a bug for the test" in str(event) for event in daemon.find("internal_error"))
    workplace.daemon()
    workplace.wait_until_all("succeeded")
    assert workplace.ledger() == dict.fromkeys(waiting, 1)
