"""What handlers and lease holders write down outside the database: when they start and end.

A file that survives the process that wrote to it; its moments are local seconds, which all processes of a host share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from worker.clock import local_seconds
from worker.torture.other_rules import Run

NOTES: Final = "TORTURE_NOTES"
"""The variable that names the file."""

Word = Literal["start", "end"]


class Notebook:
    """Appends lines that are whole, whatever happens to the process next."""

    def __init__(self, path: str, process: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._process = process

    def write(self, word: Word, *, subject: str, fence: int, kind: str) -> None:
        """`subject`: a job's id, or a lease's resource, without spaces."""
        os.write(self._file, f"{word} {subject} {fence} {kind} {self._process} {local_seconds():.6f}\n".encode())


def size(path: Path) -> int:
    """Where what is noted from now on will begin."""
    return path.stat().st_size if path.exists() else 0


def read(path: Path, *, begin: int = 0) -> Iterator[Run]:
    """Every run that was noted, from `begin` on; without an end where the process was gone before."""
    unended: dict[tuple[str, int], Run] = {}
    for line in path.read_bytes()[begin:].decode().splitlines() if path.exists() else ():
        word, subject, fence, kind, process, at = line.split(" ")
        key = (process, int(fence))
        if word == "start":
            run = Run(subject, int(fence), kind, process, float(at), None)
            if key in unended:
                yield run  # a second start under one fence is for the checker to see
            else:
                unended[key] = run
        elif key in unended:
            yield unended.pop(key)._replace(ended_at=float(at))
    yield from unended.values()
