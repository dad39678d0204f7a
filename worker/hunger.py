"""Hunger: when a claimer that finds nothing asks to be notified, when it takes that back, and how long it waits between two looks.

While a process is hungry each INSERT sends it a NOTIFY, which holds a database-wide lock: so it says so after a while of wanting
only, and takes it back once jobs come by the batch. Each of the two leaves a dead row version that every INSERT walks over for as
long as an old snapshot is open: hence FLIP_SECONDS.
"""

from __future__ import annotations

import random

from worker.clock import local_seconds

SAY_AFTER_SECONDS = 0.1
FLIP_SECONDS = 1.0
_FIRST_POLLS_SECONDS = (0.02, 0.05, 0.1, 0.25)


class Hunger:
    """What was said, and for how long there has been nothing to do."""

    def __init__(self, *, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._said_at = 0.0
        self._wanting_since: float | None = None
        self._polls = 0
        self._is_known = True
        self.is_said = False
        """Whether an INSERT should send a notification, as far as the database has acknowledged it."""

    def sated(self) -> None:
        """Nothing is wanted."""
        self._wanting_since = None

    def fed(self) -> None:
        """Jobs came."""
        self._wanting_since = None
        self._polls = 0

    def note_said(self, hungry: bool) -> None:
        """The database knows it now."""
        self.is_said, self._said_at, self._is_known = hungry, local_seconds(), True

    def forget(self) -> None:
        """An answer may be lost, or the database another one: whatever is wanted next has to be said, either way."""
        self._is_known = False

    def is_to_be_said(self) -> bool:
        """Nothing was found: whether it is time to ask for notifications."""
        now = local_seconds()
        if self._wanting_since is None:
            self._wanting_since = now
        return not (self.is_said and self._is_known) and now - self._wanting_since >= SAY_AFTER_SECONDS

    def may_be_taken_back(self) -> bool:
        return (self.is_said or not self._is_known) and local_seconds() - self._said_at >= FLIP_SECONDS

    def next_look_seconds(self) -> float:
        """How long to wait before looking again unasked: quick at first, then the poll."""
        seconds = self._poll_seconds * random.uniform(0.8, 1.2)
        if self._polls < len(_FIRST_POLLS_SECONDS):
            seconds = min(_FIRST_POLLS_SECONDS[self._polls], self._poll_seconds)
        self._polls += 1
        return seconds
