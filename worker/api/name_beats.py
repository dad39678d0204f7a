"""Renewals of named leases: those that arrive meanwhile share one statement, on a connection of their own, so that a program
without access to the database can keep hundreds of names, and waits behind no crowd of other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING

from worker.api.coalescing import Coalescer, Waiting
from worker.api.problems import Problem, busy
from worker.clock import local_seconds
from worker.measures import REMOTE
from worker.store import lease_renewals
from worker.store.lease_renewals import Renewal
from worker.store.leases import Lease

if TYPE_CHECKING:
    from worker.store.connection import Database, Lane

ROLE = "http names"
MOST = 256


def not_held() -> Problem:
    return Problem(404, "not_held", "there is no such live lease of this holder under this fence")


class NameBeats:
    """`renew` is for routes; `run` is the one loop that writes."""

    def __init__(self, database: Database, lane: Lane, *, statement_seconds: float, limit_seconds: float) -> None:
        self._database = database
        self._lane = lane
        self._statement_seconds = statement_seconds
        self._coalescer: Coalescer[Renewal, Lease] = Coalescer(self._serve, most=MOST, limit_seconds=limit_seconds)
        self.run: Callable[[], Coroutine[object, object, None]] = self._coalescer.run

    async def renew(self, renewal: Renewal) -> Lease:
        """The lease, which goes on for as long as before from now. Raises Problem when this holder has it no more."""
        return await self._coalescer.ask(renewal)

    async def _serve(self, members: Sequence[Waiting[Renewal, Lease]]) -> None:
        try:
            connection = await self._lane.get()
            sent_at = local_seconds()
            async with asyncio.timeout(self._statement_seconds):
                asked = list(dict.fromkeys(member.wish for member in members))
                renewed = await lease_renewals.renew_named(connection, self._database, asked)
        except BaseException:
            self._lane.drop()
            raise
        REMOTE.renew_seconds.observe(local_seconds() - sent_at)
        for member in members:
            lease = renewed.get(member.wish)
            if lease is not None:
                member.answer(lease)
            else:
                member.refuse(busy() if member.wish in renewed else not_held())
