"""The field: everything that the faults can lay hands on, and what they leave for the checker to know."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from worker.clock import local_seconds
from worker.store import pulse
from worker.store.connection import Connection
from worker.torture.daemons import Life, Slot
from worker.torture.load import Load, Operator
from worker.torture.server import OwnServer
from worker.torture.timing import Done, Ended, Killed

NOTES_FILE: Final = "notes"

_US: Final = 1_000_000
_DAEMONS_SHARE: Final = 0.6


@dataclass(slots=True, kw_only=True)
class Field:
    """One torture under way."""

    slots: list[Slot]
    load: Load
    operator: Operator
    lease_seconds: float
    directory: Path
    own_server: OwnServer | None
    faketime: Path | None
    server_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a fault has the whole server in its hands."""
    injected: Counter[str] = field(default_factory=Counter)
    """Faults whose effect was seen."""
    unseen: Counter[str] = field(default_factory=Counter)
    """Faults that were tried, and did nothing that could be seen."""
    terminated: Counter[str] = field(default_factory=Counter)
    """Sessions that were ended, by role."""
    lost_commits: int = 0
    """Whose answers were lost at the server; the proxies count those that were lost on the way."""
    killed: list[Killed] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    _ahead_us: int = 0

    @property
    def daemons(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.sort == "daemon"]

    @property
    def notes(self) -> Path:
        return self.directory / NOTES_FILE

    def pick(self, chance: random.Random, *, talks: bool = False) -> Slot:
        """Mostly a daemon; now and then one of the others, if it need not be one that `talks` (writes a log)."""
        return chance.choice(self.daemons if talks or chance.random() < _DAEMONS_SHARE else self.slots)

    def ends_by_themselves(self) -> int:
        """How many processes have ended so far though nobody asked them to."""
        return sum(life.asked == "nothing" and life.process.poll() is not None for slot in self.slots for life in slot.lives)

    async def read_clock(self, connection: Connection) -> None:
        """Learn how far the database's clock is ahead of ours; needed for figures only."""
        before = local_seconds()
        now = await pulse.read_clock(connection)
        self._ahead_us = now - round((before + local_seconds()) / 2 * _US)

    def database_us(self, at: float | None = None) -> int:
        """A local moment (now, if none) by the database's clock."""
        return round((local_seconds() if at is None else at) * _US) + self._ahead_us

    def local_moment(self, at: int) -> float:
        """A moment of the database by our clock."""
        return (at - self._ahead_us) / _US

    def note_kill(self, life: Life) -> None:
        self.killed.append(Killed(life.name, self.database_us(life.asked_at), alone=False))
