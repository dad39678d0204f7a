"""The output of every command: a table for people, lines for programs, and no traceback wherever it goes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.commands import worker, worker_at_a_terminal
from tests.processes import environment

CLOSED = "exec 0<&-; exec 1>&-; exec 2>&-; exec {python} -m worker {arguments}"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("stats", 0), ("jobs list --json", 0), ("enqueue k 1", 0), ("enqueue k -", 2), ("run --burst", 0), ("--version", 0), ("x", 2)],
)
def test_closed_standard_descriptors_lead_nowhere(database_url: str, tmp_path: Path, arguments: str, status: int) -> None:
    text = CLOSED.format(python=shlex.quote(sys.executable), arguments=arguments)
    environ = environment(tmp_path, DATABASE_URL=database_url)
    assert subprocess.run(["sh", "-c", text], env=environ, cwd=tmp_path, timeout=60).returncode == status


def test_a_closed_standard_output_alone_is_no_traceback(database_url: str, tmp_path: Path) -> None:
    result = subprocess.run(
        ["sh", "-c", f"exec {shlex.quote(sys.executable)} -m worker stats >&-"],
        env=environment(tmp_path, DATABASE_URL=database_url),
        capture_output=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, b"")


def test_head_ends_a_list_in_silence(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload, last_error) SELECT '1', repeat('x', 900) FROM generate_series(1, 2000)")
    process = subprocess.Popen(
        [sys.executable, "-m", "worker", "jobs", "list", "--limit", "2000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path, DATABASE_URL=database_url),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=30) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", [["jobs", "list"], ["jobs", "list", "--json"], ["stats"], ["migrate"]])
def test_a_full_disk_is_a_clear_error(database_url: str, tmp_path: Path, command: list[str]) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload) VALUES ('1')")
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "worker", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(tmp_path, DATABASE_URL=database_url),
            timeout=30,
        )
    assert result.returncode == 1
    assert result.stderr == b"worker: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "status"), [(["jobs", "show", "1"], 1), (["jobs", "list"], 78), (["enqueue", "--file", "-"], 0)]
)
def test_a_standard_error_that_nobody_reads_leaves_the_exit_status_as_it_is(
    database_url: str, tmp_path: Path, arguments: list[str], status: int
) -> None:
    workers = "none" if status == 78 else "1"
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment(tmp_path, DATABASE_URL=database_url, WORKERS=workers),
            timeout=30,
        )
    finally:
        os.close(theirs)
    assert (result.returncode, result.stdout) == (status, b"")


ODD = "é\x1b[31mred\x07\u202eevil\nnew [bold]line"


def test_data_can_neither_steer_a_terminal_nor_break_a_line(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload, kind, last_error) VALUES (%s, 'odd', %s)", [json.dumps(ODD), ODD])
    piped = worker("jobs", "list", directory=tmp_path, DATABASE_URL=database_url).stdout
    assert len(piped.splitlines()) == 2
    assert "é\\x1b[31mred\\x07\\u202eevil\\nnew [bold]line" in piped
    for command in (["jobs", "list"], ["jobs", "show", "1"]):
        status, shown = worker_at_a_terminal(*command, directory=tmp_path, DATABASE_URL=database_url)
        assert status == 0
        assert "\x1b[31mred" not in shown
        assert "\u202e" not in shown
        assert "\x07" not in shown
        assert "[bold]" in shown.replace("\n", "").replace(" ", "")


@pytest.mark.parametrize("locale", [{"LANG": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_a_poor_locale_prints_escapes_and_no_traceback(database_url: str, tmp_path: Path, locale: dict[str, str]) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload, kind) VALUES ('1', 'grüße')")
    for command in (["jobs", "list"], ["jobs", "list", "--json"], ["stats"]):
        result = worker(*command, directory=tmp_path, DATABASE_URL=database_url, **locale)
        assert (result.returncode, result.stderr) == (0, "")
        assert "gr" in result.stdout


def test_a_person_sees_a_table_and_a_pipe_gets_lines_with_tabs(database_url: str, tmp_path: Path) -> None:
    status, shown = worker_at_a_terminal("jobs", "list", directory=tmp_path, DATABASE_URL=database_url)
    assert (status, shown) == (0, "no jobs\n")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload) VALUES ('1')")
    status, shown = worker_at_a_terminal("jobs", "list", directory=tmp_path, DATABASE_URL=database_url)
    assert status == 0
    assert "attempts" in shown
    assert "─" in shown
    piped = worker("jobs", "list", directory=tmp_path, DATABASE_URL=database_url).stdout
    names, job = piped.splitlines()
    assert names.split("\t") == ["id", "state", "kind", "queue", "attempts", "available_at", "worker", "key", "last_error"]
    assert job.startswith("1\tready\tmessage\tdefault\t0/5\t")


def test_a_list_stays_readable_on_80_columns(database_url: str, tmp_path: Path) -> None:
    error = "ValueError: the address of customer 1234 is not known here"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jobs (payload, kind, idempotency_key, attempts, last_error)"
            " VALUES ('1', 'send_welcome_mail', 'welcome-mail-of-customer-1234', 4, %s)",
            [error],
        )
    _, wide = worker_at_a_terminal("jobs", "list", directory=tmp_path, DATABASE_URL=database_url, COLUMNS="200")
    assert "queue" in wide
    assert error in wide
    _, narrow = worker_at_a_terminal("jobs", "list", directory=tmp_path, DATABASE_URL=database_url, COLUMNS="80")
    narrow = re.sub("\x1b\\[[\\d;]*m", "", narrow)
    head, _, *lines = [line for line in narrow.splitlines() if line.strip()]
    assert head.split() == ["id", "state", "kind", "attempts", "key", "last_error"]
    assert lines[0].split()[:4] == ["1", "ready", "send_welcome_mail", "4/5"]
    assert all(word in narrow for word in error.split())
    assert len(lines) <= 4
    assert max(map(len, narrow.splitlines())) <= 80


def test_neither_the_daemon_nor_a_piped_command_loads_what_serves_a_person_only(database_url: str, tmp_path: Path) -> None:
    program = """
import sys
from worker.cli import main
sys.argv = ["worker", *sys.argv[1:]]
try:
    main()
finally:
    friends = {"rich", "pygments", "markdown_it"}
    print(sorted(friends & {name.partition(".")[0] for name in sys.modules}), file=sys.__stderr__)
"""
    for arguments in (["run", "--burst"], ["jobs", "list"], ["run", "--help"]):
        result = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            env=environment(tmp_path, DATABASE_URL=database_url),
            timeout=60,
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr.splitlines()[-1:] == ["[]"], result.stdout


def test_python_dash_m_and_help_name_the_due_commands_only(tmp_path: Path) -> None:
    result = worker("--help", directory=tmp_path)
    assert result.returncode == 0
    names = [
        line.split()[0] for line in result.stdout.split("Commands:")[1].splitlines() if line.startswith("  ") and line[2] != " "
    ]
    assert names == [
        *("run", "demo", "migrate", "enqueue", "check", "health", "stats", "serve", "bench", "torture"),
        *("jobs", "lease", "generator"),
    ]


@pytest.mark.parametrize("show", [worker_at_a_terminal, worker], ids=["terminal", "pipe"])
def test_a_list_says_when_a_job_is_due_only_of_those_that_can_still_run(database_url: str, tmp_path: Path, show: Any) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jobs (payload, state, completed_at, available_at) VALUES"
            " ('1', 'ready', NULL, '2031-05-06'), ('1', 'dead', now(), '2032-05-06'), ('1', 'succeeded', now(), '2033-05-06')"
        )
    shown = str(show("jobs", "list", directory=tmp_path, DATABASE_URL=database_url, COLUMNS="200"))
    assert [year for year in ("2031", "2032", "2033") if f"{year}-05-0" in shown] == ["2031"]
    listed = worker("jobs", "list", "--json", directory=tmp_path, DATABASE_URL=database_url)
    assert [job["available_at"][:4] for job in json.loads(listed.stdout)] == ["2033", "2032", "2031"]
