"""The keeper: one for everything that a process holds, in a thread of its own. It renews, and knows what cannot be renewed.

    trusted_until = local moment before sending + min(T, remaining) - M

A renewal that succeeds writes that moment into each lease (`holding.Right`); whoever works under it is stopped when the moment has
passed. An error or a time-out means nothing is known: try again, with jitter, until the trust runs out by itself. What is renewed,
and how, is a matter of `Renewals`: the jobs of a worker process (job_renewals), or named leases (name_renewals).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from worker import events, logs
from worker.clock import local_seconds
from worker.patience import Patience
from worker.store.connection import DATABASE_ERRORS

ROLE = "leases"
LEASE_SETTINGS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_hashjoin": "off"}
_LEAST_PAUSE_SECONDS = 0.01


class Renewals(Protocol):
    """What one keeper keeps. Everything in here is called in the keeper's loop."""

    has_answer: bool
    """Whether there was an answer since the last `give_up`: a beat may have nothing to ask."""

    def __len__(self) -> int:
        """How many leases are held."""

    @property
    def beat_seconds(self) -> float:
        """How long one beat may take, a new connection included."""

    def retry_seconds(self) -> float:
        """The longest wait after a beat that failed."""

    async def beat(self, *, poked: bool) -> float:
        """Renew what is due; the local moment of the next beat. `poked`: somebody has reason to look now.

        Raises one of DATABASE_ERRORS when there is no answer.
        """

    def give_up(self) -> None:
        """A beat has failed: forget its connection; what was due is due still."""


class Keeper:
    """Runs in the rights thread's loop."""

    def __init__(self, renewals: Renewals, *, patience: Patience, on_return: Callable[[], None] = lambda: None) -> None:
        self._renewals = renewals
        self._patience = patience
        self._on_return = on_return
        self._poked = asyncio.Event()
        self._lost_at: float | None = None

    @property
    def database_up(self) -> bool:
        return self._lost_at is None

    def poke(self) -> None:
        """Look now (call it in the keeper's loop): somebody cancelled a job, there is a new lease, or another loop has lost the
        database."""
        self._poked.set()

    async def run(self) -> None:
        """Renew until cancelled. Ends last at a shutdown: renewals go on until nothing is held."""
        while True:
            poked = self._poked.is_set()
            self._poked.clear()
            try:
                next_at = await self._beat(poked=poked)
            except DATABASE_ERRORS as error:
                self._renewals.give_up()
                self._note_loss(error)
                delay_seconds = self._patience.delay_seconds(error, held=len(self._renewals))
                next_at = local_seconds() + min(delay_seconds, self._renewals.retry_seconds())
            else:
                if self._renewals.has_answer:
                    self._patience.reset()
                    self._note_return()
            try:
                async with asyncio.timeout(max(next_at - local_seconds(), _LEAST_PAUSE_SECONDS)):
                    await self._poked.wait()
            except TimeoutError:
                pass

    async def _beat(self, *, poked: bool) -> float:
        async with asyncio.timeout(self._renewals.beat_seconds):
            return await self._renewals.beat(poked=poked)

    def _note_loss(self, error: BaseException) -> None:
        if self._lost_at is None:
            self._lost_at = local_seconds()
            logs.emit(events.DATABASE_LOST, error=error, error_type=type(error).__name__)

    def _note_return(self) -> None:
        if self._lost_at is not None:
            logs.emit(events.DATABASE_RESTORED, lost_seconds=round(local_seconds() - self._lost_at, 3))
            self._lost_at = None
            self._on_return()
