"""A stop while something does not end: a blocked loop, a deaf handler, a thread. The process ends all the same."""

from __future__ import annotations

import signal

import pytest

from tests.stopping import BUDGET_SECONDS, LONG_LEASE, PATIENT, SLACK_SECONDS, leases_are_over, stopped
from tests.workplace import Workplace


@pytest.mark.parametrize("kind", ["block", "spin", "deaf", "thread"])
def test_a_handler_that_does_not_end_cannot_keep_the_process(workplace: Workplace, kind: str) -> None:
    """E3, E4: gone within grace and budget, with 75; what it left is recovered by its lease, and commits once."""
    daemon = workplace.daemon(**LONG_LEASE, WORKER_SHUTDOWN_GRACE_SECONDS="1")
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
    leases_are_over(workplace)
    workplace.daemon(**PATIENT)
    assert workplace.wait_for_state(id, "succeeded").attempts == 2
    assert workplace.ledger() == {id: 1}


def test_a_loop_blocked_past_the_grace_still_releases_its_neighbours(workplace: Workplace) -> None:
    """The grace counts from the signal, not from when the loop comes round to it."""
    daemon = workplace.daemon(**PATIENT, WORKER_SHUTDOWN_GRACE_SECONDS="4")
    neighbour = workplace.add("nap", {"seconds": 60}, max_attempts=1)
    workplace.wait_for_notes("start")
    blocking = workplace.add("block", {"seconds": 5})
    workplace.wait_for_notes("start", count=2)
    assert daemon.stop() == 0
    [came_round], [told] = workplace.notes("end"), workplace.notes("told:shutdown")
    assert told.at_seconds - came_round.at_seconds < 3
    assert workplace.job(blocking).state == "succeeded"
    row = workplace.job(neighbour)
    assert (row.state, row.attempts) == ("ready", 0)


@pytest.mark.parametrize("priority", [0, 1], ids=["one claim", "two claims"])
def test_a_loop_blocked_for_good_costs_its_neighbours_nothing(workplace: Workplace, priority: int) -> None:
    """Guarantees 7 and 8: whoever only waits behind it is released, started or not, its claim answered or not; what blocks it has
    lost its lease, which is no crash."""
    # It is given back in the last second of the budget, or in its last quarter if that is less.
    larger_budget = LONG_LEASE | {"WORKER_QUERY_TIMEOUT_SECONDS": "2"}
    daemon = workplace.daemon(**larger_budget, WORKERS="6", WORKER_SHUTDOWN_GRACE_SECONDS="0.5")
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
    assert seconds < 0.5 + 2 + BUDGET_SECONDS + SLACK_SECONDS / 2
    for id in [*running, *waiting]:
        row = workplace.job(id)
        assert (row.state, row.attempts) == ("ready", 0)
        (said,) = daemon.find("job_released", job_id=id)
        unstarted = ("not_started", "claim_lost") if priority else ("not_started",)
        assert said["reason"] in (("shutdown",) if id in running else unstarted)
    assert [event["job_id"] for event in daemon.find("job_abandoned")] == [blocking]
    assert [note.word for note in workplace.notes()] == ["start"] * 3
    leases_are_over(workplace)
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
    daemon = workplace.daemon(**PATIENT, WORKER_SHUTDOWN_GRACE_SECONDS="0.2")
    id = workplace.add("to_thread", {"seconds": 60})
    workplace.wait_for_notes("start")
    status, seconds = stopped(daemon)
    assert status == 0
    assert seconds < 0.2 + 2 * SLACK_SECONDS
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("ready", 0)


def test_a_thread_that_a_library_has_left_behind_changes_nothing(workplace: Workplace) -> None:
    """The interpreter would wait for it as it ends."""
    daemon = workplace.daemon(**PATIENT)
    workplace.wait_for_state(workplace.add("library_thread", {"seconds": 60}), "succeeded")
    status, seconds = stopped(daemon)
    assert status == 0
    assert seconds < 2 * SLACK_SECONDS
    assert daemon.find("shutdown_complete", status=0)


def test_an_exit_in_a_task_of_a_handler_is_that_jobs_failure(workplace: Workplace) -> None:
    """asyncio lets SystemExit end the loop; the daemon goes on, and still hears a signal while its loop is blocked."""
    daemon = workplace.daemon(**LONG_LEASE, WORKER_SHUTDOWN_GRACE_SECONDS="0.2")
    neighbour = workplace.add("gated", {"gate": "gate"})
    workplace.wait_for_notes("start")
    id = workplace.add("exit_in_child", max_attempts=1)
    row = workplace.wait_for_state(id, "dead")
    assert row.last_error.startswith("SystemExit: 3")
    daemon.wait_for_event("internal_error", where="event loop")
    workplace.open_gate()
    workplace.wait_for_state(neighbour, "succeeded")
    workplace.add("block", {"seconds": 60})
    workplace.wait_for_notes("start", count=2)
    status, seconds = stopped(daemon)
    assert status == 75
    assert seconds < 0.2 + BUDGET_SECONDS + SLACK_SECONDS / 2


HANGS = """
import asyncio, contextlib
from tests.handlers_for_tests import handlers as others
from worker import Handlers

@contextlib.asynccontextmanager
async def broker():
    yield
    await asyncio.Event().wait()

handlers = Handlers(lifespan=broker)
handlers.include(others)
"""


def test_a_lifespan_that_does_not_end_is_named_within_the_budget(workplace: Workplace) -> None:
    """What the handlers did is written by then. The second signal takes the grace from the lifespan as well."""
    (workplace.directory / "hangs.py").write_text(HANGS)
    daemon = workplace.daemon(WORKER_HANDLERS="hangs:handlers", WORKER_SHUTDOWN_GRACE_SECONDS="60")
    done, running = workplace.add("noop"), workplace.add("nap", {"seconds": 60})
    workplace.wait_for_state(done, "succeeded")
    workplace.wait_for_notes("start")
    daemon.signal(signal.SIGTERM)
    daemon.wait_for_event("shutdown_started")
    status, seconds = stopped(daemon)
    assert status == 1
    assert seconds < BUDGET_SECONDS + SLACK_SECONDS
    assert "lifespan broker did not end" in daemon.find("internal_error")[0]["exception"]
    assert (workplace.job(running).state, workplace.job(running).attempts) == ("ready", 0)
    assert workplace.value("SELECT count(*) FROM processes") == 0
