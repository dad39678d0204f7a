"""Claims over HTTP whose answer was lost: what `worker.lost_claims` is for the daemon.

What the caller can repeat, the repetition finds; the rest goes back, attempt refunded, once the claim can no longer commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from worker import events, logs
from worker.clock import local_seconds
from worker.lost_claims import MOST_OUTSTANDING, is_over
from worker.store import task_claiming

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database
    from worker.store.sessions import Backend


class LostClaims:
    """Remembers claims without an answer, at most MOST_OUTSTANDING, and gives back what they took."""

    def __init__(self, database: Database, *, limit_seconds: float) -> None:
        self._database = database
        self._limit_seconds = limit_seconds
        self._lost: list[tuple[Backend | None, float, list[str]]] = []
        """Server process, since when, their requests that nobody can repeat."""

    @property
    def outstanding(self) -> bool:
        """Whether some claim is not known to be over."""
        return bool(self._lost)

    @property
    def are_too_many(self) -> bool:
        """Nothing more may be claimed."""
        return len(self._lost) >= MOST_OUTSTANDING

    @property
    def may_hold_tasks(self) -> bool:
        """Whether there may be a task that only `give_back` returns."""
        return any(request_ids for _, _, request_ids in self._lost)

    def add(self, connection: Connection, request_ids: list[str]) -> None:
        """A claim on this connection, which is dropped now, has had no answer; these of its requests nobody can repeat."""
        self._lost.append((connection.backend, local_seconds(), request_ids))

    async def give_back(self, connection: Connection) -> None:
        """Return what claims without an answer have taken, and forget those that are surely over and have nothing left.

        No claim may be in flight meanwhile.
        """
        over = []
        for one in self._lost:
            backend, since, _ = one
            if await is_over(connection, self._database, backend, since, limit_seconds=self._limit_seconds):
                over.append(one)
        request_ids = [id for _, _, ids in over for id in ids]
        left = await self._release(connection, request_ids) if request_ids else set()
        self._lost = [one for one in self._lost if one not in over or not left.isdisjoint(one[2])]

    async def _release(self, connection: Connection, request_ids: Sequence[str]) -> set[str]:
        """Those of these requests that still have a task: somebody keeps its row locked."""
        for task in await task_claiming.recover(connection, self._database, request_ids=request_ids):
            logs.emit(
                events.JOB_RELEASED,
                job_id=task.id,
                kind=task.kind,
                queue=task.queue,
                attempt=task.attempt,
                fence=task.fence,
                processor=task.processor,
                duration_ms=task.since_claim_ms,
                reason="claim_lost",
            )
        return await task_claiming.still_claimed(connection, self._database, request_ids=request_ids)
