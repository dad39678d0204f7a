"""`worker generator`: anybody may start, stop and change it from anywhere, and see what it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import worker
from tests.generators import CALM, SLOW_MACHINE_SECONDS, Fleet, in_production, slow_insert
from tests.waiting import wait_for


def test_start_and_stop_work_from_any_process(fleet: Fleet) -> None:
    leader, other = fleet.lead("--rate", "20", **CALM), fleet.stand_by(**CALM)
    fleet.wait_for_more(3)
    stopped = fleet.command("stop", "--json")
    assert json.loads(stopped.stdout)["state"] == "STOPPED"
    produced = fleet.produced()
    for one in (leader, other):
        one.wait_for_event("generator_standby", reason="stopped")
    wait_for(lambda: fleet.holder is None)
    again = fleet.run(**CALM)
    again.wait_for_event("generator_standby", reason="stopped")
    assert fleet.produced() == produced
    started = json.loads(fleet.command("start", "--json").stdout)
    assert started["state"] == "STARTED"
    assert started["produced"] == produced
    fleet.wait_for_more(3)
    status = fleet.status()
    assert status["holder"] == fleet.holder
    assert status["fence"] == fleet.value("SELECT fence FROM leases")
    assert (status["rate"], status["state"]) == (20, "STARTED")


def test_a_stop_waits_for_a_production_in_flight(fleet: Fleet) -> None:
    fleet.db.execute(slow_insert(1))
    fleet.lead(WORKER_LEASE_SECONDS="40", WORKER_QUERY_TIMEOUT_SECONDS="15")
    wait_for(lambda: in_production(fleet))
    stopped = fleet.command("stop", "--json")
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads(stopped.stdout)["produced"] == fleet.produced() > 0


def test_a_stop_that_came_before_the_first_instance_is_kept(fleet: Fleet) -> None:
    assert fleet.command("stop").returncode == 0
    one = fleet.run("--rate", "50")
    one.wait_for_event("generator_standby", reason="stopped")
    assert fleet.produced() == 0
    fleet.command("start")
    fleet.wait_for_more(3)
    fleet.each_slot_once(0.02)


def test_a_changed_rate_reaches_the_leader_within_a_second(fleet: Fleet) -> None:
    leader = fleet.lead("--every", "3600", **CALM)
    before = fleet.produced()
    fleet.command("start", "--rate", "50", "--min", "0", "--max", "0")
    fleet.wait_for_more(5)
    # The spacing counts from the change: its first slot was at most 0.02 s later.
    first_moment, first_late = fleet.slots()[before]
    assert first_late.total_seconds() < 1 + SLOW_MACHINE_SECONDS, first_moment
    late = fleet.slots()[-5:]
    assert all(moment.microsecond % 20_000 == 0 for moment, _ in late)
    assert fleet.value("SELECT payload FROM jobs ORDER BY id DESC LIMIT 1") == {"sleep_duration_seconds": 0}
    assert len(leader.find("generator_leader")) == 1


def test_refused_jobs_are_counted_and_told_and_do_not_stop_the_loop(fleet: Fleet) -> None:
    """H6."""
    fleet.db.execute("ALTER TABLE jobs ADD CONSTRAINT no_bad CHECK (kind <> 'bad')")
    leader = fleet.lead("--kind", "bad", "--payload", '{"secret": 1}', "--rate", "20", **CALM)
    first = leader.wait_for_event("generator_failed")
    assert "no_bad" in first["error"]
    wait_for(lambda: fleet.value("SELECT failed FROM generators") > 10)
    assert len(leader.find("generator_failed")) == 1, "and from then on one line in ten seconds"
    assert "secret" not in leader.stdout_path.read_text()
    status = fleet.status()
    assert (status["produced"], "no_bad" in status["last_error"]) == (0, True)
    assert status["failed"] < 20 * 60
    fleet.command("start", "--kind", "good", "--payload", "{}")
    fleet.wait_for_more(3)
    assert fleet.status()["last_error"] is None


# --- the commands


def test_status_is_a_table_of_lines_in_a_pipe_and_one_document_with_json(fleet: Fleet) -> None:
    lines = dict(line.split("\t") for line in fleet.command("status").stdout.splitlines())
    status = fleet.status()
    assert list(status)[:5] == ["state", "holder", "fence", "rate", "produced"]
    assert list(status.values())[:5] == ["STOPPED", None, None, 1.0, 0]
    assert set(lines) == {"what", *status}
    assert (lines["state"], lines["holder"], lines["kind"]) == ("STOPPED", "-", "sleep")
    started = json.loads(fleet.command("start", "--every", "3600", "--json").stdout)
    assert (started["every_seconds"], started["rate"]) == (3600, pytest.approx(1 / 3600))
    assert fleet.status() == started


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rate", "0"),
        ("--rate", "abc"),
        ("--rate", "nan"),
        ("--rate", "1", "--every", "1"),
        ("--min", "5", "--max", "4"),
        ("--max", "86401"),
        ("--kind", "x"),
        ("--payload", "{}"),
        ("--kind", "x", "--payload", "{"),
        ("--kind", "x" * 129, "--payload", "{}"),
        ("--kind", "x", "--payload", "{}", "--min", "1"),
    ],
)
def test_options_that_cannot_be_meant_are_wrong_usage(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    for command in ("run", "start"):
        done = worker("generator", command, *arguments, directory=tmp_path, DATABASE_URL="postgresql://127.0.0.1:1/x")
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""


def test_a_payload_may_come_from_standard_input_or_a_file(fleet: Fleet) -> None:
    (fleet.directory / "payload.json").write_text('{"from": "file"}')
    for payload, stdin, expected in (("-", '{"from": "stdin"}', "stdin"), ("@payload.json", "", "file")):
        done = worker(
            *("generator", "start", "--kind", "x", "--payload", payload),
            directory=fleet.directory,
            stdin=stdin,
            DATABASE_URL=fleet.url,
        )
        assert done.returncode == 0, done.stderr
        assert fleet.value("SELECT payload ->> 'from' FROM generators") == expected
