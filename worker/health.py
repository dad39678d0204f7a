"""Liveness without a port: each process leaves a heartbeat file, `worker health` reads and judges them.

A process is alive when it beats, and well when its event loop turns and its claim loop makes passes. A
database that is away excuses the claim loop: restarting the workers would not bring it back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from worker.clock import local_seconds
from worker.errors import ConfigError

_PREFIX = "reliable-worker-"
_SUFFIX = ".health"
_MOST_BYTES = 65_536

BEATS_MISSED = 3
BEAT_MARGIN_SECONDS = 2.0
_LAST_WRITE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a process says about itself every `beat_seconds`, from a thread that no handler can block."""

    id: str
    pid: int
    pid_started: str
    """As `process_started` gives it: a process id alone may be somebody else's by now."""
    version: str
    written_at_seconds: float
    """On the clock of `local_seconds`, which all processes of a host share."""
    beat_seconds: float
    loop_lag_seconds: float
    loop_allowed: bool
    """The event loop is blocked by a handler that is still within its time-out."""
    claim_age_seconds: float
    """Since the claim loop last made a pass, whether or not there was anything to claim."""
    claim_allowed_seconds: float
    database_up: bool
    stopping: bool


class HealthFile:
    """The heartbeat file of one process. Raises ConfigError when the directory cannot be written to.

    It is written by a thread of its own: a disk that answers late, or never, holds up neither renewals nor commits.
    """

    def __init__(self, directory: Path, id: str) -> None:
        self._path = directory / f"{_PREFIX}{re.sub(r'[^A-Za-z0-9._-]', '_', id)}{_SUFFIX}"
        self._unfinished = self._path.with_suffix(f".{os.getpid()}")
        self._newest: Heartbeat | None = None
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._write_aside("")
            self._unfinished.unlink()
        except OSError as error:
            raise ConfigError(f"WORKER_RUNTIME_DIR={str(directory)!r}: cannot write there: {error.strerror}") from None
        _remove_leftovers(directory)

    def write(self, beat: Heartbeat) -> bool:
        """Replace the file as a whole; False when that failed (a full disk), never an exception."""
        try:
            self._write_aside(json.dumps(asdict(beat)))
            self._unfinished.replace(self._path)
        except OSError:
            return False
        return True

    def write_soon(self, beat: Heartbeat) -> None:
        """`write` it in the other thread. What that has not come to before the next one is left out. Never raises, never waits."""
        self._newest = beat
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_forever, name="heartbeat", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None  # the system has no thread left; the next beat tries again

    def _write_forever(self) -> None:
        while self._changed.wait():
            self._changed.clear()
            beat = self._newest
            if beat is None:
                return
            self.write(beat)

    def remove(self) -> None:
        """The process ends in order. Never raises; where the disk does not answer, the file stays behind."""
        self._newest = None
        self._changed.set()
        if self._thread is not None:
            self._thread.join(_LAST_WRITE_SECONDS)
            if self._thread.is_alive():
                return
        for path in (self._unfinished, self._path):
            with contextlib.suppress(OSError):
                path.unlink()

    def _write_aside(self, text: str) -> None:
        # The directory may be everybody's: nothing is followed there, nothing of others is overwritten in
        # place.
        with contextlib.suppress(FileNotFoundError):
            self._unfinished.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self._unfinished, flags, 0o644), "w", encoding="utf-8") as file:
            file.write(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one heartbeat file means. `gone`: its process has ended without removing it."""

    id: str
    pid: int
    well: bool
    gone: bool
    text: str


def read_verdicts(directory: Path) -> list[Verdict]:
    """A verdict for each heartbeat file of this host, in the order of their ids."""
    verdicts: list[Verdict] = []
    for path, beat in _read_all(directory):
        if beat is None:
            id = path.name[len(_PREFIX) : -len(_SUFFIX)]
            text = "unreadable: of another version?"
            verdicts.append(Verdict(id=id, pid=0, well=False, gone=False, text=text))
        else:
            verdicts.append(judge(beat, local_seconds(), _is_running(beat)))
    return verdicts


def all_well(verdicts: list[Verdict]) -> bool:
    """One process lives at least, and each that lives is well. What a killed one left changes nothing."""
    living = [verdict for verdict in verdicts if not verdict.gone]
    return bool(living) and all(verdict.well for verdict in living)


def judge(beat: Heartbeat, now_seconds: float, is_running: bool) -> Verdict:
    """What a heartbeat says at `now_seconds` of the local clock."""
    problem = _problem(beat, now_seconds) if is_running else "gone"
    notes = "" if beat.database_up else ", database away"
    text = problem or ("stopping" if beat.stopping else "ok")
    return Verdict(id=beat.id, pid=beat.pid, well=problem is None, gone=not is_running, text=text + notes)


def _problem(beat: Heartbeat, now_seconds: float) -> str | None:
    age_seconds = now_seconds - beat.written_at_seconds
    # Negative: written before the host was started anew.
    if not 0 <= age_seconds <= BEATS_MISSED * beat.beat_seconds + BEAT_MARGIN_SECONDS:
        return f"no heartbeat for {age_seconds:.0f} s" if age_seconds > 0 else "heartbeat of an earlier boot"
    if beat.stopping:
        return None
    blocked_seconds = beat.loop_lag_seconds
    if blocked_seconds > beat.claim_allowed_seconds and not beat.loop_allowed:
        return f"event loop blocked for {blocked_seconds:.0f} s"
    idle_seconds = beat.claim_age_seconds + age_seconds
    excused = not beat.database_up or beat.loop_allowed
    if idle_seconds > beat.claim_allowed_seconds + BEAT_MARGIN_SECONDS and not excused:
        return f"no claim for {idle_seconds:.0f} s"
    return None


def process_started(pid: int) -> str | None:
    """When a process was started, as text to compare with another call's; None for no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        if os.path.exists("/proc/self/stat"):
            return None
        shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=5, check=False)
        return shown.stdout.strip() or None
    # The name in brackets may hold anything; field 22 counts from the last bracket. A zombie has ended.
    fields_after_name = text.rpartition(")")[2].split()
    return None if fields_after_name[0] in ("Z", "X") else fields_after_name[19]


def _is_running(beat: Heartbeat) -> bool:
    return process_started(beat.pid) == beat.pid_started


def _read_all(directory: Path) -> Iterator[tuple[Path, Heartbeat | None]]:
    """Each heartbeat file that can be trusted, with None for what this version does not understand."""
    try:
        trusted = {0, os.geteuid(), directory.stat().st_uid}
    except OSError:
        return
    for path in sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}")):
        text = _read_trusted(path, trusted)
        if text is not None:
            yield path, _parse(text)


def _read_trusted(path: Path, trusted: set[int]) -> str | None:
    """The text of a regular file of a trusted owner, else None: a shared directory may hold anything."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in trusted:
            return None
        return file.read(_MOST_BYTES).decode("utf-8", "replace")


def _parse(text: str) -> Heartbeat | None:
    try:
        values = json.loads(text)
        return Heartbeat(**{field.name: values[field.name] for field in fields(Heartbeat)})
    except (ValueError, KeyError, TypeError):
        return None


def _remove_leftovers(directory: Path) -> None:
    """Forget processes that were killed, or a crash loop would fill the directory."""
    for path, beat in _read_all(directory):
        if beat is not None and not _is_running(beat):
            with contextlib.suppress(OSError):
                path.unlink()
