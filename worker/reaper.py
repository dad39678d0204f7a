"""The reaper: outside the slots, it takes jobs from workers that let their lease expire, and removes what is past its retention.

Every process runs one; rows are locked with SKIP LOCKED, so they share the work. It remembers up to where leases had expired at its
last pass and starts there: what is before it has been reaped, and its dead index entries need not be walked again. What was locked
in passing is found by a pass from the start, every 5 s.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from worker import events, logs
from worker.clock import local_seconds
from worker.patience import Patience
from worker.retention import Retention
from worker.store import reaping
from worker.store.connection import DATABASE_ERRORS, read_moments_as_microseconds

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database, Lane

ROLE = "reaper"
REAP_SETTINGS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_hashjoin": "off"}
FROM_THE_START_EVERY_SECONDS = 5.0
AFTER_OUTAGE_SECONDS = 3.0
_LOOK_AGAIN_SECONDS = 0.1
_BATCHES_A_PASS = 20


class Reaper:
    """Runs in the loop of the handlers, on a connection of its own."""

    def __init__(
        self,
        database: Database,
        lane: Lane,
        *,
        reap_seconds: float,
        statement_seconds: float,
        retention: Retention,
        unwritten: Callable[[], int],
        on_ready: Callable[[], None],
    ) -> None:
        self._database = database
        self._lane = lane
        self._reap_seconds = reap_seconds
        self._statement_seconds = statement_seconds
        self._retention = retention
        self._unwritten = unwritten
        self._on_ready = on_ready
        self._patience = Patience(events.REAPER_FAILED, longest_seconds=max(reap_seconds, 5.0))
        self._connection: Connection | None = None
        self._horizon = reaping.FROM_THE_START
        self._full_at = 0.0
        self._rare_at = 0.0

    async def run(self) -> None:
        """Reap until cancelled. Waits out an absent database."""
        while True:
            try:
                is_done = await self._pass()
            except DATABASE_ERRORS as error:
                self._lane.drop()
                self._horizon = reaping.FROM_THE_START
                await asyncio.sleep(self._patience.delay_seconds(error))
                await self._let_finished_work_in()
                continue
            self._patience.reset()
            if is_done:
                await asyncio.sleep(self._reap_seconds * random.uniform(0.8, 1.0))

    async def _let_finished_work_in(self) -> None:
        """After an outage our own finished jobs may have expired leases: they are to be written before they are reaped."""
        for _ in range(int(AFTER_OUTAGE_SECONDS / _LOOK_AGAIN_SECONDS)):
            if self._unwritten() == 0:
                return
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    async def _pass(self) -> bool:
        """Reap, and once in a while look after the rest; False if leases may be left that have expired."""
        connection = await self._lane.get()
        if connection is not self._connection:
            async with asyncio.timeout(self._statement_seconds):
                await read_moments_as_microseconds(connection)
            self._connection = connection
        now = local_seconds()
        if now >= self._full_at:
            self._horizon = reaping.FROM_THE_START
            self._full_at = now + FROM_THE_START_EVERY_SECONDS
        is_done = False
        for _ in range(_BATCHES_A_PASS):
            async with asyncio.timeout(self._statement_seconds):
                reaped = await reaping.reap(connection, self._database, horizon=self._horizon)
            if reaped:
                self._horizon = reaped[-1].lease_until
                self._tell(reaped)
            if is_done := len(reaped) < reaping.REAP_BATCH:
                break
        if now >= self._rare_at:
            self._rare_at = now + max(self._reap_seconds, 1.0) * 3
            await self._rarely(connection)
        return is_done

    async def _rarely(self, connection: Connection) -> None:
        async with asyncio.timeout(self._statement_seconds):
            buried = await reaping.bury(connection, self._database)
        for job in buried:
            logs.emit(
                events.JOB_DEAD,
                job_id=job.id,
                kind=job.kind,
                queue=job.queue,
                attempt=job.attempt,
                fence=job.fence,
                error="attempts used up",
            )
        await self._retention.step(connection)

    def _tell(self, reaped: list[reaping.Reaped]) -> None:
        for job in reaped:
            fields = {
                "job_id": job.id,
                "kind": job.kind,
                "queue": job.queue,
                "attempt": job.attempt,
                "fence": job.fence,
            }
            logs.emit(
                events.LEASE_EXPIRED,
                **fields,
                state=job.state,
                outcome="crashed" if job.crashed else "lease_lost",
                lost_worker=job.lost_worker,
            )
            if job.state == "dead":
                what = "worker lost" if job.crashed else "lease lost"
                logs.emit(events.JOB_DEAD, **fields, error=f"{what}: {job.lost_worker}")
        if any(job.state == "ready" for job in reaped):
            self._on_ready()
