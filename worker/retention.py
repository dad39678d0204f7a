"""Retention: how long finished and dead jobs, ledger rows and ended leases are kept; the slow walk that removes what is older."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from worker.clock import local_seconds
from worker.store import pruning

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database
    from worker.store.pruning import PruneStep

STEP_SECONDS = 0.3
"""About a tenth of the reaper's rhythm."""
RARELY_SECONDS = 60.0
REST_SECONDS = 30.0
"""After all three walks, before they begin again; a retention shorter than this rests for as long as it is."""


class _Walk:
    """Over one table, a page a statement."""

    def __init__(self, prune: Callable[[Connection, int], Awaitable[PruneStep]]) -> None:
        self._prune = prune
        self.cursor: int | None = pruning.FROM_THE_START

    @property
    def is_over(self) -> bool:
        return self.cursor is None

    async def go_on(self, connection: Connection) -> None:
        assert self.cursor is not None
        self.cursor = (await self._prune(connection, self.cursor)).next_cursor


class Retention:
    """One walk over finished rows, one over the ledger, one over the leases; each `step` goes on where the last one stopped.

    They rest together, once each of them has come to its end.
    """

    def __init__(
        self,
        database: Database,
        *,
        retention_seconds: float | None,
        dead_retention_seconds: float | None,
        ledger_retention_seconds: float | None,
        statement_seconds: float,
    ) -> None:
        self._database = database
        self._retention_seconds = retention_seconds
        self._dead_retention_seconds = dead_retention_seconds
        self._ledger_retention_seconds = ledger_retention_seconds
        self._statement_seconds = statement_seconds
        self._walks = [_Walk(self._prune_jobs), _Walk(self._prune_ledger), _Walk(self._prune_leases)]
        self._failures_cursor = pruning.FROM_THE_START
        self._rarely_at = 0.0
        self._walk_at = 0.0
        shortest_seconds = min(retention_seconds or REST_SECONDS, dead_retention_seconds or REST_SECONDS)
        self._rest_seconds = min(REST_SECONDS, shortest_seconds)

    async def step(self, connection: Connection) -> None:
        """Remove some of what is too old, in short statements with a limit each; begins nothing more after STEP_SECONDS."""
        until = local_seconds() + STEP_SECONDS
        if local_seconds() >= self._rarely_at:
            self._rarely_at = local_seconds() + RARELY_SECONDS
            async with self._limit():
                await pruning.prune_processes(connection, self._database)
            async with self._limit():
                failures = await pruning.prune_orphaned_failures(connection, self._database, cursor=self._failures_cursor)
            self._failures_cursor = failures.next_cursor or pruning.FROM_THE_START
        while self._walk_at <= local_seconds() < until:
            for walk in [walk for walk in self._walks if not walk.is_over]:
                try:
                    async with self._limit():
                        await walk.go_on(connection)
                except BaseException:
                    # From now on the others go first, and do not wait for its end.
                    self._walks.sort(key=lambda one: one is walk)
                    self._begin_again()
                    raise
            if all(walk.is_over for walk in self._walks):
                self._begin_again()
                self._walk_at = local_seconds() + self._rest_seconds

    def _begin_again(self) -> None:
        """Send each walk that is over to its start."""
        for walk in self._walks:
            if walk.is_over:
                walk.cursor = pruning.FROM_THE_START

    async def _prune_jobs(self, connection: Connection, cursor: int) -> PruneStep:
        return await pruning.prune_jobs(
            connection,
            self._database,
            cursor=cursor,
            retention_seconds=self._retention_seconds,
            dead_retention_seconds=self._dead_retention_seconds,
        )

    async def _prune_ledger(self, connection: Connection, cursor: int) -> PruneStep:
        return await pruning.prune_ledger(
            connection, self._database, cursor=cursor, ledger_retention_seconds=self._ledger_retention_seconds
        )

    async def _prune_leases(self, connection: Connection, cursor: int) -> PruneStep:
        return await pruning.prune_leases(connection, self._database, cursor=cursor, retention_seconds=self._retention_seconds)

    def _limit(self) -> asyncio.Timeout:
        return asyncio.timeout(self._statement_seconds)
