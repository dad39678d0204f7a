"""Places: where the claimer looks, each a range of the ready index (queue and priority) with a cursor of its own.

A cursor remembers the last row that was taken: dead index entries of claimed jobs stay in front of it for as long as any old
snapshot is open, and need not be walked again. What sorts before a cursor, and places that are new, are found by a survey of the
index from its start, which is dear exactly when the cursors are worth something: it may take 5 % of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

from worker.clock import local_seconds
from worker.store.claiming import START, Cursor, Range

SURVEY_SHARE = 0.05
SURVEY_PAUSE_SECONDS = 0.05
SURVEY_AT_LEAST_EVERY_SECONDS = 5.0


@dataclass(slots=True)
class Place:
    """One range of the ready index."""

    queue: str
    priority: int
    cursor: Cursor = START
    due_at: float = 0.0
    """Local moment from which a claim is worth while; infinite: it was found empty."""


class Places:
    """The places of some queues, which of them are worth a claim, and when to survey them."""

    def __init__(self, queues: Sequence[str]) -> None:
        self._queues = list(queues)
        self._places = {(queue, 0): Place(queue, 0) for queue in queues}
        self._turn = 0
        self.suspects: list[Place] = []
        """Places with jobs that lost a process before; they are claimed one at a time."""
        self.next_survey_at = 0.0

    def survey_soon(self) -> None:
        """What is known may be out of date."""
        self.next_survey_at = 0.0

    def found(self, ranges: Sequence[Range], asked_at: float) -> None:
        """Take in the answer of a survey that was sent at `asked_at`."""
        now = local_seconds()
        pause_seconds = max((now - asked_at) / SURVEY_SHARE, SURVEY_PAUSE_SECONDS)
        self.next_survey_at = now + min(pause_seconds, SURVEY_AT_LEAST_EVERY_SECONDS)
        known = {(range.queue, range.priority) for range in ranges}
        self._places = {at: place for at, place in self._places.items() if place.priority == 0 or at in known}
        for place in self._places.values():
            place.due_at = math.inf
        self.suspects = []
        for range in ranges:
            due_at = now + range.due_in_seconds if range.due_in_seconds > 0 else 0.0
            if range.suspect:
                self.suspects.append(Place(range.queue, range.priority, due_at=due_at))
                continue
            place = self._places.setdefault((range.queue, range.priority), Place(range.queue, range.priority))
            place.due_at = due_at
            if range.first <= place.cursor:
                place.cursor = START  # somebody stands behind the cursor: start over

    def look_behind_the_cursors(self, queues: Set[str]) -> None:
        """The places of these queues (none or "": of all) are worth a claim again: that costs next to nothing."""
        now = local_seconds()
        for place in self._places.values():
            if not queues or place.queue in queues or "" in queues:
                place.due_at = min(place.due_at, now)

    def any_due(self) -> bool:
        now = local_seconds()
        return any(place.due_at <= now for place in self._places.values())

    def in_turn(self) -> list[Place]:
        """The places that may have due jobs: queues in turn, higher priorities first within each."""
        now = local_seconds()
        due = [place for place in self._places.values() if place.due_at <= now]
        if len(due) > 1:
            self._turn += 1
            count = len(self._queues)
            order = {queue: (number - self._turn) % count for number, queue in enumerate(self._queues)}
            due.sort(key=lambda place: (order[place.queue], -place.priority))
        return due

    def suspect(self) -> Place | None:
        """The place of the suspect to run next, if one is due."""
        now = local_seconds()
        due = [place for place in self.suspects if place.due_at <= now]
        return max(due, key=lambda place: place.priority, default=None)

    def next_due_at(self, *, with_suspects: bool) -> float:
        """The local moment at which the first place is worth a claim; infinite if none is known."""
        places = [*self._places.values(), *(self.suspects if with_suspects else ())]
        return min((place.due_at for place in places), default=math.inf)
