"""Coalescing: many requests share few statements, and nobody waits for company.

One statement is in flight at a time; whatever is asked meanwhile shares the next one. Under light load a request goes at once and
alone, under heavy load the groups grow by themselves. The queue has a size and every wait a limit.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from worker.api.problems import Problem, of_database, overloaded
from worker.store.connection import DATABASE_ERRORS

W = TypeVar("W")
A = TypeVar("A")

QUEUE = 2_000
BYTES = 16 * 1024 * 1024


class Waiting(Generic[W, A]):
    """One request and the place for its answer."""

    __slots__ = ("_future", "wish")

    def __init__(self, wish: W, future: asyncio.Future[A]) -> None:
        self.wish = wish
        self._future = future

    def answer(self, answer: A) -> bool:
        """False: nobody waits for it any more."""
        if self._future.done():
            return False
        self._future.set_result(answer)
        return True

    def refuse(self, problem: Problem) -> None:
        if not self._future.done():
            self._future.set_exception(problem)

    @property
    def is_over(self) -> bool:
        return self._future.done()


class Coalescer(Generic[W, A]):
    """Hands waiting requests to `work`, at most `most` of one group at a time, groups in turn.

    `work` answers each of them. If it raises a database error, all that wait are refused: they would meet the same one.
    `hand_back` gets an answer whose caller was cancelled before it woke up to it.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Waiting[W, A]]], Awaitable[None]],
        *,
        most: int,
        limit_seconds: float,
        group_of: Callable[[W], Hashable] = lambda _: None,
        bytes_of: Callable[[W], int] = lambda _: 0,
        hand_back: Callable[[A], object] = lambda _: None,
    ) -> None:
        self._work = work
        self._most = most
        self._limit_seconds = limit_seconds
        self._group_of = group_of
        self._bytes_of = bytes_of
        self._hand_back = hand_back
        self._groups: OrderedDict[Hashable, deque[Waiting[W, A]]] = OrderedDict()
        self._waiting = 0
        self._signal = asyncio.Event()

    async def ask(self, wish: W) -> A:
        """The answer. Raises Problem, `overloaded` when the queue is full or the answer does not come in time."""
        if self._waiting >= QUEUE:
            raise overloaded()
        future = self._put(wish)
        try:
            async with asyncio.timeout(self._limit_seconds):
                return await future
        except TimeoutError:
            # It may be answered already, and only not have had its turn since.
            if future.cancelled():
                raise overloaded() from None
            return future.result()
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._hand_back(future.result())
            raise

    def _put(self, wish: W) -> asyncio.Future[A]:
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._groups.setdefault(self._group_of(wish), deque()).append(Waiting(wish, future))
        self._waiting += 1
        self._signal.set()
        return future

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            batch = self._take()
            if not batch:
                self._signal.clear()
                await self._signal.wait()
                continue
            try:
                await self._work(batch)
            except DATABASE_ERRORS as error:
                problem = of_database(error)
                for one in (*batch, *self._take_all()):
                    one.refuse(problem)

    def _take(self) -> list[Waiting[W, A]]:
        """The next group's oldest requests, without those whose caller has gone."""
        while self._groups:
            group, queue = self._groups.popitem(last=False)
            batch: list[Waiting[W, A]] = []
            size = 0
            while queue and len(batch) < self._most and size < BYTES:
                one = queue.popleft()
                self._waiting -= 1
                if not one.is_over:
                    batch.append(one)
                    size += self._bytes_of(one.wish)
            if queue:
                self._groups[group] = queue  # behind the others
            if batch:
                return batch
        return []

    def _take_all(self) -> list[Waiting[W, A]]:
        found = [one for queue in self._groups.values() for one in queue]
        self._groups.clear()
        self._waiting = 0
        return found
