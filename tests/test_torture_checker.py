"""The checker of `worker torture` accepts histories that keep every promise, and finds each breach.

A checker that has never failed proves nothing: here are histories with one breach each. Daemons that are broken on purpose are in
test_torture.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.torture_histories import KINDS, LEASE, OPERATOR, SECOND, A, B, History, broken, writer
from worker.store.audit import (
    Change,
    GuardedRow,
    LeaseChange,
    LeaseStanding,
    Slots,
    Standing,
)
from worker.torture import other_rules
from worker.torture.breaches import RULES, Findings
from worker.torture.job_rules import Draw, JobFacts, JobRules

# --- what keeps every promise


def ordinary(history: History) -> None:
    history.add()
    history.claim()
    history.renew()
    history.succeed()


def failed_and_done_elsewhere(history: History) -> None:
    history.add()
    history.claim()
    history.end(said_fence=101)
    history.claim(owner=B)
    history.succeed()


def taken_over_after_expiry(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim(owner=B)
    history.succeed()


def completed_late_before_the_reaper(history: History) -> None:
    """Owner and fence decide, not the time."""
    history.add()
    history.claim()
    history.expire()
    history.succeed()


def released_and_snoozed(history: History) -> None:
    history.add(most=1)
    for _ in range(3):
        history.claim()
        history.end(attempts=-1)
    history.claim()
    history.succeed()


def dead_of_failures(history: History) -> None:
    history.add(most=2)
    history.claim()
    history.end()
    history.claim()
    history.end(state="dead")


def dead_of_crashes(history: History) -> None:
    history.add(most=2)
    for state in ("ready", "dead"):
        history.claim()
        history.expire()
        history.reap(state=state)


def cancelled_and_retried(history: History) -> None:
    history.add()
    history.claim()
    history.end(state="cancelled", by=OPERATOR)
    history.change(1, history.now_of(1)._replace(state="ready", attempts=0), OPERATOR)
    history.claim(owner=B)
    history.succeed()


def own_transaction(history: History) -> None:
    history.add()
    history.claim()
    done = history.succeed(by=writer(A, "pool"), said_fence=None)
    history.change(1, history.now_of(1), writer(A, "pool"), txid=done.txid, said_fence=101)


def pruned_and_enqueued_again(history: History) -> None:
    """The ledger still has the key: the second time nothing is applied."""
    history.add(1, key="k")
    history.claim(1)
    history.succeed(1)
    history.change(1, None, OPERATOR)
    history.add(2, key="k")
    history.claim(2)
    history.succeed(2, effect=False)


def follow_up(history: History) -> None:
    history.add(1, kind="chain")
    history.claim(1)
    done = history.succeed(1)
    history.add(2, key="k1/next", by=writer(A, "commit"), txid=done.txid)
    history.claim(2)
    history.succeed(2)


def generated_key(history: History) -> None:
    history.add(key="auto:1")
    history.claim()
    history.succeed()


def refused_for_good(history: History) -> None:
    history.add(kind="refuse")
    history.claim()
    history.end(state="dead")


def given_back_to_its_place_and_snoozed_to_another(history: History) -> None:
    history.add(1)
    history.claim(1)
    history.end(1, attempts=-1, old_due=5, new_due=5)
    history.claim(1)
    history.succeed(1)
    history.add(2, kind="snooze")
    history.claim(2)
    history.end(2, attempts=-1, old_due=5, new_due=9)
    history.claim(2)
    history.succeed(2)


def lost_by_a_process_that_lives(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap(crashes=0, owner_until=history.now + 2 * SECOND, owner_seen=history.now - 3 * SECOND)
    history.claim()
    history.succeed()


def lost_by_a_process_that_came_back_meanwhile(history: History) -> None:
    """Nobody can tell whether the reaper saw that presence."""
    history.add()
    history.claim()
    history.expire()
    history.reap(crashes=1, owner_until=history.now + 5 * SECOND, owner_seen=history.now + SECOND // 2)
    history.claim()
    history.succeed()


def more_failures_than_are_kept(history: History) -> None:
    history.add(most=30)
    for _ in range(25):
        history.claim()
        history.end()
    history.failures = history.failures[-20:]
    history.claim()
    history.succeed()


def pruned_with_its_failures(history: History) -> None:
    dead_of_failures(history)
    history.change(1, None, OPERATOR)
    history.failures = []


GOOD = [
    ordinary,
    failed_and_done_elsewhere,
    taken_over_after_expiry,
    completed_late_before_the_reaper,
    released_and_snoozed,
    dead_of_failures,
    dead_of_crashes,
    cancelled_and_retried,
    own_transaction,
    pruned_and_enqueued_again,
    follow_up,
    generated_key,
    refused_for_good,
    given_back_to_its_place_and_snoozed_to_another,
    lost_by_a_process_that_lives,
    lost_by_a_process_that_came_back_meanwhile,
    more_failures_than_are_kept,
    pruned_with_its_failures,
]


@pytest.mark.parametrize("write", GOOD, ids=lambda write: write.__name__)
def test_a_history_that_keeps_every_promise_is_accepted(write: Callable[[History], None]) -> None:
    history = History()
    write(history)
    assert history.check().breaches == []


# --- one breach each


def claimed_while_leased(history: History) -> None:
    history.add()
    history.claim()
    history.claim(owner=B)  # straight from running


def reaped_too_early(history: History) -> None:
    history.add()
    history.claim()
    history.reap()
    history.claim(owner=B)
    history.succeed()


def reaped_after_a_renewal_in_between(history: History) -> None:
    """The reaper looked while the lease was over, and wrote without looking again."""
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim(owner=B)
    history.reap(by=writer(A, "reaper"))
    history.claim(owner=B)
    history.succeed()


def claimed_with_a_dead_lease(history: History) -> None:
    history.add()
    history.claim()
    history.changes[-1] = history.changes[-1]._replace(new=history.now_of(1)._replace(until=1))
    history.standing[1] = history.changes[-1].new
    history.succeed()


def completed_by_another(history: History) -> None:
    """Zombie A completes over its successor: the completion matched the id alone."""
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim(owner=B)
    history.succeed(by=writer(A, "commit"), said_fence=None)


def failed_by_another(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim(owner=B)
    history.end(by=writer(A, "commit"))
    history.claim(owner=B)
    history.succeed()


def renewed_by_another(history: History) -> None:
    """The renewal matched the id alone."""
    history.add()
    history.claim()
    history.renew(by=writer(B, "leases"))
    history.succeed()


def renewed_and_taken(history: History) -> None:
    """The renewal wrote its own name into somebody else's row."""
    history.add()
    history.claim()
    history.change(1, history.now_of(1)._replace(owner=B), writer(B, "leases"))
    history.succeed()


def renewed_after_expiry(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.renew()
    history.succeed()


def renewed_with_an_attempt(history: History) -> None:
    history.add()
    history.claim()
    history.change(1, history.now_of(1)._replace(attempts=2), writer(A, "leases"))
    history.succeed()


def claimed_for_another(history: History) -> None:
    history.add()
    history.claim(by=writer(B, "claim"))
    history.succeed()


def cancelled_by_a_daemon(history: History) -> None:
    history.add()
    history.claim()
    history.end(state="cancelled")


def same_fence_again(history: History) -> None:
    history.add()
    history.claim()
    history.end()
    history.claim(fence=101)
    history.succeed()


def fence_of_another_job(history: History) -> None:
    history.add(1)
    history.claim(1)
    history.add(2)
    history.claim(2, fence=101, begun=0)
    history.succeed(1)
    history.succeed(2)


def fence_below_the_one_before(history: History) -> None:
    history.add()
    history.claim()
    history.end()
    history.claim(fence=60, begun=0)
    history.succeed()


def fence_below_an_earlier_one(history: History) -> None:
    """As after a sequence that was put back: the fence is new, and too low."""
    history.add(1)
    history.claim(1)
    history.succeed(1)
    history.add(2)
    history.claim(2, fence=50)
    history.succeed(2)


def fence_changed_at_the_end(history: History) -> None:
    history.add()
    history.claim()
    old = history.now_of(1)
    history.change(1, old._replace(state="cancelled", owner=None, until=None, fence=0), OPERATOR)


def claimed_free_of_charge(history: History) -> None:
    history.add()
    history.claim()
    history.changes[-1] = history.changes[-1]._replace(new=history.now_of(1)._replace(attempts=0))
    history.standing[1] = history.changes[-1].new
    history.succeed()


def claimed_too_often(history: History) -> None:
    history.add(most=1)
    history.claim()
    history.end()
    history.claim()
    history.succeed()


def refunded_twice_over(history: History) -> None:
    history.add()
    for _ in range(2):
        history.claim()
        history.end()
    history.claim()
    history.end(attempts=-2)
    history.claim()
    history.succeed()


def refunded_by_the_reaper(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap(attempts=-1)
    history.claim()
    history.succeed()


def buried_without_an_attempt(history: History) -> None:
    history.add(kind="refuse")
    history.claim()
    history.end(state="dead", attempts=-1)


def ready_and_used_up(history: History) -> None:
    history.add(most=1)
    history.claim()
    history.end()
    history.change(1, history.now_of(1)._replace(state="dead"), writer(B, "reaper"))


def reaped_to_ready_and_used_up(history: History) -> None:
    history.add(most=1)
    history.claim()
    history.expire()
    history.reap(state="ready")
    history.change(1, history.now_of(1)._replace(state="dead"), writer(B, "reaper"))


def buried_too_early(history: History) -> None:
    history.add(most=3)
    history.claim()
    history.expire()
    history.reap(state="dead")


def crash_counted_by_its_own_process(history: History) -> None:
    history.add()
    history.claim()
    history.end(crashes=1)
    history.claim()
    history.succeed()


def crash_counted_twice(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap(crashes=2)
    history.claim()
    history.succeed()


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


def effect_applied_twice(history: History) -> None:
    """Look without lock after a lost COMMIT: it was taken for rolled back, and done again."""
    history.add()
    history.claim()
    done = history.succeed()
    history.effect(1, done.txid, 101)


def effect_applied_again_for_the_same_key(history: History) -> None:
    pruned_and_enqueued_again(history)
    done = history.changes[-1]
    history.effect(2, done.txid, history.now_of(2).fence)


def effect_committed_apart(history: History) -> None:
    history.add()
    history.claim()
    done = history.succeed(effect=False)
    history.effect(1, done.txid + 1, 101)


def effect_of_an_older_attempt(history: History) -> None:
    """Answers were matched by the id alone: what the fence refused was applied because its job was in the answer."""
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim(owner=A)
    done = history.succeed(effect=False)
    history.effect(1, done.txid, 101)


def effect_of_a_failed_attempt(history: History) -> None:
    history.add(most=1)
    history.claim()
    done = history.end(state="dead")
    history.effect(1, done.txid, 101)


def no_effect(history: History) -> None:
    history.add()
    history.claim()
    history.succeed(effect=False)


def follow_up_forgotten(history: History) -> None:
    history.add(kind="chain")
    history.claim()
    history.succeed()


def follow_up_apart(history: History) -> None:
    history.add(1, kind="chain")
    history.claim(1)
    history.succeed(1)
    history.add(2, key="k1/next", by=writer(A, "commit"))
    history.claim(2)
    history.succeed(2)


def follow_up_of_a_failure(history: History) -> None:
    history.add(1, kind="chain", most=1)
    history.claim(1)
    done = history.end(1, state="dead")
    history.add(2, key="k1/next", by=writer(A, "commit"), txid=done.txid)
    history.claim(2)
    history.succeed(2)


def key_not_in_the_ledger(history: History) -> None:
    history.add()
    history.claim()
    done = history.succeed(effect=False)
    history.effect(1, done.txid, 101, entered=False)


def key_entered_by_another(history: History) -> None:
    ordinary(history)
    history.ledger = [row._replace(fence=7) for row in history.ledger]


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


def crash_forgotten_by_a_claim(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim()
    history.changes[-1] = history.changes[-1]._replace(new=history.now_of(1)._replace(crashes=0))
    history.standing[1] = history.changes[-1].new
    history.succeed()


def refunded_at_the_end(history: History) -> None:
    history.add()
    history.claim()
    history.succeed(attempts=-1)


def refunded_by_a_cancellation(history: History) -> None:
    history.add()
    history.claim()
    history.end(state="cancelled", by=OPERATOR, attempts=-1)


def retried_with_old_attempts(history: History) -> None:
    history.add(kind="refuse")
    history.claim()
    history.end(state="dead")
    history.change(1, history.now_of(1)._replace(state="ready"), OPERATOR)
    history.claim()
    history.succeed()


def refunded_while_it_waited(history: History) -> None:
    history.add()
    history.claim()
    history.end()
    history.change(1, history.now_of(1)._replace(attempts=0), writer(A, "commit"))
    history.claim()
    history.succeed()


def buried_with_attempts_left(history: History) -> None:
    history.add(most=2)
    history.claim()
    history.end(state="dead")


def given_back_at_the_price_of_an_attempt(history: History) -> None:
    """A release that looks like a failure, which would have left a word."""
    history.add()
    history.claim()
    history.end()
    history.failures = []
    history.claim()
    history.succeed()


def reaped_without_a_word(history: History) -> None:
    taken_over_after_expiry(history)
    history.failures = []


def given_back_and_on_record_as_failed(history: History) -> None:
    history.add()
    history.claim()
    history.end(attempts=-1)
    history.failures.append((1, 101))
    history.claim()
    history.succeed()


def given_back_to_the_end_of_the_queue(history: History) -> None:
    history.add()
    history.claim()
    history.end(attempts=-1, old_due=5, new_due=9)
    history.claim()
    history.succeed()


def crash_not_counted(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap(crashes=0)
    history.claim()
    history.succeed()


def crash_not_counted_long_after_its_process_was_seen(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap(crashes=0, owner_until=history.now, owner_seen=history.now - LEASE)
    history.claim()
    history.succeed()


def crash_counted_though_its_process_lives(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap(crashes=1, owner_until=history.now + 2 * SECOND, owner_seen=history.now - 3 * SECOND)
    history.claim()
    history.succeed()


def crash_forgotten_by_a_cancellation(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim()
    history.end(state="cancelled", by=OPERATOR, crashes=-1)


def crash_forgotten_by_a_retry(history: History) -> None:
    dead_of_crashes(history)
    history.change(1, history.now_of(1)._replace(state="ready", attempts=0, crashes=0), OPERATOR)
    history.claim()
    history.succeed()


BAD: list[tuple[Callable[[History], None], set[str]]] = [
    (claimed_while_leased, {"one_live_lease", "owner_writes", "fence_rises", "not_lost"}),
    (reaped_too_early, {"one_live_lease"}),
    (reaped_after_a_renewal_in_between, {"one_live_lease"}),
    (claimed_with_a_dead_lease, {"one_live_lease"}),
    (completed_by_another, {"owner_writes"}),
    (failed_by_another, {"owner_writes", "one_live_lease"}),
    (renewed_by_another, {"owner_writes"}),
    (renewed_and_taken, {"owner_writes", "one_live_lease"}),
    (renewed_after_expiry, {"renewal"}),
    (renewed_with_an_attempt, {"renewal"}),
    (claimed_for_another, {"owner_writes"}),
    (cancelled_by_a_daemon, {"owner_writes"}),
    (same_fence_again, {"fence_rises"}),
    (fence_of_another_job, {"fence_rises"}),
    (fence_below_the_one_before, {"fence_rises"}),
    (fence_below_an_earlier_one, {"fence_rises"}),
    (fence_changed_at_the_end, {"fence_rises"}),
    (claimed_free_of_charge, {"attempts"}),
    (claimed_too_often, {"attempts", "used_up"}),
    (refunded_twice_over, {"attempts"}),
    (refunded_at_the_end, {"attempts"}),
    (refunded_by_a_cancellation, {"attempts"}),
    (retried_with_old_attempts, {"attempts"}),
    (refunded_while_it_waited, {"attempts"}),
    (crash_forgotten_by_a_claim, {"crashes"}),
    (refunded_by_the_reaper, {"attempts"}),
    (buried_without_an_attempt, {"attempts"}),
    (ready_and_used_up, {"used_up", "terminal"}),
    (reaped_to_ready_and_used_up, {"used_up", "terminal"}),
    (buried_too_early, {"used_up"}),
    (crash_counted_by_its_own_process, {"crashes"}),
    (crash_counted_twice, {"crashes"}),
    (succeeded_and_run_again, {"terminal"}),
    (written_after_it_had_ended, {"terminal"}),
    (completed_after_a_cancellation, {"terminal", "effect_with_completion"}),
    (retried_by_a_daemon, {"terminal"}),
    (result_of_an_older_attempt, {"own_outcome"}),
    (error_of_an_older_attempt, {"own_outcome"}),
    (result_of_another_in_its_own_transaction, {"own_outcome"}),
    (effect_applied_twice, {"effect_once"}),
    (effect_applied_again_for_the_same_key, {"effect_once", "ledger"}),
    (effect_committed_apart, {"effect_with_completion"}),
    (effect_of_an_older_attempt, {"effect_with_completion"}),
    (effect_of_a_failed_attempt, {"effect_with_completion"}),
    (no_effect, {"effect_iff_succeeded"}),
    (follow_up_forgotten, {"outbox"}),
    (follow_up_apart, {"outbox"}),
    (follow_up_of_a_failure, {"outbox"}),
    (key_not_in_the_ledger, {"ledger"}),
    (key_entered_by_another, {"ledger"}),
    (acknowledged_and_never_there, {"not_lost"}),
    (deleted_by_a_daemon, {"not_lost"}),
    (deleted_while_it_waited, {"not_lost"}),
    (vanished, {"not_lost"}),
    (still_ready, {"not_lost"}),
    (still_running, {"not_lost"}),
    (row_that_is_not_as_recorded, {"unbroken"}),
    (gap_in_the_history, {"unbroken"}),
    (came_running, {"unbroken"}),
    (buried_with_attempts_left, {"used_up"}),
    (given_back_at_the_price_of_an_attempt, {"attempts"}),
    (reaped_without_a_word, {"attempts"}),
    (given_back_and_on_record_as_failed, {"attempts"}),
    (given_back_to_the_end_of_the_queue, {"deploy"}),
    (crash_not_counted, {"crashes"}),
    (crash_not_counted_long_after_its_process_was_seen, {"crashes"}),
    (crash_counted_though_its_process_lives, {"crashes"}),
    (crash_forgotten_by_a_cancellation, {"crashes"}),
    (crash_forgotten_by_a_retry, {"crashes"}),
]


@pytest.mark.parametrize(("write", "rules"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_found(write: Callable[[History], None], rules: set[str]) -> None:
    history = History()
    write(history)
    assert broken(history.check()) == rules


# --- named leases


def lease(holder: str, fence: int, expires: int, released: int | None = None) -> LeaseStanding:
    return LeaseStanding(holder, fence, expires * SECOND, None if released is None else released * SECOND)


def lease_change(
    seq: int, at: int, resource: str, old: LeaseStanding | None, new: LeaseStanding | None, *, by: str | None = None
) -> LeaseChange:
    """By its holder, if nobody else is named."""
    moment = at * SECOND
    return LeaseChange(seq, moment, moment - 1000, seq, by or f"{new.holder if new else 't0-1'} leases", resource, old, new)


PLACE = lease("t5-1", 0, 0, 0)
HELD = lease("t5-1", 101, 5)
LEASES: dict[str, tuple[Sequence[tuple[int, LeaseStanding | None]], set[str]]] = {
    "acquired, renewed, released, acquired": (
        [(0, PLACE), (1, HELD), (2, lease("t5-1", 101, 7)), (3, lease("t5-1", 101, 7, 3)), (3, lease("t7-1", 102, 9))],
        set(),
    ),
    "acquired at once": ([(1, HELD)], set()),
    "acquired after expiry": ([(1, HELD), (6, lease("t7-1", 102, 9))], set()),
    "deleted when it was over": ([(1, HELD), (6, None)], set()),
    "acquired while it was held": ([(1, HELD), (4, lease("t7-1", 102, 9))], {"one_live_lease"}),
    "deleted while it was held": ([(1, HELD), (4, None)], {"one_live_lease"}),
    "another holder under the same fence": ([(1, HELD), (2, lease("t7-1", 101, 7))], {"one_live_lease"}),
    "a fence that does not rise": ([(1, HELD), (6, lease("t7-1", 100, 9))], {"fence_rises"}),
    "a job's fence": ([(1, lease("t5-1", 55, 5))], {"fence_rises"}),
    "below a job's fence before": ([(1, lease("t5-1", 54, 5))], {"fence_rises"}),
    "no fence": ([(1, lease("t5-1", 0, 5))], {"fence_rises"}),
    "renewed after expiry": ([(1, HELD), (6, lease("t5-1", 101, 9))], {"lease_by_holder"}),
    "renewed after the release": (
        [(1, HELD), (2, lease("t5-1", 101, 5, 2)), (3, lease("t5-1", 101, 9))],
        {"lease_by_holder"},
    ),
    "released after expiry": ([(1, HELD), (6, lease("t5-1", 101, 5, 6))], {"lease_by_holder"}),
}


@pytest.mark.parametrize("case", LEASES)
def test_named_leases_are_judged_like_jobs(case: str) -> None:
    standings, rules = LEASES[case]
    history = History()
    history.now = -100 * SECOND
    history.add()
    history.claim(fence=55)
    history.succeed()
    findings = Findings()
    jobs = JobRules(findings, KINDS)
    for change in history.changes:
        jobs.feed(change)
    changes, old = [], None
    for seq, (at, new) in enumerate(standings):
        changes.append(lease_change(seq, at, "red", old, new))
        old = new
    other_rules.check_leases(changes, findings, jobs.facts)
    other_rules.check_fences(jobs.facts.draws, findings)
    assert broken(findings) == rules


def test_a_lease_whose_history_has_a_gap_and_a_fence_of_another_lease_are_found() -> None:
    findings = Findings()
    changes = [
        lease_change(1, 1, "red", None, HELD),
        lease_change(2, 2, "red", HELD._replace(expires=1), HELD),
        lease_change(3, 1, "blue", None, HELD),
    ]
    other_rules.check_leases(changes, findings, JobFacts())
    assert broken(findings) == {"unbroken", "lease_by_holder", "fence_rises"}


@pytest.mark.parametrize(
    ("by", "rules"),
    [("t5-1 leases", set()), ("t5-1 pool", set()), ("t7-1 leases", {"lease_by_holder"}), ("t5-11 leases", {"lease_by_holder"})],
)
@pytest.mark.parametrize("holder", ["t5-1", "t5-1-0123abcd"])
@pytest.mark.parametrize("change", ["acquired", "renewed", "released"])
def test_a_named_lease_that_is_written_by_somebody_else_is_found(change: str, holder: str, by: str, rules: set[str]) -> None:
    """Who has lost it renews and releases that of the next holder, under his name and his fence."""
    held = HELD._replace(holder=holder)
    new = {"acquired": held, "renewed": held._replace(expires=9 * SECOND), "released": held._replace(released=2 * SECOND)}[change]
    changes = [lease_change(1, 1, "red", None, new, by=by)]
    if change != "acquired":
        changes = [lease_change(1, 1, "red", None, held, by="t5-1 pool"), lease_change(2, 2, "red", held, new, by=by)]
    findings = Findings()
    other_rules.check_leases(changes, findings, JobFacts())
    assert broken(findings) == rules


def test_fences_of_jobs_and_leases_are_judged_by_the_order_in_which_they_were_drawn() -> None:
    first, later = Draw(0, SECOND, 101, "job 1"), Draw(2 * SECOND, 3 * SECOND, 100, "red")
    for draws, rules in (
        ([first, later], {"fence_rises"}),
        ([later, first], {"fence_rises"}),
        ([first, later._replace(fence=102)], set()),
        ([first, later._replace(begun=SECOND // 2)], set()),  # at the same time: in whatever order
    ):
        findings = Findings()
        other_rules.check_fences(draws, findings)
        assert broken(findings) == rules


def test_a_stale_fence_that_was_let_in_is_found() -> None:
    findings = Findings()
    other_rules.check_guarded([GuardedRow(1, "red", 5), GuardedRow(2, "red", 5), GuardedRow(3, "blue", 1)], findings)
    assert broken(findings) == set()
    other_rules.check_guarded([GuardedRow(1, "red", 5), GuardedRow(2, "red", 6), GuardedRow(3, "red", 5)], findings)
    assert broken(findings) == {"guarded"}


# --- the generator


def slot_job(slot: int, txid: int) -> Change:
    return Change(1, 0, 0, txid, "t4-1 generator", slot, f"generator:{slot}", "nothing", 5, None, None, None)


HOLDS = [lease_change(1, 1, "generator", None, lease("t4-1-0123abcd", 101, 9))]
SLOTS: dict[str, tuple[list[Slots], list[Change], list[LeaseChange], set[str]]] = {
    "in order": ([Slots(1, 2 * SECOND, 7, 0, 2, 2)], [slot_job(1, 7), slot_job(2, 7)], HOLDS, set()),
    "skipped": ([Slots(1, 2 * SECOND, 7, 0, 2, 0)], [], HOLDS, set()),
    "somebody else's job": ([], [slot_job(1, 7)._replace(key="k1")], HOLDS, set()),
    "changed by a wish": ([Slots(1, 0, 7, 0, 2, 0)], [], [], set()),
    "twice": (
        [Slots(1, 2 * SECOND, 7, 0, 1, 1), Slots(2, 3 * SECOND, 8, 1, 2, 1)],
        [slot_job(1, 7), slot_job(1, 8)],
        HOLDS,
        {"slot_once"},
    ),
    "another mark was left": (
        [Slots(1, 2 * SECOND, 7, 0, 2, 0), Slots(2, 3 * SECOND, 8, 1, 3, 0)],
        [],
        HOLDS,
        {"slot_once"},
    ),
    "the mark went back": ([Slots(1, 2 * SECOND, 7, 3, 2, 0)], [], HOLDS, {"slot_once"}),
    "more said than made": ([Slots(1, 2 * SECOND, 7, 0, 2, 2)], [slot_job(1, 7)], HOLDS, {"slot_once"}),
    "without a lease": ([Slots(1, 2 * SECOND, 7, 0, 1, 1)], [slot_job(1, 7)], [], {"slot_once"}),
    "after the lease": ([Slots(1, 20 * SECOND, 7, 0, 1, 1)], [slot_job(1, 7)], HOLDS, {"slot_once"}),
    "by somebody who has not got the lease": (
        [Slots(1, 2 * SECOND, 7, 0, 1, 1)],
        [slot_job(1, 7)._replace(writer="t6-1 generator")],
        HOLDS,
        {"slot_once"},
    ),
    "without the mark": ([], [slot_job(1, 7)], HOLDS, {"slot_once"}),
}


@pytest.mark.parametrize("case", SLOTS)
def test_a_slot_is_produced_once_under_the_lease_and_with_its_mark(case: str) -> None:
    marks, jobs, leases, rules = SLOTS[case]
    findings = Findings()
    other_rules.check_slots(marks, leases, jobs, findings, resource="generator")
    assert broken(findings) == rules


def test_every_rule_has_a_history_that_breaks_it() -> None:
    tables = [rules for _, rules in BAD] + [rules for _, rules in LEASES.values()] + [rules for *_, rules in SLOTS.values()]
    by_themselves = {"guarded", "started_once", "told_to_stop", "no_start_after_shutdown"}
    by_themselves |= {"log_lines", "exits", "recovery", "return", "room", "one_suspect", "live_start", "deploy"}
    assert set().union(*tables) | by_themselves == RULES.keys()
