"""What the checker can find: a rule, and the rows that break it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

RULES: Final[Mapping[str, str]] = {
    "one_live_lease": "nobody takes a job or a named lease while its lease is live by the database's clock",
    "room": "a claim takes no more than it has room for: one row in the textbook shape",
    "owner_writes": "an attempt is renewed, completed, failed and released by its owner only",
    "renewal": "a renewal extends a live lease and changes nothing else",
    "fence_rises": "each claim and each acquisition has a higher fence than those before, and no two have the same",
    "attempts": "a claim spends one attempt, a refund gives it back, at most max_attempts are spent, each with a reason on record",
    "used_up": "nothing stands ready with its attempts used up, or is buried before they are (unless its handler refused it)",
    "crashes": "a crash is counted by the reaper only, and if, and only if, the process has gone",
    "terminal": "what has ended stays as it is, unless it is retried or pruned by its operator",
    "own_outcome": "a result and an error belong to the attempt they are filed under",
    "effect_once": "an effect is applied once per idempotency key",
    "effect_with_completion": "an effect is committed in the transaction that completes its own attempt",
    "effect_iff_succeeded": "a job has its effect if, and only if, it succeeded",
    "outbox": "a follow-up job is enqueued in the transaction that completes the job before it",
    "ledger": "the ledger has the key of every effect, entered by the attempt that applied it",
    "not_lost": "every acknowledged job is there, and has ended",
    "unbroken": "the history of a row has no gap, and ends with the row as it stands",
    "started_once": "a handler starts once a claim, in the process that claimed; so does a block under a named lease",
    "live_start": "a handler starts under a lease that is live",
    "one_suspect": "a process runs one job at a time with which a process was lost before",
    "told_to_stop": "a handler, or a block under a lease, has stopped before the next one starts, and soon after a loss, if it can",
    "no_start_after_shutdown": "no handler starts after its process has logged shutdown_started",
    "deploy": "who says it has stopped cleanly leaves no job to the end of its lease, and what is given back keeps its place",
    "lease_by_holder": "a named lease is renewed and released by its holder, while it is live",
    "guarded": "a resource that checks fences lets no stale one pass",
    "slot_once": "a slot of the generator is produced once, by whoever holds its lease",
    "log_lines": "every line of a daemon's log is one JSON object",
    "exits": "a daemon ends only when told to, within its limit, with a status that means so",
    "recovery": "jobs of a killed process are ready again within the lease and two seconds",
    "return": "after each single fault the throughput is back to nine tenths within ten seconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One broken promise."""

    rule: str
    text: str
    rows: tuple[object, ...] = ()
    """The offending rows, as they were recorded."""


@dataclass(slots=True)
class Findings:
    """What one check came to: breaches, and how many facts each rule was tried on."""

    breaches: list[Breach] = field(default_factory=list)
    tried: Counter[str] = field(default_factory=Counter)

    def expect(self, holds: bool, rule: str, text: str, *rows: object) -> bool:
        """Note one fact; a breach if it does not hold."""
        self.tried[rule] += 1
        if not holds:
            self.breaches.append(Breach(rule=rule, text=text, rows=rows))
        return holds
