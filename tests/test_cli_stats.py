"""`worker stats --watch`: in place at a terminal, one below the other in a pipe, through an outage, until somebody ends it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.commands import worker, worker_under_way
from tests.processes import environment
from tests.servers import PrivateCluster
from tests.waiting import wait_for

SESSIONS = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'reliable-worker command'
"""
STOP_SECONDS = 10
HOME_OF_FRAME = "\x1b[1A"
"""Rich goes up line by line to where the frame before began."""

CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "worker", *sys.argv[1:]])
"""
"""A program whose terminal is its own, so that Ctrl-C there is for it."""


@pytest.fixture
def db(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


class Terminal:
    """A terminal of 40 lines and what has appeared on it."""

    def __init__(self, directory: Path, *arguments: str, **variables: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(directory, **({"TERM": "xterm"} | variables)),
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def press_control_c(self) -> None:
        os.write(self._ours, b"\x03")

    def read(self) -> str:
        """All that has appeared so far."""
        while select.select([self._ours], [], [], 0)[0]:
            try:
                piece = os.read(self._ours, 65_536)
            except OSError:  # Linux's way to say that the other side is closed
                break
            if not piece:
                break
            self.shown += piece.decode(errors="replace")
        return self.shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextlib.contextmanager
def at_a_terminal(directory: Path, *arguments: str, **variables: str) -> Iterator[Terminal]:
    terminal = Terminal(directory, *arguments, **variables)
    try:
        yield terminal
    finally:
        terminal.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def wait_for_ready(process: subprocess.Popen[str], jobs: int) -> None:
    """A document that says so; there may be older ones before it that nobody has read."""
    while json.loads(line_of(process))["ready"] != jobs:
        pass


def complaint_of(process: subprocess.Popen[str]) -> str:
    """The next line on standard error, once it is there."""
    assert process.stderr is not None
    return process.stderr.readline()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and what it has said on standard error since."""
    _, said = process.communicate(timeout=STOP_SECONDS)
    return process.returncode, said


def test_a_person_sees_the_latest_numbers_in_place_until_control_c(
    database_url: str, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    with at_a_terminal(tmp_path, "stats", "--watch", DATABASE_URL=database_url) as terminal:
        wait_for(lambda: "lost_leases" in terminal.read(), 20)
        assert "queue mail" not in terminal.shown
        db.execute("INSERT INTO jobs (payload, queue) SELECT '1', 'mail' FROM generate_series(1, 77)")
        wait_for(lambda: "queue mail" in terminal.read())
        assert HOME_OF_FRAME in terminal.shown
        terminal.press_control_c()
        assert terminal.process.wait(STOP_SECONDS) == 0
        last = terminal.read().rpartition(HOME_OF_FRAME)[2]
        assert "77" in last, "the last numbers stay"
        assert "\x1b[?25h" in last, "the cursor is back"
        assert "Traceback" not in terminal.shown


def test_an_outage_is_said_in_place_and_passes(database_url: str, db: psycopg.Connection[Any], tmp_path: Path) -> None:
    with at_a_terminal(tmp_path, "stats", "--watch", DATABASE_URL=database_url) as terminal:
        wait_for(lambda: "until Ctrl-C" in terminal.read(), 20)
        [(pid,)] = db.execute(SESSIONS).fetchall()
        db.execute("SELECT pg_terminate_backend(%s)", [pid])
        wait_for(lambda: "it is asked again" in terminal.read())
        before = len(terminal.shown)
        wait_for(lambda: "until Ctrl-C" in terminal.read()[before:])
        terminal.process.terminate()
        assert terminal.process.wait(STOP_SECONDS) == 0
        assert "Traceback" not in terminal.read()


def test_a_terminal_that_replaces_nothing_gets_one_below_the_other(database_url: str, tmp_path: Path) -> None:
    with at_a_terminal(tmp_path, "stats", "--watch", DATABASE_URL=database_url, TERM="dumb") as terminal:
        wait_for(lambda: terminal.read().count("lost_leases") >= 2, 20)
        assert "\x1b" not in terminal.shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_pipe_gets_a_document_a_line_from_one_session_until_a_signal(
    database_url: str, db: psycopg.Connection[Any], tmp_path: Path, number: signal.Signals
) -> None:
    with worker_under_way("stats", "--watch", "--json", directory=tmp_path, DATABASE_URL=database_url) as process:
        assert json.loads(line_of(process))["ready"] == 0
        before = db.execute(SESSIONS).fetchall()
        db.execute("INSERT INTO jobs (payload) VALUES ('1')")
        wait_for_ready(process, 1)
        assert db.execute(SESSIONS).fetchall() == before
        assert len(before) == 1
        process.send_signal(number)
        assert ended(process) == (0, "")


def test_a_pipe_gets_blocks_with_an_empty_line_between_them(database_url: str, tmp_path: Path) -> None:
    with worker_under_way("stats", "--watch", directory=tmp_path, DATABASE_URL=database_url) as process:
        lines = [line_of(process) for _ in range(25)]  # more than a block of an empty queue
        end = lines.index("\n")
        assert lines[0] == lines[end + 1] == "what\tvalue\n"
        assert "ready\t0\n" in lines[:end]
        process.terminate()
        assert ended(process)[0] == 0


def test_a_session_that_is_terminated_and_a_table_that_is_locked_are_said_once_and_pass(
    database_url: str, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    with worker_under_way("stats", "--watch", "--json", directory=tmp_path, DATABASE_URL=database_url) as process:
        line_of(process)
        [(first,)] = db.execute(SESSIONS).fetchall()
        db.execute("SELECT pg_terminate_backend(%s)", [first])
        terminated = complaint_of(process)
        assert "terminat" in terminated or "closed" in terminated
        assert complaint_of(process) == "worker: the database answers again\n"
        [(second,)] = db.execute(SESSIONS).fetchall()
        assert second != first

        def is_another_session() -> bool:
            return db.execute(SESSIONS).fetchall() not in ([], [(second,)])

        with psycopg.connect(database_url) as other:
            other.execute("LOCK TABLE jobs")
            wait_for(is_another_session, 20)  # it has given that one up, and asks again
        db.execute("INSERT INTO jobs (payload) VALUES ('1')")
        wait_for_ready(process, 1)
        assert "lock timeout" in complaint_of(process)
        assert complaint_of(process) == "worker: the database answers again\n"
        process.terminate()
        assert ended(process) == (0, "")


def test_a_schema_that_is_gone_is_waited_for(database_url: str, db: psycopg.Connection[Any], tmp_path: Path) -> None:
    """As while a restore is under way."""
    with worker_under_way("stats", "--watch", "--json", directory=tmp_path, DATABASE_URL=database_url) as process:
        line_of(process)
        db.execute("ALTER SCHEMA public RENAME TO away")
        assert "does not exist" in complaint_of(process)
        assert "holds no tables" in complaint_of(process)
        db.execute("ALTER SCHEMA away RENAME TO public")
        db.execute("INSERT INTO jobs (payload) VALUES ('1')")
        wait_for_ready(process, 1)
        process.terminate()
        assert ended(process)[0] == 0


def test_a_server_that_is_stopped_or_says_nothing_is_waited_for(
    private_cluster: Callable[..., PrivateCluster], tmp_path: Path
) -> None:
    server = private_cluster()
    with worker_under_way("stats", "--watch", "--json", directory=tmp_path, DATABASE_URL=server.dsn) as process:
        line_of(process)
        server.stop()
        while "cannot connect" not in (said := complaint_of(process)):
            assert said.startswith("worker: ")
        server.start()
        while "answers again" not in complaint_of(process):
            pass
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            [(pid,)] = connection.execute(SESSIONS).fetchall()
        os.kill(pid, signal.SIGSTOP)
        try:
            assert complaint_of(process).startswith("worker: no answer for 5 s")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert complaint_of(process) == "worker: the database answers again\n"
        process.terminate()
        assert ended(process) == (0, "")


def test_what_is_wrong_at_first_ends_it_as_it_does_without_watch(
    database_url: str, empty_database_url: str, tmp_path: Path
) -> None:
    for url, variables, status in (
        ("postgresql://nobody@127.0.0.1:1/none", {}, 69),
        (empty_database_url, {}, 78),
        (database_url, {"WORKERS": "many"}, 78),
    ):
        once = worker("stats", directory=tmp_path, DATABASE_URL=url, **variables)
        watched = worker("stats", "--watch", directory=tmp_path, DATABASE_URL=url, **variables)
        assert (watched.returncode, watched.stdout, watched.stderr) == (status, "", once.stderr)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_head_ends_it_in_silence(database_url: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    with worker_under_way("stats", "--watch", *options, directory=tmp_path, DATABASE_URL=database_url) as process:
        assert line_of(process)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(STOP_SECONDS) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="the size of a pipe cannot be set here")
def test_a_reader_that_takes_nothing_does_not_keep_it_from_ending(
    database_url: str, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    db.execute("INSERT INTO jobs (payload, queue) SELECT '1', 'queue ' || n FROM generate_series(1, 500) AS n")
    with worker_under_way("stats", "--watch", "--json", directory=tmp_path, DATABASE_URL=database_url) as process:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        size = fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)

        def is_full() -> bool:
            return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0] >= size

        wait_for(is_full, 20)
        process.terminate()
        assert process.wait(STOP_SECONDS) == 0
