"""Liveness: files that processes leave, judged without asking the database, and never fooled by a reused process id."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from worker.clock import local_seconds
from worker.errors import ConfigError
from worker.health import HealthFile, Heartbeat, all_well, judge, process_started, read_verdicts

NOW = 1_000.0


def beat(**changes: object) -> Heartbeat:
    started = process_started(os.getpid())
    assert started is not None
    well = Heartbeat(
        id="host-12345678",
        pid=os.getpid(),
        pid_started=started,
        version="1",
        written_at_seconds=NOW,
        beat_seconds=1,
        loop_lag_seconds=0,
        loop_allowed=False,
        claim_age_seconds=0,
        claim_allowed_seconds=10,
        database_up=True,
        stopping=False,
    )
    return replace(well, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heartbeat", "text"),
    [
        (beat(), "ok"),
        (beat(written_at_seconds=NOW - 4.9), "ok"),
        (beat(written_at_seconds=NOW - 60), "no heartbeat for 60 s"),
        (beat(written_at_seconds=NOW + 500), "heartbeat of an earlier boot"),
        (beat(loop_lag_seconds=11), "event loop blocked for 11 s"),
        (beat(loop_lag_seconds=90, loop_allowed=True, claim_age_seconds=90), "ok"),
        (beat(claim_age_seconds=60), "no claim for 60 s"),
        (beat(claim_age_seconds=600, database_up=False), "ok, database away"),
        (beat(claim_age_seconds=600, stopping=True), "stopping"),
        (beat(written_at_seconds=NOW - 60, stopping=True), "no heartbeat for 60 s"),
        (beat(written_at_seconds=NOW - 60, database_up=False), "no heartbeat for 60 s, database away"),
    ],
)
def test_a_heartbeat_is_judged_by_its_age_its_loop_and_its_claims(heartbeat: Heartbeat, text: str) -> None:
    verdict = judge(heartbeat, NOW, is_running=True)
    assert verdict.text == text
    assert verdict.well is text.startswith(("ok", "stopping"))


def test_what_is_written_is_read_back_and_removed_at_the_end(tmp_path: Path) -> None:
    file = HealthFile(tmp_path, "odd/na me-12345678")
    assert not all_well(read_verdicts(tmp_path))
    assert file.write(beat(written_at_seconds=local_seconds()))
    [verdict] = read_verdicts(tmp_path)
    assert (verdict.pid, verdict.text, verdict.well) == (os.getpid(), "ok", True)
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_does_not_make_a_living_one_ill_but_alone_it_is_no_health(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        gone = beat(id="gone", pid=child.pid, pid_started=process_started(child.pid), written_at_seconds=local_seconds())
        HealthFile(tmp_path, "gone").write(gone)
        assert all_well(read_verdicts(tmp_path))
        child.kill()
    [verdict] = read_verdicts(tmp_path)
    assert (verdict.gone, verdict.text) == (True, "gone")
    assert not all_well([verdict])
    HealthFile(tmp_path, "alive").write(beat(written_at_seconds=local_seconds()))
    assert all_well(read_verdicts(tmp_path))


def test_a_process_id_that_somebody_else_has_now_is_not_taken_for_the_daemon(tmp_path: Path) -> None:
    HealthFile(tmp_path, "a").write(beat(pid_started="long ago", written_at_seconds=local_seconds()))
    [verdict] = read_verdicts(tmp_path)
    assert verdict.gone
    # What a killed one left behind is cleared away by the next that starts.
    HealthFile(tmp_path, "b")
    assert read_verdicts(tmp_path) == []


def test_one_ill_process_among_well_ones_is_ill_health(tmp_path: Path) -> None:
    HealthFile(tmp_path, "a").write(beat(written_at_seconds=local_seconds()))
    HealthFile(tmp_path, "b").write(beat(written_at_seconds=local_seconds(), claim_age_seconds=600))
    assert not all_well(read_verdicts(tmp_path))


def test_files_that_are_no_heartbeats_are_no_health_and_no_hang(tmp_path: Path) -> None:
    (tmp_path / "reliable-worker-a.health").write_text('{"pid": 1}')
    os.mkfifo(tmp_path / "reliable-worker-b.health")
    (tmp_path / "reliable-worker-c.health").symlink_to("/etc/passwd")
    (tmp_path / "unrelated").write_text("x")
    [verdict] = read_verdicts(tmp_path)
    assert (verdict.id, verdict.well) == ("a", False)
    assert not all_well([verdict])


def test_a_directory_that_cannot_be_written_is_refused_by_the_name_of_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="WORKER_RUNTIME_DIR"):
        HealthFile(tmp_path / "file" / "below", "a")


def test_a_write_that_fails_is_false_and_no_exception(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    file = HealthFile(directory, "a")
    directory.rmdir()
    assert file.write(beat()) is False
    file.remove()


def test_nobody_is_led_elsewhere_by_a_link_in_a_shared_directory(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / f"reliable-worker-a.{os.getpid()}").symlink_to(victim)
    (directory / "reliable-worker-a.health").symlink_to(victim)
    assert HealthFile(directory, "a").write(beat())
    assert victim.read_text() == "precious"
