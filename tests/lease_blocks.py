"""Blocks under a named lease, and a way to see what `Leases` asks for."""

from __future__ import annotations

from typing import Any

import pytest

from worker import LeaseLost, Leases
from worker.lease_transport import DatabaseTransport
from worker.store.connection import Database


class Watched(DatabaseTransport):
    """Notes which names were asked for, and how many questions were on their way at a time."""

    def __init__(self, dsn: str) -> None:
        super().__init__(Database(dsn, environ={}))
        self.answered: list[str] = []
        self.most_at_once = 0
        self._at_once = 0

    async def acquire(self, **terms: Any) -> Any:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            answer = await super().acquire(**terms)
            self.answered.append(terms["resource"])
            return answer
        finally:
            self._at_once -= 1


async def hold_once(leases: Leases, name: str, **options: Any) -> int:
    async with leases.hold(name, **options) as held:
        return held.fence


def loses(match: str | None = None) -> Any:
    """`with loses():` a block that is told of its loss."""
    return pytest.raises(LeaseLost, match=match)
