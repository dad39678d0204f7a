"""What a database would have recorded of jobs under `worker torture`, written down by hand, for the checker to judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from worker.store.audit import Change, EffectRow, FinalRow, LeaseChange, LeaseStanding, LedgerRow, Standing
from worker.torture import end_rules, other_rules
from worker.torture.breaches import RULES, Findings
from worker.torture.job_rules import JobRules, Kinds

SECOND = 1_000_000
LEASE = 3 * SECOND

A, B = "t0-1-aaaaaaaa", "t1-1-bbbbbbbb"
OPERATOR = "reliable-worker torture"
KINDS = Kinds(with_effect={"effect", "chain"}, with_next={"chain"}, refusing={"refuse"}, snoozing={"snooze"})


def writer(owner: str, role: str) -> str:
    return f"{owner[:4]} {role}"


class History:
    """Writes down what a database would have recorded; one job at a time, a second between two changes."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.effects: list[EffectRow] = []
        self.ledger: list[LedgerRow] = []
        self.acknowledged: list[int] = []
        self.failures: list[tuple[int, int]] = []
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
        if state in ("ready", "dead") and attempts == 0:
            self.failures.append((job, old.fence))
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
        rules = JobRules(findings, KINDS)
        for change in sorted(self.changes, key=lambda one: (one.job_id, one.seq)):
            rules.feed(change)
        other_rules.check_fences(rules.facts.draws, findings)
        end_rules.check_end(
            rules.facts,
            findings,
            KINDS,
            final=[FinalRow(job, *self._key[job], standing) for job, standing in self.standing.items() if standing is not None],
            effects=self.effects,
            ledger=self.ledger,
            failures=self.failures,
            acknowledged=self.acknowledged,
        )
        return findings


Story = Callable[[History], None]
"""What happens in a history."""
Breaches = Mapping[Story, set[str]]
"""Stories with one breach each, and exactly the rules that are found broken."""


def judged(write: Story) -> Findings:
    history = History()
    write(history)
    return history.check()


def broken(findings: Findings) -> set[str]:
    rules = {breach.rule for breach in findings.breaches}
    assert rules <= RULES.keys()
    return rules


def each_of(*stories: Story) -> pytest.MarkDecorator:
    """The test is about `write`: each of these."""
    return pytest.mark.parametrize("write", stories, ids=[story.__name__ for story in stories])


def each_breach(table: Breaches) -> pytest.MarkDecorator:
    """The test is about `write` and the `rules` that it breaks: each of these."""
    return pytest.mark.parametrize(("write", "rules"), table.items(), ids=[story.__name__ for story in table])


# --- histories that several tests begin with, or are about


def ordinary(history: History) -> None:
    history.add()
    history.claim()
    history.renew()
    history.succeed()


def taken_over_after_expiry(history: History) -> None:
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim(owner=B)
    history.succeed()


def dead_of_failures(history: History) -> None:
    history.add(most=2)
    history.claim()
    history.end()
    history.claim()
    history.end(state="dead")


# --- named leases


def lease(holder: str, fence: int, expires: int, released: int | None = None) -> LeaseStanding:
    return LeaseStanding(holder, fence, expires * SECOND, None if released is None else released * SECOND)


def lease_change(
    seq: int, at: int, resource: str, old: LeaseStanding | None, new: LeaseStanding | None, *, by: str | None = None
) -> LeaseChange:
    """By its holder, if nobody else is named."""
    moment = at * SECOND
    return LeaseChange(seq, moment, moment - 1000, seq, by or f"{new.holder if new else 't0-1'} leases", resource, old, new)
