"""Named leases over HTTP: the transport of `Leases(url=…, bearer=…)`. The server's database judges, as everywhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from worker.clock import local_seconds
from worker.errors import ConfigError
from worker.holding import HeldName
from worker.http_calls import Answer, HttpCalls
from worker.lease_transport import Renewed
from worker.store.leases import Ended, Grant, Held

TIMEOUT_SECONDS = 4.0
SILENCE_SECONDS = TIMEOUT_SECONDS + 1
"""An answer that did not come is asked for again."""
CONNECTIONS = 16
"""So many acquisitions and releases are on their way at a time."""
RENEWALS = 64
"""And so many renewals. The server makes few statements of them; where it is slow to answer, more at a time is what helps."""


class HttpTransport:
    """The way to the leases of a `worker serve`."""

    def __init__(self, url: str, bearer: str | None) -> None:
        # Apart, so that a renewal waits behind no crowd of acquisitions.
        self._calls = HttpCalls(url, bearer=bearer, timeout_seconds=TIMEOUT_SECONDS, connections=CONNECTIONS)
        self._renewals = HttpCalls(url, bearer=bearer, timeout_seconds=TIMEOUT_SECONDS, connections=RENEWALS)

    @property
    def where(self) -> str:
        return self._calls.where

    @property
    def connections(self) -> int:
        return CONNECTIONS

    @property
    def answer_seconds(self) -> float:
        return TIMEOUT_SECONDS

    @property
    def silence_seconds(self) -> float:
        return SILENCE_SECONDS

    async def acquire(
        self, *, resource: str, holder: str, ttl_seconds: float, request_id: str, metadata: Mapping[str, object] | None
    ) -> Grant | Held | Ended:
        """Acquire, or learn who has it; the same answer for a repeated request_id."""
        body = {
            "resource": resource,
            "holder": holder,
            "ttl_seconds": ttl_seconds,
            "request_id": request_id,
            "metadata": {} if metadata is None else dict(metadata),
        }
        answer = await self._calls.call("POST", "/api/leases", body)
        match answer.status, answer.error:
            case 201, _:
                return Grant(_number(answer, "id"), _number(answer, "fence"), _number(answer, "expires_in_ms"))
            case 409, "ended":
                return Ended(id=_number(answer, "id"), fence=_number(answer, "fence"))
            case 409, _:
                holder_now = answer.body.get("holder")
                return Held(
                    holder=None if holder_now is None else str(holder_now), retry_after_ms=_number(answer, "retry_after_ms")
                )
        raise _refused(answer)

    async def renew_many(self, held: Sequence[HeldName], *, limit_seconds: float) -> Renewed:
        """Renew each, several at a time, those first that are trusted for the shortest time. None with an answer raises
        ConnectionError."""
        renewed: dict[tuple[int, int], int] = {}
        lost: set[tuple[int, int]] = set()
        unasked: set[tuple[int, int]] = set()
        trouble: list[Exception] = []
        turns = asyncio.Semaphore(RENEWALS)
        # Of all together. In the second half nothing new is sent: what is under way then would only lose its connection.
        deadline = local_seconds() + limit_seconds

        async def renew(one: HeldName) -> None:
            body = {"resource": one.resource, "holder": one.holder, "fence": one.fence}
            async with turns:
                left_seconds = deadline - local_seconds()
                if left_seconds <= limit_seconds / 2:
                    unasked.add(one.key)
                    return
                try:
                    answer = await self._renewals.call("PUT", "/api/leases/renew", body, seconds=left_seconds)
                    if answer.status == 200:
                        renewed[one.key] = _number(answer, "expires_in_ms")
                    elif answer.status == 404:
                        lost.add(one.key)
                except (ConnectionError, ConfigError, ValueError) as error:
                    trouble.append(error)

        async with asyncio.TaskGroup() as group:
            for one in sorted(held, key=lambda one: one.trusted_until):
                group.create_task(renew(one), name=f"renew {one.resource}")
        if trouble and not renewed and not lost:
            raise ConnectionError(str(trouble[0]))
        return Renewed(renewed, frozenset(lost), frozenset(unasked))

    async def release(self, *, resource: str, holder: str, fence: int) -> bool:
        """End it at once; also True when that had happened before. False: it was not this holder's any more."""
        body = {"resource": resource, "holder": holder, "fence": fence}
        answer = await self._calls.call("DELETE", "/api/leases/release", body)
        if answer.status not in (200, 404):
            raise _refused(answer)
        return answer.status == 200

    def drop(self) -> None:
        """Nothing to forget: a request that ran out of time has lost its connection."""

    async def close(self, limit_seconds: float) -> None:
        # Says goodbye to nobody, so it waits for nobody: a limit could only leave some of the connections open.
        for calls in (self._calls, self._renewals):
            with contextlib.suppress(OSError):
                await calls.close()


def _number(answer: Answer, name: str) -> int:
    value = answer.body.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConnectionError(f"an answer without {name}")
    return value


def _refused(answer: Answer) -> Exception:
    if answer.status == 422:
        return ValueError(answer.message)
    return ConfigError(f"the server answers {answer.status}: {answer.message}")
