"""A crash is counted when its process was lost, and stays counted: the checker finds each that is not, or is without reason."""

from __future__ import annotations

from tests.torture_histories import LEASE, OPERATOR, SECOND, Breaches, History, Story, broken, each_breach, each_of, judged

# --- what keeps every promise


def dead_of_crashes(history: History) -> None:
    history.add(most=2)
    for state in ("ready", "dead"):
        history.claim()
        history.expire()
        history.reap(state=state)


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


@each_of(
    dead_of_crashes,
    lost_by_a_process_that_lives,
    lost_by_a_process_that_came_back_meanwhile,
)
def test_crashes_that_are_counted_by_the_rules_are_accepted(write: Story) -> None:
    assert judged(write).breaches == []


# --- one breach each


def crash_forgotten_by_a_claim(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim()
    history.changes[-1] = history.changes[-1]._replace(new=history.now_of(1)._replace(crashes=0))
    history.standing[1] = history.changes[-1].new
    history.succeed()


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


BREACHES: Breaches = {
    crash_forgotten_by_a_claim: {"crashes"},
    crash_counted_by_its_own_process: {"crashes"},
    crash_counted_twice: {"crashes"},
    crash_not_counted: {"crashes"},
    crash_not_counted_long_after_its_process_was_seen: {"crashes"},
    crash_counted_though_its_process_lives: {"crashes"},
    crash_forgotten_by_a_cancellation: {"crashes"},
    crash_forgotten_by_a_retry: {"crashes"},
}


@each_breach(BREACHES)
def test_a_crash_that_is_counted_wrongly_is_found(write: Story, rules: set[str]) -> None:
    assert broken(judged(write)) == rules
