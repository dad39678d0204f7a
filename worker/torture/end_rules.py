"""The checker, when every change has been looked at: what only all jobs together can show, and the rows that are left. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from worker.store.audit import Change, EffectRow, FinalRow, LedgerRow
from worker.torture.breaches import Findings
from worker.torture.job_rules import TERMINAL, JobFacts, Kinds

GENERATED_KEY: Final = "auto:"
NEXT: Final = "/next"
"""What the key of a follow-up job ends with."""
_FAILURES_KEPT: Final = 20
"""Of a job."""


def check_end(
    facts: JobFacts,
    findings: Findings,
    kinds: Kinds,
    *,
    final: Sequence[FinalRow],
    effects: Sequence[EffectRow],
    ledger: Sequence[LedgerRow],
    failures: Collection[tuple[int, int]],
    acknowledged: Iterable[int],
) -> None:
    """`failures`: the attempts on record as failed, by job and fence. `acknowledged`: ids that an enqueue has answered with."""
    _all_have_ended(facts, findings, final, acknowledged)
    _attempts_are_accounted_for(facts, findings, failures)
    _effects(facts, findings, effects, ledger, kinds.with_effect)
    _follow_ups(facts, findings, kinds.with_next)


def _all_have_ended(facts: JobFacts, findings: Findings, final: Sequence[FinalRow], acknowledged: Iterable[int]) -> None:
    expect, last = findings.expect, facts.last
    for row in final:
        expect(last.get(row.id) == row.standing, "unbroken", "the row is not as its history ends", last.get(row.id), row)
        expect(row.standing.state in TERMINAL, "not_lost", "it has not ended", row)
    there = {row.id for row in final}
    for id in acknowledged:
        if id in there:
            continue
        recorded = id in last
        expect(recorded, "not_lost", f"job {id} was acknowledged, and its row was never committed")
        expect(not recorded or last[id] is None, "not_lost", f"job {id} is gone, and nobody deleted it", last.get(id))


def _attempts_are_accounted_for(facts: JobFacts, findings: Findings, failures: Collection[tuple[int, int]]) -> None:
    """Whoever is told to go costs a job no attempt: one that is spent has a reason on record."""
    recorded = set(failures)
    of_job = Counter(job_id for job_id, _ in recorded)

    def judged(changes: Iterable[Change]) -> Iterable[tuple[Change, bool]]:
        for change in changes:
            # The records of a deleted job go, and of many only the last ones stay.
            if change.old is not None and facts.last[change.job_id] is not None and of_job[change.job_id] < _FAILURES_KEPT:
                yield change, (change.job_id, change.old.fence) in recorded

    for change, is_recorded in judged(facts.spent):
        findings.expect(is_recorded, "attempts", "spent, and nothing says for what", change)
    for change, is_recorded in judged(facts.refunded):
        findings.expect(not is_recorded, "attempts", "given back, and on record as failed", change)


def _effects(
    facts: JobFacts, findings: Findings, effects: Sequence[EffectRow], ledger: Sequence[LedgerRow], kinds: Collection[str]
) -> None:
    expect = findings.expect
    entered = {row.key: row for row in ledger}
    first: dict[str, EffectRow] = {}
    completed: dict[str, Change] = {}
    for change in sorted(facts.completions.values(), key=lambda change: change.at):
        if change.kind in kinds:
            completed.setdefault(change.key, change)
    for effect in effects:
        other = first.setdefault(effect.key, effect)
        expect(other is effect, "effect_once", "applied a second time", other, effect)
        own_completion = facts.completions.get((effect.txid, effect.job_id, effect.fence))
        expect(own_completion is not None, "effect_with_completion", "no completion of that attempt in that transaction", effect)
        if own_completion is not None and other is effect:
            earlier = completed.get(effect.key, own_completion)
            expect(earlier is own_completion, "effect_iff_succeeded", "an earlier success went without it", earlier, effect)
        if not effect.key.startswith(GENERATED_KEY):
            row = entered.get(effect.key)
            own = row is not None and (row.job_id, row.fence) == (effect.job_id, effect.fence)
            expect(own, "ledger", "the key is missing, or entered by somebody else", effect, row)
    for key, change in completed.items():
        expect(key in first, "effect_iff_succeeded", "succeeded without its effect", change)


def _follow_ups(facts: JobFacts, findings: Findings, kinds: Collection[str]) -> None:
    expect = findings.expect
    entered = {change.key: change for change in facts.inserts.values() if change.key.endswith(NEXT)}
    done: dict[str, set[int]] = {}
    for change in facts.completions.values():
        if change.kind in kinds:
            done.setdefault(change.key, set()).add(change.txid)
            expect(change.key + NEXT in entered, "outbox", "succeeded without its follow-up job", change)
    for key, change in entered.items():
        own = change.txid in done.get(key.removesuffix(NEXT), set())
        expect(own, "outbox", "enqueued apart from the completion", change)
