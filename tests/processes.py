"""Real processes under test, and waiting for facts about them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parent.parent


class Daemon:
    """A process that logs JSON lines on standard output. Its output goes to files, so it never blocks."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], directory: Path, name: str) -> None:
        self.stdout_path = directory / f"{name}.stdout"
        self.stderr_path = directory / f"{name}.stderr"
        # If the test run is killed no process of it stays behind.
        setpriv = shutil.which("setpriv")
        prefix = (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()
        with open(self.stdout_path, "wb") as stdout, open(self.stderr_path, "wb") as stderr:
            self.process = subprocess.Popen(
                (*prefix, *command),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environ,
                cwd=directory,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def events(self) -> list[dict[str, Any]]:
        """Its log so far. A line that is no JSON object fails the test: the contract is one object a line."""
        text = self.stdout_path.read_text()
        whole = text[: text.rfind("\n") + 1]
        events = []
        for line in whole.splitlines():
            event = json.loads(line)
            assert isinstance(event, dict), line
            events.append(event)
        return events

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def find(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """The events of this name, and with these fields, so far."""
        wanted = {"event": event, **fields}
        return [entry for entry in self.events if wanted.items() <= entry.items()]

    def wait_for_event(self, event: str, timeout_seconds: float = 30, **fields: object) -> dict[str, Any]:
        """The first such event; fails at once when the process ends without it."""

        def logged_or_ended() -> bool:
            # In this order: what it logged last is there once it has ended.
            ended = self.process.poll() is not None
            return bool(self.find(event, **fields)) or ended

        try:
            wait_for(logged_or_ended, timeout_seconds)
            return self.find(event, **fields)[0]
        except (AssertionError, IndexError):
            tail = "\n".join(self.stdout_path.read_text().splitlines()[-20:])
            status = self.process.returncode
            message = f"no {event} {fields or ''} from pid {self.pid} (exit status {status})"
            raise AssertionError(f"{message}\n{tail}\n{self.stderr}") from None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_seconds: float = 30) -> int:
        """Its exit status; negative when a signal ended it."""
        return self.process.wait(timeout=timeout_seconds)

    def stop(self, timeout_seconds: float = 30) -> int:
        """SIGTERM, and its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_seconds)

    def kill(self) -> None:
        """End it and all it has started; also when it is stopped (SIGSTOP) or has ended already."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(timeout=10)


@contextlib.contextmanager
def daemons(directory: Path) -> Iterator[Callable[..., Daemon]]:
    """A factory of `worker run` processes, called with arguments of `run` and variables by name."""
    started: list[Daemon] = []

    def start(*arguments: str, **variables: str) -> Daemon:
        command = (sys.executable, "-m", "worker", "run", *arguments)
        name = f"daemon-{len(started) + 1}"
        started.append(Daemon(command, environment(directory, **variables), directory, name))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()


def below_a_namespace() -> tuple[str, ...]:
    """What to start a command with for it to be process 1, as in a container; the test is skipped where that cannot be."""
    unshare = shutil.which("unshare")
    prefix = (unshare or "", "--fork", "--pid", "--mount-proc")
    if unshare is None or subprocess.run((*prefix, "true"), capture_output=True, check=False).returncode:
        pytest.skip("a process id namespace needs Linux, unshare, and root with all its rights")
    return prefix


def process_1_of(outer: Daemon) -> int:
    """The process id, as seen from here, of the command that was started below a namespace."""
    (inner,) = map(int, Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split())
    return inner


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def environment(directory: Path, **variables: str) -> dict[str, str]:
    """What a process under test sees: nothing of ours but the way to Python and to this checkout."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    ours = {"WORKER_RUNTIME_DIR": str(directory), "PYTHONPATH": f"{ROOT}{os.pathsep}{directory}"}
    return inherited | ours | variables


def open_sockets(pid: int) -> list[str]:
    """What /proc calls the open sockets of a process (`socket:[123]`); one that is closed meanwhile may be missing."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return [link for link in found if link.startswith("socket:[")]
