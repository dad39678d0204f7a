"""The end of a process: what its trouble means, and what it does while a look-up of a name hangs, which nothing can cancel."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.inprocess import listening
from tests.processes import Daemon, environment
from worker import ending, events
from worker.errors import ConfigError, DatabaseUnavailable, PortTaken, SchemaError
from worker.events import Event

# A thread that ends its loop late, as one does that waits for a look-up.
LATE = """
import sys, time
from worker import ending
from worker.rights import RightsThread

def be_late():
    time.sleep(float(sys.argv[1]))
    print("the loop has ended", flush=True)

rights = RightsThread()
rights.start()
rights.call(be_late)
rights.stop(timeout_seconds=0.05)
"""

# In a network of its own, where the one name server takes every question and answers none; goes on as the program it is given.
DEAF_NAME_SERVER = """
import fcntl, os, pathlib, socket, struct, subprocess, sys

up = struct.pack("16sh14x", b"lo", 1)
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.ioctl(server, 0x8914, up)
server.bind(("127.0.0.1", 53))
server.set_inheritable(True)
settings = pathlib.Path("resolv.conf")
settings.write_text("nameserver 127.0.0.1\\noptions timeout:30 attempts:4\\n")
subprocess.run(["mount", "--bind", settings, "/etc/resolv.conf"], check=True)
os.execv(sys.argv[1], sys.argv[1:])
"""
UNSHARE = ("unshare", "--net", "--mount")
NOWHERE = "postgresql://worker@database.example.test/app"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-c", program, *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(Path("/nonexistent")), check=False)


@pytest.mark.parametrize(
    ("error", "status", "event", "says"),
    [
        (ConfigError("one", "two"), 78, events.CONFIG_INVALID, "two"),
        (SchemaError("no such schema"), 78, events.CONFIG_INVALID, "no such schema"),
        (DatabaseUnavailable("nobody answers"), 69, events.DATABASE_LOST, "nobody answers"),
        (PortTaken("port 80"), 69, events.HTTP_PORT_TAKEN, "port 80"),
        (ValueError("a bug"), 1, events.INTERNAL_ERROR, "a bug"),
        (ConnectionError("unexpected here"), 1, events.INTERNAL_ERROR, "unexpected here"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_ends_a_process_is_said_and_has_a_status(error: Exception, status: int, event: Event, says: str) -> None:
    with listening() as log:
        assert ending.status_of(error, where="here") == status
    assert {name for name, _ in log.lines} == {event.name}
    assert says in log.text


def test_the_interpreter_is_not_torn_down_under_a_thread_that_still_closes_its_loop() -> None:
    ended = run(LATE, "1")
    assert (ended.returncode, ended.stdout) == (0, "the loop has ended\n"), ended.stderr


def test_a_process_that_has_said_its_last_word_waits_for_no_such_thread() -> None:
    ended = run(LATE + "ending.wait_for_threads(7)", "600")
    assert (ended.returncode, ended.stdout) == (7, ""), ended.stderr


@pytest.fixture
def without_names(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """`without_names(*arguments, …)`: a `worker` process that gets no answer about any name."""
    trial = (*UNSHARE, sys.executable, "-c", DEAF_NAME_SERVER, shutil.which("true") or "true")
    if shutil.which(UNSHARE[0]) is None or subprocess.run(trial, cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("a network without name server needs Linux, unshare, and root with all its rights")
    started: list[Daemon] = []

    def start(*arguments: str, **variables: str) -> Daemon:
        command = (*UNSHARE, sys.executable, "-c", DEAF_NAME_SERVER, sys.executable, "-m", "worker", *arguments)
        environ = environment(tmp_path, DATABASE_URL=NOWHERE, **variables)
        started.append(Daemon(command, environ, tmp_path, f"process-{len(started) + 1}"))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "started"),
    [
        (("run",), "daemon_started"),
        (("generator", "run"), "generator_started"),
        (("serve", "--port", "0"), "http_started"),
    ],
)
def test_a_process_whose_name_server_is_silent_stops_when_told_to(
    without_names: Callable[..., Daemon], arguments: tuple[str, ...], started: str
) -> None:
    process = without_names(*arguments)
    process.wait_for_event(started, 30)
    process.wait_for_event("database_lost", 30)  # the first question has had no answer; nobody has cancelled it
    assert process.stop(60) == 0
    assert process.find("shutdown_complete", status=0)
    assert not process.find("internal_error")


def test_a_leased_command_without_name_server_ends_with_its_status(without_names: Callable[..., Daemon]) -> None:
    """Here the thread that looks the name up is not the main one."""
    process = without_names("lease", "run", "nightly", "--", "true")
    assert process.wait(60) == 69, process.stderr
    assert "timed out" in process.stderr
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# As process 1 of a container, while what the command needs is still being imported.
PROCESS_1 = """
import os, sys, time, types
os.getpid = lambda: 1
cli = sys.modules["worker.cli"] = types.ModuleType("worker.cli")
def main():
    print("importing", flush=True)
    time.sleep(60)
cli.main = main
import worker.__main__
worker.__main__.main()
"""


@pytest.mark.parametrize(("command", "status"), [("run", 0), ("serve", 0), ("enqueue", 128 + signal.SIGTERM)])
def test_process_1_hears_a_signal_before_everything_is_imported(command: str, status: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROCESS_1, command], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.terminate()
        assert process.wait(30) == status


def test_the_package_is_imported_without_what_its_names_need() -> None:
    """Or the time in which process 1 hears nothing would be ten times as long."""
    program = "import sys, worker; print({'asyncpg', 'pydantic', 'asyncio'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
