"""The checker, change by change: each of each job against what SPEC calls guarantees. No I/O. What needs all of them: end_rules.

Whoever wrote is known by the name of its session, which the torture chose (`t2-7 commit`: the seventh process of slot 2, its
connection for commits); an owner is that process and eight hex digits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from worker.store.audit import Change, Standing
from worker.torture.breaches import Findings

OPERATOR: Final = "torture"
"""The role of the torture's own sessions, which enqueue, cancel, retry and prune."""
REAPER: Final = "reaper"
TERMINAL: Final = frozenset({"succeeded", "dead", "cancelled"})

_FRESH = Standing("ready", None, 0, None, 0, 0)
_JUST_NOW_US: Final = 1_000_000
"""A presence that was written so shortly before a job was taken may have come behind the look at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """What the handlers of each kind do."""

    with_effect: Collection[str]
    with_next: Collection[str]
    """Enqueue a follow-up job."""
    refusing: Collection[str]
    """Refuse their jobs for good."""
    snoozing: Collection[str]


def process_of(owner: str | None) -> str | None:
    return None if owner is None else owner.rpartition("-")[0]


class Draw(NamedTuple):
    """One fence, drawn after `begun` and before `at`."""

    begun: int
    at: int
    fence: int
    whose: str


class Claim(NamedTuple):
    job_id: int
    kind: str
    process: str | None
    at: int
    txid: int
    is_suspect: bool
    """A process was lost with it before."""


class Reap(NamedTuple):
    """A job taken from a process that let its lease expire."""

    process: str
    at: int
    expired: int


@dataclass(slots=True)
class JobFacts:
    """What the histories of all jobs come to, for the rules that look at more than one job, and for the report."""

    draws: list[Draw] = field(default_factory=list)
    claims: dict[int, Claim] = field(default_factory=dict)
    """By fence."""
    completions: dict[tuple[int, int, int], Change] = field(default_factory=dict)
    """By (txid, job, fence)."""
    leases: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By fence: from when on it was to live until when; one entry for the claim, and one for each renewal."""
    reaps: list[Reap] = field(default_factory=list)
    taken: dict[int, int] = field(default_factory=dict)
    """Fence to the moment at which the job was taken from that attempt, by the reaper or by a cancellation."""
    cancelled: set[int] = field(default_factory=set)
    """Fences of attempts that were cancelled: their operator may have the job run again at once."""
    inserts: dict[int, Change] = field(default_factory=dict)
    """By job."""
    completed_at: list[int] = field(default_factory=list)
    spent: list[Change] = field(default_factory=list)
    """How attempts ended that were not given back, and did not succeed."""
    refunded: list[Change] = field(default_factory=list)
    """How attempts ended that were given back."""
    last: dict[int, Standing | None] = field(default_factory=dict)
    """By job: how its history ends; None: deleted."""
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


class JobRules:
    """Fed with every change, job by job and in order; then `facts` are complete."""

    def __init__(self, findings: Findings, kinds: Kinds) -> None:
        self.facts = JobFacts()
        self._findings = findings
        self._kinds = kinds
        self._previous: Change | None = None
        self._before: Change | None = None
        """The one before the change that is looked at, of the same job."""
        self._highest_fence = 0
        self._completed_in: int | None = None

    def feed(self, change: Change) -> None:
        """The next change of the same job, or the first of another."""
        before = self._previous
        if before is None or before.job_id != change.job_id:
            before = None
            self._highest_fence = 0
            self._completed_in = None
        self._before, self._previous = before, change
        self.facts.last[change.job_id] = change.new
        self._findings.expect(
            change.old == (None if before is None else before.new), "unbroken", "this row did not come from there", before, change
        )
        if change.old is None:
            self._inserted(change)
        elif change.new is None:
            self._deleted(change, change.old)
        else:
            self._updated(change, change.old, change.new)

    # --- one change

    def _inserted(self, change: Change) -> None:
        self.facts.inserts[change.job_id] = change
        self.facts.count("enqueued")
        self._findings.expect(change.new == _FRESH, "unbroken", "a job that was not new when it came", change)

    def _deleted(self, change: Change, old: Standing) -> None:
        self.facts.count("pruned")
        self._findings.expect(
            _role(change) == OPERATOR and old.state in TERMINAL,
            "not_lost",
            "deleted by somebody else, or before it had ended",
            change,
        )

    def _updated(self, change: Change, old: Standing, new: Standing) -> None:
        expect = self._findings.expect
        if new.state == "ready":
            expect(new.attempts < change.max_attempts, "used_up", "ready, and its attempts are used up", change)
        if (old.state, new.state) != ("ready", "running"):
            expect(new.fence == old.fence, "fence_rises", "the fence changed without a claim", change)
        match old.state, new.state:
            case "ready", "running":
                self._claimed(change, old, new)
            case "running", "running":
                self._renewed(change, old, new)
            case "running", "succeeded":
                self._succeeded(change, old, new)
            case "running", ("ready" | "dead") if _role(change) == REAPER:
                self._reaped(change, old, new)
            case "running", ("ready" | "dead"):
                self._settled(change, old, new)
            case (("running" | "ready"), "cancelled"):
                self.facts.count("cancelled")
                if old.state == "running":
                    self.facts.taken[old.fence] = change.at
                    self.facts.cancelled.add(old.fence)
                expect(_role(change) == OPERATOR, "owner_writes", "cancelled by somebody whom nobody asked", change)
                expect(new.attempts == old.attempts, "attempts", "a cancellation changed the attempts", change)
                expect(new.crashes == old.crashes, "crashes", "a cancellation changed the crashes", change)
            case (("dead" | "cancelled"), "ready"):
                self.facts.count("retried")
                expect(_role(change) == OPERATOR, "terminal", "made ready again by somebody whom nobody asked", change)
                expect(new.attempts == 0, "attempts", "a retry gives fresh attempts", change)
                expect(new.crashes == old.crashes, "crashes", "a retry changed the crashes", change)
            case "ready", "ready":
                expect(old == new, "attempts", "a waiting job changed", change)
            case "succeeded", "succeeded":
                # A handler's own transaction stores its result after the completion.
                expect(change.txid == self._completed_in and old == new, "terminal", "written after it had ended", change)
                self._said(change, new)
            case _:
                expect(False, "terminal", f"{old.state} became {new.state}", change)

    def _claimed(self, change: Change, old: Standing, new: Standing) -> None:
        expect = self._findings.expect
        self.facts.count("claims")
        process = process_of(new.owner)
        whose = f"job {change.job_id}"
        expect(new.fence > max(old.fence, self._highest_fence), "fence_rises", "the fence did not rise with the claim", change)
        other = self.facts.claims.get(new.fence)
        expect(other is None, "fence_rises", f"the fence was given to job {other and other.job_id} as well", change)
        expect(new.attempts == old.attempts + 1 <= change.max_attempts, "attempts", "a claim that did not spend one", change)
        expect(new.crashes == old.crashes, "crashes", "a claim changed the crashes", change)
        expect(_process(change) == process, "owner_writes", "claimed for somebody else", change)
        expect((new.until or 0) > change.begun, "one_live_lease", "claimed with a lease that is over", change)
        self._highest_fence = max(self._highest_fence, new.fence)
        self.facts.claims[new.fence] = Claim(change.job_id, change.kind, process, change.at, change.txid, old.crashes > 0)
        self.facts.leases[new.fence] = [(change.at, new.until or 0)]
        self.facts.draws.append(Draw(change.begun, change.at, new.fence, whose))

    def _renewed(self, change: Change, old: Standing, new: Standing) -> None:
        expect = self._findings.expect
        self.facts.count("renewals")
        if new.owner != old.owner or new.fence != old.fence:
            expect((old.until or 0) <= change.at, "one_live_lease", "the owner changed while the lease was live", change)
            expect(False, "owner_writes", "the owner changed without a claim", change)
            return
        expect(_process(change) == process_of(old.owner), "owner_writes", "renewed by somebody who does not own it", change)
        expect((old.until or 0) > change.begun, "renewal", "renewed after it had expired", change)
        expect((new.attempts, new.crashes) == (old.attempts, old.crashes), "renewal", "more than the lease was changed", change)
        # One that began earlier and came later counts from its own beginning.
        overtaken = self._before is not None and change.begun < self._before.begun
        expect(overtaken or (new.until or 0) >= (old.until or 0), "renewal", "the lease ends earlier than before", change)
        self.facts.leases.setdefault(new.fence, []).append((change.at, new.until or 0))

    def _succeeded(self, change: Change, old: Standing, new: Standing) -> None:
        expect = self._findings.expect
        self.facts.count("succeeded")
        self._completed_in = change.txid
        expect(_process(change) == process_of(old.owner), "owner_writes", "completed by somebody who does not own it", change)
        expect((new.attempts, new.crashes) == (old.attempts, old.crashes), "attempts", "a completion changed them", change)
        self._said(change, new)
        self.facts.completions[change.txid, change.job_id, new.fence] = change
        self.facts.completed_at.append(change.at)

    def _reaped(self, change: Change, old: Standing, new: Standing) -> None:
        expect = self._findings.expect
        self.facts.count("reaped")
        expect((old.until or 0) <= change.at, "one_live_lease", "taken away while the lease was live", change)
        expect(new.attempts == old.attempts, "attempts", "an attempt whose lease expired is spent", change)
        expect(old.crashes <= new.crashes <= old.crashes + 1, "crashes", "more than one crash at a time", change)
        if change.owner_seen is None or change.owner_seen < change.begun - _JUST_NOW_US:
            has_gone = change.owner_until is None or change.owner_until <= change.begun
            text = "its process has gone, and no crash was counted" if has_gone else "a crash was counted, and its process lives"
            expect((new.crashes > old.crashes) == has_gone, "crashes", text, change)
        expect((new.state == "dead") == (old.attempts >= change.max_attempts), "used_up", "reaped into the wrong state", change)
        self.facts.spent.append(change)
        self.facts.reaps.append(Reap(process_of(old.owner) or "", change.at, old.until or 0))
        self.facts.taken[old.fence] = change.at

    def _settled(self, change: Change, old: Standing, new: Standing) -> None:
        expect = self._findings.expect
        refunded = new.attempts == old.attempts - 1
        self.facts.count("dead" if new.state == "dead" else "refunded" if refunded else "failed")
        if not expect(_process(change) == process_of(old.owner), "owner_writes", "ended by somebody who does not own it", change):
            expect((old.until or 0) <= change.at, "one_live_lease", "taken away while the lease was live", change)
        expect(
            new.attempts == old.attempts or (refunded and new.state == "ready"), "attempts", "neither spent nor refunded", change
        )
        expect(new.crashes == old.crashes, "crashes", "its own process counted a crash", change)
        for_good = old.attempts >= change.max_attempts or change.kind in self._kinds.refusing
        expect(new.state == "ready" or for_good, "used_up", "buried with attempts left", change)
        if refunded:
            self.facts.refunded.append(change)
            kept = change.new_due == change.old_due or change.kind in self._kinds.snoozing
            expect(kept, "deploy", "given back, and not to its place in the queue", change)
        else:
            self.facts.spent.append(change)
        self._said(change, old)

    def _said(self, change: Change, of: Standing) -> None:
        if change.said_fence is not None:
            expect = self._findings.expect
            expect(change.said_fence == of.fence, "own_outcome", f"what attempt {change.said_fence} said is filed here", change)


def _role(change: Change) -> str:
    return change.writer.rpartition(" ")[2]


def _process(change: Change) -> str:
    return change.writer.rpartition(" ")[0]
