"""The watch: from the rights thread it sees whether the loop of the handlers turns and claims go on, and tells who asks.

It logs a blocked loop with the stack of what blocks it, leaves the heartbeat that `worker health` reads, and feeds systemd's
watchdog: as long as renewals are tried, and either claims go on or the loop is blocked by a handler within its time-out. A database
that is away stops neither: a restart would not bring it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from worker import events, logs
from worker.clock import local_seconds
from worker.health import HealthFile, Heartbeat, process_started

if TYPE_CHECKING:
    from worker.claimer import Claimer
    from worker.keeper import Keeper
    from worker.pool import Pool

BEAT_SECONDS = 1.0
SLEPT_SECONDS = 0.5
"""So much more on the clock that goes on while the host sleeps than on the other is a sleep."""
LOOP_BLOCKED_SECONDS = 1.0
_STACK_FRAMES = 20


@contextlib.asynccontextmanager
async def seen_alive(health_file: HealthFile | None, *, process_id: str, version: str) -> AsyncIterator[None]:
    """Leave heartbeats during the block, in which a process waits for its database, or for what its handlers need: it is alive, and
    a restart would bring neither nearer."""
    if health_file is None:
        yield
        return
    beating = asyncio.create_task(_beat_unready(health_file, process_id=process_id, version=version), name="beat unready")
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.wait({beating})


async def _beat_unready(health_file: HealthFile, *, process_id: str, version: str) -> None:
    pid_started = process_started(os.getpid()) or ""
    while True:
        health_file.write_soon(
            Heartbeat(
                id=process_id,
                pid=os.getpid(),
                pid_started=pid_started,
                version=version,
                written_at_seconds=local_seconds(),
                beat_seconds=BEAT_SECONDS,
                loop_lag_seconds=0.0,
                loop_allowed=False,
                claim_age_seconds=0.0,
                claim_allowed_seconds=0.0,
                database_up=False,
                stopping=False,
            )
        )
        await asyncio.sleep(BEAT_SECONDS)


class Watch:
    """Runs in the rights thread's loop; made in the loop that it watches."""

    def __init__(
        self,
        *,
        process_id: str,
        version: str,
        pool: Pool,
        claimer: Claimer,
        keeper: Keeper,
        claim_allowed_seconds: float,
        health_file: HealthFile | None,
        beat: Callable[[], None],
        alive: Callable[[], None],
        stopping: Callable[[], bool],
    ) -> None:
        self._process_id = process_id
        self._version = version
        self._pool = pool
        self._claimer = claimer
        self._keeper = keeper
        self._claim_allowed_seconds = claim_allowed_seconds
        self._health_file = health_file
        self._beat = beat
        self._alive = alive
        self._stopping = stopping
        self._work_loop = asyncio.get_running_loop()
        self._work_thread = threading.get_ident()
        self._pid_started = process_started(os.getpid()) or ""
        self._asked_at: float | None = None
        self._reported = False
        self.lag_seconds = 0.0

    async def run(self) -> None:
        """Watch until cancelled."""
        self._look()  # whoever asks for our health need not wait for the first beat
        while True:
            self._ask()
            ahead = self._ahead()
            await asyncio.sleep(BEAT_SECONDS)
            if self._ahead() - ahead > SLEPT_SECONDS:
                self._call(self._pool.look_at_leases)
            self._look()
            self._beat()

    def _ahead(self) -> float:
        """How far the clock of leases is ahead of the clock of timers: it grows while the host sleeps."""
        return local_seconds() - asyncio.get_running_loop().time()

    def _call(self, function: Callable[[], object]) -> bool:
        """Call it in the watched loop, soon; False if that has ended, and this thread will."""
        try:
            self._work_loop.call_soon_threadsafe(function)
        except RuntimeError:
            return False
        return True

    def _ask(self) -> None:
        if self._asked_at is None:
            self._asked_at = local_seconds()
            if not self._call(self._answer):
                self._asked_at = None

    def _answer(self) -> None:
        self._asked_at = None

    def _look(self) -> None:
        now = local_seconds()
        asked_at = self._asked_at
        self.lag_seconds = 0.0 if asked_at is None else now - asked_at
        if self.lag_seconds < LOOP_BLOCKED_SECONDS * 0.9:
            self._reported = False
        elif not self._reported:
            self._reported = True
            self._report()
        loop_allowed = self.lag_seconds > 0 and self._within_time_out(now)
        claim_age = now - self._claimer.passed_at
        if self._health_file is not None:
            self._health_file.write_soon(
                Heartbeat(
                    id=self._process_id,
                    pid=os.getpid(),
                    pid_started=self._pid_started,
                    version=self._version,
                    written_at_seconds=now,
                    beat_seconds=BEAT_SECONDS,
                    loop_lag_seconds=self.lag_seconds,
                    loop_allowed=loop_allowed,
                    claim_age_seconds=claim_age,
                    claim_allowed_seconds=self._claim_allowed_seconds,
                    database_up=self._keeper.database_up,
                    stopping=self._stopping(),
                )
            )
        claims_go_on = claim_age < self._claim_allowed_seconds or not self._keeper.database_up
        if loop_allowed or self._stopping() or (claims_go_on and self.lag_seconds < self._claim_allowed_seconds):
            self._alive()

    def _within_time_out(self, now: float) -> bool:
        """Whether a handler that may be what blocks the loop is still within its time-out."""
        return any(attempt.held.renew_until is not None and now < attempt.held.renew_until for attempt in self._pool.running())

    def _report(self) -> None:
        frame = sys._current_frames().get(self._work_thread)
        stack = "" if frame is None else "".join(traceback.format_stack(frame, limit=_STACK_FRAMES))
        blocking = asyncio.current_task(self._work_loop)
        running = self._pool.running()
        guilty = [attempt for attempt in running if blocking is not None and attempt.runs_in(blocking)]
        kinds = sorted({attempt.held.job.kind for attempt in guilty or running})
        logs.emit(
            events.LOOP_BLOCKED,
            blocked_seconds=round(self.lag_seconds, 3),
            kind=", ".join(kinds),
            stack=stack,
        )
