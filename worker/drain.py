"""The drain: how a process stops. No new work; what has not started goes back; what runs gets the grace, with renewals going on,
and is then cancelled. After the grace there is one budget (M + 2Q) for all the rest: writing what is finished, releasing what is
left.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from worker import events, logs
from worker.clock import local_seconds
from worker.domain import Released
from worker.holding import Held, Phase
from worker.store import claiming, leasing
from worker.store.connection import DATABASE_ERRORS

if TYPE_CHECKING:
    from worker.assembly import Parts
    from worker.rights import RightsThread
    from worker.store.connection import Connection, Database

LEFT_TO_EXPIRY = 75
_EXIT_RESERVE_SECONDS = 0.5
_LOOK_AGAIN_SECONDS = 0.05
_TRY_AGAIN_SECONDS = 0.2
_GOODBYE_SECONDS = 0.5


class Drain:
    """One orderly stop. Afterwards `status` is 0, or 75 if something was left to lease expiry."""

    def __init__(
        self,
        parts: Parts,
        rights: RightsThread,
        database: Database,
        *,
        process_id: str,
        grace_until: float,
        stopping_seconds: float,
        budget_seconds: float,
        hurry: asyncio.Event,
    ) -> None:
        self._parts = parts
        self._rights = rights
        self._database = database
        self._process_id = process_id
        self._grace_until = grace_until  # local moment: a loop that was blocked meanwhile has used up its grace
        self._stopping_seconds = stopping_seconds
        self._budget_seconds = budget_seconds
        self._reserve_seconds = min(_EXIT_RESERVE_SECONDS, budget_seconds / 4)
        self._hurry = hurry
        self.status = 0
        self.close_until = 0.0
        """Local moment: what is left of the budget after the drain is for closing connections, and for the interpreter's end."""
        self.has_deaf = False
        """Some handler did not end: its task or thread outlives the drain."""

    async def run(self, claiming_task: asyncio.Task[None]) -> None:
        """Stop the loops in order. Returns within what is left of the grace plus the budget."""
        pool = self._parts.pool
        self._parts.claimer.stop()
        pool.stop_starting()
        ended = asyncio.create_task(pool.emptied(), name="emptied")
        hurried = asyncio.create_task(self._hurry.wait(), name="hurry")
        await asyncio.wait({ended, hurried}, timeout=_left(self._grace_until), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        deadline = min(local_seconds(), self._grace_until) + self._budget_seconds - self._reserve_seconds
        self.close_until = deadline + self._reserve_seconds / 2
        if not ended.done():
            pool.cancel_running()
            await asyncio.wait({ended}, timeout=min(self._stopping_seconds, _left(deadline)))
        await asyncio.wait({claiming_task}, timeout=_left(deadline) / 2)
        claiming_task.cancel()  # a claim that has no answer by now counts as lost, and leaves time to give back what it took
        await asyncio.wait({claiming_task}, timeout=_LOOK_AGAIN_SECONDS)
        await self._finish_writing(deadline)
        self._name_the_deaf()
        await self._release_the_rest(deadline)
        try:
            async with asyncio.timeout(_left(deadline)):
                await pool.hooks_ended()
        except TimeoutError:
            pass  # closing the pool cancels them
        ended.cancel()

    async def _finish_writing(self, deadline: float) -> None:
        """Wait until every outcome is written; name those that are not."""
        try:
            await self._rights.run(self._parts.committer.drained(), timeout_seconds=_left(deadline))
        except TimeoutError:
            pass  # what is left is named below
        if _name_the_unwritten(self._parts):
            self.status = LEFT_TO_EXPIRY

    def _name_the_deaf(self) -> None:
        for attempt in self._parts.pool.running():
            self.has_deaf = self.has_deaf or not attempt.is_over
            self.status = LEFT_TO_EXPIRY
            _name_the_deaf(attempt.held)

    async def _release_the_rest(self, deadline: float) -> None:
        """Whatever is still ours without anybody holding it: a claim whose answer was lost, for example."""
        claimer = self._parts.claimer
        if self._something_is_ours:
            self._rights.call(self._parts.outlive_leases)
        while True:
            try:
                async with asyncio.timeout(_left(deadline)):
                    await self._release_over_a_connection(deadline)
                return
            except DATABASE_ERRORS as error:
                if self._something_is_ours and local_seconds() + _TRY_AGAIN_SECONDS < deadline:
                    await asyncio.sleep(_TRY_AGAIN_SECONDS * random.uniform(0.5, 1))  # a failover may be under way
                    continue
                said: BaseException | str = error
                if self._something_is_ours:
                    self.status = LEFT_TO_EXPIRY
                if claimer.has_lost_claims:
                    said = "a claim without an answer may still take jobs, which are then left to lease expiry"
                logs.emit(events.CLAIM_FAILED, error=said, error_type=type(error).__name__)
                return

    @property
    def _something_is_ours(self) -> bool:
        return bool(self._parts.holdings.keys()) or self._parts.claimer.has_lost_claims

    async def _release_over_a_connection(self, deadline: float) -> None:
        claimer = self._parts.claimer
        connection = await self._database.connect("release")
        try:
            await claimer.give_back_lost(connection)
            while claimer.has_lost_claims:
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                await claimer.give_back_lost(connection)
            await _return_orphans(connection, self._parts, self._database, self._process_id)
            if not self._parts.holdings.keys():
                await self._rights.run(self._parts.renewals.end_presence(), timeout_seconds=_left(deadline))
                await leasing.remove_presence(connection, self._database, process_id=self._process_id)
        finally:
            await close_quietly(connection, deadline)


# --- without the loop of the handlers: it is blocked, and the process ends regardless; called in the rights thread's loop ------


async def release_behind(parts: Parts, database: Database, *, process_id: str, blocking: asyncio.Task[object] | None) -> None:
    """Give back, attempt refunded, all that waits behind a task that blocks its loop: what has not started, handlers that are
    suspended, claims whose answer nobody could take. What is left (the handler that blocks, threads, transactions of their own)
    goes to the reaper, but not as a crash: it must make nobody a suspect.
    """
    for held in parts.holdings:
        if held.phase is Phase.WAITING and held.lost is None:
            parts.committer.hand_over(held, Released(reason="not_started"))
    running = parts.pool.running()
    # A task that is no attempt may be the child of one, nobody can tell which: then no handler is known to be suspended.
    if blocking is not None and any(attempt.runs_in(blocking) for attempt in running):
        for attempt in running:
            if attempt.is_behind(blocking):
                parts.committer.hand_over(attempt.held, Released(reason="shutdown"))
                attempt.held.lose("lease_lost")  # should the loop turn once more after all
    parts.outlive_leases()
    try:
        connection = await database.connect("release")
        try:
            await _return_orphans(connection, parts, database, process_id)
        finally:
            connection.terminate()
    except DATABASE_ERRORS as error:
        logs.emit(events.CLAIM_FAILED, error=error, error_type=type(error).__name__)


def name_what_is_left(parts: Parts) -> int:
    """Log each job that is left to lease expiry; LEFT_TO_EXPIRY if there is one, else 0."""
    left = _name_the_unwritten(parts)
    for held in parts.holdings:
        if held.phase in (Phase.RUNNING, Phase.OWN_TRANSACTION) and held.lost is None:
            _name_the_deaf(held)
            left = True
    return LEFT_TO_EXPIRY if left else 0


# --- both ----------------------------------------------------------------------------------------------------------------------


def _name_the_unwritten(parts: Parts) -> bool:
    leftovers = parts.committer.leftovers()
    for one in leftovers:
        logs.emit(
            events.COMPLETION_DEFERRED,
            **one.held.job.log_fields(),
            error="not written before the end; left to lease expiry",
            waiting=parts.committer.waiting,
        )
    return bool(leftovers)


def _name_the_deaf(held: Held) -> None:
    logs.emit(events.JOB_ABANDONED, **held.job.log_fields(), duration_ms=held.duration_ms, reason="deaf_handler")


async def _return_orphans(connection: Connection, parts: Parts, database: Database, process_id: str) -> None:
    """One statement for every job that is ours and that nobody here holds."""
    for job in await claiming.recover(connection, database, owner=process_id, held=parts.holdings.keys()):
        logs.emit(events.JOB_RELEASED, **job.log_fields(), duration_ms=0.0, reason="claim_lost")


async def close_quietly(connection: Connection, until: float) -> None:
    """Say goodbye by then, else drop the connection."""
    left_seconds = until - local_seconds()
    try:
        if left_seconds > 0:
            await connection.close(timeout=min(left_seconds, _GOODBYE_SECONDS))
    except DATABASE_ERRORS:
        pass
    finally:
        connection.terminate()


def _left(deadline: float) -> float:
    return max(deadline - local_seconds(), 0.01)
