"""What handlers and processes wrote down under `worker torture`: each start, end and exit is judged by the history of its job."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.torture_histories import KINDS, LEASE, SECOND, History, broken
from worker.torture import notes, other_rules
from worker.torture.breaches import Findings
from worker.torture.checking import read_log
from worker.torture.daemons import Asked, Life, Slot, check_exits, is_textbook, slot_of
from worker.torture.handlers import POISON
from worker.torture.job_rules import Claim, JobRules, Reap
from worker.torture.notes import Notebook
from worker.torture.other_rules import Excuse, Run

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
        ([FIRST._replace(ended_at=5.5, fence=103), SECOND_RUN], {}, [], set()),
    ],
)
def test_a_handler_has_stopped_before_the_next_attempt_starts(
    noted: list[Run], died_at: dict[str, float], excuses: list[Excuse], rules: set[str]
) -> None:
    findings = Findings()
    about: dict[str, Any] = {"deaf_kinds": {"deaf"}, "cancelled": {103}}
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
    about: dict[str, Any] = {"deaf_kinds": {"deaf"}, "cancelled": {103}, "taken_at": {101: 5.0, 103: 5.0, 104: 5.0}}
    others = [run._replace(subject="2", fence=103), run._replace(subject="3", fence=104, kind="deaf")]
    other_rules.check_stops([run, *others], findings, died_at=died_at, excuses=excuses, **about)
    assert broken(findings) == rules
    assert len(findings.breaches) == len(rules)


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


def test_a_process_that_has_not_said_a_word_yet_may_end_by_the_signal(tmp_path: Path) -> None:
    """On a busy machine it takes long to start."""
    log = tmp_path / "log"
    for sort, said, lived_seconds, rules in (
        ("daemon", "", 20.0, set()),
        ("daemon", "", 60.0, {"exits"}),
        ("daemon", '{"event": "daemon_started"}\n', 20.0, {"exits"}),
        ("holder", "", 20.0, {"exits"}),
    ):
        log.write_text(said)
        life = Life(
            "t0-1", cast("Any", Process(-15)), log, started_at=100.0 - lived_seconds, asked="term", asked_at=100.0, ended_at=100.1
        )
        slot = Slot(0, sort, environ={}, directory=tmp_path, url=str, proxy=None)
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
