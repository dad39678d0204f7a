"""The committer: it writes outcomes, in groups: everything that finished while its previous commit was in flight.

It lives in the rights thread, so that a handler that blocks its loop blocks no commit. What cannot be written yet stays here and is
renewed by the keeper. With a batch of 1 every job has a transaction of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from worker import events
from worker.clock import local_seconds
from worker.committing import Finished, group, newest_of_each_job
from worker.domain import Abandoned, AlreadyApplied, Backoff, Committed, Failed, Outcome, Released, Snoozed, Succeeded
from worker.holding import Held, Holdings
from worker.last_word import FailureListener, LastWord
from worker.writer import Writer

if TYPE_CHECKING:
    from worker.job import Job
    from worker.store.connection import Database, Lane

ROLE = "commit"
COMMIT_SETTINGS = {"plan_cache_mode": "force_generic_plan"}
BACKLOG = 2_000
"""Outcomes that may wait; past that the worker tasks wait too."""


class Committer:
    """`hand_over` and `room` are called in the loop of the handlers, the rest runs in the rights thread's."""

    def __init__(
        self,
        database: Database,
        lane: Lane,
        *,
        owner: str,
        holdings: Holdings,
        backoff: Backoff,
        batch: int,
        deletes: bool,
        group_seconds: float,
        statement_seconds: float,
        work_loop: asyncio.AbstractEventLoop,
        rights_loop: asyncio.AbstractEventLoop,
        on_failed: FailureListener | None,
        on_trouble: Callable[[], None],
    ) -> None:
        self._batch = batch
        self._work_loop = work_loop
        self._rights_loop = rights_loop
        self._queue: deque[Finished] = deque()
        self._later: list[tuple[float, Finished]] = []
        self._in_hand: list[Finished] = []
        self._signalled = False
        self._signal = asyncio.Event()
        self._quiet = asyncio.Event()
        self._room: list[asyncio.Future[None]] = []
        self._holdings = holdings
        self._on_failed = on_failed
        self._last_word = LastWord(holdings, None if on_failed is None else self._tell_failed)
        self._writer = Writer(
            database,
            lane,
            self._last_word,
            owner=owner,
            backoff=backoff,
            batch=batch,
            deletes=deletes,
            group_seconds=group_seconds,
            statement_seconds=statement_seconds,
            on_trouble=on_trouble,
            postpone=lambda one, due_at: self._later.append((due_at, one)),
            waiting=lambda: self.waiting,
        )

    def _tell_failed(self, job: Job[object], error: BaseException, will_retry: bool) -> None:
        assert self._on_failed is not None
        self._work_loop.call_soon_threadsafe(self._on_failed, job, error, will_retry)

    # --- from the loop of the handlers

    def hand_over(self, held: Held, outcome: Outcome) -> None:
        """Take the outcome of an attempt. Its lease is kept until the outcome is written or refused."""
        duration_ms = round((local_seconds() - held.started_at) * 1000, 3) if held.started_at else 0.0
        self._queue.append(Finished(held, outcome, duration_ms))
        if not self._signalled:
            self._signalled = True
            self._rights_loop.call_soon_threadsafe(self._signal.set)

    async def room(self) -> None:
        """Return at once unless too many outcomes wait to be written."""
        while self.is_full:
            waiter = self._work_loop.create_future()
            self._room.append(waiter)
            if self.is_full:  # looked at again: the other thread may have missed the waiter
                await waiter

    # --- the loop

    @property
    def waiting(self) -> int:
        """Outcomes not yet written."""
        return len(self._queue) + len(self._later) + len(self._in_hand)

    @property
    def is_full(self) -> bool:
        """Whether so many outcomes wait that no new work should be taken."""
        return self.waiting > BACKLOG

    def retry_now(self) -> None:
        """The database is back: whatever waits for it need not wait any longer. Call it in the rights thread's loop."""
        self._later = [(0.0, one) for _, one in self._later]
        self._signal.set()

    async def drained(self) -> None:
        """Wait until nothing is left to write."""
        while self.waiting:
            self._quiet.clear()
            await self._quiet.wait()

    def leftovers(self) -> list[Finished]:
        """What is not written yet, each once."""
        kept = [*self._queue, *self._in_hand, *(one for _, one in self._later)]
        return list({one.held.key: one for one in kept if one.held in self._holdings}.values())

    async def run(self) -> None:
        """Write outcomes until cancelled."""
        while True:
            self._signalled = False
            batch = self._take()
            if not batch:
                self._quiet.set()
                await self._wait_for_more()
                continue
            self._in_hand = batch
            await self._write(batch)
            self._in_hand = []

    def _take(self) -> list[Finished]:
        now = local_seconds()
        batch = [one for due_at, one in self._later if due_at <= now]
        if batch:
            self._later = [entry for entry in self._later if entry[0] > now]
        most = max(self._batch, 50)  # a batch of 1 still takes several, and gives each a transaction of its own
        while self._queue and len(batch) < most:
            batch.append(self._queue.popleft())
        if self._room and not self.is_full:
            self._work_loop.call_soon_threadsafe(self._make_room)
        return batch

    def _make_room(self) -> None:
        waiters, self._room = self._room, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait_for_more(self) -> None:
        seconds = None
        if self._later:
            seconds = max(min(due_at for due_at, _ in self._later) - local_seconds(), 0.001)
        try:
            async with asyncio.timeout(seconds):
                await self._signal.wait()
        except TimeoutError:
            pass
        self._signal.clear()

    async def _write(self, batch: Sequence[Finished]) -> None:
        """What may share a transaction first, then what failed lately: whatever that waits for, it holds up nobody else."""
        again = [one for one in batch if not one.is_fresh]
        if again:
            batch = [one for one in batch if one.is_fresh]
            batch += await self._writer.still_ours(again)
        completions: list[Finished] = []
        settlements: list[Finished] = []
        for one in batch:
            match one.outcome:
                case Committed():
                    self._last_word.end(one, events.JOB_SUCCEEDED)
                case Abandoned():
                    self._last_word.end(one, events.JOB_ABANDONED, reason=one.outcome.reason)
                case Succeeded() | AlreadyApplied():
                    completions.append(one)
                case Failed() | Snoozed() | Released():
                    settlements.append(one)
        newest, stale = newest_of_each_job(completions)
        for one in stale:
            self._last_word.end(one, events.JOB_ABANDONED, reason="lease_lost")
        groups = group(newest, self._writer.caution, self._writer.largest)
        careful = groups.careful
        for members in groups.clean:
            if self._writer.is_cautious_about(members):  # since a moment ago
                careful.append(members)
            else:
                await self._writer.write(members)
        while settlements:
            largest = self._writer.largest
            members, settlements = settlements[:largest], settlements[largest:]
            await self._writer.write(members)
        for members in careful:
            await self._writer.write_with_care(members)
