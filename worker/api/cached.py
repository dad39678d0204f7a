"""One answer for many callers: asked for once, then good for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from worker.clock import local_seconds

T = TypeVar("T")


class Cached(Generic[T]):
    """Calls `ask` at most once at a time and once in `seconds`, however many wait for the answer. `ask` must not raise."""

    def __init__(self, ask: Callable[[], Awaitable[T]], *, seconds: float) -> None:
        self._ask = ask
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._good_until = 0.0
        self._answer: T

    async def get(self) -> T:
        if local_seconds() < self._good_until:
            return self._answer
        async with self._turn:
            if local_seconds() >= self._good_until:
                self._answer = await self._ask()
                self._good_until = local_seconds() + self._seconds
            return self._answer
