"""What handlers wrote down under `worker torture`: each start and end is judged by the history of its job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.torture_histories import KINDS, LEASE, SECOND, History, broken
from worker.torture import notes, other_rules
from worker.torture.breaches import Findings
from worker.torture.daemons import is_textbook, slot_of
from worker.torture.job_rules import Claim, JobRules
from worker.torture.notes import Notebook
from worker.torture.other_rules import Excuse, Run

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
        ([FIRST], {}, [], set()),
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
        ([FIRST._replace(ended_at=5.5, fence=100), SECOND_RUN], {}, [], set()),
        ([FIRST._replace(started_at=5.2, ended_at=5.8), SECOND_RUN], {}, [], {"told_to_stop"}),
        ([FIRST._replace(started_at=5.2, ended_at=5.8, fence=100), SECOND_RUN], {}, [], set()),
    ],
)
def test_a_handler_has_stopped_before_the_next_attempt_starts(
    noted: list[Run], died_at: dict[str, float], excuses: list[Excuse], rules: set[str]
) -> None:
    findings = Findings()
    about: dict[str, Any] = {"deaf_kinds": {"deaf"}, "cancelled": {100}, "lease_seconds": 3.0}
    other_rules.check_stops(noted, findings, died_at=died_at, excuses=excuses, taken_at={}, **about)
    assert broken(findings) == rules


@pytest.mark.parametrize(
    ("ended_at", "died_at", "excuses", "rules"),
    [
        (2.0, {}, [], set()),
        (5.9, {}, [], set()),
        (6.5, {}, [], {"told_to_stop"}),
        (None, {}, [], {"told_to_stop"}),
        (None, {"t0-1": 3.0}, [], set()),
        (None, {"t0-1": 9.0}, [], {"told_to_stop"}),
        (6.5, {}, [Excuse("t0-1", 2.0, 6.4)], set()),
        (6.5, {}, [Excuse("t1-1", 2.0, 6.4)], {"told_to_stop"}),
    ],
)
def test_a_handler_has_stopped_soon_after_its_job_was_taken_though_nobody_comes_next(
    ended_at: float | None, died_at: dict[str, float], excuses: list[Excuse], rules: set[str]
) -> None:
    """It was the last attempt, for example."""
    run = FIRST._replace(ended_at=ended_at)
    findings = Findings()
    about: dict[str, Any] = {"deaf_kinds": {"deaf"}, "cancelled": set(), "taken_at": {101: 5.0, 104: 5.0}, "lease_seconds": 3.0}
    deaf = run._replace(subject="3", fence=104, kind="deaf")
    other_rules.check_stops([run, deaf], findings, died_at=died_at, excuses=excuses, **about)
    assert broken(findings) == rules
    assert len(findings.breaches) == len(rules)


@pytest.mark.parametrize(("ended_at", "rules"), [(6.5, set()), (8.9, set()), (9.5, {"told_to_stop"}), (None, {"told_to_stop"})])
def test_a_handler_has_stopped_when_the_lease_would_have_been_over_whose_job_was_cancelled(
    ended_at: float | None, rules: set[str]
) -> None:
    findings = Findings()
    about: dict[str, Any] = {"deaf_kinds": {"deaf"}, "cancelled": {101}, "taken_at": {101: 5.0}, "lease_seconds": 3.0}
    other_rules.check_stops([FIRST._replace(ended_at=ended_at)], findings, died_at={}, excuses=[], **about)
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
    rules = JobRules(Findings(), KINDS)
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
