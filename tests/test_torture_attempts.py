"""Attempts are counted and end: the checker finds those that cost nothing, are refunded, or are too many or too few."""

from __future__ import annotations

from tests.torture_histories import (
    OPERATOR,
    A,
    B,
    Breaches,
    History,
    Story,
    broken,
    dead_of_failures,
    each_breach,
    each_of,
    judged,
    taken_over_after_expiry,
    writer,
)

# --- what keeps every promise


def released_and_snoozed(history: History) -> None:
    history.add(most=1)
    for _ in range(3):
        history.claim()
        history.end(attempts=-1)
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


@each_of(
    released_and_snoozed,
    dead_of_failures,
    refused_for_good,
    given_back_to_its_place_and_snoozed_to_another,
    more_failures_than_are_kept,
    pruned_with_its_failures,
)
def test_attempts_that_are_counted_and_refunded_by_the_rules_are_accepted(write: Story) -> None:
    assert judged(write).breaches == []


# --- one breach each


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


BREACHES: Breaches = {
    claimed_free_of_charge: {"attempts"},
    claimed_too_often: {"attempts", "used_up"},
    refunded_twice_over: {"attempts"},
    refunded_at_the_end: {"attempts"},
    refunded_by_a_cancellation: {"attempts"},
    retried_with_old_attempts: {"attempts"},
    refunded_while_it_waited: {"attempts"},
    refunded_by_the_reaper: {"attempts"},
    buried_without_an_attempt: {"attempts"},
    ready_and_used_up: {"used_up", "terminal"},
    reaped_to_ready_and_used_up: {"used_up", "terminal"},
    buried_too_early: {"used_up"},
    buried_with_attempts_left: {"used_up"},
    given_back_at_the_price_of_an_attempt: {"attempts"},
    reaped_without_a_word: {"attempts"},
    given_back_and_on_record_as_failed: {"attempts"},
    given_back_to_the_end_of_the_queue: {"deploy"},
}


@each_breach(BREACHES)
def test_an_attempt_that_is_counted_wrongly_is_found(write: Story, rules: set[str]) -> None:
    assert broken(judged(write)) == rules
