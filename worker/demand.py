"""Demand: how many jobs the claimer asks for, and how many it has asked for too early.

The free slots, plus what all slots could finish while the answer travels (Little: slots / seconds a job x round trip x 2, and at
least AHEAD_SECONDS' worth: large claims cost less a job), so that long jobs are never claimed early and short ones never waited
for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from worker.clock import local_seconds
from worker.measures import POOL_CLAIMS

AHEAD_SECONDS = 0.03
SURPLUS_SECONDS = 1.0
PAYLOAD_BYTES_A_CLAIM = 16 * 1024 * 1024
PAYLOAD_BYTES_AHEAD = 32 * 1024 * 1024


class Slots(Protocol):
    """What the pool tells of its slots and of the claimed jobs that wait for one."""

    workers: int

    def free(self) -> int:
        """Worker tasks that wait for a job."""

    def waiting(self) -> int:
        """Claimed jobs that no task has taken yet."""

    def waiting_bytes(self) -> int:
        """Their payloads."""

    def finished(self) -> tuple[int, float]:
        """Attempts that have ended since the start, and the seconds of slots that they took."""

    def is_full(self) -> bool:
        """Whether finished work cannot be written, so that no more should be taken."""


class Demand:
    """How much to claim for these slots. `may_claim_ahead`: whether jobs may be claimed for which no slot is free yet."""

    def __init__(self, slots: Slots, *, batch: int, may_claim_ahead: Callable[[], bool]) -> None:
        self._slots = slots
        self._batch = batch
        self._may_claim_ahead = may_claim_ahead
        self._slot_seconds = math.inf
        self._round_trip_seconds = 0.002
        self._measured = (0, 0.0)
        self._measured_at = 0.0
        self._surplus_since: float | None = None
        self.low_water = 0
        """Ask again when no more than this many claimed jobs wait."""

    def jobs(self) -> int:
        """How many jobs to ask for now; 0 when enough is at hand."""
        free, waiting = 0 if self._slots.is_full() else self._slots.free(), self._slots.waiting()
        ahead = self._ahead()
        wish = min(free + ahead - waiting, self._batch)
        if waiting < free:
            self.low_water = ahead
            return wish
        # Enough for the moment: ask again when half of what is kept ahead has gone, or a full batch fits.
        enough = min(self._batch, max(ahead // 2, 1))
        self.low_water = max(free + ahead - enough, 0)
        return wish if wish >= enough else 0

    def jobs_at_once(self) -> int:
        """How many could start this moment."""
        return 0 if self._slots.is_full() else max(self._slots.free() - self._slots.waiting(), 0)

    def payload_bytes(self) -> int:
        """What the payloads of one claim may come to."""
        return max(min(PAYLOAD_BYTES_A_CLAIM, PAYLOAD_BYTES_AHEAD - self._slots.waiting_bytes()), 1)

    def surplus(self) -> int:
        """How many jobs were claimed ahead of quick ones and have waited behind slow ones for a while: others may be free."""
        now = local_seconds()
        if now - self._measured_at >= SURPLUS_SECONDS / 4:
            self._measure_slots()
        surplus = self._slots.waiting() - self._ahead()
        if surplus <= 0:
            self._surplus_since = None
        elif self._surplus_since is None:
            self._surplus_since = now
        elif now - self._surplus_since >= SURPLUS_SECONDS:
            self._surplus_since = None
            return surplus
        return 0

    def measure_claim(self, sent_at: float) -> None:
        """A claim that was sent at this local moment has been answered, with jobs."""
        self._measure_slots()
        seconds = local_seconds() - sent_at
        self._round_trip_seconds += 0.3 * (seconds - self._round_trip_seconds)
        POOL_CLAIMS.claim_seconds.observe(seconds)

    def _ahead(self) -> int:
        slots = self._slots
        if self._batch == 1 or slots.is_full() or slots.waiting_bytes() >= PAYLOAD_BYTES_AHEAD or not self._may_claim_ahead():
            return 0
        jobs_a_second = slots.workers / max(self._slot_seconds, 1e-6)
        return min(int(jobs_a_second * max(self._round_trip_seconds * 2, AHEAD_SECONDS)), 2 * self._batch)

    def _measure_slots(self) -> None:
        """How long a job takes a slot, lately."""
        finished, busy_seconds = self._slots.finished()
        jobs, seconds = finished - self._measured[0], busy_seconds - self._measured[1]
        self._measured_at = local_seconds()
        if jobs > 0:
            old_seconds = seconds / jobs if math.isinf(self._slot_seconds) else self._slot_seconds
            self._slot_seconds = old_seconds + 0.3 * (seconds / jobs - old_seconds)
            self._measured = (finished, busy_seconds)
        elif self._slots.free() < self._slots.workers:
            # Nothing has ended since: a job takes at least as long as the slots have been busy with it.
            self._slot_seconds = max(self._slot_seconds, seconds / self._slots.workers)
