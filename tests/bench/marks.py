"""What a worker under comparison tells the orchestrator, over a pipe that it inherits: nothing but a few lines a run.

    first <ns>           the first handler has started
    handled <ns>         the last expected handler has returned
    start <number> <ns>  a handler has started (latency only)

All moments are CLOCK_MONOTONIC of the one machine. Standard library only: it runs in the environment of every peer.
"""

from __future__ import annotations

import os
import time


class Marks:
    """Counts handler calls and reports the first and the last of them."""

    def __init__(self) -> None:
        self._pipe = int(os.environ["COMPARE_PIPE"])
        self._expected = int(os.environ["COMPARE_JOBS"])
        self._every = os.environ["COMPARE_WORKLOAD"] == "latency"
        self._started = 0
        self._ended = 0

    def begin(self, number: int) -> None:
        if self._every:
            self._say(f"start {number} {time.monotonic_ns()}")
        elif not self._started:
            self._say(f"first {time.monotonic_ns()}")
        self._started += 1

    def end(self) -> None:
        self._ended += 1
        if self._ended == self._expected:
            self._say(f"handled {time.monotonic_ns()}")

    def _say(self, line: str) -> None:
        os.write(self._pipe, f"{line}\n".encode())
