"""The command line under test, as a process, or in this one."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.processes import environment
from worker import cli


def worker(
    *arguments: str, directory: Path, stdin: str | bytes = b"", timeout_seconds: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`python -m worker …` with pipes for its output."""
    result = subprocess.run(
        [sys.executable, "-m", "worker", *arguments],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        env=environment(directory, **variables),
        cwd=directory,
        timeout=timeout_seconds,
    )
    return subprocess.CompletedProcess(
        result.args, result.returncode, result.stdout.decode(errors="surrogateescape"), result.stderr.decode()
    )


@contextlib.contextmanager
def worker_under_way(*arguments: str, directory: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m worker …` with pipes for its output; killed at the end of the block if it still runs then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "worker", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(directory, **variables),
        cwd=directory,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def worker_at_a_terminal(*arguments: str, directory: Path, timeout_seconds: float = 60, **variables: str) -> tuple[int, str]:
    """The same at a terminal of 100 columns: exit status, and all that appeared there."""
    ours, theirs = pty.openpty()
    variables = {"TERM": "xterm", "COLUMNS": "100"} | variables
    with subprocess.Popen(
        [sys.executable, "-m", "worker", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(directory, **variables),
        cwd=directory,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        shown = b""
        deadline = time.monotonic() + timeout_seconds
        try:
            while piece := _read(ours, deadline):
                shown += piece
            process.wait(max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            process.kill()
            error.add_note(f"it had shown: {shown!r}")
            raise
        finally:
            os.close(ours)
    return process.returncode, shown.decode(errors="replace").replace("\r\n", "\n")


def _read(terminal: int, deadline: float) -> bytes:
    """What it shows next; nothing once the other side has closed it, which Linux calls an error."""
    readable, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
    assert readable, "it still runs after its time"
    try:
        return os.read(terminal, 65_536)
    except OSError:
        return b""


def parse(arguments: Sequence[str]) -> None:
    """Parse a `worker` command line without running it; usage errors rise."""
    command: Any = typer.main.get_command(cli.app)
    context = command.make_context("worker", list(arguments))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, list(rest), parent=context)


@dataclass(frozen=True, slots=True)
class Ended:
    status: object
    out: str
    err: str


def worker_in_this_process(*arguments: str, stdin: bytes = b"") -> Ended:
    """What `worker …` does, with pipes for its output, in milliseconds. Whatever is raised would be a traceback."""
    streams = {"stdin": io.BytesIO(stdin), "stdout": io.BytesIO(), "stderr": io.BytesIO()}
    texts = {name: io.TextIOWrapper(stream, encoding="utf-8", write_through=True) for name, stream in streams.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["worker", *arguments])
        for name, text in texts.items():
            patch.setattr(sys, name, text)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return Ended(ended.value.code, streams["stdout"].getvalue().decode(), streams["stderr"].getvalue().decode())
