"""Job: what a handler sees of the attempt it makes, and what it may do."""

from __future__ import annotations

import copy
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Generic, TypeVar

from worker import logs, owntransaction
from worker.clock import local_seconds
from worker.domain import CancelReason, CodePlace, Effect
from worker.domain_json import encode_json
from worker.effect_sql import must_be_alone
from worker.errors import LeaseLost
from worker.handlers import Kind
from worker.holding import Held, Phase
from worker.new_job import DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE, new_job
from worker.store.following import follow_up

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database, Pool

P = TypeVar("P")

_MUTABLE = (dict, list, tuple, set, bytearray)
"""Arguments of an effect that may change behind the call, themselves or in their depth."""


class Surroundings:
    """What all attempts of a process share."""

    def __init__(
        self,
        *,
        database: Database,
        pool: Pool,
        owner: str,
        deletes: bool,
        query_timeout_seconds: float,
        leave_seconds: float,
        may_start: Callable[[], bool],
    ) -> None:
        self.database = database
        self.pool = pool
        self.owner = owner
        self.deletes = deletes
        """Whether completed rows are removed at once (RETENTION_SECONDS 0)."""
        self.query_timeout_seconds = query_timeout_seconds
        self.leave_seconds = leave_seconds
        """How long each step may take by which a cancelled handler lets go of a connection, which may be dead: it has to have
        stopped before its lease can pass on."""
        self.may_start = may_start
        """False from the moment a shutdown has begun."""


class Job(Generic[P]):
    """One attempt of one job. Its names are the row's; `attempt` is 1 at the first claim."""

    __slots__ = (
        "__weakref__",
        "_committed",
        "_connections",
        "_deadline",
        "_effects",
        "_has_returned",
        "_held",
        "_in_thread",
        "_log",
        "_surroundings",
        "_transaction_error",
        "_transaction_used",
        "cancel_reason",
        "payload",
        "resources",
        "result",
    )

    def __init__(self, held: Held, resources: object, surroundings: Surroundings, deadline: float, *, in_thread: bool) -> None:
        self.payload: P = None  # type: ignore[assignment]  # the attempt reads it: None is what `on_failure` sees if it cannot
        self.resources = resources
        """What the lifespan of the handlers yielded."""
        self.result: object = None
        """Set it inside `transaction()` to store a result; otherwise return one."""
        self.cancel_reason: CancelReason | None = None
        """Why this attempt was told to stop, or None. A plain `def` handler should look at it from time to time."""
        self._held = held
        self._surroundings = surroundings
        self._deadline = deadline
        self._in_thread = in_thread
        self._effects: list[Effect] | None = None
        self._connections = 0
        self._has_returned = False
        self._transaction_used = False
        self._transaction_error: BaseException | None = None
        """What rolled the transaction back: the attempt's outcome, whatever the handler makes of it."""
        self._committed = False
        self._log: logs.JobLogger | None = None

    # --- the row

    @property
    def id(self) -> int:
        return self._held.job.id

    @property
    def key(self) -> str:
        return self._held.job.key

    @property
    def kind(self) -> str:
        return self._held.job.kind

    @property
    def queue(self) -> str:
        return self._held.job.queue

    @property
    def attempt(self) -> int:
        """1 at the first claim."""
        return self._held.job.attempt

    @property
    def max_attempts(self) -> int:
        return self._held.job.max_attempts

    @property
    def fence(self) -> int:
        """The fencing token of this attempt; it rises over all jobs and named leases."""
        return self._held.job.fence

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.kind} attempt {self.attempt} fence {self.fence}>"

    # --- the lease

    def remaining_seconds(self) -> float:
        """How long this attempt may still run: the least of its lease's trust and its time-out; 0 once it has ended."""
        if self._held.phase is Phase.FINISHED:
            return 0.0
        until = self._deadline
        if self._held.phase is not Phase.OWN_TRANSACTION:  # else the keeper moves it on, as long as the row is locked
            until = min(until, self._held.trusted_until)
        return max(until - local_seconds(), 0.0)

    def ensure_lease(self, for_seconds: float = 0) -> None:
        """Raise LeaseLost unless the lease is trusted for that long. Call it right before an external side effect."""
        held = self._held
        if held.phase is Phase.FINISHED:  # a thread may have outlived its attempt, and the job be somebody else's
            raise LeaseLost(f"job {self.id}: {held.lost or 'the attempt has ended'}", "lease_lost")
        if held.lost is None and held.phase is Phase.OWN_TRANSACTION and local_seconds() < held.safe_until:
            return
        if (doubt := held.doubt(for_seconds)) is not None:
            raise LeaseLost(f"job {self.id}: {doubt}", "lease_untrusted" if held.lost is None else "lease_lost")

    # --- what is committed with the completion

    def effect(self, sql: str, *arguments: object) -> None:
        """Record one statement to be committed together with the completion, after the handler has returned.

        One INSERT, UPDATE, DELETE, MERGE or SELECT (a leading WITH is allowed), arguments as asyncpg takes them, dict and list for
        json and jsonb, as they are at the call. Dropped unless the handler returns. Raises ValueError for any other statement,
        RuntimeError after `transaction()`, and when the handler has returned.
        """
        # As they are now: what the handler goes on to do with a dict is not meant.
        for argument in arguments:
            if isinstance(argument, _MUTABLE):
                arguments = tuple(copy.deepcopy(one) if isinstance(one, _MUTABLE) else one for one in arguments)
                break
        self._record(sql, arguments, must_be_alone(sql), _caller())

    def enqueue(
        self,
        kind: str | Kind[P],
        payload: object,
        *,
        key: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        run_at: datetime | None = None,
        delay_seconds: float | None = None,
        max_attempts: int | None = None,
    ) -> None:
        """Enqueue a follow-up job in the transaction of the completion: both happen or neither (a transactional outbox).

        A kind made by `handlers.job` brings its defaults and checks the payload. A key that exists already is left as it is.
        Raises ValueError or TypeError for what cannot be enqueued.
        """
        if isinstance(kind, Kind):
            payload = kind.dump(payload)  # type: ignore[arg-type]  # the point of dump is to check it
            queue = kind.queue if queue is None else queue
            priority = kind.priority if priority is None else priority
            max_attempts = kind.max_attempts if max_attempts is None else max_attempts
            kind = kind.name
        job = new_job(
            kind,
            payload,
            key=key,
            queue=DEFAULT_QUEUE if queue is None else queue,
            priority=0 if priority is None else priority,
            run_at=run_at,
            delay_seconds=delay_seconds,
            max_attempts=DEFAULT_MAX_ATTEMPTS if max_attempts is None else max_attempts,
        )
        sql, arguments = follow_up(self._surroundings.database, job)
        self._record(sql, arguments, False, _caller())

    def _record(self, sql: str, arguments: tuple[object, ...], alone: bool, called_from: CodePlace) -> None:
        if self._has_returned:
            raise RuntimeError("the handler has returned: what it left to be committed is on its way")
        if self._transaction_used:
            raise RuntimeError("job.effect and job.enqueue are for handlers without job.transaction(): run the statement on `tx`")
        if self._effects is None:
            self._effects = []
        self._effects.append(Effect(sql, arguments, alone, len(self._effects) + 1, called_from))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Arbitrary code on a connection that holds the fence; the job is complete when the block commits.

        Entry raises LeaseLost if the lease is gone and EffectAlreadyApplied if this key's effect was committed before. An
        exception inside rolls everything back and is the attempt's outcome. Raises RuntimeError when used twice, together with
        `effect`, from a plain `def`, or while `connection()` is held.
        """
        if self._in_thread:
            raise RuntimeError("job.transaction() needs an `async def` handler; a plain `def` records its SQL with job.effect")
        if self._transaction_used:
            raise RuntimeError("job.transaction() can be used once: it completes the job")
        if self._effects:
            raise RuntimeError("job.transaction() and job.effect exclude each other: run all statements in the transaction")
        if self._connections:
            raise RuntimeError("leave job.connection() before entering job.transaction(): holding both can starve the pool")
        self._transaction_used = True
        was_entered = False
        try:
            async with owntransaction.fenced(self._held, self._surroundings, lambda: self._result_text()) as connection:
                was_entered = True
                yield connection
        except BaseException as error:
            if was_entered:
                self._transaction_error = error
            raise
        self._committed = True

    def _result_text(self) -> str | None:
        return None if self.result is None else encode_json(self.result, "result")

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A pooled connection for reading, outside the fence. Not for slow work in between: others wait for it.

        Raises TimeoutError when none is free within the query time-out, RuntimeError inside `transaction()` or a plain `def`.
        """
        if self._in_thread:
            raise RuntimeError("job.connection() needs an `async def` handler")
        if self._held.phase is Phase.OWN_TRANSACTION and not self._committed:
            raise RuntimeError("read on the transaction's own connection: holding two can starve the pool")
        async with self._surroundings.pool.acquire(
            timeout_seconds=self._surroundings.query_timeout_seconds, leave_seconds=self._surroundings.leave_seconds
        ) as connection:
            self._connections += 1
            try:
                yield connection
            finally:
                self._connections -= 1

    # --- logs

    @property
    def log(self) -> logs.JobLogger:
        """A logger whose lines carry this job's id, kind, queue, attempt and fence."""
        if self._log is None:
            self._log = logs.job_logger(**self._held.job.log_fields())
        return self._log


def _caller() -> CodePlace:
    frame = sys._getframe(2)
    return CodePlace(frame.f_code.co_filename, frame.f_lineno)
