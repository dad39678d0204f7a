"""Small programs that configure logs and say something, and what came out of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from typing import Any


def run(code: str, *, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """A process that configures logs and then runs `code`."""
    program = "from worker import events, logs\nlogs.configure(worker='w-1', version='1')\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", program],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


def said(code: str) -> list[dict[str, Any]]:
    """The lines of that process, each parsed; it fails when one of them is no JSON object."""
    lines = [json.loads(line) for line in run(code).stdout.splitlines()]
    for line in lines:
        assert list(line)[:6] == ["timestamp", "level", "event", "worker", "pid", "version"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["timestamp"])
    return lines


def only(code: str) -> dict[str, Any]:
    (line,) = said(code)
    return line
