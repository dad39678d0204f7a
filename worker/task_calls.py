"""The requests of a remote worker, one method each: what is sent, and what the answer means. How a task is brought to its end with
them is in `task_client`.

A lease is trusted until (local moment before the request) + what the answer says is left − a tenth.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Literal, Self

from worker.clock import local_seconds
from worker.domain import Lease, clean_text
from worker.errors import ConfigError, LeaseLost
from worker.http_calls import Answer, HttpCalls, delay_seconds
from worker.lease_terms import HOST_CHARACTERS, MAX_HOLDER_BYTES, check_name
from worker.store.trouble import ConnectFailed

LEASE_SECONDS = 30.0
_MARGIN_SHARE = 0.1
_CLAIM_TRIES = 5
_MOST_UNANSWERED = 100
_UNTOLD = (LeaseLost, ConfigError, ConnectionError, TimeoutError, ValueError)
_ERROR_CHARACTERS = 8_192


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
    is_told: bool = False
    """Whether its end is on its way or has been told: by then somebody else may have it, heartbeat or not."""

    def remaining_seconds(self) -> float:
        """How long the lease may still be trusted without another heartbeat; 0 once it is lost, or its end is told."""
        return 0.0 if self.is_told or self.lost is not None else max(self.trusted_until - local_seconds(), 0.0)

    def ensure_lease(self, for_seconds: float = 0) -> None:
        """Raise LeaseLost unless the lease is trusted for that long. Call it right before an external side effect."""
        remaining = self.remaining_seconds()
        if remaining <= 0 or remaining < for_seconds:
            lost = self.lost or ("its end has been told" if self.is_told else None)
            nobody_knows = lost in (None, "lease_untrusted")
            reason: Literal["lease_lost", "lease_untrusted"] = "lease_untrusted" if nobody_knows else "lease_lost"
            raise LeaseLost(f"task {self.id}: {lost or f'trusted for {remaining:.1f} s only'}", reason)


@dataclass(slots=True)
class _Wish:
    queue: str
    kinds: tuple[str, ...] | None
    lease_seconds: float
    request_id: str = field(default_factory=lambda: secrets.token_hex(16))
    may_be_granted: bool = False
    """An answer to it was lost, which may have been a task."""

    @property
    def terms(self) -> tuple[object, ...]:
        return self.queue, self.kinds, self.lease_seconds

    def anew(self) -> _Wish:
        """The same under a new name."""
        return _Wish(self.queue, self.kinds, self.lease_seconds)

    def body(self, processor: str) -> dict[str, object]:
        body: dict[str, object] = {"processor": processor, "queue": self.queue, "lease_seconds": self.lease_seconds}
        if self.kinds is not None:
            body["kinds"] = list(self.kinds)
        return body | {"request_id": self.request_id}


class TaskCalls:
    """A `worker serve` as one remote worker sees it."""

    def __init__(self, url: str, *, bearer: str | None, processor: str | None, timeout_seconds: float, connections: int) -> None:
        drawn = f"{clean_text(socket.gethostname(), HOST_CHARACTERS)}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self.processor = check_name("processor", drawn if processor is None else processor, MAX_HOLDER_BYTES)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._calls = HttpCalls(url, bearer=bearer, timeout_seconds=timeout_seconds, connections=connections)
        self._unanswered: deque[_Wish] = deque(maxlen=_MOST_UNANSWERED)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._calls.close()

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

        Raises ConnectionError after a few tries, ValueError for terms that are refused. Who is cancelled meanwhile holds nothing,
        if that can be told within `timeout_seconds`. What an answer that was lost may have given, and has not been given back, is
        asked for by the next claim on the same terms.
        """
        if isinstance(kinds, str):
            raise TypeError("kinds: a list of names is needed, not one text")
        wish = self._wish(_Wish(queue, None if kinds is None else tuple(kinds), lease_seconds))
        try:
            task = await self._claim(wish)
            wish.may_be_granted = False
            if task is not None and task.remaining_seconds() <= 0:  # its answer was lost long ago
                with contextlib.suppress(*_UNTOLD):
                    async with asyncio.timeout(self._calls.timeout_seconds):
                        await self._give_back(task)
                wish = wish.anew()
                task = await self._claim(wish)
            return task
        except BaseException:
            if wish.may_be_granted:
                self._unanswered.append(wish)
            raise

    async def _claim(self, wish: _Wish) -> RemoteTask | None:
        failures = 0
        while True:
            asking = asyncio.create_task(self._ask(wish), name="claim")
            try:
                try:
                    return await asyncio.shield(asking)
                except ConnectionError:
                    failures += 1
                    if failures == _CLAIM_TRIES:
                        raise
                    await asyncio.sleep(delay_seconds(failures - 1))
            except asyncio.CancelledError:
                await self._take_back(wish, asking)
                raise

    def _wish(self, new: _Wish) -> _Wish:
        """This one, or one on the same terms whose answer was lost."""
        for wish in self._unanswered:
            if wish.terms == new.terms:
                self._unanswered.remove(wish)
                return wish
        return new

    async def _ask(self, wish: _Wish) -> RemoteTask | None:
        """Claim, once."""
        sent_at = local_seconds()
        try:
            answer = await self._calls.call("POST", "/api/tasks/next", wish.body(self.processor))
        except (ConnectionError, asyncio.CancelledError) as error:
            wish.may_be_granted |= not isinstance(error, ConnectFailed)
            raise
        if answer.status == 204:
            return None
        if answer.status != 200:
            raise ValueError(answer.message)
        return self._task(answer.body, wish.lease_seconds, sent_at)

    async def _take_back(self, wish: _Wish, asking: Awaitable[RemoteTask | None]) -> None:
        """The caller is cancelled: await what it has asked for, again and again while an answer may have been lost, and give back
        what comes. Limited, and silent when that does not succeed."""
        failures = 0
        with contextlib.suppress(*_UNTOLD):
            async with asyncio.timeout(self._calls.timeout_seconds):
                while True:
                    try:
                        task = await asking
                        break
                    except ConnectionError:
                        if not wish.may_be_granted:
                            raise
                        await asyncio.sleep(delay_seconds(failures))
                        failures += 1
                        asking = self._ask(wish)
                wish.may_be_granted = False
                if task is not None:
                    try:
                        await self._give_back(task)
                    finally:
                        wish.may_be_granted = not task.is_told  # else it may be somebody else's by the time it is asked for

    async def _give_back(self, task: RemoteTask) -> None:
        """Release, again and again until there is an answer: the limit is the caller's."""
        failures = 0
        while True:
            try:
                return await self.release(task)
            except ConnectionError:
                failures += 1
                await asyncio.sleep(delay_seconds(failures))

    async def heartbeat(self, task: RemoteTask) -> None:
        """Renew once. Raises LeaseLost when the server says that it is over, ConnectionError when nothing is known."""
        sent_at = local_seconds()
        answer = await self._tell(task, "heartbeat", seconds=max(task.lease_seconds / 6, 0.2))
        left = answer.body.get("expires_in_ms")
        task.trusted_until = _trusted_until(sent_at, task.lease_seconds, left if isinstance(left, int) else 0)

    async def complete(self, task: RemoteTask, output: object = None) -> None:
        """The attempt succeeded. Raises LeaseLost when it no longer counts, ValueError for an output that cannot be stored."""
        await self._tell_end(task, "complete", {"output": output})

    async def fail(self, task: RemoteTask, error: str) -> None:
        """The attempt failed: again later, or dead on the last one."""
        await self._tell_end(task, "fail", {"error": clean_text(error[-_ERROR_CHARACTERS:], _ERROR_CHARACTERS)})

    async def release(self, task: RemoteTask) -> None:
        """Give it back, attempt refunded."""
        await self._tell_end(task, "release")

    async def _tell_end(self, task: RemoteTask, verb: str, more: Mapping[str, object] | None = None) -> None:
        was_told, task.is_told = task.is_told, True
        try:
            await self._tell(task, verb, more)
        except (ConnectFailed, ConfigError, TypeError, ValueError):  # not sent, or refused: nothing has come of it
            task.is_told = was_told
            raise

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


def renew_in_seconds(task: RemoteTask) -> float:
    """Until a third of its lease is over. That may be so at once: the answer to a claim that was repeated comes late."""
    begun_at = task.trusted_until - task.lease_seconds * (1 - _MARGIN_SHARE)
    return begun_at + task.lease_seconds / 3 - local_seconds()


def _trusted_until(sent_at: float, lease_seconds: float, expires_in_ms: int) -> float:
    terms = Lease(lease_seconds, lease_seconds * _MARGIN_SHARE)
    return terms.trusted_until(sent_at, expires_in_ms / 1000)


def _integer(body: Mapping[str, object], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConnectionError(f"an answer without {name}")
    return value
