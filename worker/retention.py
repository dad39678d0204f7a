"""Retention: how long finished and dead jobs, ledger rows and ended leases are kept; the slow walk that removes what is older."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from worker.clock import local_seconds
from worker.store import pruning

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

STEP_SECONDS = 0.3
"""About a tenth of the reaper's rhythm."""
RARELY_SECONDS = 60.0
REST_SECONDS = 30.0
"""After all three walks, before they begin again; a retention shorter than this rests for as long as it is."""


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
        # Where each walk of this round goes on; None once it is over: it waits for the others.
        self._jobs_cursor: int | None = pruning.FROM_THE_START
        self._ledger_cursor: int | None = pruning.FROM_THE_START
        self._leases_cursor: int | None = pruning.FROM_THE_START
        self._failures_cursor = pruning.FROM_THE_START
        self._rarely_at = 0.0
        self._walk_at = 0.0
        shortest_seconds = min(retention_seconds or REST_SECONDS, dead_retention_seconds or REST_SECONDS)
        self._rest_seconds = min(REST_SECONDS, shortest_seconds)

    async def step(self, connection: Connection) -> None:
        """Remove some of what is too old, in short statements with a limit each; begins nothing more after STEP_SECONDS."""
        until = local_seconds() + STEP_SECONDS
        while self._walk_at <= local_seconds() < until:
            try:
                await self._walk_on(connection)
            except BaseException:
                self._begin_again()  # the others do not wait for one that fails
                raise
            if self._jobs_cursor is None and self._ledger_cursor is None and self._leases_cursor is None:
                self._begin_again()
                self._walk_at = local_seconds() + self._rest_seconds
        if local_seconds() >= self._rarely_at:
            self._rarely_at = local_seconds() + RARELY_SECONDS
            async with self._limit():
                await pruning.prune_processes(connection, self._database)
            async with self._limit():
                failures = await pruning.prune_orphaned_failures(connection, self._database, cursor=self._failures_cursor)
            self._failures_cursor = failures.next_cursor or pruning.FROM_THE_START

    async def _walk_on(self, connection: Connection) -> None:
        """One statement of each walk that is not over."""
        if self._jobs_cursor is not None:
            async with self._limit():
                jobs = await pruning.prune_jobs(
                    connection,
                    self._database,
                    cursor=self._jobs_cursor,
                    retention_seconds=self._retention_seconds,
                    dead_retention_seconds=self._dead_retention_seconds,
                )
            self._jobs_cursor = jobs.next_cursor
        if self._ledger_cursor is not None:
            async with self._limit():
                ledger = await pruning.prune_ledger(
                    connection,
                    self._database,
                    cursor=self._ledger_cursor,
                    ledger_retention_seconds=self._ledger_retention_seconds,
                )
            self._ledger_cursor = ledger.next_cursor
        if self._leases_cursor is not None:
            async with self._limit():
                ended = await pruning.prune_leases(
                    connection, self._database, cursor=self._leases_cursor, retention_seconds=self._retention_seconds
                )
            self._leases_cursor = ended.next_cursor

    def _begin_again(self) -> None:
        """Send each walk that is over to its start."""
        self._jobs_cursor = self._jobs_cursor or pruning.FROM_THE_START
        self._ledger_cursor = self._ledger_cursor or pruning.FROM_THE_START
        self._leases_cursor = self._leases_cursor or pruning.FROM_THE_START

    def _limit(self) -> asyncio.Timeout:
        return asyncio.timeout(self._statement_seconds)
