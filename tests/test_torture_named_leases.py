"""Named leases under `worker torture`: the checker finds whoever takes, renews or releases what is somebody else's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.torture_histories import KINDS, SECOND, History, broken, lease, lease_change
from worker.store.audit import LeaseStanding
from worker.torture import other_rules
from worker.torture.breaches import Findings
from worker.torture.job_rules import JobFacts, JobRules

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
    "below a job's fence before": ([(1, lease("t5-1", 54, 5))], {"fence_rises"}),
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
    history.now = -100 * SECOND
    history.add()
    history.claim(fence=55)
    history.succeed()
    findings = Findings()
    jobs = JobRules(findings, KINDS)
    for change in history.changes:
        jobs.feed(change)
    changes, old = [], None
    for seq, (at, new) in enumerate(standings):
        changes.append(lease_change(seq, at, "red", old, new))
        old = new
    other_rules.check_leases(changes, findings, jobs.facts)
    other_rules.check_fences(jobs.facts.draws, findings)
    assert broken(findings) == rules


def test_a_lease_whose_history_has_a_gap_and_a_fence_of_another_lease_are_found() -> None:
    findings = Findings()
    changes = [
        lease_change(1, 1, "red", None, HELD),
        lease_change(2, 2, "red", HELD._replace(expires=1), HELD),
        lease_change(3, 1, "blue", None, HELD),
    ]
    other_rules.check_leases(changes, findings, JobFacts())
    assert broken(findings) == {"unbroken", "lease_by_holder", "fence_rises"}


@pytest.mark.parametrize(
    ("by", "rules"),
    [("t5-1 leases", set()), ("t5-1 pool", set()), ("t7-1 leases", {"lease_by_holder"}), ("t5-11 leases", {"lease_by_holder"})],
)
@pytest.mark.parametrize("holder", ["t5-1", "t5-1-0123abcd"])
@pytest.mark.parametrize("change", ["acquired", "renewed", "released"])
def test_a_named_lease_that_is_written_by_somebody_else_is_found(change: str, holder: str, by: str, rules: set[str]) -> None:
    """Who has lost it renews and releases that of the next holder, under his name and his fence."""
    held = HELD._replace(holder=holder)
    new = {"acquired": held, "renewed": held._replace(expires=9 * SECOND), "released": held._replace(released=2 * SECOND)}[change]
    changes = [lease_change(1, 1, "red", None, new, by=by)]
    if change != "acquired":
        changes = [lease_change(1, 1, "red", None, held, by="t5-1 pool"), lease_change(2, 2, "red", held, new, by=by)]
    findings = Findings()
    other_rules.check_leases(changes, findings, JobFacts())
    assert broken(findings) == rules
