"""Attempt: one handler, run under its lease, brought to an outcome.

The handler runs in a task of its own. It is told to stop (cancelled, with `job.cancel_reason` set) when the keeper says that the
lease is gone, when the lease is no longer trusted, at its time-out, or at the end of a shutdown's grace. What cannot be stopped
(a thread, a handler deaf to cancellation) gets its outcome decided without it, keeps its slot until it really ends, and can
write nothing meanwhile: the fence sees to that.
"""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Protocol

from worker import events, logs
from worker.clock import local_seconds
from worker.domain import (
    Abandoned,
    AlreadyApplied,
    CancelReason,
    Committed,
    Outcome,
    Released,
    Snoozed,
    Succeeded,
    failure,
)
from worker.domain_json import encode_json
from worker.errors import Discard, EffectAlreadyApplied, Retry, Snooze
from worker.handlers import Kind
from worker.holding import Held, Phase
from worker.job import Job

if TYPE_CHECKING:
    from worker.job import Surroundings

_LOST: frozenset[CancelReason | None] = frozenset({"lease_lost", "lease_untrusted", "cancelled"})
_EARLY_SECONDS = 0.001  # timers may fire this much before their time
_SOON_SECONDS = 0.05
_LOOK_AGAIN_SECONDS = 1.0


class Host(Protocol):
    """What an attempt needs of the pool that runs it."""

    surroundings: Surroundings
    loop: asyncio.AbstractEventLoop
    executor: Executor
    deaf_seconds: float
    """How long a handler that was told to stop may take before its outcome is decided without it."""

    def decided(self, attempt: Attempt, outcome: Outcome) -> None:
        """What an attempt came to; its handler may not have ended."""

    def ended(self, attempt: Attempt, error: Exception | None) -> None:
        """A handler has really ended: its slot is free. `error`: a bug of ours."""


class Attempt:
    """One run of a handler: `run` is its task. The pool hears of its outcome (`decided`) and of its real end (`ended`)."""

    __slots__ = (
        "_deadline",
        "_is_decided",
        "_kind",
        "_pool",
        "_resources",
        "_timeout_seconds",
        "_timer",
        "held",
        "job",
        "reason",
        "task",
    )

    def __init__(self, pool: Host, held: Held, kind: Kind[object], resources: object, timeout_seconds: float) -> None:
        self.held = held
        self.job: Job[object] | None = None
        """What the handler sees, from the moment it is made."""
        self.reason: CancelReason | None = None
        self.task: asyncio.Task[None] | None = None
        self._pool = pool
        self._kind = kind
        self._resources = resources
        self._timeout_seconds = timeout_seconds
        self._deadline = held.started_at + timeout_seconds
        self._is_decided = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        """True once the handler has really ended."""
        return self.task is None or self.task.done()

    # --- the handler's task

    async def run(self) -> None:
        """Run the handler and decide what the attempt came to, unless it has been decided without it by then."""
        bug: Exception | None = None
        try:
            if not self._is_decided:  # told to stop before this task's first step
                self._decide(await self._outcome())
        except Exception as error:
            bug = error
        finally:
            self._pool.ended(self, bug)

    async def _outcome(self) -> Outcome:
        held, kind = self.held, self._kind
        if (refused := self._refused()) is not None:
            return refused
        surroundings = self._pool.surroundings
        now = local_seconds()
        # Before the payload is read: `on_failure` is told of an unreadable one as well.
        job: Job[object] = Job(held, self._resources, surroundings, self._deadline, in_thread=not kind.is_async)
        self.job = job
        try:
            job.payload = kind.read(held.job.payload)
        except BaseException as error:  # a validator is the user's code as well
            return self._raised(job, error)
        held.renew_until = self._deadline
        held.on_lost = self._lost_elsewhere
        if held.lost is not None:  # just before there was somebody to tell
            return Abandoned(reason=held.lost)
        held.phase = Phase.RUNNING
        if min(held.trusted_until, self._deadline) - now < _SOON_SECONDS:
            self.watch()  # the pool does it for the others, a little later
        try:
            if kind.is_async:
                value = await kind.function(job)  # type: ignore[misc]  # is_async says that it is awaitable
            else:
                context = contextvars.copy_context()
                executor = self._pool.executor
                refused, value, raised = await self._pool.loop.run_in_executor(executor, context.run, self._in_thread, job)
                if refused is not None:
                    return refused
                if raised is not None:
                    return self._raised(job, raised)
            return self._returned(job, value)
        except BaseException as error:
            # The edge of the user's code. A cancellation ends here because this task is the attempt, and whoever cancels it
            # (only this class does) wants an outcome; SystemExit and KeyboardInterrupt are that job's failure.
            return self._raised(job, error)

    def _refused(self) -> Abandoned | Released | None:
        """Why this handler must not start now, if so."""
        if self.held.lost is not None:
            return Abandoned(reason=self.held.lost)
        if not self._pool.surroundings.may_start():
            return Released(reason="not_started")
        if local_seconds() >= self.held.trusted_until:
            return Abandoned(reason="lease_untrusted")
        return None

    def _in_thread(self, job: Job[object]) -> tuple[Abandoned | Released | None, object, BaseException | None]:
        """Call a plain `def` handler, unless that must not be any more: a thread may have taken a while to get going. Its exception
        comes back as a value: a future cannot carry every one (StopIteration)."""
        if (refused := self._refused()) is not None:
            return refused, None, None
        try:
            return None, self._kind.function(job), None
        except BaseException as error:
            return None, None, error

    def _returned(self, job: Job[object], value: object) -> Outcome:
        if job._committed:
            return Committed()
        if self.reason in _LOST:
            return Abandoned(reason=self.reason)  # type: ignore[arg-type]
        if self.reason == "timeout":
            return self._timed_out()
        if job._transaction_error is not None:
            return self._raised(job, job._transaction_error)  # caught outside of the block: what was to be written is gone
        try:
            result = None if value is None else encode_json(value, "result")
        except (TypeError, ValueError) as error:
            return failure(error)
        job._has_returned = True
        return Succeeded(result, tuple(job._effects) if job._effects else ())

    def _raised(self, job: Job[object], error: BaseException) -> Outcome:
        if job._committed:
            if not isinstance(error, asyncio.CancelledError) or self.reason is None:
                fields = self.held.job.log_fields()
                logs.emit(events.HANDLER_FAILED_AFTER_COMMIT, **fields, duration_ms=self.held.duration_ms, exception=error)
            return Committed()
        lost = self.held.lost or self.reason
        if lost in _LOST:
            return Abandoned(reason=lost)  # type: ignore[arg-type]
        match error:
            case _ if self.reason == "timeout":
                return self._timed_out(error)
            case Snooze() if _is_delay(error.seconds):
                return Snoozed(seconds=float(error.seconds))
            case Retry() if _is_delay(error.after_seconds):
                return failure(error, after_seconds=float(error.after_seconds))
            case Discard():
                return failure(error, final=True)
            case EffectAlreadyApplied() if job._transaction_used:
                return AlreadyApplied()
            case _ if self.reason == "shutdown":
                return Released(reason="shutdown")
        return failure(error)

    def _timed_out(self, error: BaseException | None = None) -> Outcome:
        late = TimeoutError(f"not done after {self._timeout_seconds:g} s")
        if error is not None and not isinstance(error, asyncio.CancelledError):
            late.__cause__ = error
        return failure(late, outcome="timeout")

    def _decide(self, outcome: Outcome) -> None:
        if self._is_decided:
            return
        self._is_decided = True
        self.held.on_lost = None
        if self._timer is not None:
            self._timer.cancel()
        self._pool.decided(self, outcome)

    # --- being told to stop

    def stop(self, reason: CancelReason) -> None:
        """Tell the handler to stop. The first reason stays, except that a lost lease overrules a shutdown."""
        if self._is_decided or self.task is None:
            return
        if self.reason is None or (self.reason == "shutdown" and reason in _LOST):
            self.reason = reason
            if self.job is not None:
                self.job.cancel_reason = reason
        if self.held.phase is Phase.WAITING:  # a task that is cancelled before its first step never takes it
            # Not its fault either if its time has passed meanwhile: another handler has blocked the loop.
            self._decide(Abandoned(reason=reason) if reason in _LOST else Released(reason="not_started"))
        elif self._kind.is_async:
            self.task.cancel(reason)
            if reason == "timeout":
                self._give_up_in(self._pool.deaf_seconds)
            elif reason in _LOST:
                self._give_up(reason)
        else:
            self._give_up()

    def _give_up(self, reason: CancelReason | None = None) -> None:
        """Decide without the handler, which has not ended: it can write nothing any more."""
        assert self.job is not None
        reason = reason or self.held.lost or self.reason
        if self._is_decided or self.job._committed or not (reason == "timeout" or reason in _LOST):
            return
        if self.held.phase is Phase.OWN_TRANSACTION:
            self._give_up_in(_LOOK_AGAIN_SECONDS)  # its COMMIT decides, unless the server ends its session
        elif reason == "timeout":
            self._decide(self._timed_out())
        else:
            self._decide(Abandoned(reason=reason))  # type: ignore[arg-type]

    def _give_up_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._pool.loop.call_later(seconds, self._give_up)

    def _lost_elsewhere(self, reason: CancelReason) -> None:
        """Called by the keeper's thread."""
        try:
            self._pool.loop.call_soon_threadsafe(self.stop, reason)
        except RuntimeError:
            pass  # the loop has ended, and the handler with it

    def is_behind(self, blocking: asyncio.Task[object]) -> bool:
        """Whether this handler cannot go on while `blocking`, which is not its own, blocks the loop. From any thread."""
        return self._kind.is_async and self.held.phase is Phase.RUNNING and self.task is not blocking and not self._is_decided

    def runs_in(self, task: asyncio.Task[object]) -> bool:
        return self.task is task

    def look_again(self) -> None:
        """The host has slept: timers did not count that time, the trust in a lease does."""
        if self.reason in (None, "shutdown"):  # else it has been told already, and the timer is not this one
            if self._timer is not None:
                self._timer.cancel()
            self.watch()

    def watch(self) -> None:
        """Stop the handler at its time-out, or when the lease is no longer trusted; look again if the trust has moved on."""
        if self._is_decided:
            return
        if self.held.phase is Phase.WAITING and self.is_over:  # cancelled by somebody else before its first step
            self._decide(Released(reason="not_started"))
            self._pool.ended(self, None)
            return
        now = local_seconds() + _EARLY_SECONDS
        if now >= self._deadline:
            self.stop("timeout")
            return
        until = self._deadline
        if self.job is None or not self.job._committed:  # complete: there is nothing left to lose
            if now >= self.held.safe_until:
                self.stop("lease_untrusted")
                return
            until = min(until, self.held.safe_until)
        if self.held.phase is Phase.OWN_TRANSACTION:
            until = min(until, now + _LOOK_AGAIN_SECONDS)  # the trust alone counts again if that transaction rolls back
        self._timer = self._pool.loop.call_later(until - now + _EARLY_SECONDS, self.watch)


def _is_delay(seconds: object) -> bool:
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds <= 30 * 86_400
