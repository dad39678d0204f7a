"""The processes under torture: real ones, one a slot, started again when they end as a service manager would.

Most are daemons (`worker run`); a few produce jobs (`worker generator run`) or live by named leases (the program in holder.py).
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Final, Literal

from worker.clock import local_seconds
from worker.torture.breaches import Findings
from worker.torture.handlers import NOTHING, POISON
from worker.torture.notes import NOTES
from worker.torture.other_rules import Excuse, Run
from worker.torture.proxy import Proxy

HANDLERS: Final = "worker.torture.handlers:handlers"
TASKS: Final = 12
GRACE_SECONDS: Final = 2.0
QUERY_SECONDS: Final = 1.5
REAP_SECONDS: Final = 0.5

_START_AGAIN_SECONDS: Final = 0.2
_LOOK_AGAIN_SECONDS: Final = 0.02
_MEASURING_SECONDS: Final = 1.0
"""A busy machine lets us notice late that a process has ended."""
_STARTING_SECONDS: Final = 3.0
_SLOWLY_STARTING_SECONDS: Final = 30.0
_A_JUMP_SECONDS: Final = 300.0
"""More than a process lives to see its clock moved, and less than any jump."""
_PIPE_BYTES: Final = 4096
_TEXTBOOK: Final = {"WORKER_CLAIM_BATCH": "1", "WORKER_COMMIT_BATCH": "1"}
MOST_AT_ONCE: Final = 300
"""Jobs that a claim takes in the other shape."""

COMMANDS: Final[Mapping[str, Sequence[str]]] = {
    "daemon": ("-m", "worker", "run"),
    "generator": (
        *("-m", "worker", "generator", "run"),
        *("--every", "0.25", "--kind", NOTHING, "--payload", '{"seconds": 0.01}'),
    ),
    "holder": ("-m", "worker.torture.holder"),
}

Asked = Literal["nothing", "term", "kill"]
Log = Literal["file", "full_disk", "full_pipe"]


def daemon_environ(*, schema: str, lease_seconds: float, directory: Path, notes: Path) -> dict[str, str]:
    """What all daemons share. Nothing of the user's own configuration has a say here."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WORKER", "PG", "DATABASE_URL", "NOTIFY_SOCKET", "WATCHDOG_"))
    }
    return inherited | {
        "WORKERS": str(TASKS),
        "WORKER_HANDLERS": HANDLERS,
        "WORKER_SCHEMA": schema,
        "WORKER_RUNTIME_DIR": str(directory),
        "WORKER_LEASE_SECONDS": f"{lease_seconds:g}",
        "WORKER_QUERY_TIMEOUT_SECONDS": f"{QUERY_SECONDS:g}",
        "WORKER_CONNECT_TIMEOUT_SECONDS": f"{QUERY_SECONDS:g}",
        "WORKER_REAP_SECONDS": f"{REAP_SECONDS:g}",
        "WORKER_POLL_SECONDS": "0.25",
        "WORKER_BACKOFF_BASE_SECONDS": "0.1",
        "WORKER_BACKOFF_MAX_SECONDS": "1",
        "WORKER_SHUTDOWN_GRACE_SECONDS": f"{GRACE_SECONDS:g}",
        "WORKER_RETENTION_SECONDS": "never",
        NOTES: str(notes),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def is_textbook(number: int) -> bool:
    """Whether the daemons of this slot claim and commit one job at a time."""
    return number % 2 == 1


def slot_of(process: str) -> int:
    """The number of the slot in which the process of this name lives."""
    return int(process.partition("-")[0].removeprefix("t"))


@dataclass(slots=True)
class Life:
    """One process, from start to end."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None
    """None: it went where nobody can read it."""
    started_at: float = field(default_factory=local_seconds)
    asked: Asked = "nothing"
    asked_at: float = 0.0
    ended_at: float | None = None

    def clock_jumped(self) -> bool:
        """Whether the moments in its log are further from each other than it has lived."""
        moments = sorted(_moments(self.log))
        return bool(moments) and (moments[-1] - moments[0]).total_seconds() > _A_JUMP_SECONDS


class Slot:
    """A place for one process at a time."""

    def __init__(
        self, number: int, sort: str, *, environ: Mapping[str, str], directory: Path, url: Callable[[str], str], proxy: Proxy | None
    ) -> None:
        self.number = number
        self.sort = sort
        """Which of COMMANDS."""
        self.proxy = proxy
        self.lives: list[Life] = []
        self.excuses: list[Excuse] = []
        self.mishandled = asyncio.Lock()
        """Held while a fault has this process in its hands."""
        self._environ = {**environ, **(_TEXTBOOK if is_textbook(number) else {})}
        self._directory = directory
        self._url = url
        self._next_log: Log = "file"
        self._next_environ: Mapping[str, str] = {}
        self._unread: list[int] = []

    @property
    def life(self) -> Life:
        return self.lives[-1]

    def prepare(self, *, log: Log = "file", environ: Mapping[str, str] | None = None) -> None:
        """How the next process is to be started."""
        self._next_log = log
        self._next_environ = environ or {}

    def start(self) -> None:
        name = f"t{self.number}-{len(self.lives) + 1}"  # see slot_of
        path = self._directory / f"{name}.log" if self._next_log == "file" else None
        command = [sys.executable, *COMMANDS[self.sort]]
        # If the torture itself is killed, its daemons must not go on working.
        if sys.platform == "linux" and (setpriv := shutil.which("setpriv")):
            command = [setpriv, "--pdeathsig", "KILL", "--", *command]
        with self._open_log(path) as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._environ, "DATABASE_URL": self._url(name), "WORKER_NAME": name, **self._next_environ},
                # A Ctrl-C is for the torture, which then ends its daemons.
                start_new_session=True,
            )
        self.lives.append(Life(name, process, path))

    def _open_log(self, path: Path | None) -> IO[bytes]:
        if path is not None:
            return path.open("wb")
        if self._next_log == "full_disk":
            return open("/dev/full", "wb")
        reader, writer = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # full in no time
        self._unread.append(reader)
        return os.fdopen(writer, "wb")

    def has_nowhere_to_write(self) -> bool:
        """Whether the process of this moment is alive, its log on a full disk, or in a pipe that is as good as full."""
        life, log = self.life, self._next_log
        if life.process.poll() is not None or life.log is not None:
            return False
        if log == "full_disk":
            return True
        unread = array.array("i", [0])
        fcntl.ioctl(self._unread[-1], termios.FIONREAD, unread)
        return unread[0] > _PIPE_BYTES / 2

    def ask(self, asked: Asked) -> Life:
        """SIGTERM or SIGKILL for the process of this moment, unless it has ended: then that stays its own doing."""
        life = self.life
        if life.process.poll() is None:
            life.asked, life.asked_at = asked, local_seconds()
            life.process.send_signal(signal.SIGTERM if asked == "term" else signal.SIGKILL)
        return life

    async def freeze(self, seconds: float) -> bool:
        """Let it stand still. Returns whether it did, to the end: it may have ended by itself."""
        life = self.life
        began_at = local_seconds()
        life.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
            return _stands_still(life.process)
        finally:
            life.process.send_signal(signal.SIGCONT)
            self.excuse(life, began_at)

    def excuse(self, life: Life, began_at: float) -> None:
        """It could not be told anything from then until a moment ago."""
        self.excuses.append(Excuse(life.name, began_at, local_seconds() + 0.5))

    def last_words(self) -> str:
        return _last_line(self.life.log)

    def has_ended(self) -> bool:
        return _note_end(self.life)

    async def keep_running(self) -> None:
        """Start another process whenever one has ended; until cancelled."""
        while True:
            if self.has_ended():
                await asyncio.sleep(_START_AGAIN_SECONDS)
                self.start()
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    async def wait_ended(self, life: Life, seconds: float) -> bool:
        until = local_seconds() + seconds
        while not _note_end(life):
            if local_seconds() > until:
                return False
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        return True

    async def wait_replaced(self, life: Life, seconds: float) -> bool:
        until = local_seconds() + seconds
        while self.life is life:
            if local_seconds() > until:
                return False
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        return True

    def kill(self) -> None:
        """End it, whatever state it is in."""
        for life in self.lives:
            if life.process.poll() is None:
                life.process.kill()
                life.process.wait()
        for reader in self._unread:
            os.close(reader)
        self._unread.clear()


def check_exits(slots: list[Slot], runs: list[Run], findings: Findings, *, lease_seconds: float) -> None:
    """Each process has ended as it was asked to, or by a job that kills its process."""
    limit = GRACE_SECONDS + lease_seconds / 10 + 2 * QUERY_SECONDS + _MEASURING_SECONDS
    poisoned = {run.process for run in runs if run.kind == POISON}
    for sort, life in ((slot.sort, life) for slot in slots for life in slot.lives):
        status, took = life.process.poll(), (life.ended_at or 0.0) - life.asked_at
        last = _last_line(life.log)
        if life.asked == "term":
            in_time = findings.expect(took <= limit, "exits", f"{life.name} took {took:.1f} s to stop, limit {limit:.1f} s", last)
            # A Python that only just starts does not hear the signal yet: it ends by it. Who is silent may have been slow.
            is_silent = sort != "holder" and life.log is not None and not last
            starting_seconds = _SLOWLY_STARTING_SECONDS if is_silent else _STARTING_SECONDS
            early = status == -signal.SIGTERM and life.asked_at - life.started_at < starting_seconds
            findings.expect(not in_time or status in (0, 75) or early, "exits", f"{life.name} stopped with status {status}", last)
        elif life.asked == "nothing":
            by_poison = status == -signal.SIGKILL and life.name in poisoned
            findings.expect(by_poison, "exits", f"{life.name} ended by itself, with status {status}", last)


def _note_end(life: Life) -> bool:
    """Whether it has ended; the first time that is seen counts as the moment."""
    if life.process.poll() is None:
        return False
    if life.ended_at is None:
        life.ended_at = local_seconds()
    return True


def _stands_still(process: subprocess.Popen[bytes]) -> bool:
    """Whether it is stopped, as its parent is told."""
    if process.poll() is not None:
        return False
    stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    return stopped is not None and stopped.si_status == signal.SIGSTOP


def _moments(log: Path | None) -> Iterator[datetime]:
    """Of the lines of a log, by the clock of the process."""
    for line in log.read_text("utf-8", "replace").splitlines() if log is not None and log.exists() else ():
        try:
            yield datetime.fromisoformat(json.loads(line)["timestamp"])
        except (ValueError, TypeError, KeyError):
            pass  # for the check of the log to see


def _last_line(log: Path | None) -> str:
    lines = log.read_text("utf-8", "replace").splitlines() if log is not None and log.exists() else []
    return lines[-1][:1000] if lines else ""
