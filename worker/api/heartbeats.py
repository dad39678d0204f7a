"""Heartbeats of remote workers: those that arrive meanwhile share the statements. The renewal is the keeper's, for the length that
was asked for at the claim; a row that somebody keeps locked is passed over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker.api.coalescing import Coalescer, Waiting
from worker.api.judging import judge
from worker.clock import local_seconds
from worker.measures import REMOTE
from worker.store import leasing, tasks
from worker.store.leasing import Key
from worker.store.tasks import Standing, Task

if TYPE_CHECKING:
    from worker.store.connection import Database, Lane

MOST = 64


class Beat(NamedTuple):
    """A remote worker says that it works on its task."""

    id: int
    fence: int
    owner: str


Member = Waiting[Beat, Task]


class Heartbeats:
    """`renew` is for routes; `run` is the one loop that writes."""

    def __init__(
        self,
        database: Database,
        lane: Lane,
        *,
        default_lease_seconds: float,
        statement_seconds: float,
        limit_seconds: float,
    ) -> None:
        self._database = database
        self._lane = lane
        self._default_lease_seconds = default_lease_seconds
        self._statement_seconds = statement_seconds
        self._coalescer: Coalescer[Beat, Task] = Coalescer(self._serve, most=MOST, limit_seconds=limit_seconds)
        self.run: Callable[[], Coroutine[object, object, None]] = self._coalescer.run

    async def renew(self, beat: Beat) -> Task:
        """The task with its lease renewed. Raises Problem when it is not this worker's any more."""
        return await self._coalescer.ask(beat)

    async def _serve(self, members: Sequence[Member]) -> None:
        try:
            renewed, standings = await self._renew([member.wish for member in members])
        except BaseException:
            self._lane.drop()
            raise
        for member, standing in zip(members, standings, strict=True):
            beat = member.wish
            if standing is not None and beat in renewed:
                member.answer(standing.task)
                continue
            problem = judge("heartbeat", standing, fence=beat.fence, owner=beat.owner)
            if problem is None:
                assert standing is not None
                member.answer(standing.task)
            else:
                REMOTE.lost_leases += problem.status_code == 409
                member.refuse(problem)

    async def _renew(self, beats: Sequence[Beat]) -> tuple[set[Beat], list[Standing | None]]:
        """Which of them have been renewed, and how each stands then."""
        connection = await self._lane.get()
        sent_at = local_seconds()
        async with asyncio.timeout(self._statement_seconds):
            before = await tasks.look(connection, self._database, beats)
            groups: dict[tuple[str, float], list[Key]] = {}
            for beat, standing in zip(beats, before, strict=True):
                if standing is not None and standing.owner == beat.owner and standing.task.fence == beat.fence:
                    lease_seconds = standing.lease_seconds or self._default_lease_seconds
                    groups.setdefault((beat.owner, lease_seconds), []).append((beat.id, beat.fence))
            renewed: set[Beat] = set()
            for (owner, lease_seconds), held in groups.items():
                keys = await leasing.renew(connection, self._database, held=held, owner=owner, lease_seconds=lease_seconds)
                renewed |= {Beat(*key, owner) for key in keys}
            standings = await tasks.look(connection, self._database, beats)
        REMOTE.renew_seconds.observe(local_seconds() - sent_at)
        return renewed, standings
