"""The generator's loop: every instance runs it, the one that holds the lease produces, the others stand by.

It asks the database which slots are due, and the database produces them: the lease is checked, jobs and the mark of the last slot
are written in one statement, which locks the lease's row. So nothing that this process believes (its lease, its clock, what it
did before it was frozen) can produce a slot twice, and no lease is released or handed on in the middle of a production.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from worker import events, logs
from worker.clock import local_seconds
from worker.errors import ConfigError, DatabaseUnavailable, LeaseHeld, LeaseLost
from worker.patience import Patience
from worker.store import generating
from worker.store.connection import DATABASE_ERRORS, is_unavailable

if TYPE_CHECKING:
    from worker.events import Event
    from worker.store.connection import Database, Lane
    from worker.store.generating import GeneratorStatus, Production

ROLE = "generator"
LATE_SECONDS = 60.0
"""Slots that are late by no more than this, or by two leases, are made up for."""
MOST_SLOTS = 1_000
"""In one transaction."""
TOGETHER_SECONDS = 0.02
"""So long at least from one transaction to the next: many slots a second share one."""
_NOT_NOW: tuple[type[Exception], ...] = (*DATABASE_ERRORS, DatabaseUnavailable)
_SOON_SECONDS = 0.001
_LONGEST_POLL_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 1.0
_TELL_EVERY_SECONDS = 10.0


class HeldLease(Protocol):
    """The lease while it is held. Its block is cancelled before anybody else can have it."""

    fence: int

    def ensure_lease(self) -> None:
        """Raise LeaseLost unless the lease is trusted."""


Hold = Callable[[], AbstractAsyncContextManager[HeldLease]]
"""Acquires the lease of the generator for a block, renews it meanwhile and releases it; raises LeaseHeld and LeaseLost."""


class _Tally:
    """Slots of one sort, told in few lines: the first at once, then all that came in a while together."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._slots = 0
        self._told_at = -math.inf

    def add(self, slots: int, **fields: object) -> None:
        self._slots += slots
        now = local_seconds()
        if slots and now - self._told_at >= _TELL_EVERY_SECONDS:
            logs.emit(self._event, slots=self._slots, **fields)
            self._slots, self._told_at = 0, now


class Generator:
    """One instance. `run` until `stop`; what it holds is released when it returns, if the database answers."""

    def __init__(
        self,
        database: Database,
        lane: Lane,
        *,
        holder: str,
        hold: Hold,
        lease_seconds: float,
        poll_seconds: float,
        statement_seconds: float,
    ) -> None:
        self._database = database
        self._lane = lane
        self._holder = holder
        self._hold = hold
        self._late_seconds = max(LATE_SECONDS, 2 * lease_seconds)
        # A lease that has ended is found within a second, and so is a changed rate.
        self._poll_seconds = min(poll_seconds, _LONGEST_POLL_SECONDS)
        self._statement_seconds = statement_seconds
        self._stopping = asyncio.Event()
        self._said: tuple[str, str | None] | None = None
        self._lost_at: float | None = None
        self._outage = Patience(events.DATABASE_LOST, longest_seconds=_LONGEST_PAUSE_SECONDS)
        self._trouble = Patience(events.GENERATOR_FAILED, longest_seconds=_LONGEST_PAUSE_SECONDS)
        self._kept_out = Patience(events.GENERATOR_FAILED, longest_seconds=_LONGEST_PAUSE_SECONDS)
        self._refused = _Tally(events.GENERATOR_FAILED)
        self._skipped = _Tally(events.GENERATOR_SKIPPED)
        self._is_producing = False
        self.fence: int | None = None
        """Of the lease that this instance has, as far as it knows."""
        self.passed_at = local_seconds()
        """When the database last answered."""

    @property
    def database_up(self) -> bool:
        return self._lost_at is None

    def stop(self) -> None:
        """Produce nothing more. A production in flight is awaited, then the lease is released."""
        self._stopping.set()

    def hurry(self) -> None:
        """Do not wait for a production in flight."""
        if self._is_producing:  # all else is quick, and tells whether the lease was released
            self._lane.drop()

    async def run(self) -> None:
        """Stand by or produce until `stop`. Waits out a database that is absent or refuses us; whatever this raises is a bug."""
        while not self._stopping.is_set():
            try:
                pause_seconds = await self._stand_by()
                if pause_seconds == 0:
                    await self._lead()
            except LeaseHeld as error:
                pause_seconds = min(error.retry_after_seconds, self._poll_seconds)
            except LeaseLost as error:
                self._say_lost(error.reason)
            except _NOT_NOW as error:
                pause_seconds = self._wait_out(error)
            except ConfigError as error:
                # A password or a grant: at the start a fault of the configuration, from then on somebody's doing that ends.
                pause_seconds = self._kept_out.delay_seconds(error)
            await self._wait(pause_seconds * random.uniform(0.8, 1.2))
        if self.fence is not None:
            with contextlib.suppress(*DATABASE_ERRORS):
                await self._look()

    async def _look(self) -> GeneratorStatus:
        connection = await self._lane.get()
        async with asyncio.timeout(self._statement_seconds):
            now = await generating.status(connection, self._database)
        self._note_answer()
        if self.fence is not None and now.fence != self.fence:
            logs.emit(events.GENERATOR_RELEASED, fence=self.fence)
            self.fence = None
        return now

    async def _stand_by(self) -> float:
        """Seconds to wait before the next look; 0 when it is our turn to produce."""
        now = await self._look()
        if now.state == "STOPPED":
            self._say_standby("stopped", now.holder)
            return self._poll_seconds
        if now.lease_expires_in_seconds is not None:
            self._say_standby("held", now.holder)
            return min(now.lease_expires_in_seconds + _SOON_SECONDS, self._poll_seconds)
        return 0

    async def _lead(self) -> None:
        """Hold the lease and produce, until somebody wants it stopped or the lease is lost."""
        async with self._hold() as held:
            self.fence = held.fence
            self._said = None
            self._kept_out.reset()
            logs.emit(events.GENERATOR_LEADER, fence=held.fence)
            try:
                await self._produce_on(held)
            except asyncio.CancelledError:
                try:
                    held.ensure_lease()
                except LeaseLost as error:
                    self._say_lost(error.reason)  # at once: to leave the block may take a while
                raise

    async def _produce_on(self, held: HeldLease) -> None:
        while not self._stopping.is_set():
            try:
                made = await self._produce(held.fence)
            except DATABASE_ERRORS as error:
                # How long that may go on is the business of the lease.
                await self._wait(self._wait_out(error))
                continue
            match made.outcome:
                case "stopped":
                    return
                case "lost":
                    self._say_lost("lease_lost")
                    return
            await self._wait(self._pause_seconds(made))

    async def _produce(self, fence: int) -> Production:
        connection = await self._lane.get()
        self._is_producing = True
        try:
            async with asyncio.timeout(self._statement_seconds):
                made = await generating.produce(
                    connection,
                    self._database,
                    holder=self._holder,
                    fence=fence,
                    late_seconds=self._late_seconds,
                    most=MOST_SLOTS,
                )
        finally:
            self._is_producing = False
        self._note_answer()
        if made.produced:
            logs.emit(events.GENERATOR_PRODUCED, jobs=made.produced, fence=fence)
        self._skipped.add(made.skipped, fence=fence)
        self._refused.add(made.failed, fence=fence, error=made.error, error_type="refused")
        return made

    def _pause_seconds(self, made: Production) -> float:
        """Until the next slot is due; short enough to notice what has changed meanwhile, long enough for many to share a turn."""
        settled = made.produced + made.skipped + made.failed
        if settled >= MOST_SLOTS:
            return 0
        due_in_seconds = self._poll_seconds if made.next_in_seconds is None else made.next_in_seconds
        least_seconds = TOGETHER_SECONDS if settled else _SOON_SECONDS
        return min(max(due_in_seconds, least_seconds), self._poll_seconds)

    async def _wait(self, seconds: float) -> None:
        """That long, or until `stop`."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    def _wait_out(self, error: Exception) -> float:
        """Seconds to wait before the next try."""
        self._lane.drop()
        if not isinstance(error, DatabaseUnavailable) and not is_unavailable(error):
            return self._trouble.delay_seconds(error)
        if self._lost_at is None:
            self._lost_at = local_seconds()
        return self._outage.delay_seconds(error)

    def _note_answer(self) -> None:
        self.passed_at = local_seconds()
        self._outage.reset()
        self._trouble.reset()
        if self._lost_at is not None:
            logs.emit(events.DATABASE_RESTORED, lost_seconds=round(self.passed_at - self._lost_at, 3))
            self._lost_at = None

    def _say_standby(self, reason: str, holder: str | None) -> None:
        if self._said != (reason, holder):
            self._said = (reason, holder)
            logs.emit(events.GENERATOR_STANDBY, reason=reason, holder=holder)

    def _say_lost(self, reason: str) -> None:
        if self.fence is not None:
            logs.emit(events.GENERATOR_LOST, reason=reason, fence=self.fence)
            self.fence = None
