"""Patience: how a loop behaves while what it needs is not to be had. A growing, jittered delay, and few lines about it."""

from __future__ import annotations

import random

from worker import logs
from worker.clock import local_seconds
from worker.events import Event

_LINE_EVERY_SECONDS = 30.0


class Patience:
    """The delays of one loop. `delay_seconds(error)` after each failure, `reset()` after a success."""

    def __init__(self, event: Event, *, first_seconds: float = 0.1, longest_seconds: float = 5.0) -> None:
        self._event = event
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._failures = 0
        self._logged_at: float | None = None

    def delay_seconds(self, error: BaseException, **fields: object) -> float:
        """Seconds to wait before the next try; logs the first failure and then one line in half a minute."""
        now = local_seconds()
        quiet_seconds = 1.0 if self._failures == 0 else _LINE_EVERY_SECONDS
        if self._logged_at is None or now - self._logged_at >= quiet_seconds:
            self._logged_at = now
            logs.emit(self._event, error=error, error_type=type(error).__name__, **fields)
        delay = min(self._first_seconds * 2.0 ** min(self._failures, 16), self._longest_seconds)
        self._failures += 1
        return delay * random.uniform(0.5, 1)

    def reset(self) -> None:
        self._failures = 0
