"""Every job that was accepted ends, once, by its own outcome: the checker finds each that does not, and gaps in what it reads."""

from __future__ import annotations

from tests.torture_histories import OPERATOR, A, B, Breaches, History, Story, broken, each_breach, each_of, judged, ordinary, writer
from worker.store.audit import Standing

# --- what keeps every promise


def failed_and_done_elsewhere(history: History) -> None:
    history.add()
    history.claim()
    history.end(said_fence=101)
    history.claim(owner=B)
    history.succeed()


def cancelled_and_retried(history: History) -> None:
    history.add()
    history.claim()
    history.end(state="cancelled", by=OPERATOR)
    history.change(1, history.now_of(1)._replace(state="ready", attempts=0), OPERATOR)
    history.claim(owner=B)
    history.succeed()


@each_of(
    failed_and_done_elsewhere,
    cancelled_and_retried,
)
def test_jobs_that_end_once_by_their_own_outcome_are_accepted(write: Story) -> None:
    assert judged(write).breaches == []


# --- one breach each


def succeeded_and_run_again(history: History) -> None:
    history.add()
    history.claim()
    history.succeed()
    history.change(1, history.now_of(1)._replace(state="ready"), OPERATOR)
    history.claim()
    history.end(state="cancelled", by=OPERATOR)


def written_after_it_had_ended(history: History) -> None:
    history.add()
    history.claim()
    history.succeed()
    history.change(1, history.now_of(1), writer(A, "commit"))


def completed_after_a_cancellation(history: History) -> None:
    """Look without lock: it saw the row as it was before, and wrote by the id alone."""
    history.add()
    history.claim()
    history.end(state="cancelled", by=OPERATOR)
    history.succeed(by=writer(A, "commit"), said_fence=None)


def retried_by_a_daemon(history: History) -> None:
    history.add(most=1)
    history.claim()
    history.end(state="dead")
    history.change(1, history.now_of(1)._replace(state="ready", attempts=0), writer(A, "commit"))
    history.claim()
    history.succeed()


def result_of_an_older_attempt(history: History) -> None:
    """The same process has claimed the job again, and its first attempt ends the second: owner matched, fence did not."""
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim(owner=A)
    history.succeed(said_fence=101)


def error_of_an_older_attempt(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim(owner=A)
    history.end(said_fence=101)
    history.claim(owner=A)
    history.succeed()


def result_of_another_in_its_own_transaction(history: History) -> None:
    history.add()
    history.claim()
    done = history.succeed(said_fence=None)
    history.change(1, history.now_of(1), writer(A, "pool"), txid=done.txid, said_fence=7)


def acknowledged_and_never_there(history: History) -> None:
    ordinary(history)
    history.acknowledged.append(2)


def deleted_by_a_daemon(history: History) -> None:
    ordinary(history)
    history.change(1, None, writer(A, "reaper"))


def deleted_while_it_waited(history: History) -> None:
    history.add()
    history.change(1, None, OPERATOR)


def vanished(history: History) -> None:
    """Gone, and no deletion was recorded."""
    ordinary(history)
    history.standing[1] = None


def still_ready(history: History) -> None:
    history.add()


def still_running(history: History) -> None:
    history.add()
    history.claim()
    history.expire()


def row_that_is_not_as_recorded(history: History) -> None:
    ordinary(history)
    history.standing[1] = history.now_of(1)._replace(attempts=2)


def gap_in_the_history(history: History) -> None:
    history.add()
    history.claim()
    history.succeed(old=history.now_of(1)._replace(until=1))


def came_running(history: History) -> None:
    history.add()
    history.changes[-1] = history.changes[-1]._replace(new=Standing("ready", None, 5, None, 1, 0))
    history.standing[1] = history.changes[-1].new
    history.claim()
    history.succeed()


BREACHES: Breaches = {
    succeeded_and_run_again: {"terminal"},
    written_after_it_had_ended: {"terminal"},
    completed_after_a_cancellation: {"terminal", "effect_with_completion"},
    retried_by_a_daemon: {"terminal"},
    result_of_an_older_attempt: {"own_outcome"},
    error_of_an_older_attempt: {"own_outcome"},
    result_of_another_in_its_own_transaction: {"own_outcome"},
    acknowledged_and_never_there: {"not_lost"},
    deleted_by_a_daemon: {"not_lost"},
    deleted_while_it_waited: {"not_lost"},
    vanished: {"not_lost"},
    still_ready: {"not_lost"},
    still_running: {"not_lost"},
    row_that_is_not_as_recorded: {"unbroken"},
    gap_in_the_history: {"unbroken"},
    came_running: {"unbroken"},
}


@each_breach(BREACHES)
def test_a_job_that_ends_otherwise_or_not_at_all_is_found(write: Story, rules: set[str]) -> None:
    assert broken(judged(write)) == rules
