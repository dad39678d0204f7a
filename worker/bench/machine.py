"""What the machine says of itself: cores, and the CPU time of processes, where there is a /proc to read it from."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the daemons ran."""

    cores: int
    """Those this process may use."""
    cpu: str
    system: str
    python: str
    load_1m: float | None
    """Before the bench began: what else was going on."""


def this_machine() -> Machine:
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        cpu=_cpu_model() or platform.processor() or platform.machine(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        load_1m=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def has_proc() -> bool:
    return (_PROC / "self" / "stat").exists()


def process_cpu_seconds(pid: int) -> float | None:
    """User and system time of a process so far, in steps of the kernel's clock tick (10 ms); None where nobody tells."""
    times = _times(pid)
    return None if times is None else times.own_seconds


def server_cpu_seconds(postmaster: int) -> float | None:
    """The same of a whole PostgreSQL server, processes that have ended included."""
    main = _times(postmaster)
    if main is None:
        return None
    total_seconds = main.own_seconds + main.reaped_seconds
    for entry in os.listdir(_PROC):
        if entry.isdigit() and (times := _times(int(entry))) is not None and times.parent == postmaster:
            total_seconds += times.own_seconds + times.reaped_seconds
    return total_seconds


def busy_core_seconds() -> tuple[float, ...] | None:
    """How long each core of this machine has been busy since it started, whoever used it."""
    try:
        lines = (_PROC / "stat").read_text().splitlines()
    except OSError:
        return None
    tick = os.sysconf("SC_CLK_TCK")
    return tuple(_busy_ticks(line) / tick for line in lines if line.startswith("cpu") and line[3].isdigit())


def _busy_ticks(line: str) -> int:
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return user + nice + system + irq + softirq + steal


def postmaster_of(backend: int, *, user: str, database: str) -> int | None:
    """The main process of the server that this session belongs to, if it runs here: its process title names user and database."""
    try:
        title = (_PROC / str(backend) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return None
    times = _times(backend)
    if times is None or not title.startswith("postgres") or user not in title or database not in title:
        return None
    return times.parent


@dataclass(frozen=True, slots=True)
class _Times:
    parent: int
    own_seconds: float
    reaped_seconds: float


def _times(pid: int) -> _Times | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in brackets, which may hold anything.
    fields = text.rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return _Times(int(fields[1]), own / tick, reaped / tick)


def _cpu_model() -> str | None:
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
