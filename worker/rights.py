"""The rights thread: what keeps and uses this process's rights (renewals, commits, the last deadline) runs here.

It has an event loop and connections of its own, so that a handler that blocks the loop it shares costs no lease and no commit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

import uvloop

from worker import ending, logs

T = TypeVar("T")

_START_SECONDS = 10.0


class RightsThread:
    """A thread with an event loop. `start`, then `run(coroutine)` from another loop, at last `stop`."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.loop.set_exception_handler(logs.loop_exception_handler)
        self._thread = threading.Thread(target=self._turn, name="rights", daemon=True)
        self._turning = threading.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._thread.start()
        if not self._turning.wait(_START_SECONDS):
            raise RuntimeError("the rights thread does not start")

    def _turn(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._turning.set)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in this thread's loop, soon. Nothing happens once the thread has ended."""
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            pass

    async def run(self, work: Coroutine[object, object, T], *, timeout_seconds: float) -> T:
        """Await a coroutine that runs in this thread's loop; TimeoutError (and its cancellation) after the limit."""
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await asyncio.wrap_future(future)
        except BaseException:
            future.cancel()
            raise

    def spawn(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run a loop in this thread until `cancel_all`."""

        async def turn() -> None:
            await work()

        def begin() -> None:
            self._tasks.append(self.loop.create_task(turn(), name=name))

        self.call(begin)

    async def cancel_all(self) -> None:
        """In this thread's loop: end every spawned loop and wait for it."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)

    def stop(self, timeout_seconds: float) -> None:
        """End the loop and the thread, and wait for them so long."""
        self.call(self.loop.stop)
        ending.join_loop(self._thread, timeout_seconds)
