"""What this process holds: the leases it was given, as seen by those that use them.

The pool runs jobs, the keeper renews them, the committer settles them; a named lease has a holder instead. They and the keeper live
in different threads. Everything is keyed by (id, fence): a process can still hold an old attempt (a thread deaf to cancellation) of
a job that it has claimed again.
Single reads and writes of these fields and dictionaries are atomic under the interpreter lock; no rule needs two at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

from worker.clock import local_seconds
from worker.domain import CancelReason, ClaimedJob, Lease


class Phase(enum.Enum):
    WAITING = "claimed, not started"
    RUNNING = "its handler runs"
    OWN_TRANSACTION = "inside job.transaction(): its row lock protects it too, and keeps it from being renewed"
    FINISHED = "its outcome waits to be written"


class Right:
    """A lease in this process's hand, of a job or of a name."""

    __slots__ = ("lost", "on_lost", "trusted_until")

    def __init__(self, trusted_until: float) -> None:
        self.trusted_until = trusted_until
        """Local moment; moved on by the keeper, read by whoever works under the lease."""
        self.lost: CancelReason | None = None
        """Set once, by whoever learns first that the lease is gone."""
        self.on_lost: Callable[[CancelReason], None] | None = None
        """Tells whoever works under the lease, from any thread."""

    def lose(self, reason: CancelReason) -> None:
        """This lease is over: the work under it stops, and writes nothing. The first reason stays."""
        if self.lost is None:
            self.lost = reason
            on_lost = self.on_lost  # read once: the work may end, in its own thread, meanwhile
            if on_lost is not None:
                on_lost(reason)

    def doubt(self, for_seconds: float) -> str | None:
        """Why this lease must not be trusted for that long from now, or None."""
        if self.lost is not None:
            return self.lost
        trusted_seconds = self.trusted_until - local_seconds()
        if trusted_seconds < max(for_seconds, 0):
            return f"the lease is trusted for {max(trusted_seconds, 0):.3f} s, not {for_seconds} s"
        return None


class Held(Right):
    """The lease of one job."""

    __slots__ = ("job", "locked_until", "phase", "renew_until", "started_at")

    def __init__(self, job: ClaimedJob, trusted_until: float) -> None:
        super().__init__(trusted_until)
        self.job = job
        self.phase = Phase.WAITING
        self.renew_until: float | None = None
        """Local moment after which a running handler's lease is no longer renewed (its own time-out)."""
        self.started_at = 0.0
        self.locked_until = 0.0
        """Local moment; moved on by the keeper when it has found the row locked while the handler was in its own transaction."""

    @property
    def key(self) -> tuple[int, int]:
        return self.job[:2]

    @property
    def duration_ms(self) -> float:
        """How long ago its handler was started; 0 if it was not."""
        return round((local_seconds() - self.started_at) * 1000, 3) if self.started_at else 0.0

    @property
    def safe_until(self) -> float:
        """Local moment up to which nobody else gets the job, as far as this process can know. A transaction of its handler's may
        outlive the lease, for as long as the database is heard to say that it does."""
        if self.phase is Phase.OWN_TRANSACTION:
            return max(self.trusted_until, self.locked_until)
        return self.trusted_until


class HeldName(Right):
    """A named lease."""

    __slots__ = ("begun_at", "fence", "holder", "id", "resource", "terms")

    def __init__(
        self, *, resource: str, holder: str, id: int, fence: int, terms: Lease, asked_at: float, remaining_seconds: float
    ) -> None:
        super().__init__(0.0)
        self.resource = resource
        self.holder = holder
        self.id = id
        self.fence = fence
        self.terms = terms
        self.begun_at = 0.0
        """Local moment from which it is as long as its terms say: before the last acquisition or renewal that succeeded was sent,
        and earlier still where that was heard of late, by asking again."""
        self.renewed(asked_at, remaining_seconds)

    @property
    def key(self) -> tuple[int, int]:
        return self.id, self.fence

    def renewed(self, asked_at: float, remaining_seconds: float) -> None:
        self.begun_at = asked_at - max(self.terms.seconds - remaining_seconds, 0.0)
        self.trusted_until = self.terms.trusted_until(asked_at, remaining_seconds)


class Holdings:
    """Every lease this process holds, by (id, fence)."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Held] = {}
        self._newest: dict[int, Held] = {}
        self._suspects: set[tuple[int, int]] = set()
        self.on_suspect_gone: Callable[[], None] | None = None
        """Called, in whatever thread settles it, once a job that lost a process before is held no more."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, held: Held) -> bool:
        return self._held.get(held.job[:2]) is held

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held.values()))

    def add(self, held: Held) -> None:
        """Take a new lease. An older attempt of the same job that is still held has lost its own."""
        older = self._newest.get(held.job.id)
        if older is not None:
            older.lose("lease_lost")
        self._held[held.job[:2]] = held
        if held.job.crashes > 0:
            self._suspects.add(held.job[:2])
        self._newest[held.job.id] = held

    def remove(self, held: Held) -> None:
        """Settled, or lost: nothing more to renew."""
        self._held.pop(held.job[:2], None)
        if self._newest.get(held.job.id) is held:
            del self._newest[held.job.id]
        if held.job.crashes > 0:
            self._suspects.discard(held.job[:2])
            if self.on_suspect_gone is not None:
                self.on_suspect_gone()

    @property
    def has_suspect(self) -> bool:
        """Whether a job that lost a process before is held: until its outcome is written, a crash would count against it."""
        return bool(self._suspects)

    def keys(self) -> list[tuple[int, int]]:
        return list(self._held)
