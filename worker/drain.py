"""The drain: how a process stops. No new work; what has not started goes back; what runs gets the grace, with renewals going on,
and is then cancelled. After the grace there is one budget (M + 2Q) for all the rest: writing what is finished, releasing what is
left.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from worker import events, logs
from worker.clock import local_seconds
from worker.store import claiming, leasing
from worker.store.connection import DATABASE_ERRORS

if TYPE_CHECKING:
    from worker.assembly import Parts
    from worker.rights import RightsThread
    from worker.store.connection import Connection, Database

LEFT_TO_EXPIRY = 75
_EXIT_RESERVE_SECONDS = 0.5


class Drain:
    """One orderly stop. Afterwards `status` is 0, or 75 if something was left to lease expiry."""

    def __init__(
        self,
        parts: Parts,
        rights: RightsThread,
        database: Database,
        *,
        process_id: str,
        since: float,
        grace_seconds: float,
        stopping_seconds: float,
        budget_seconds: float,
        hurry: asyncio.Event,
    ) -> None:
        self._parts = parts
        self._rights = rights
        self._database = database
        self._process_id = process_id
        self._grace_until = since + grace_seconds  # a loop that was blocked meanwhile has used up its grace
        self._stopping_seconds = stopping_seconds
        self._budget_seconds = budget_seconds
        self._hurry = hurry
        self.status = 0
        self.has_deaf = False
        """Some handler did not end: its task or thread outlives the drain."""

    async def run(self, claiming_task: asyncio.Task[None], working: list[asyncio.Task[None]]) -> None:
        """Stop these tasks in order. Returns within what is left of the grace plus the budget."""
        pool = self._parts.pool
        self._parts.claimer.stop()
        pool.stop_starting()
        ended = asyncio.ensure_future(asyncio.wait(working))
        hurried = asyncio.create_task(self._hurry.wait(), name="hurry")
        await asyncio.wait({ended, hurried}, timeout=_left(self._grace_until), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        deadline = min(local_seconds(), self._grace_until) + self._budget_seconds - _EXIT_RESERVE_SECONDS
        if not ended.done():
            pool.cancel_running()
            await asyncio.wait({ended}, timeout=min(self._stopping_seconds, _left(deadline)))
        await asyncio.wait({claiming_task}, timeout=_left(deadline))
        await self._finish_writing(deadline)
        self._name_the_deaf()
        await self._release_the_rest(deadline)
        try:
            async with asyncio.timeout(_left(deadline)):
                await pool.hooks_ended()
        except TimeoutError:
            pass  # closing the pool cancels them
        for task in (*working, claiming_task):
            task.cancel()
        ended.cancel()

    async def _finish_writing(self, deadline: float) -> None:
        """Wait until every outcome is written; name those that are not."""
        committer = self._parts.committer
        try:
            await self._rights.run(committer.drained(), timeout_seconds=_left(deadline))
        except TimeoutError:
            pass  # what is left is named below
        for one in committer.leftovers():
            self.status = LEFT_TO_EXPIRY
            logs.emit(
                events.COMPLETION_DEFERRED,
                **one.held.job.log_fields(),
                error="not written before the end; left to lease expiry",
                waiting=committer.waiting,
            )
        if committer.unwritten:
            self.status = LEFT_TO_EXPIRY

    def _name_the_deaf(self) -> None:
        for attempt in self._parts.pool.running():
            self.has_deaf = self.has_deaf or not attempt.is_over
            self.status = LEFT_TO_EXPIRY
            duration_ms = round((local_seconds() - attempt.held.started_at) * 1000, 3)
            logs.emit(events.JOB_ABANDONED, **attempt.held.job.log_fields(), duration_ms=duration_ms, reason="deaf_handler")

    async def _release_the_rest(self, deadline: float) -> None:
        """One statement for whatever is still ours without anybody holding it: a claim whose answer was lost, for example."""
        holdings = self._parts.holdings
        try:
            async with asyncio.timeout(_left(deadline)):
                connection = await self._database.connect("release")
                try:
                    released = await claiming.recover(connection, self._database, owner=self._process_id, held=holdings.keys())
                    if not holdings.keys():
                        await leasing.remove_presence(connection, self._database, process_id=self._process_id)
                finally:
                    await close_quietly(connection)
        except DATABASE_ERRORS as error:
            if holdings.keys():
                self.status = LEFT_TO_EXPIRY
            logs.emit(events.CLAIM_FAILED, error=error, error_type=type(error).__name__)
            return
        for job in released:
            logs.emit(events.JOB_RELEASED, **job.log_fields(), reason="claim_lost")


async def close_quietly(connection: Connection) -> None:
    """Say goodbye within a second, else drop the connection."""
    try:
        await connection.close(timeout=1.0)
    except DATABASE_ERRORS:
        connection.terminate()


def _left(deadline: float) -> float:
    return max(deadline - local_seconds(), 0.01)
