"""Handlers: which function does which kind of job, and with what defaults.

    handlers = Handlers()

    @handlers.job("welcome", payload=Welcome, timeout_seconds=60)
    async def welcome(job: Job[Welcome]) -> dict: ...

    await welcome.enqueue(connection, Welcome(message="hi"), key="welcome-1001")

The defaults given here (queue, priority, attempts) go into the row when it is enqueued, and from then on the row decides.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Generic, TypeVar, cast, overload

from pydantic import TypeAdapter, ValidationError

from worker.domain_json import decode_json
from worker.new_job import DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE, new_job
from worker.store import enqueueing

if TYPE_CHECKING:
    from worker.job import Job
    from worker.store.connection import Connection

P = TypeVar("P")
Handler = Callable[["Job[P]"], object]
OnFailure = Callable[["Job[object]", BaseException, bool], Awaitable[object]]
Lifespan = Callable[[], AbstractAsyncContextManager[object]]


class PayloadError(ValueError):
    """The payload does not fit its kind. The message names the fields and never shows their values."""


def _check_handler(name: str, function: object) -> None:
    """Raise TypeError for what can never handle a job."""
    if not callable(function):
        raise TypeError(f"kind {name!r}: a function is needed, not {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"kind {name!r}: a handler returns a value, it does not yield")
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:
        return  # it cannot be told
    try:
        signature.bind(None)
    except TypeError:
        raise TypeError(f"kind {name!r}: a handler is called with one argument, the job") from None


class Kind(Generic[P]):
    """One kind of job: its function, the type of its payload, its defaults at enqueue."""

    def __init__(
        self,
        name: str,
        function: Handler[P],
        *,
        payload: type[P] | None,
        timeout_seconds: float | None,
        queue: str,
        priority: int,
        max_attempts: int,
    ) -> None:
        self.name = name
        # A Kind: one function registered for several kinds.
        self.function: Handler[P] = function.function if isinstance(function, Kind) else function
        _check_handler(name, self.function)
        self.timeout_seconds = timeout_seconds
        """None: the process's JOB_TIMEOUT_SECONDS."""
        self.queue = queue
        self.priority = priority
        self.max_attempts = max_attempts
        called = (self.function, type(self.function).__call__)
        self.is_async = any(inspect.iscoroutinefunction(inspect.unwrap(one)) for one in called)
        self._adapter: TypeAdapter[P] | None = None if payload is None else TypeAdapter(payload)
        self._validate_json = None if self._adapter is None else self._adapter.validator.validate_json

    def __call__(self, job: Job[P]) -> object:
        return self.function(job)

    def __repr__(self) -> str:
        return f"<Kind {self.name}>"

    def read(self, text: str) -> P:
        """The payload of a row. Raises PayloadError."""
        try:
            return cast(P, decode_json(text) if self._validate_json is None else self._validate_json(text))
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False, include_context=False)
            lines = [f"{'.'.join(map(str, fault['loc'])) or 'payload'}: {fault['msg']}" for fault in faults[:10]]
            raise PayloadError("; ".join(lines)) from None
        except ValueError as error:
            raise PayloadError(f"payload: {error}") from None

    def dump(self, payload: P) -> object:
        """The JSON value of a payload, checked against its type. Raises PayloadError."""
        if self._adapter is None:
            return payload
        try:
            checked = self._adapter.validate_python(payload)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False, include_context=False)
            raise PayloadError("; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in faults[:10])) from None
        return self._adapter.dump_python(checked, mode="json")

    async def enqueue(
        self,
        connection: Connection,
        payload: P,
        *,
        key: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        run_at: datetime | None = None,
        delay_seconds: float | None = None,
        max_attempts: int | None = None,
        schema: str = "public",
    ) -> enqueueing.Enqueued:
        """Enqueue a job of this kind on the caller's connection, inside the caller's transaction; see `worker.enqueue`."""
        return await enqueueing.enqueue(
            connection,
            self.name,
            self.dump(payload),
            key=key,
            queue=self.queue if queue is None else queue,
            priority=self.priority if priority is None else priority,
            run_at=run_at,
            delay_seconds=delay_seconds,
            max_attempts=self.max_attempts if max_attempts is None else max_attempts,
            schema=schema,
        )


class Handlers:
    """The kinds a process knows. `lifespan`: an async context manager, entered before the first claim and left after the last
    attempt; what it yields is `job.resources`. To end it has what is left of the stop's grace and budget, then it is cancelled."""

    def __init__(self, *, lifespan: Lifespan | None = None) -> None:
        if lifespan is not None and not callable(lifespan):
            raise TypeError("lifespan: a function that returns an async context manager is needed")
        self.kinds: dict[str, Kind[object]] = {}
        self.lifespan = lifespan
        self.lifespans: dict[str, Lifespan] = {}
        """By kind, for the kinds whose Handlers have one."""
        self.failure_hooks: list[OnFailure] = []

    @overload
    def job(
        self,
        kind: str,
        *,
        payload: type[P],
        timeout_seconds: float | None = None,
        queue: str = DEFAULT_QUEUE,
        priority: int = 0,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    ) -> Callable[[Handler[P]], Kind[P]]: ...

    @overload
    def job(
        self,
        kind: str,
        *,
        timeout_seconds: float | None = None,
        queue: str = DEFAULT_QUEUE,
        priority: int = 0,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    ) -> Callable[[Handler[object]], Kind[object]]: ...

    def job(
        self,
        kind: str,
        *,
        payload: type[P] | None = None,
        timeout_seconds: float | None = None,
        queue: str = DEFAULT_QUEUE,
        priority: int = 0,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    ) -> Callable[[Handler[P]], Kind[P]]:
        """Register the decorated function (`async def`, or plain `def`, which runs in a thread) for `kind`.

        `payload`: a pydantic model or any type pydantic can validate; without it the handler gets the JSON value. Raises
        ValueError for a kind that is registered already or a default out of bounds.
        """
        new_job(kind, None, queue=queue, priority=priority, max_attempts=max_attempts)  # checks the bounds of all four
        if kind in self.kinds:
            raise ValueError(f"kind {kind!r} is registered already")
        if timeout_seconds is not None and not 0.1 <= timeout_seconds <= 30 * 86_400:
            raise ValueError(f"kind {kind!r}: timeout_seconds must be from 0.1 to {30 * 86_400}, not {timeout_seconds}")

        def register(function: Handler[P]) -> Kind[P]:
            made = Kind(
                kind,
                function,
                payload=payload,
                timeout_seconds=timeout_seconds,
                queue=queue,
                priority=priority,
                max_attempts=max_attempts,
            )
            self.kinds[kind] = cast("Kind[object]", made)
            if self.lifespan is not None:
                self.lifespans[kind] = self.lifespan
            return made

        return register

    def on_failure(self, function: OnFailure) -> OnFailure:
        """Call `await function(job, error, will_retry)` after a failure has been written; its own errors are only logged."""
        if not any(inspect.iscoroutinefunction(called) for called in (function, type(function).__call__)):
            raise TypeError("on_failure: an `async def` function is needed")
        self.failure_hooks.append(function)
        return function

    def include(self, other: Handlers) -> None:
        """Take over the kinds and failure hooks of `other`, registered so far. Raises ValueError when a kind is known already.

        Kinds of handlers with a lifespan keep it: their `job.resources` is what that one yielded; the others get this one's.
        """
        for name in other.kinds:
            if name in self.kinds:
                raise ValueError(f"kind {name!r} is registered already")
        self.kinds |= other.kinds
        for name in other.kinds:
            lifespan = other.lifespans.get(name) or self.lifespan
            if lifespan is not None:
                self.lifespans[name] = lifespan
        self.failure_hooks.extend(other.failure_hooks)
