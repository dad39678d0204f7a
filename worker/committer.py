"""The committer: it writes outcomes, in groups: everything that finished while its previous commit was in flight.

It lives in the rights thread, so that a handler that blocks its loop blocks no commit. What cannot be written yet stays here and is
renewed by the keeper. With a batch of 1 every job has a transaction of its own.

While more than a full group waits, a second writer works beside the first, on a connection of its own that is opened for it: the
server checks the fences of one group while it applies the effects of the other. It is a help that nothing depends on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from worker import events
from worker.clock import local_seconds
from worker.committing import Caution, Finished, group, newest_of_each_job
from worker.domain import Abandoned, AlreadyApplied, Backoff, Committed, Failed, Outcome, Released, Snoozed, Succeeded
from worker.holding import Held, Holdings
from worker.last_word import FailureListener, LastWord
from worker.store.connection import DATABASE_ERRORS
from worker.writer import Writer

if TYPE_CHECKING:
    from worker.job import Job
    from worker.store.connection import Database, Lane

ROLE = "commit"
SECOND_PAUSE_SECONDS = 30.0
"""So long the second writer waits when there is no connection for it."""
COMMIT_SETTINGS = {"plan_cache_mode": "force_generic_plan"}
BACKLOG = 2_000
"""Outcomes that may wait; past that the worker tasks wait too."""


class Committer:
    """`hand_over` and `makes_wait` are called in the loop of the handlers, the rest runs in the rights thread's."""

    def __init__(
        self,
        database: Database,
        lane: Lane,
        second_lane: Lane,
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
        on_room: Callable[[], None],
        on_trouble: Callable[[], None],
    ) -> None:
        self._most = max(batch, 50)  # a batch of 1 still takes several, and gives each a transaction of its own
        self._work_loop = work_loop
        self._rights_loop = rights_loop
        self._queue: deque[Finished] = deque()
        self._later: list[tuple[float, Finished]] = []
        self._in_hand: list[Finished] = []
        self._in_second_hand: list[Finished] = []
        self._signalled = False
        self._signal = asyncio.Event()
        self._piled_up = asyncio.Event()
        self._quiet = asyncio.Event()
        self._on_room = on_room
        self._is_awaited = False
        self._holdings = holdings
        self._on_failed = on_failed
        self._last_word = LastWord(holdings, None if on_failed is None else self._tell_failed)
        self._caution = Caution(batch)
        one_at_a_time = asyncio.Lock()
        self._second_lane = second_lane
        self._first_writer, self._second_writer = (
            Writer(
                database,
                one_lane,
                self._last_word,
                owner=owner,
                backoff=backoff,
                caution=self._caution,
                one_at_a_time=one_at_a_time,
                batch=batch,
                deletes=deletes,
                group_seconds=group_seconds,
                statement_seconds=statement_seconds,
                on_trouble=on_trouble,
                postpone=self._postpone,
                waiting=lambda: self.waiting,
            )
            for one_lane in (lane, second_lane)
        )

    def _postpone(self, one: Finished, due_at: float) -> None:
        self._later.append((due_at, one))
        self._signal.set()  # the second writer may have put it off while the first one sleeps

    def _tell_failed(self, job: Job[object], error: BaseException, will_retry: bool) -> None:
        assert self._on_failed is not None
        self._call_in_work_loop(self._on_failed, job, error, will_retry)

    # --- from the loop of the handlers

    def hand_over(self, held: Held, outcome: Outcome, job: Job[object] | None = None) -> None:
        """Take the outcome of an attempt. Its lease is kept until the outcome is written or refused."""
        self._queue.append(Finished(held, outcome, held.duration_ms, job))
        if not self._signalled:
            self._signalled = True
            # After the end of that loop this is from a handler that has outlived the drain: its job was left to lease expiry.
            with contextlib.suppress(RuntimeError):
                self._rights_loop.call_soon_threadsafe(self._signal.set)

    def makes_wait(self) -> bool:
        """Whether no new work should be taken; if so, `on_room` is called once that has changed."""
        if not self.is_full:
            return False
        self._is_awaited = True
        return self.is_full  # looked at again: the other thread may have missed that somebody waits

    # --- the loop

    @property
    def waiting(self) -> int:
        """Outcomes not yet written."""
        return len(self._queue) + len(self._later) + len(self._in_hand) + len(self._in_second_hand)

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
        kept = [*self._queue, *self._in_hand, *self._in_second_hand, *(one for _, one in self._later)]
        return list({one.held.key: one for one in kept if one.held in self._holdings}.values())

    async def run(self) -> None:
        """Write outcomes until cancelled."""
        try:
            while True:
                self._signalled = False
                again, fresh = self._due(), self._take()
                if not again and not fresh:
                    self._last_word.tell()
                    self._quiet.set()
                    await self._wait_for_more()
                    continue
                if self._is_piled_up():
                    self._piled_up.set()
                self._in_hand = again + fresh
                await self._write(self._first_writer, again, fresh)
                self._in_hand = []
        finally:
            self._last_word.tell()

    async def run_beside(self) -> None:
        """The second writer's loop: help while a full group waits, until cancelled."""
        while True:
            await self._piled_up.wait()
            while self._is_piled_up():
                try:
                    await self._second_lane.get()
                except DATABASE_ERRORS:
                    await asyncio.sleep(SECOND_PAUSE_SECONDS * random.uniform(0.8, 1.2))
                    continue
                self._in_second_hand = self._take()
                await self._write(self._second_writer, [], self._in_second_hand)
                self._in_second_hand = []
                self._offer_room()
            self._piled_up.clear()
            self._last_word.tell()
            self._quiet.set()  # who waits for it looks again

    def _is_piled_up(self) -> bool:
        return len(self._queue) >= self._most

    def _due(self) -> list[Finished]:
        """Those that were put off until now."""
        if not self._later:
            return []
        now = local_seconds()
        due = [one for due_at, one in self._later if due_at <= now]
        if due:
            self._later = [entry for entry in self._later if entry[0] > now]
        return due

    def _take(self) -> list[Finished]:
        """Those that have just finished."""
        queue = self._queue
        batch = [queue.popleft() for _ in range(min(len(queue), self._most))]
        self._offer_room()
        return batch

    def _offer_room(self) -> None:
        if self._is_awaited and not self.is_full:
            self._is_awaited = False
            self._call_in_work_loop(self._on_room)

    def _call_in_work_loop(self, function: Callable[..., None], *arguments: object) -> None:
        """Once that loop has ended nobody is left to be told; what has finished is written all the same."""
        with contextlib.suppress(RuntimeError):
            self._work_loop.call_soon_threadsafe(function, *arguments)

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

    async def _write(self, writer: Writer, again: Sequence[Finished], fresh: Sequence[Finished]) -> None:
        """What may share a transaction first, then what failed lately: whatever that waits for, it holds up nobody else."""
        batch = fresh
        if again:
            tried = [one for one in again if not one.is_fresh]
            batch = [one for one in again if one.is_fresh] + list(fresh)
            if tried:
                batch += await writer.still_ours(tried)
        completions: list[Finished] = []
        settlements: list[Finished] = []
        for one in batch:
            match one.outcome:
                case Succeeded() | AlreadyApplied():
                    completions.append(one)
                case Committed():
                    self._last_word.succeeded(one)
                case Abandoned():
                    self._last_word.end(one, events.JOB_ABANDONED, reason=one.outcome.reason)
                case Failed() | Snoozed() | Released():
                    settlements.append(one)
        newest, stale = newest_of_each_job(completions)
        for one in stale:
            self._last_word.end(one, events.JOB_ABANDONED, reason="lease_lost")
        groups = group(newest, self._caution, writer.largest)
        careful = groups.careful
        for members in groups.clean:
            if writer.is_cautious_about(members):  # since a moment ago
                careful.append(members)
            else:
                await writer.write(members)
        while settlements:
            largest = writer.largest
            members, settlements = settlements[:largest], settlements[largest:]
            await writer.write(members)
        for members in careful:
            await writer.write_with_care(members)
