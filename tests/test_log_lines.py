"""A line of the log: one JSON object with an end, whatever it is given, and a readable one on a console."""

from __future__ import annotations

import datetime
import json
import os
import re
from typing import Any

import pytest

from worker import log_lines, masking
from worker.log_lines import Identity, console_line, json_line

IDENTITY = Identity("w-12345678", "1.2.3")


def rendered(**fields: object) -> dict[str, Any]:
    """The fields as they are read back from the line."""
    line = json_line(IDENTITY, "info", "tested", fields)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    read: dict[str, Any] = json.loads(line)
    return read


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


CYCLE: list[object] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        ("\ud800 lone", "\ufffd lone"),
        ("two\nlines\r\x1b[31m", "two\nlines\r\x1b[31m"),
        (b"\xff\x00x", "\\xff\x00x"),
        ({1}, [1]),
        (2**70, str(2**70)),
        (-(2**63), -(2**63)),
        ({1: {"\udfff": 2}}, {"1": {"\ufffd": 2}}),
        (ValueError("wrong"), "ValueError: wrong"),
        (Unspeakable(), "<Unspeakable that cannot be shown>"),
        ([Unspeakable(), 2**65], ["<Unspeakable that cannot be shown>", str(2**65)]),
        ("x" * 40_000, "x" * 40_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_odd_values_are_made_safe(value: object, read: object) -> None:
    assert rendered(value=value)["value"] == read


def test_times_are_written_in_iso_8601() -> None:
    moment = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
    assert rendered(at=moment)["at"] == "2024-02-29T12:00:00Z"
    assert rendered(at=moment, odd=2**70)["at"] == "2024-02-29T12:00:00+00:00"


def test_a_cycle_and_a_deep_nest_are_cut() -> None:
    deep: object = "bottom"
    for _ in range(2000):
        deep = [deep]
    assert "… (cut)" in json.dumps(rendered(cycle=CYCLE, deep=deep), ensure_ascii=False)


@pytest.mark.parametrize(
    "value",
    ["m" * 1_000_000, ["m" * 30_000] * 50, {f"key {n}": "m" * 30_000 for n in range(50)}, 10**100_000],
    ids=lambda value: type(value).__name__,
)
def test_a_line_has_an_end_whatever_it_is_given(value: object) -> None:
    line = json_line(IDENTITY, "info", "tested", {"value": value})
    assert len(line) < 140_000
    assert json.loads(line)["event"] == "tested"


def test_fields_cannot_pose_as_the_head_of_the_line() -> None:
    line = rendered(worker="other", level="debug", timestamp=0)
    assert (line["worker"], line["level"], line["pid"]) == ("w-12345678", "info", os.getpid())
    assert (line["worker_"], line["level_"], line["timestamp_"]) == ("other", "debug", 0)


def test_a_traceback_is_one_bounded_string_without_locals_and_secrets() -> None:
    masking.remember("remembered-secret")

    def dive(depth: int) -> None:
        local = "a local value"
        if depth == 0:
            raise ValueError("remembered-secret", "postgresql://u:other-secret@h")
        dive(depth - 1)
        del local

    with pytest.raises(ValueError, match="remembered") as raised:
        dive(3)
    text = log_lines.traceback_text(raised.value)
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith("ValueError: ('***', 'postgresql://u:***@h')")
    assert "a local value" not in text
    with pytest.raises(RecursionError) as recursed:
        dive(100_000)
    assert len(log_lines.traceback_text(recursed.value)) < 17_000
    assert "RecursionError" in log_lines.traceback_text(recursed.value)


def test_the_console_shows_the_same_for_people() -> None:
    fields = {"job_id": 3, "error": "two words", "odd": "\x1b[31m", "exception": "Traceback:\n  \x1b[1mboom"}
    line = console_line(IDENTITY, "warning", "job_failed", fields).decode()
    assert re.match(r"\d\d:\d\d:\d\d\.\d{3} warning job_failed +job_id=3 error='two words' odd='\\x1b", line)
    assert "\x1b" not in line
    assert line.endswith("\n    Traceback:\n      ?[1mboom\n")
