"""TaskClient: a remote worker. It claims tasks of a `worker serve` and runs them under leases that it keeps alive.

    async def thumbnail(task: RemoteTask) -> object:
        task.ensure_lease(for_seconds=10)               # right before an external side effect; task.fence goes with it
        return {"pages": 3}                             # the task's output

    async with TaskClient("https://jobs.internal", bearer=token, processor="thumbnails-1") as tasks:
        await tasks.run(thumbnail, queue="thumbnails", concurrency=4)

The rules are those of the daemon. A lease is trusted until (local moment before the request) + what the answer says is left − a
tenth; it is renewed at a third of its length, and the handler is cancelled when the server says that the lease is gone, or when the
trust has run out without an answer. An end that could not be told is told again until the server takes or refuses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Literal, Self

from worker.clock import local_seconds
from worker.domain import Lease, clean_text, describe
from worker.domain_json import encode_json
from worker.errors import ConfigError, LeaseLost
from worker.http_calls import Answer, HttpCalls, delay_seconds

LEASE_SECONDS = 30.0
IDLE_SECONDS = 1.0
_MARGIN_SHARE = 0.1
_CLAIM_TRIES = 5
_ERROR_CHARACTERS = 8_192
_TELL_LEASES = 10
_TELL_AT_LEAST_SECONDS = 60.0
_log = logging.getLogger("worker.tasks")

Ended = Literal["completed", "failed", "released", "lost"]


@dataclass(eq=False, slots=True, kw_only=True)
class RemoteTask:
    """A task while it is held."""

    id: int
    key: str
    kind: str
    queue: str
    payload: object
    fence: int
    """The fencing token: whoever guards a resource refuses a lower one than it has seen."""
    attempt: int
    processor: str
    lease_seconds: float
    trusted_until: float
    """Local moment; moved on by the heartbeat."""
    lost: str | None = None
    """Why the lease is over, once it is."""

    def remaining_seconds(self) -> float:
        """How long the lease may still be trusted without another heartbeat; 0 once it is lost."""
        return 0.0 if self.lost is not None else max(self.trusted_until - local_seconds(), 0.0)

    def ensure_lease(self, for_seconds: float = 0) -> None:
        """Raise LeaseLost unless the lease is trusted for that long. Call it right before an external side effect."""
        remaining = self.remaining_seconds()
        if remaining <= 0 or remaining < for_seconds:
            reason: Literal["lease_lost", "lease_untrusted"] = "lease_untrusted" if self.lost is None else "lease_lost"
            raise LeaseLost(f"task {self.id}: {self.lost or f'trusted for {remaining:.1f} s only'}", reason)


Handler = Callable[[RemoteTask], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class _Wish:
    queue: str
    kinds: tuple[str, ...] | None
    lease_seconds: float
    request_id: str = field(default_factory=lambda: secrets.token_hex(16))

    def body(self, processor: str) -> dict[str, object]:
        body: dict[str, object] = {"processor": processor, "queue": self.queue, "lease_seconds": self.lease_seconds}
        if self.kinds is not None:
            body["kinds"] = list(self.kinds)
        return body | {"request_id": self.request_id}


class TaskClient:
    """One remote worker. Use it with `async with`.

    `processor` names it; two that share a name can end each other's tasks only with the other's fence. By default it is the host's
    name, the process id and random digits. Raises ConfigError for an address, a token or a name that cannot be right.
    """

    def __init__(
        self,
        url: str,
        *,
        bearer: str | None = None,
        processor: str | None = None,
        timeout_seconds: float = 10.0,
        connections: int = 16,
    ) -> None:
        if processor == "":
            raise ConfigError("processor: the name is empty")
        self.processor = processor or f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._calls = HttpCalls(url, bearer=bearer, timeout_seconds=timeout_seconds, connections=connections)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._calls.close()

    # --- one request each

    async def enqueue(
        self,
        kind: str,
        payload: object,
        *,
        key: str | None = None,
        queue: str = "default",
        priority: int = 0,
        run_at: datetime | None = None,
        delay_seconds: float | None = None,
        max_attempts: int = 5,
    ) -> tuple[int, bool]:
        """The id of the task, and whether it is new. Give a key, and asking again after a ConnectionError is safe."""
        fields: dict[str, object] = {
            "kind": kind,
            "payload": payload,
            "queue": queue,
            "priority": priority,
            "max_attempts": max_attempts,
        }
        optional = {"key": key, "delay_seconds": delay_seconds, "run_at": None if run_at is None else run_at.isoformat()}
        fields |= {name: value for name, value in optional.items() if value is not None}
        answer = await self._calls.call("POST", "/api/tasks", fields)
        if answer.status not in (200, 201):
            raise ValueError(answer.message)
        return _integer(answer.body, "id"), answer.status == 201

    async def claim(
        self, *, queue: str = "default", kinds: Sequence[str] | None = None, lease_seconds: float = LEASE_SECONDS
    ) -> RemoteTask | None:
        """A task, or None when none is due. A lost answer is asked for again: the same task comes.

        Raises ConnectionError after a few tries, ValueError for terms that are refused.
        """
        wish = _Wish(queue, None if kinds is None else tuple(kinds), lease_seconds)
        for failures in range(_CLAIM_TRIES):
            sent_at = local_seconds()
            try:
                answer = await self._calls.call("POST", "/api/tasks/next", wish.body(self.processor))
            except ConnectionError:
                if failures == _CLAIM_TRIES - 1:
                    raise
                await asyncio.sleep(delay_seconds(failures))
                continue
            if answer.status == 204:
                return None
            if answer.status != 200:
                raise ValueError(answer.message)
            return self._task(answer.body, lease_seconds, sent_at)
        raise AssertionError("unreachable")

    async def heartbeat(self, task: RemoteTask) -> None:
        """Renew once. Raises LeaseLost when the server says that it is over, ConnectionError when nothing is known."""
        sent_at = local_seconds()
        answer = await self._tell(task, "heartbeat", seconds=max(task.lease_seconds / 6, 0.2))
        left = answer.body.get("expires_in_ms")
        task.trusted_until = _trusted_until(sent_at, task.lease_seconds, left if isinstance(left, int) else 0)

    async def complete(self, task: RemoteTask, output: object = None) -> None:
        """The attempt succeeded. Raises LeaseLost when it no longer counts, ValueError for an output that cannot be stored."""
        await self._tell(task, "complete", {"output": output})

    async def fail(self, task: RemoteTask, error: str) -> None:
        """The attempt failed: again later, or dead on the last one."""
        await self._tell(task, "fail", {"error": clean_text(error[-_ERROR_CHARACTERS:], _ERROR_CHARACTERS)})

    async def release(self, task: RemoteTask) -> None:
        """Give it back, attempt refunded."""
        await self._tell(task, "release")

    async def _tell(
        self, task: RemoteTask, verb: str, more: Mapping[str, object] | None = None, *, seconds: float | None = None
    ) -> Answer:
        body = {"processor": self.processor, "fence": task.fence, **(more or {})}
        answer = await self._calls.call("PUT", f"/api/tasks/{task.id}/{verb}", body, seconds=seconds)
        if answer.status in (404, 409):
            task.lost = task.lost or answer.error
            raise LeaseLost(f"task {task.id}: {answer.error}")
        if answer.status != 202:
            raise ValueError(answer.message)
        return answer

    def _task(self, body: Mapping[str, object], lease_seconds: float, sent_at: float) -> RemoteTask:
        return RemoteTask(
            id=_integer(body, "id"),
            key=str(body["key"]),
            kind=str(body["kind"]),
            queue=str(body["queue"]),
            payload=body["payload"],
            fence=_integer(body, "fence"),
            attempt=_integer(body, "attempt"),
            processor=self.processor,
            lease_seconds=lease_seconds,
            trusted_until=_trusted_until(sent_at, lease_seconds, _integer(body, "expires_in_ms")),
        )

    # --- the life of an attempt

    async def run(
        self,
        handler: Handler,
        *,
        queue: str = "default",
        kinds: Sequence[str] | None = None,
        lease_seconds: float = LEASE_SECONDS,
        concurrency: int = 1,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Claim and run until cancelled; what runs then is cancelled and given back. Waits out an absent server.

        Raises ConfigError and ValueError for what waiting cannot mend, once everything has been given back.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency: {concurrency} is not 1 or more")

        async def lane() -> None:
            failures = 0
            while True:
                try:
                    ended = await self.run_one(handler, queue=queue, kinds=kinds, lease_seconds=lease_seconds)
                except ConnectionError as error:
                    failures += 1
                    _log.warning("no answer: %s", error)
                    await asyncio.sleep(delay_seconds(failures))
                else:
                    failures = 0
                    if ended is None:
                        await asyncio.sleep(idle_seconds)

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(concurrency):
                    group.create_task(lane(), name=f"remote worker {number}")
        except ExceptionGroup as refused:
            raise refused.exceptions[0] from None  # the lanes' are alike

    async def run_one(
        self, handler: Handler, *, queue: str = "default", kinds: Sequence[str] | None = None, lease_seconds: float = LEASE_SECONDS
    ) -> Ended | None:
        """Claim one task and bring it to its end; how it ended, or None when none was due."""
        task = await self.claim(queue=queue, kinds=kinds, lease_seconds=lease_seconds)
        return None if task is None else await self.attempt(task, handler)

    async def attempt(self, task: RemoteTask, handler: Handler) -> Ended:
        """Run the handler under the lease of `task`, and tell the server how it ended.

        When the caller is cancelled the handler is cancelled too, and the task given back.
        """
        working = asyncio.create_task(_run(handler, task), name=f"task {task.id}")
        keeping = asyncio.create_task(self._keep(task, working), name=f"heartbeat {task.id}")
        try:
            try:
                await asyncio.wait({working})
            except asyncio.CancelledError:
                working.cancel()
                await asyncio.wait({working})
                keeping.cancel()
                # Limited: the cancellation goes on when it is told, or could not be.
                with contextlib.suppress(LeaseLost, ConnectionError, TimeoutError, ValueError):
                    await asyncio.wait_for(self.release(task), self._calls.timeout_seconds)
                raise
            return await self._finish(task, working)
        finally:
            keeping.cancel()
            working.cancel()

    async def _finish(self, task: RemoteTask, working: asyncio.Task[object]) -> Ended:
        """Tell how the handler ended. Its lease is kept meanwhile, and it is told again until there is an answer, or too much time
        has passed."""
        if task.lost is not None:
            _log.warning("task %d: stopped: %s", task.id, task.lost)
            return "lost"
        error = asyncio.CancelledError("cancelled itself") if working.cancelled() else working.exception()
        output = None if error is not None else working.result()
        failures = 0
        until = local_seconds() + max(task.lease_seconds * _TELL_LEASES, _TELL_AT_LEAST_SECONDS)
        while True:
            try:
                if error is None:
                    await self.complete(task, output)
                    return "completed"
                await self.fail(task, f"{type(error).__name__}: {describe(error)}")
                return "failed"
            except LeaseLost as refused:
                _log.warning("%s", refused)
                return "lost"
            except (TypeError, ValueError) as refused:
                if error is not None:
                    raise
                error = refused  # an output that cannot be stored is a failed attempt
            except ConnectionError as trouble:
                # Also past the trust: a late end counts until somebody has taken the task back.
                failures += 1
                _log.warning("task %d: not told yet: %s", task.id, trouble)
                if local_seconds() >= until:
                    return "lost"
                await asyncio.sleep(delay_seconds(failures))

    async def _keep(self, task: RemoteTask, working: asyncio.Task[object]) -> None:
        """Renew at a third of the lease; stop the handler when the lease is gone, or no longer trusted."""
        pause_seconds = task.lease_seconds / 3
        failures = 0
        while task.lost is None:
            await asyncio.sleep(max(min(pause_seconds, task.trusted_until - local_seconds()), 0))
            try:
                if local_seconds() >= task.trusted_until:
                    task.lost = "lease_untrusted"
                else:
                    await self.heartbeat(task)
                    pause_seconds, failures = task.lease_seconds / 3, 0
            except LeaseLost:
                pass  # task.lost says why
            except (ConnectionError, ConfigError, ValueError) as error:
                # Whatever it was, nobody has said that the lease is gone, nor that it goes on: the trust decides.
                failures += 1
                pause_seconds = min(delay_seconds(failures), task.lease_seconds / 12)
                _log.warning("task %d: no heartbeat: %s", task.id, error)
        working.cancel()


async def _run(handler: Handler, task: RemoteTask) -> object:
    try:
        output = await handler(task)
    except (SystemExit, KeyboardInterrupt) as error:  # that task's failure: it would end the loop and all others
        raise RuntimeError(f"the handler raised {type(error).__name__}: {describe(error)}") from error
    encode_json(output, "output")  # here, where a failure is the handler's own
    return output


def _trusted_until(sent_at: float, lease_seconds: float, expires_in_ms: int) -> float:
    terms = Lease(lease_seconds, lease_seconds * _MARGIN_SHARE)
    return terms.trusted_until(sent_at, expires_in_ms / 1000)


def _integer(body: Mapping[str, object], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConnectionError(f"an answer without {name}")
    return value
