"""The lifespans of handlers: what is open from before the first claim to behind the last attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from worker.clock import local_seconds
from worker.handlers import Handlers, Lifespan

LEAVE_AT_LEAST_SECONDS = 0.1


class Lifespans:
    """Those of one process, each entered once.

    `leave_seconds()`, asked when one is left, tells how long that may take; at least LEAVE_AT_LEAST_SECONDS, whatever went before.
    `on_hang` hears of one that had to be cancelled then.
    """

    def __init__(self, handlers: Handlers, leave_seconds: Callable[[], float], on_hang: Callable[[TimeoutError], None]) -> None:
        self._handlers = handlers
        self._leave_seconds = leave_seconds
        self._on_hang = on_hang
        self._entering: asyncio.Timeout | None = None
        self._leaving: asyncio.Timeout | None = None
        self._is_stopped = False

    async def enter(self, stack: contextlib.AsyncExitStack) -> dict[Lifespan, object]:
        """Enter them, to be left with `stack`, and return what they gave; after `stop` perhaps not all. Raises what they raise."""
        resources: dict[Lifespan, object] = {}
        try:
            # In this task, which leaves them too: what they open may belong to it.
            async with asyncio.timeout(None) as self._entering:
                for lifespan in dict.fromkeys(self._handlers.lifespans.values()):
                    if self._is_stopped:
                        break
                    resources[lifespan] = await stack.enter_async_context(self._bounded(lifespan))
        except Exception:
            if not self._is_stopped:
                raise  # else it is what the cancelled one has made of that, and nobody needs it any more
        finally:
            self._entering = None
        return resources

    def stop(self) -> None:
        """Enter no more, and cancel what is being entered: nothing is held yet, so nothing is worth waiting for."""
        self._is_stopped = True
        if self._entering is not None:
            self._entering.reschedule(asyncio.get_running_loop().time())

    def hurry(self) -> None:
        """There is less time to end than there was."""
        if self._leaving is not None and not self._leaving.expired():
            self._limit_leaving()

    def _limit_leaving(self) -> None:
        assert self._leaving is not None
        limit_seconds = max(self._leave_seconds(), LEAVE_AT_LEAST_SECONDS)
        self._leaving.reschedule(asyncio.get_running_loop().time() + limit_seconds)

    @contextlib.asynccontextmanager
    async def _bounded(self, lifespan: Lifespan) -> AsyncIterator[object]:
        since, failure = 0.0, None
        leaving = asyncio.timeout(None)
        try:
            async with leaving, lifespan() as resource:
                try:
                    yield resource
                except BaseException as error:
                    failure = error
                    raise
                finally:
                    since, self._leaving = local_seconds(), leaving
                    self._limit_leaving()
        except TimeoutError:
            if not leaving.expired():
                raise
            if failure is not None:
                raise failure from failure.__cause__
        finally:
            self._leaving = None
            if leaving.expired():
                name = getattr(lifespan, "__qualname__", repr(lifespan))
                self._on_hang(TimeoutError(f"lifespan {name} did not end within {local_seconds() - since:.1f} s"))
