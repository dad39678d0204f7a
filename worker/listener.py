"""The listener: it turns notifications into wake-ups, and owes nothing to them. Losing it costs latency, never jobs.

Two channels of the schema: one says that a queue has jobs (sent only while somebody is hungry), one that a job of a process was
cancelled. After every LISTEN comes one look at the table, since nobody was told of what happened before.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from worker import events, logs
from worker.clock import local_seconds
from worker.patience import Patience
from worker.store import listening
from worker.store.connection import DATABASE_ERRORS

if TYPE_CHECKING:
    from worker.store.connection import Lane

ROLE = "listen"
PROBE_SECONDS = 5.0


def channel(schema: str) -> str:
    """The schema's notification channel, as `wake_channel()` in the database computes it."""
    return "worker_" + hashlib.md5(schema.encode(), usedforsecurity=False).hexdigest()


class Listener:
    """Runs in the loop of the handlers, also while the pool drains: a cancelled job must not wait for the grace to end."""

    def __init__(
        self,
        lane: Lane,
        *,
        schema: str,
        owner: str,
        queues: frozenset[str],
        answer_seconds: float,
        delivers: bool,
        on_jobs: Callable[[str], None],
        on_cancel: Callable[[], None],
    ) -> None:
        self._lane = lane
        self._channel = channel(schema)
        self._owner = owner
        self._queues = queues
        self._answer_seconds = answer_seconds
        self._delivers = delivers
        self._on_jobs = on_jobs
        self._on_cancel = on_cancel
        self._patience = Patience(events.LISTENER_LOST)
        self._lost_at: float | None = None

    async def run(self) -> None:
        """Listen until cancelled; a connection that answers no probe within its limit is replaced."""
        if not self._delivers:
            logs.emit(
                events.LISTENER_LOST,
                error="a transaction pooler delivers no notifications: polling. WORKER_LISTEN_DATABASE_URL names a direct route",
            )
            return
        while True:
            try:
                await self._listen()
            except DATABASE_ERRORS as error:
                self._lane.drop()
                if self._lost_at is None:
                    self._lost_at = local_seconds()
                await asyncio.sleep(self._patience.delay_seconds(error))

    async def _listen(self) -> None:
        connection = await self._lane.get()
        closed, heard = asyncio.Event(), asyncio.Event()
        check = f"check {self._owner}"
        async with asyncio.timeout(self._answer_seconds):
            await listening.listen(
                connection,
                self._channel,
                on_jobs=self._jobs,
                on_cancel=lambda payload: heard.set() if payload == check else self._cancelled(payload),
                on_end=closed.set,
            )
            await listening.check(connection, self._channel, check)
            is_writable = await listening.probe(connection)
        try:
            async with asyncio.timeout(self._answer_seconds):
                await heard.wait()
        except TimeoutError:
            raise ConnectionError("LISTEN delivers nothing: is a transaction pooler in between? (WORKER_POOLER)") from None
        self._patience.reset()
        if self._lost_at is not None:
            logs.emit(events.LISTENER_RESTORED, lost_seconds=round(local_seconds() - self._lost_at, 3))
            self._lost_at = None
        self._on_jobs("")
        self._on_cancel()
        while not closed.is_set():
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    await closed.wait()
            except TimeoutError:
                was_writable = is_writable
                async with asyncio.timeout(self._answer_seconds):
                    is_writable = await listening.probe(connection)
                if was_writable and not is_writable:
                    # It goes on answering, but jobs and whoever speaks of them are elsewhere now.
                    raise ConnectionError("the server has become read-only") from None
        raise ConnectionError("the connection was closed")

    def _jobs(self, queue: str) -> None:
        if not queue or queue in self._queues:
            self._on_jobs(queue)

    def _cancelled(self, owner: str) -> None:
        if owner == self._owner:
            self._on_cancel()
