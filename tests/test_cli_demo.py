"""`worker demo`, and the private PostgreSQL of `--embedded`: they work out of the box and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.commands import worker, worker_at_a_terminal
from tests.processes import Daemon, environment
from tests.waiting import wait_for
from worker.cli import demo


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A short path that the account of the server can enter too."""
    directory = Path(tempfile.mkdtemp(prefix="rwt-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def processes_of(directory: Path) -> list[int]:
    """Everything that runs and was told about this directory, by arguments or environment."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(directory) in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def test_what_to_try_next_begins_with_how_to_get_the_command_where_the_shell_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_directory = tmp_path / ".venv" / "bin"
    bin_directory.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(bin_directory / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert demo._where_worker_is() == ""  # no virtual environment: nothing to activate
    (bin_directory / "activate").touch()
    assert demo._where_worker_is() == ", after `. .venv/bin/activate`"
    (bin_directory / "worker").touch(0o755)
    monkeypatch.setenv("PATH", str(bin_directory))
    assert demo._where_worker_is() == ""
    assert 'worker enqueue --embedded message \'{"message": "hello"}\'  ' in demo.NEXT.format(where="")


@pytest.mark.slow
def test_the_demo_shows_each_effect_applied_once_and_leaves_nothing_behind(open_dir: Path) -> None:
    # A configuration of the user's own has no say in it.
    foreign = {"WORKERS": "0", "DATABASE_URL": "x", "PGHOST": "/nowhere"}
    result = worker("demo", directory=open_dir, timeout_seconds=110, TMPDIR=str(open_dir), **foreign)
    assert (result.returncode, result.stderr) == (0, "")
    table = dict(line.split("\t") for line in result.stdout.splitlines() if "\t" in line)
    assert table["jobs"] == table["jobs succeeded"] == table["effects applied once"] == "1000"
    assert table["effects missing"] == table["effects applied twice or more"] == "0"
    [held] = [value for name, value in table.items() if name.startswith("jobs held by process")]
    assert table["of these recovered by the other process"] == held
    assert re.fullmatch(r"\d+(\.\d+)? s", table["all of this took"])
    assert "of 1000 jobs done" in result.stdout
    assert "worker run --embedded" in result.stdout
    assert processes_of(open_dir) == []
    assert list(open_dir.iterdir()) == []


@pytest.mark.slow
def test_the_demo_shows_a_bar_to_a_person(open_dir: Path) -> None:
    status, shown = worker_at_a_terminal("demo", directory=open_dir, TMPDIR=str(open_dir))
    assert status == 0
    assert "━" in shown
    assert "effects applied once" in shown


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_cleans_up(open_dir: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "worker", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(open_dir, TMPDIR=str(open_dir)),
        cwd=open_dir,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if b"0 of 1000 jobs done" in line:
                break
        assert len(processes_of(open_dir)) > 3
        process.send_signal(number)
        _, complaint = process.communicate(timeout=30)
        assert process.returncode == 130
        assert complaint == b""
        assert processes_of(open_dir) == []
        assert list(open_dir.iterdir()) == []
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_newcomer_runs_enqueues_and_lists_on_the_private_postgresql(open_dir: Path, daemon: Callable[..., Daemon]) -> None:
    place = ["--embedded", "--data-dir", str(open_dir / "data")]
    # Before any daemon: the command starts the server, gives it the schema and stops it again.
    first = worker("enqueue", *place, "message", '{"message": "early"}', "--key", "early", directory=open_dir, TMPDIR=str(open_dir))
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["created"] is True
    assert processes_of(open_dir) == []

    process = daemon(*place, TMPDIR=str(open_dir))
    process.wait_for_event("daemon_ready", 30)
    url = shlex.split(re.findall(r"^DATABASE_URL=(.*)$", process.stderr, re.MULTILINE)[0])[0]
    process.wait_for_event("job_succeeded", 30)
    second = worker("enqueue", *place, "message", '{"message": "hi"}', directory=open_dir, TMPDIR=str(open_dir))
    assert second.returncode == 0, second.stderr
    wait_for(lambda: len(process.find("job_succeeded")) == 2, 30)
    listed = worker("jobs", "list", *place, "--json", directory=open_dir, TMPDIR=str(open_dir))
    assert [job["state"] for job in json.loads(listed.stdout)] == ["succeeded", "succeeded"]
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM processed_messages").fetchone() == (2,)
    healthy = worker("health", directory=process.stdout_path.parent)
    assert (healthy.returncode, healthy.stderr) == (0, "")
    for command in (["check"], ["migrate", "--check"], ["stats", "--json"], ["jobs", "prune"], ["health"]):
        result = worker(*command, *place, directory=process.stdout_path.parent, TMPDIR=str(open_dir))
        assert result.returncode == 0, (command, result.stderr)
    assert process.stop() == 0
    assert processes_of(open_dir) == []


def test_a_data_directory_that_holds_other_things_is_refused(open_dir: Path) -> None:
    (open_dir / "precious.txt").write_text("x")
    result = worker("jobs", "list", "--embedded", "--data-dir", str(open_dir), directory=open_dir)
    assert result.returncode == 69
    assert "holds other files" in result.stderr
    assert (open_dir / "precious.txt").read_text() == "x"
