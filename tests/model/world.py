"""What the model of jobs is made of: one row, two processes, and what is under way between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tests.model.statements import Row, Verb

Key = tuple[int, int]
"""(id, fence)"""

VERBS: tuple[Verb, ...] = ("complete", "retry", "give_back")
TERMINAL = ("succeeded", "dead", "cancelled")

Phase = Literal["works", "sent", "finished", "unsure"]
"""Its handler runs · its transaction is open · its outcome is to be sent (again) · nobody knows what became of it."""


class Attempt(NamedTuple):
    key: Key
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How far the model goes. The processes in `faulty` lose connections and hold two attempts of the job at once; what the others
    say always arrives."""

    fences: int = 3
    faulty: str = "a"
    crash: bool = False
    cancel: bool = False
    retry: bool = False
    deletion: bool = False
    late_recovery: bool = False
    """What gives a lost claim's jobs back may be lost itself, and arrive at any time."""


class Process(NamedTuple):
    up: bool = True
    attempts: tuple[Attempt, ...] = ()
    stray_claim: bool = False
    """On the server, on a connection that the process has lost: it has found the job ready, and may write yet."""
    lost_claim: bool = False
    """A claim had no answer."""


class Write(NamedTuple):
    """The end of an attempt, on the server."""

    owner: str
    key: Key
    verb: Verb


class Recovery(NamedTuple):
    """The statement that gives back what a lost claim took, sent on a connection that was lost then: it may be executed yet."""

    owner: str
    held: tuple[Key, ...]
    """By the process, when it was sent."""
    bound: int
    """The last fence drawn before it was sent."""


class World(NamedTuple):
    row: Row = Row(1)
    ledger: Key | None = None
    effects: tuple[Key, ...] = ()
    completed: tuple[Key, ...] = ()
    given_up: Key | None = None
    """An attempt of which its process has said that it came to nothing, while a transaction of it may commit yet."""
    fence: int = 0
    """The sequence."""
    left: int = 3
    """So many claims the model goes on for."""
    a: Process = Process()
    b: Process = Process()
    open: Write | None = None
    """A transaction that has written and holds the row's lock."""
    heard: bool = True
    """The connection of that transaction lives."""
    stray: Write | None = None
    """Sent on a connection that was lost then: it may be executed yet."""
    recovery: Recovery | None = None
    picked: Key | None = None
    """What the reaper has found expired, and has not written yet."""
    crash_to_come: bool = False
    cancel_to_come: bool = False
    retry_to_come: bool = False
    deletion_to_come: bool = False

    def process(self, name: str) -> Process:
        return self.a if name == "a" else self.b

    def with_process(self, name: str, process: Process) -> World:
        return self._replace(a=process) if name == "a" else self._replace(b=process)

    def with_attempt(self, name: str, key: Key, phase: Phase | None) -> World:
        """`phase` None: the process has done with it."""
        process = self.process(name)
        kept = [one for one in process.attempts if one.key != key]
        if phase is not None:
            kept.append(Attempt(key, phase))
        return self.with_process(name, process._replace(attempts=tuple(sorted(kept))))

    def giving_up(self, name: str, key: Key) -> World:
        """The process says that this attempt came to nothing."""
        may_commit = any(one is not None and one.key == key for one in (self.open, self.stray))
        after = self.with_attempt(name, key, None)
        return after._replace(given_up=key) if may_commit or key in self.completed else after
