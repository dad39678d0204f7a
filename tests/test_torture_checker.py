"""The checker of `worker torture` accepts histories that keep every promise, and finds each breach.

A checker that has never failed proves nothing: here are histories with one breach each. Daemons that are broken on purpose are in
test_torture.py.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from worker.store.audit import (
    Change,
    EffectRow,
    FinalRow,
    GuardedRow,
    LeaseChange,
    LeaseStanding,
    LedgerRow,
    Slots,
    Standing,
)
from worker.torture import notes, other_rules, timing
from worker.torture.breaches import RULES, Findings
from worker.torture.checking import read_log
from worker.torture.daemons import Asked, Life, Slot, check_exits, is_textbook, slot_of
from worker.torture.handlers import POISON
from worker.torture.job_rules import Claim, JobFacts, JobRules, Reap
from worker.torture.notes import Notebook
from worker.torture.other_rules import Excuse, Run
from worker.torture.timing import Ended, Killed, Usual

SECOND = 1_000_000
LEASE = 3 * SECOND

A, B = "t0-1-aaaaaaaa", "t1-1-bbbbbbbb"
OPERATOR = "reliable-worker torture"


def writer(owner: str, role: str) -> str:
    return f"{owner[:4]} {role}"


class History:
    """Writes down what a database would have recorded; one job at a time, a second between two changes."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.effects: list[EffectRow] = []
        self.ledger: list[LedgerRow] = []
        self.acknowledged: list[int] = []
        self.standing: dict[int, Standing | None] = {}
        self._key: dict[int, tuple[str, str, int]] = {}
        self.now = 0
        self.fence = 100

    def change(self, job: int, new: Standing | None, by: str, **other: Any) -> Change:
        """One change by the session of that name; `at`, `begun`, `txid`, `said_fence`, `old` may differ from what they would be."""
        self.now += SECOND
        key, kind, most = self._key[job]
        values = {
            "seq": len(self.changes) + 1,
            "at": self.now,
            "begun": self.now - 1000,
            "txid": len(self.changes) + 1000,
            "writer": by,
            "job_id": job,
            "key": key,
            "kind": kind,
            "max_attempts": most,
            "old": self.standing.get(job),
            "new": new,
            "said_fence": None,
        }
        made = Change(**(values | other))
        self.changes.append(made)
        self.standing[job] = new
        return made

    def add(
        self, job: int = 1, *, key: str | None = None, kind: str = "effect", most: int = 3, by: str = OPERATOR, **other: Any
    ) -> None:
        self._key[job] = (key or f"k{job}", kind, most)
        self.change(job, Standing("ready", None, 0, None, 0, 0), by, **other)
        self.acknowledged.append(job)

    def now_of(self, job: int) -> Standing:
        standing = self.standing[job]
        assert standing is not None
        return standing

    def claim(self, job: int = 1, owner: str = A, *, fence: int | None = None, by: str | None = None, **other: Any) -> None:
        self.fence += 1
        old = self.now_of(job)
        new = old._replace(
            state="running",
            owner=owner,
            fence=self.fence if fence is None else fence,
            until=self.now + SECOND + LEASE,
            attempts=old.attempts + 1,
        )
        self.change(job, new, by or writer(owner, "claim"), **other)

    def renew(self, job: int = 1, *, by: str | None = None, **other: Any) -> None:
        old = self.now_of(job)
        self.change(job, old._replace(until=self.now + SECOND + LEASE), by or writer(old.owner or A, "leases"), **other)

    def end(
        self, job: int = 1, state: str = "ready", *, by: str | None = None, attempts: int = 0, crashes: int = 0, **other: Any
    ) -> Change:
        old = self.now_of(job)
        new = old._replace(state=state, owner=None, until=None, attempts=old.attempts + attempts, crashes=old.crashes + crashes)
        return self.change(job, new, by or writer(old.owner or A, "commit"), **other)

    def succeed(self, job: int = 1, *, by: str | None = None, effect: bool = True, **other: Any) -> Change:
        old = self.now_of(job)
        made = self.end(job, "succeeded", by=by, **({"said_fence": old.fence} | other))
        if effect:
            self.effect(job, made.txid, old.fence)
        return made

    def effect(self, job: int, txid: int, fence: int, *, entered: bool = True) -> None:
        key = self._key[job][0]
        self.effects.append(EffectRow(len(self.effects) + 1, txid, key, job, fence))
        if entered and not key.startswith("auto:") and key not in {row.key for row in self.ledger}:
            self.ledger.append(LedgerRow(key, job, fence))

    def expire(self) -> None:
        """Time goes by until every lease is over."""
        self.now += LEASE

    def reap(self, job: int = 1, *, by: str = writer(B, "reaper"), state: str = "ready", crashes: int = 1, **other: Any) -> None:
        self.end(job, state, by=by, crashes=crashes, **other)

    def check(self) -> Findings:
        findings = Findings()
        rules = JobRules(findings)
        for change in sorted(self.changes, key=lambda one: (one.job_id, one.seq)):
            rules.feed(change)
        rules.finish(
            final=[FinalRow(job, *self._key[job], standing) for job, standing in self.standing.items() if standing is not None],
            effects=self.effects,
            ledger=self.ledger,
            acknowledged=self.acknowledged,
            kinds_with_effect={"effect", "chain"},
            kinds_with_next={"chain"},
        )
        return findings


def broken(findings: Findings) -> set[str]:
    rules = {breach.rule for breach in findings.breaches}
    assert rules <= RULES.keys()
    return rules


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
    history.add()
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
    history.add()
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
    history.add()
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
]


@pytest.mark.parametrize(("write", "rules"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_found(write: Callable[[History], None], rules: set[str]) -> None:
    history = History()
    write(history)
    assert broken(history.check()) == rules


# --- named leases


def lease(holder: str, fence: int, expires: int, released: int | None = None) -> LeaseStanding:
    return LeaseStanding(holder, fence, expires * SECOND, None if released is None else released * SECOND)


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
    history.add()
    history.claim(fence=55)
    history.succeed()
    findings = Findings()
    jobs = JobRules(findings)
    for change in history.changes:
        jobs.feed(change)
    changes, old = [], None
    for seq, (at, new) in enumerate(standings):
        changes.append(LeaseChange(seq, at * SECOND, seq, "red", old, new))
        old = new
    other_rules.check_leases(changes, findings, jobs.facts)
    assert broken(findings) == rules


def test_a_lease_whose_history_has_a_gap_and_a_fence_of_another_lease_are_found() -> None:
    findings = Findings()
    changes = [
        LeaseChange(1, SECOND, 1, "red", None, HELD),
        LeaseChange(2, 2 * SECOND, 2, "red", HELD._replace(expires=1), HELD),
        LeaseChange(3, SECOND, 1, "blue", None, HELD),
    ]
    other_rules.check_leases(changes, findings, JobFacts())
    assert broken(findings) == {"unbroken", "lease_by_holder", "fence_rises"}


def test_a_stale_fence_that_was_let_in_is_found() -> None:
    findings = Findings()
    other_rules.check_guarded([GuardedRow(1, "red", 5), GuardedRow(2, "red", 5), GuardedRow(3, "blue", 1)], findings)
    assert broken(findings) == set()
    other_rules.check_guarded([GuardedRow(1, "red", 5), GuardedRow(2, "red", 6), GuardedRow(3, "red", 5)], findings)
    assert broken(findings) == {"guarded"}


# --- the generator


def slot_job(slot: int, txid: int) -> Change:
    return Change(1, 0, 0, txid, "t4-1 generator", slot, f"generator:{slot}", "nothing", 5, None, None, None)


HOLDS = [LeaseChange(1, SECOND, 1, "generator", None, lease("t4-1", 101, 9))]
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
    "without the mark": ([], [slot_job(1, 7)], HOLDS, {"slot_once"}),
}


@pytest.mark.parametrize("case", SLOTS)
def test_a_slot_is_produced_once_under_the_lease_and_with_its_mark(case: str) -> None:
    marks, jobs, leases, rules = SLOTS[case]
    findings = Findings()
    other_rules.check_slots(marks, leases, jobs, findings, resource="generator")
    assert broken(findings) == rules


# --- what handlers wrote down

OWNERS = {101: ("1", "t0-1"), 102: ("1", "t1-1")}


FIRST = Run("1", 101, "effect", "t0-1", 1.0, 2.0)
SECOND_RUN = Run("1", 102, "effect", "t1-1", 5.0, 6.0)


@pytest.mark.parametrize(
    ("noted", "rules"),
    [
        ([FIRST, SECOND_RUN], set()),
        ([FIRST, FIRST._replace(started_at=3.0)], {"started_once"}),
        ([FIRST._replace(fence=77)], {"started_once"}),
        ([FIRST._replace(process="t1-1")], {"started_once"}),
        ([FIRST._replace(subject="2")], {"started_once"}),
    ],
)
def test_a_handler_starts_once_under_a_claim_of_its_process(noted: list[Run], rules: set[str]) -> None:
    findings = Findings()
    other_rules.check_runs(noted, findings, OWNERS)
    assert broken(findings) == rules


@pytest.mark.parametrize(
    ("noted", "died_at", "excuses", "rules"),
    [
        ([FIRST, SECOND_RUN], {}, [], set()),
        ([SECOND_RUN, FIRST], {}, [], set()),
        ([FIRST._replace(ended_at=5.05), SECOND_RUN], {}, [], set()),
        ([FIRST._replace(ended_at=5.5), SECOND_RUN], {}, [], {"told_to_stop"}),
        ([FIRST._replace(ended_at=None), SECOND_RUN], {}, [], {"told_to_stop"}),
        ([FIRST._replace(ended_at=None), SECOND_RUN], {"t0-1": 1.5}, [], set()),
        ([FIRST._replace(ended_at=None), SECOND_RUN], {"t0-1": 9.0}, [], {"told_to_stop"}),
        ([FIRST._replace(ended_at=5.5), SECOND_RUN], {}, [Excuse("t0-1", 2.0, 5.4)], set()),
        ([FIRST._replace(ended_at=5.5), SECOND_RUN], {}, [Excuse("t1-1", 2.0, 5.4)], {"told_to_stop"}),
        ([FIRST._replace(ended_at=5.5), SECOND_RUN], {}, [Excuse("t0-1", 0.0, 0.9)], {"told_to_stop"}),
        ([FIRST._replace(ended_at=5.5, kind="deaf"), SECOND_RUN], {}, [], set()),
        ([FIRST._replace(ended_at=5.5, fence=103), SECOND_RUN], {}, [], set()),
    ],
)
def test_a_handler_has_stopped_before_the_next_attempt_starts(
    noted: list[Run], died_at: dict[str, float], excuses: list[Excuse], rules: set[str]
) -> None:
    findings = Findings()
    other_rules.check_stops(noted, findings, died_at=died_at, excuses=excuses, deaf_kinds={"deaf"}, cancelled={103})
    assert broken(findings) == rules


def claims(*suspects: int) -> dict[int, Claim]:
    return {fence: Claim(1, "effect", "t0-1", 0, fence, fence in suspects) for fence in (101, 102, 103)}


BESIDE = SECOND_RUN._replace(process="t0-1", started_at=1.5)


@pytest.mark.parametrize(
    ("noted", "suspects", "died_at", "rules"),
    [
        ([FIRST, BESIDE._replace(started_at=2.0)], (101, 102), {}, set()),
        ([BESIDE, FIRST], (101, 102), {}, {"one_suspect"}),
        ([FIRST, BESIDE], (101,), {}, set()),
        ([FIRST, BESIDE._replace(process="t1-1")], (101, 102), {}, set()),
        ([FIRST._replace(ended_at=None), BESIDE], (101, 102), {}, {"one_suspect"}),
        ([FIRST._replace(ended_at=None), BESIDE], (101, 102), {"t0-1": 9.0}, {"one_suspect"}),
    ],
)
def test_a_process_runs_one_suspect_at_a_time(
    noted: list[Run], suspects: tuple[int, ...], died_at: dict[str, float], rules: set[str]
) -> None:
    findings = Findings()
    other_rules.check_suspects(noted, findings, claims(*suspects), died_at)
    assert broken(findings) == rules
    assert findings.tried["one_suspect"] > 0


@pytest.mark.parametrize(
    ("started_at", "excuses", "rules"),
    [
        (11.0, [], set()),
        (13.02, [], set()),
        (13.2, [], {"live_start"}),
        (14.9, [], set()),
        (16.2, [], {"live_start"}),
        (16.2, [Excuse("t0-1", 15.0, 16.5)], set()),
        (16.2, [Excuse("t1-1", 15.0, 16.5)], {"live_start"}),
        (16.2, [Excuse("t0-1", 11.0, 12.5)], {"live_start"}),
    ],
)
def test_a_handler_starts_while_its_lease_is_live(started_at: float, excuses: list[Excuse], rules: set[str]) -> None:
    """Claimed at 10 for 3 s; renewed, too late for whoever starts before, at 14 for 2 s."""
    leases = {101: [(10 * SECOND, 13 * SECOND), (14 * SECOND, 16 * SECOND)]}
    findings = Findings()
    run = FIRST._replace(started_at=started_at, ended_at=started_at + 1)
    other = run._replace(fence=7, kind="lease")
    other_rules.check_starts([run, other], findings, leases=leases, excuses=excuses, database_us=lambda at: round(at * SECOND))
    assert broken(findings) == rules
    assert findings.tried["live_start"] == 1


def test_the_leases_that_starts_are_judged_by_are_those_of_the_history() -> None:
    history = History()
    history.add()
    history.claim()
    history.renew()
    rules = JobRules(Findings())
    for change in history.changes:
        rules.feed(change)
    [(claimed, until), (renewed, later)] = rules.facts.leases[101]
    assert (until - claimed, later - renewed) == (LEASE, LEASE)
    assert renewed > claimed


def test_a_claim_of_more_than_there_is_room_for_is_found() -> None:
    one, other = Claim(1, "effect", "t1-1", 0, 1000, False), Claim(2, "effect", "t1-1", 0, 1000, False)
    for taken, rules in (
        ([one, other._replace(txid=1001)], set()),
        ([one, other], {"room"}),
        ([one, other._replace(process="t0-1")], set()),
    ):
        findings = Findings()
        other_rules.check_room(taken, findings, most=lambda process: 1 if is_textbook(slot_of(process)) else 300)
        assert broken(findings) == rules


def test_a_process_that_stops_cleanly_and_leaves_a_job_behind_is_found() -> None:
    stopped = {"t0-1": 10 * SECOND, "t1-1": 10 * SECOND}
    findings = Findings()
    earlier, others = Reap("t0-1", 9 * SECOND, 0), Reap("t2-1", 90 * SECOND, 0)
    other_rules.check_deploys(stopped, [earlier, others], findings)
    assert broken(findings) == set()
    assert findings.tried["deploy"] == 2
    other_rules.check_deploys(stopped, [Reap("t0-1", 13 * SECOND, 0)], findings)
    assert broken(findings) == {"deploy"}


@pytest.mark.parametrize(
    ("events", "rules"),
    [
        (["started", "started", "shutdown", "job_succeeded"], set()),
        (["started", "shutdown", "started"], {"no_start_after_shutdown"}),
    ],
)
def test_no_handler_starts_after_the_shutdown_has_begun(events: Iterable[str], rules: set[str]) -> None:
    findings = Findings()
    other_rules.check_log("t0-1", [{"event": event} for event in events], findings, started="started", shutdown="shutdown")
    assert broken(findings) == rules


# --- how processes ended


class Process:
    """One that has ended."""

    def __init__(self, status: int) -> None:
        self.status = status

    def poll(self) -> int:
        return self.status


@pytest.mark.parametrize(
    ("asked", "status", "took_seconds", "lived_seconds", "rules"),
    [
        ("term", 0, 2.0, 60.0, set()),
        ("term", 75, 2.0, 60.0, set()),
        ("kill", -9, 0.0, 60.0, set()),
        ("term", -15, 0.1, 1.0, set()),
        ("term", 0, 9.0, 60.0, {"exits"}),
        ("term", 1, 2.0, 60.0, {"exits"}),
        ("term", -15, 0.1, 60.0, {"exits"}),
        ("nothing", 0, 0.0, 60.0, {"exits"}),
        ("nothing", 1, 0.0, 60.0, {"exits"}),
        ("nothing", -9, 0.0, 60.0, {"exits"}),
    ],
)
def test_a_process_that_ends_otherwise_than_asked_is_found(
    asked: Asked, status: int, took_seconds: float, lived_seconds: float, rules: set[str], tmp_path: Path
) -> None:
    life = Life(
        "t0-1",
        cast("Any", Process(status)),
        None,
        started_at=100.0 - lived_seconds,
        asked=asked,
        asked_at=100.0,
        ended_at=100.0 + took_seconds,
    )
    slot = Slot(0, "daemon", environ={}, directory=tmp_path, url=str, proxy=None)
    slot.lives.append(life)
    findings = Findings()
    check_exits([slot], [], findings, lease_seconds=3)
    assert broken(findings) == rules


def test_who_comes_too_late_to_end_a_process_does_not_hide_that_it_ended_by_itself(tmp_path: Path) -> None:
    slot = Slot(0, "daemon", environ={}, directory=tmp_path, url=str, proxy=None)
    slot.lives.append(Life("t0-1", cast("Any", Process(1)), None))
    assert [slot.ask(asked).asked for asked in ("kill", "term")] == ["nothing", "nothing"]


def test_a_process_that_has_ended_by_itself_is_neither_frozen_nor_a_fault_of_the_torture(tmp_path: Path) -> None:
    slot = Slot(0, "daemon", environ={}, directory=tmp_path, url=str, proxy=None)
    process = subprocess.Popen(["true"])
    process.wait()
    slot.lives.append(Life("t0-1", process, None))
    assert not asyncio.run(slot.freeze(0))


def test_a_job_that_kills_its_process_explains_its_end(tmp_path: Path) -> None:
    slot = Slot(0, "daemon", environ={}, directory=tmp_path, url=str, proxy=None)
    slot.lives.append(Life("t0-1", cast("Any", Process(-9)), None))
    findings = Findings()
    check_exits([slot], [FIRST._replace(kind=POISON)], findings, lease_seconds=3)
    assert broken(findings) == set()


def test_a_line_that_is_no_json_object_is_found_and_a_cut_one_at_the_end_is_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"event": "a"}\n{"event": "b"}\n{"eve')
    findings = Findings()
    assert [entry["event"] for entry in read_log(log, "t0-1", findings)] == ["a", "b"]
    assert broken(findings) == set()
    log.write_text('{"event": "a"}\nTraceback\n[1]\n')
    assert len(read_log(log, "t0-1", findings)) == 1
    assert [breach.rule for breach in findings.breaches] == ["log_lines", "log_lines"]


def test_what_was_noted_is_read_also_of_a_process_that_was_killed(tmp_path: Path) -> None:
    notebook = Notebook(str(tmp_path / "notes"), "t0-1")
    for fence in (5, 6):
        notebook.write("start", subject="1", fence=fence, kind="effect")
    notebook.write("end", subject="1", fence=5, kind="effect")
    notebook.write("start", subject="1", fence=6, kind="effect")
    ended, *unended = notes.read(tmp_path / "notes")
    assert (ended.fence, ended.subject, ended.process) == (5, "1", "t0-1")
    assert ended.ended_at is not None
    assert ended.ended_at >= ended.started_at
    assert [(run.fence, run.ended_at) for run in unended] == [(6, None), (6, None)]


# --- how fast it came back


def test_a_recovery_beyond_the_lease_and_two_seconds_is_found() -> None:
    killed = [Killed("t0-1", 10 * SECOND, True), Killed("t1-1", 10 * SECOND, False)]
    findings = Findings()
    in_time = [
        Reap("t0-1", 13 * SECOND, 0),
        Reap("t0-1", 5 * SECOND, 0),
        Reap("t1-1", 90 * SECOND, 0),
        Reap("t2-1", 90 * SECOND, 0),
    ]
    assert timing.recovery(in_time, killed, findings, lease_seconds=3) == (1, 3.0, 3.0, 3.0, 5.0)
    assert broken(findings) == set()
    expired = [reap._replace(expired=12 * SECOND) for reap in timing.recovered(in_time, killed)]
    assert timing.after_expiry(expired, reap_seconds=0.5) == (1, 1.0, 1.0, 1.0, 0.5)
    timing.recovery([Reap("t0-1", 16 * SECOND, 0)], killed, findings, lease_seconds=3)
    assert broken(findings) == {"recovery"}


TEN = Usual(10, 10)


def jobs(begin: float, seconds: float, *, per_second: float = 10) -> list[int]:
    """Moments of completions, evenly; the first one after its share of time."""
    return [round((begin + number / per_second) * SECOND) for number in range(1, int(seconds * per_second) + 1)]


def returned(completed: list[int], *faults: Ended, usual: Usual = TEN) -> tuple[dict[str, timing.Returns], list[str]]:
    findings = Findings()
    found = timing.returns(completed, faults, findings, usual=usual)
    return dict(found), [breach.text for breach in findings.breaches]


def a_reset(began: float, ended: float, *, watched_seconds: float = 11) -> Ended:
    return Ended("reset", round(began * SECOND), round(ended * SECOND), round((ended + watched_seconds) * SECOND))


def test_the_return_is_the_end_of_the_first_full_second_after_the_fault() -> None:
    before = jobs(90, 10)
    assert returned(before + jobs(105, 20), a_reset(100, 105)) == ({"reset": (1, 1.0, 1.0, 10.0)}, [])
    assert returned(before + jobs(109, 20), a_reset(100, 105)) == ({"reset": (1, 4.9, 4.9, 10.0)}, [])
    # What was completed while the fault was in force does not count, nor does a rate below nine tenths.
    assert returned(before + jobs(100, 5) + jobs(105, 3, per_second=1) + jobs(108, 9), a_reset(100, 105))[0]["reset"].worst == 3.8


def test_a_throughput_that_does_not_come_back_in_time_is_found() -> None:
    before = jobs(90, 10)
    found, texts = returned(before + jobs(116, 20), a_reset(100, 105, watched_seconds=20))
    assert found == {"reset": (1, 11.9, 11.9, 10.0)}
    assert texts == ["reset: nine tenths of 10 jobs/s after 11.9 s"]
    found, texts = returned(before + jobs(105, 60, per_second=8), a_reset(100, 105))
    assert found == {"reset": (1, None, None, 10.0)}
    assert texts == ["reset: nine tenths of 10 jobs/s after more"]
    assert returned(before, a_reset(100, 105, watched_seconds=4)) == ({}, [])


def test_a_fault_is_measured_by_the_seconds_before_it() -> None:
    wide = Usual(10, 40)
    twice = [*jobs(90, 10, per_second=20), *jobs(105, 60)]
    assert returned(twice, a_reset(100, 105), usual=wide) == (
        {"reset": (1, None, None, 20.0)},
        ["reset: nine tenths of 20 jobs/s after more"],
    )
    # Not by a backlog that was caught up with, nor by what an earlier fault has left.
    assert returned([*jobs(90, 10, per_second=90), *jobs(105, 60)], a_reset(100, 105)) == ({"reset": (1, 1.0, 1.0, 10.0)}, [])
    assert returned([*jobs(90, 10, per_second=1), *jobs(105, 60, per_second=1)], a_reset(100, 105))[1] != []


def test_the_returns_of_a_kind_have_a_median_and_a_worst() -> None:
    ends = (105, 205, 305, 405)
    completed = [moment for end, gap in zip(ends, (0, 2, 4, 9), strict=True) for moment in jobs(end - 15, 10) + jobs(end + gap, 20)]
    faults = [a_reset(end - 5, end) for end in ends]
    other = faults[0]._replace(fault="kill")
    found, texts = returned(completed, *faults, other)
    assert found == {"reset": (4, 2.9, 9.9, 10.0), "kill": (1, 1.0, 1.0, 10.0)}
    assert texts == []


def test_every_rule_has_a_history_that_breaks_it() -> None:
    tables = [rules for _, rules in BAD] + [rules for _, rules in LEASES.values()] + [rules for *_, rules in SLOTS.values()]
    by_themselves = {"guarded", "started_once", "told_to_stop", "no_start_after_shutdown"}
    by_themselves |= {"log_lines", "exits", "recovery", "return", "room", "one_suspect", "live_start", "deploy"}
    assert set().union(*tables) | by_themselves == RULES.keys()
