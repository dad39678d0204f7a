"""A job is one process's while its lease lives: who writes without it, or takes what is leased, is found out by the checker."""

from __future__ import annotations

from tests.torture_histories import (
    A,
    B,
    Breaches,
    History,
    Story,
    broken,
    each_breach,
    each_of,
    judged,
    taken_over_after_expiry,
    writer,
)

# --- what keeps every promise


def renewed_by_one_that_was_overtaken(history: History) -> None:
    """It began before the renewal that came first, and counts from its own beginning."""
    history.add()
    history.claim()
    history.renew()
    old = history.now_of(1)
    history.change(1, old._replace(until=(old.until or 0) - 1), writer(A, "leases"), begun=history.changes[-1].begun - 1)
    history.succeed()


def completed_late_before_the_reaper(history: History) -> None:
    """Owner and fence decide, not the time."""
    history.add()
    history.claim()
    history.expire()
    history.succeed()


@each_of(
    taken_over_after_expiry,
    renewed_by_one_that_was_overtaken,
    completed_late_before_the_reaper,
)
def test_leases_that_are_taken_renewed_and_lost_in_order_are_accepted(write: Story) -> None:
    assert judged(write).breaches == []


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


def renewed_for_less(history: History) -> None:
    history.add()
    history.claim()
    old = history.now_of(1)
    history.change(1, old._replace(until=(old.until or 0) - 1), writer(A, "leases"))
    history.succeed()


def claimed_for_another(history: History) -> None:
    history.add()
    history.claim(by=writer(B, "claim"))
    history.succeed()


def cancelled_by_a_daemon(history: History) -> None:
    history.add()
    history.claim()
    history.end(state="cancelled")


BREACHES: Breaches = {
    claimed_while_leased: {"one_live_lease", "owner_writes", "fence_rises", "not_lost"},
    reaped_too_early: {"one_live_lease"},
    reaped_after_a_renewal_in_between: {"one_live_lease"},
    claimed_with_a_dead_lease: {"one_live_lease"},
    completed_by_another: {"owner_writes"},
    failed_by_another: {"owner_writes", "one_live_lease"},
    renewed_by_another: {"owner_writes"},
    renewed_and_taken: {"owner_writes", "one_live_lease"},
    renewed_after_expiry: {"renewal"},
    renewed_with_an_attempt: {"renewal"},
    renewed_for_less: {"renewal"},
    claimed_for_another: {"owner_writes"},
    cancelled_by_a_daemon: {"owner_writes"},
}


@each_breach(BREACHES)
def test_a_write_without_a_live_lease_of_ones_own_is_found(write: Story, rules: set[str]) -> None:
    assert broken(judged(write)) == rules
