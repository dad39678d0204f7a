"""Fences rise, over all jobs and leases: the checker finds each that does not, and each stale one that was let in."""

from __future__ import annotations

from tests.torture_histories import OPERATOR, SECOND, Breaches, History, Story, broken, each_breach, judged
from worker.store.audit import GuardedRow
from worker.torture import other_rules
from worker.torture.breaches import Findings
from worker.torture.job_rules import Draw


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


BREACHES: Breaches = {
    same_fence_again: {"fence_rises"},
    fence_of_another_job: {"fence_rises"},
    fence_below_the_one_before: {"fence_rises"},
    fence_below_an_earlier_one: {"fence_rises"},
    fence_changed_at_the_end: {"fence_rises"},
}


@each_breach(BREACHES)
def test_a_fence_that_does_not_rise_is_found(write: Story, rules: set[str]) -> None:
    assert broken(judged(write)) == rules


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
