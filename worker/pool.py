"""The pool: N worker tasks, each of which takes a claimed job, runs the attempt, and hands the outcome over.

A slot is free again when its handler has really ended; the lease is kept until the outcome is written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from worker import events, logs
from worker.attempt import Attempt
from worker.clock import local_seconds
from worker.domain import UNKNOWN_KIND_DELAY_SECONDS, Abandoned, Outcome, Released
from worker.holding import Held, Phase
from worker.job import Job, Surroundings

if TYPE_CHECKING:
    from worker.claimer import Claimer
    from worker.committer import Committer
    from worker.handlers import Handlers, Lifespan

_FAILURE_HOOK_SECONDS = 10.0
_FAILURE_HOOKS_AT_ONCE = 100


class Pool:
    """Runs in the loop of the handlers."""

    def __init__(
        self,
        *,
        workers: int,
        handlers: Handlers,
        resources: Mapping[Lifespan, object],
        surroundings: Surroundings,
        committer: Committer,
        job_timeout_seconds: float,
        deaf_seconds: float,
    ) -> None:
        self.workers = workers
        self._handlers = handlers
        self._resources = resources
        self._surroundings = surroundings
        self._committer = committer
        self._job_timeout_seconds = job_timeout_seconds
        self._deaf_seconds = deaf_seconds
        self._executor = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="handler")
        self._inbox: deque[Held] = deque()
        self._inbox_bytes = 0
        self._sleepers: deque[asyncio.Future[None]] = deque()
        self._running: dict[tuple[int, int], Attempt] = {}
        self._busy = 0
        self._finished = 0
        self._busy_seconds = 0.0
        self._started_sum = 0.0
        """Of the moments at which the running attempts began."""
        self._suspects = 0
        self._stopping = False
        self._hooks: set[asyncio.Task[None]] = set()
        self._unknown: dict[str, int] = {}
        self.claimer: Claimer | None = None

    # --- what the claimer asks

    def free(self) -> int:
        return self.workers - self._busy

    def waiting(self) -> int:
        return len(self._inbox)

    def waiting_bytes(self) -> int:
        return self._inbox_bytes

    def finished(self) -> tuple[int, float]:
        running_seconds = self._busy * local_seconds() - self._started_sum
        return self._finished, self._busy_seconds + running_seconds

    def is_full(self) -> bool:
        return self._committer.is_full

    def give_back(self, jobs: int) -> None:
        """Release the last so many of the waiting jobs, unstarted."""
        for _ in range(min(jobs, len(self._inbox))):
            held = self._inbox.pop()
            self._inbox_bytes -= len(held.job.payload)
            self._forget_suspect(held)
            self._hand_over(held, Released(reason="not_started"))

    def suspect_runs(self) -> bool:
        return self._suspects > 0

    def busy(self) -> int:
        return self._busy

    def running(self) -> list[Attempt]:
        """The attempts whose handler has not ended."""
        return list(self._running.values())

    def put(self, jobs: list[Held]) -> None:
        """Jobs to run, in this order. After `stop_starting` they are given back."""
        for held in jobs:
            job = held.job
            logs.emit(
                events.JOB_CLAIMED,
                **job.log_fields(),
            )
            if job.crashes > 0:
                self._suspects += 1
            self._inbox_bytes += len(job.payload)
        self._inbox.extend(jobs)
        if self._stopping:
            self._return_inbox()
            return
        for _ in range(min(len(jobs), len(self._sleepers))):
            self._wake_one()

    # --- the worker tasks

    async def work(self) -> None:
        """One worker task: ends when starting has stopped."""
        while (held := await self._next()) is not None:
            self._busy += 1
            started_at = local_seconds()
            self._started_sum += started_at
            try:
                await self._attempt(held)
            finally:
                self._busy -= 1
                self._finished += 1
                self._busy_seconds += local_seconds() - started_at
                self._started_sum -= started_at
                self._forget_suspect(held)
            await self._committer.room()

    async def _next(self) -> Held | None:
        while not self._inbox:
            if self._stopping:
                return None
            self._ask_for_more()
            sleeper = asyncio.get_running_loop().create_future()
            self._sleepers.append(sleeper)
            try:
                await sleeper
            finally:
                if not sleeper.done():
                    self._sleepers.remove(sleeper)
        held = self._inbox.popleft()
        self._inbox_bytes -= len(held.job.payload)
        claimer = self.claimer
        if claimer is not None and len(self._inbox) <= claimer.low_water:
            claimer.wake()
        return held

    def _ask_for_more(self) -> None:
        if self.claimer is not None:
            self.claimer.wake()

    def _wake_one(self) -> None:
        while self._sleepers:
            sleeper = self._sleepers.popleft()
            if not sleeper.done():
                sleeper.set_result(None)
                return

    async def _attempt(self, held: Held) -> None:
        job = held.job
        if held.lost is not None:
            self._hand_over(held, Abandoned(reason=held.lost))
            return
        kind = self._handlers.kinds.get(job.kind)
        if kind is None:
            self._note_unknown(held)
            self._hand_over(held, Released(reason="unknown_kind", delay_seconds=UNKNOWN_KIND_DELAY_SECONDS))
            return
        lifespan = self._handlers.lifespans.get(job.kind)
        attempt = Attempt(
            held,
            kind,
            surroundings=self._surroundings,
            resources=None if lifespan is None else self._resources[lifespan],
            timeout_seconds=kind.timeout_seconds or self._job_timeout_seconds,
            deaf_seconds=self._deaf_seconds,
            executor=self._executor,
        )
        key = job[:2]
        self._running[key] = attempt
        try:
            self._hand_over(held, await attempt.outcome())
            if not attempt.is_over:
                await attempt.ended()
        finally:
            del self._running[key]

    def _hand_over(self, held: Held, outcome: Outcome) -> None:
        held.phase = Phase.FINISHED
        self._committer.hand_over(held, outcome)

    def _forget_suspect(self, held: Held) -> None:
        if held.job.crashes > 0:
            self._suspects -= 1
            if self.claimer is not None:
                self.claimer.suspect_ended()

    def _note_unknown(self, held: Held) -> None:
        """One line a kind, and then one for each power of two, however many jobs of it there are."""
        if len(self._unknown) >= 1_000:
            self._unknown.clear()
        count = self._unknown[held.job.kind] = self._unknown.get(held.job.kind, 0) + 1
        if count & (count - 1) == 0:
            logs.emit(events.UNKNOWN_KIND, kind=held.job.kind, queue=held.job.queue, jobs=count)

    # --- failure hooks

    def failed(self, job: Job[object], error: BaseException, will_retry: bool) -> None:
        """Called in this loop after a failure has been written: run the hooks, under a time limit, a bounded number at once."""
        if len(self._hooks) >= _FAILURE_HOOKS_AT_ONCE:
            logs.emit(
                events.INTERNAL_ERROR,
                where="on_failure",
                error="too many hooks run already; this one is left out",
            )
            return
        task = asyncio.get_running_loop().create_task(self._run_hooks(job, error, will_retry), name="on_failure")
        self._hooks.add(task)
        task.add_done_callback(self._hooks.discard)

    async def _run_hooks(self, job: Job[object], error: BaseException, will_retry: bool) -> None:
        for hook in self._handlers.failure_hooks:
            try:
                async with asyncio.timeout(_FAILURE_HOOK_SECONDS):
                    await hook(job, error, will_retry)
            except BaseException as trouble:  # SystemExit as well would end more than the hook
                task = asyncio.current_task()
                if isinstance(trouble, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                logs.emit(events.INTERNAL_ERROR, where="on_failure", exception=trouble)

    def look_at_leases(self) -> None:
        """The host has slept: stop whatever is no longer within its trust or its time."""
        for attempt in self.running():
            attempt.look_again()

    # --- the end

    def stop_starting(self) -> None:
        """Start nothing more: give back what waits, and let the worker tasks end with their attempts."""
        self._stopping = True
        self._return_inbox()
        while self._sleepers:
            self._wake_one()

    def _return_inbox(self) -> None:
        while self._inbox:
            held = self._inbox.popleft()
            self._forget_suspect(held)
            self._hand_over(held, Released(reason="not_started") if held.lost is None else Abandoned(reason=held.lost))
        self._inbox_bytes = 0

    def cancel_running(self) -> None:
        """The grace is over: tell every handler to stop."""
        for attempt in self.running():
            attempt.stop("shutdown")

    async def hooks_ended(self) -> None:
        """Wait for failure hooks under way; they are time-limited."""
        if self._hooks:
            await asyncio.wait(self._hooks)

    def close(self) -> None:
        """No attempt is left, or the process ends regardless. Does not wait for threads."""
        for task in self._hooks:
            task.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)
