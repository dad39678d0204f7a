"""The pool: N slots, each of which takes a claimed job, runs the attempt as a task, and hands the outcome over.

A slot is free again when its handler has really ended; the lease is kept until the outcome is written.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING

from worker import events, logs
from worker.attempt import Attempt
from worker.cancellation import is_cancelled
from worker.clock import local_seconds
from worker.domain import UNKNOWN_KIND_DELAY_SECONDS, Abandoned, Outcome, Released
from worker.holding import Held, Phase
from worker.job import Job, Surroundings

if TYPE_CHECKING:
    from worker.claimer import Claimer
    from worker.committer import Committer
    from worker.handlers import Handlers, Lifespan

YOUNG_SECONDS = 0.01
"""A running attempt has a timer for its time-out and its lease from this age on."""
_FAILURE_HOOK_SECONDS = 10.0
_FAILURE_HOOKS_AT_ONCE = 100


class Pool:
    """Runs in the loop of the handlers. Each of its slots runs one attempt at a time, in a task of the attempt's own."""

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
        on_bug: Callable[[Exception], None],
    ) -> None:
        self.workers = workers
        self.surroundings = surroundings
        self.deaf_seconds = deaf_seconds
        self.executor: Executor = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="handler")
        self.loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        """What every attempt begins with: an attempt that starts the next one must not hand it its own."""
        self._handlers = handlers
        self._resources = resources
        self._committer = committer
        self._job_timeout_seconds = job_timeout_seconds
        self._on_bug = on_bug
        self._inbox: deque[Held] = deque()
        self._inbox_bytes = 0
        self._running: dict[tuple[int, int], Attempt] = {}
        self._young: list[Attempt] = []
        """Started lately, and without a timer yet: most have ended by the time it would be set."""
        self._young_timer: asyncio.TimerHandle | None = None
        self._finished = 0
        self._busy_seconds = 0.0
        self._started_sum = 0.0
        """Of the moments at which the running attempts began."""
        self._suspects = 0
        self._stopping = False
        self._emptied = asyncio.Event()
        self._hooks: set[asyncio.Task[None]] = set()
        self._unknown: dict[str, int] = {}
        self.claimer: Claimer | None = None

    # --- what the claimer asks

    def free(self) -> int:
        return self.workers - len(self._running)

    def waiting(self) -> int:
        return len(self._inbox)

    def waiting_bytes(self) -> int:
        return self._inbox_bytes

    def finished(self) -> tuple[int, float]:
        running_seconds = len(self._running) * local_seconds() - self._started_sum
        return self._finished, self._busy_seconds + running_seconds

    def is_full(self) -> bool:
        return self._committer.is_full

    def give_back(self, jobs: int) -> None:
        """Release the last so many of the waiting jobs, unstarted."""
        for _ in range(min(jobs, len(self._inbox))):
            held = self._inbox.pop()
            self._inbox_bytes -= len(held.job.payload)
            self._hand_over(held, Released(reason="not_started"))

    def suspect_runs(self) -> bool:
        return self._suspects > 0

    def busy(self) -> int:
        return len(self._running)

    def running(self) -> list[Attempt]:
        """The attempts whose handler has not ended."""
        return list(self._running.values())

    def put(self, jobs: list[Held]) -> None:
        """Jobs to run, in this order. After `stop_starting` they are given back."""
        tells = logs.is_on(events.JOB_CLAIMED)
        for held in jobs:
            job = held.job
            if tells:
                logs.emit(events.JOB_CLAIMED, **job.log_fields())
            self._inbox_bytes += len(job.payload)
        self._inbox.extend(jobs)
        if self._stopping:
            self._return_inbox()
        else:
            self.fill()

    # --- the slots

    def fill(self) -> None:
        """Start waiting jobs in free slots; ask for more while there is room for them."""
        try:
            while len(self._running) < self.workers and not self._stopping:
                if self._committer.makes_wait():
                    return  # it calls this again when there is room
                if not self._inbox:
                    break
                held = self._inbox.popleft()
                self._inbox_bytes -= len(held.job.payload)
                self._start(held)
        except Exception as error:
            self._on_bug(error)
        claimer = self.claimer
        if claimer is not None and len(self._inbox) <= claimer.low_water and not self._stopping:
            claimer.wake()

    def _start(self, held: Held) -> None:
        job = held.job
        kind = self._handlers.kinds.get(job.kind)
        if held.lost is not None:
            self._hand_over(held, Abandoned(reason=held.lost))
        elif kind is None:
            self._note_unknown(held)
            self._hand_over(held, Released(reason="unknown_kind", delay_seconds=UNKNOWN_KIND_DELAY_SECONDS))
        else:
            lifespan = self._handlers.lifespans.get(job.kind)
            resources = None if lifespan is None else self._resources[lifespan]
            held.started_at = now = local_seconds()
            self._started_sum += now
            attempt = Attempt(self, held, kind, resources, kind.timeout_seconds or self._job_timeout_seconds)
            self._running[job[:2]] = attempt
            self._suspects += job.crashes > 0
            # Not by the loop's factory, which is the application's: an eager one would run the handler in here.
            attempt.task = asyncio.Task(attempt.run(), loop=self.loop, context=self._context.copy())
            self._young.append(attempt)
            if self._young_timer is None:
                self._young_timer = self.loop.call_later(YOUNG_SECONDS, self._watch_the_young)

    def _watch_the_young(self) -> None:
        young, self._young = self._young, []
        self._young_timer = None
        for attempt in young:
            attempt.watch()

    def decided(self, attempt: Attempt, outcome: Outcome) -> None:
        """What an attempt came to; its handler may not have ended."""
        attempt.held.phase = Phase.FINISHED
        self._committer.hand_over(attempt.held, outcome, attempt.job)

    def ended(self, attempt: Attempt, error: Exception | None) -> None:
        """A handler has really ended: its slot is free. `error`: a bug of ours, which stops the process in order."""
        held = attempt.held
        del self._running[held.job[:2]]
        self._finished += 1
        self._busy_seconds += local_seconds() - held.started_at
        self._started_sum -= held.started_at
        if held.job.crashes > 0:
            self._suspects -= 1
            if self.claimer is not None:
                self.claimer.suspect_ended()
        if error is not None:
            self._on_bug(error)
        if self._stopping:
            if not self._running:
                self._emptied.set()
        else:
            self.fill()

    def _hand_over(self, held: Held, outcome: Outcome) -> None:
        held.phase = Phase.FINISHED
        self._committer.hand_over(held, outcome)

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
                if isinstance(trouble, asyncio.CancelledError) and is_cancelled():
                    raise
                logs.emit(events.INTERNAL_ERROR, where="on_failure", exception=trouble)

    def look_at_leases(self) -> None:
        """The host has slept: stop whatever is no longer within its trust or its time."""
        for attempt in self.running():
            attempt.look_again()

    # --- the end

    def stop_starting(self) -> None:
        """Start nothing more: give back what waits, and let the slots run empty."""
        self._stopping = True
        self._return_inbox()
        if not self._running:
            self._emptied.set()

    async def emptied(self) -> None:
        """Wait, after `stop_starting`, until every handler has really ended."""
        await self._emptied.wait()

    def _return_inbox(self) -> None:
        while self._inbox:
            held = self._inbox.popleft()
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
        if self._young_timer is not None:
            self._young_timer.cancel()
        for task in self._hooks:
            task.cancel()
        self.executor.shutdown(wait=False, cancel_futures=True)
