"""How processes ended under `worker torture`: the checker finds what they left behind, an end nobody asked for, and odd lines."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.torture_histories import SECOND, broken
from worker.torture import other_rules
from worker.torture.breaches import Findings
from worker.torture.checking import read_log
from worker.torture.daemons import Asked, Life, Slot, check_exits
from worker.torture.handlers import POISON
from worker.torture.job_rules import Reap
from worker.torture.other_rules import Run


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
    check_exits([slot], [Run("1", 101, POISON, "t0-1", 1.0, 2.0)], findings, lease_seconds=3)
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
