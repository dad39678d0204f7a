"""Slots of the generator under `worker torture`: the checker finds those made twice, without their mark, or without the lease."""

from __future__ import annotations

import pytest

from tests.torture_histories import SECOND, broken, lease, lease_change
from worker.store.audit import Change, LeaseChange, Slots
from worker.torture import other_rules
from worker.torture.breaches import Findings


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
