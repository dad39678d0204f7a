"""The desk of `Leases`, in the keeper's loop: it asks for leases, hands them to the keeper, and gives them back.

A question whose answer was lost is asked again under the same request_id: the answer is the same then. Who no longer wants the
answer (cancelled while asking, or tired of asking) leaves it to the desk to find out whether there is something to give back.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker import events, logs
from worker.cancellation import is_cancelled
from worker.clock import local_seconds
from worker.errors import ConfigError, DatabaseUnavailable, LeaseHeld
from worker.holding import HeldName
from worker.keeper import Keeper
from worker.masking import safe_text
from worker.name_renewals import NameRenewals, terms_of
from worker.patience import Patience
from worker.store.connection import DATABASE_ERRORS, ConnectFailed
from worker.store.leases import Ended, Grant, Held

if TYPE_CHECKING:
    from worker.lease_transport import LeaseTransport

_TROUBLE: tuple[type[Exception], ...] = (*DATABASE_ERRORS, ConfigError)
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5
_LEAST_PAUSE_SECONDS = 0.01
_TURN_SECONDS = 30.0
"""How long a question may wait for its turn, where many are asked at the same time."""


@dataclass(slots=True, kw_only=True)
class Asking:
    """What somebody wants to hold, and what has become of it."""

    resource: str
    holder: str
    ttl_seconds: float
    wait_seconds: float
    metadata: Mapping[str, object] | None
    request_id: str = ""
    asked_at: float | None = None
    """Local moment of the last question under `request_id` that was sent and has no answer yet."""
    right: HeldName | None = None
    task: asyncio.Task[object] | None = None
    is_abandoned: bool = False


class LeaseDesk:
    """All of it is called in the keeper's loop."""

    def __init__(self, transport: LeaseTransport) -> None:
        self.transport = transport
        self.names = NameRenewals(transport)
        self.keeper = Keeper(
            self.names, patience=Patience(events.RENEW_FAILED, first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=1.0)
        )
        self._is_broken = False
        self._turns = asyncio.Semaphore(transport.connections)
        self._is_closed = False
        self._at_work: dict[asyncio.Task[object], float] = {}
        """Until which local moment `close` is patient with each."""

    async def guard(self, name: str, loop: Coroutine[object, object, None]) -> None:
        """Run one of the two loops. A bug in it must leave nobody trusting a lease that is not watched any more."""
        try:
            await loop
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            self._is_broken = True
            logs.emit(events.INTERNAL_ERROR, where=name, exception=error)
            self._lose_all()

    def _lose_all(self) -> None:
        for held in self.names.all():
            held.lose("lease_untrusted")

    # --- asking

    async def ask(self, asking: Asking) -> HeldName:
        """Acquire, and renew from now on. Raises LeaseHeld, DatabaseUnavailable, ConfigError, ValueError."""
        asking.task = self._begin()
        asking.request_id = secrets.token_hex(16)
        try:
            if asking.is_abandoned:
                raise asyncio.CancelledError
            asking.right = await self._acquire(asking)
        except BaseException:
            if asking.asked_at is not None:
                self._go_on(self._undo(asking))
            raise
        self.names.add(asking.right)
        self.keeper.poke()
        return asking.right

    def abandon(self, asking: Asking) -> None:
        """Nobody waits for the answer any more."""
        asking.is_abandoned = True
        if asking.right is not None:
            self._go_on(self.give_back(asking.right))
        elif asking.task is not None:
            asking.task.cancel()

    async def _acquire(self, asking: Asking) -> HeldName:
        give_up_at = local_seconds() + asking.wait_seconds
        silent_since: float | None = None
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self._is_broken:
            asked_at = local_seconds()
            try:
                async with self._turn():
                    asked_at = local_seconds()
                    answer = await self._question(asking)
            except DATABASE_ERRORS as error:
                now = local_seconds()
                silent_since = asked_at if silent_since is None else silent_since
                if now >= max(give_up_at, silent_since + self.transport.silence_seconds):
                    raise DatabaseUnavailable(f"lease {asking.resource!r}: no answer: {safe_text(error)}") from error
                free_at = give_up_at
            else:
                silent_since = None
                now = local_seconds()
                match answer:
                    case HeldName() if answer.trusted_until > now:
                        return answer
                    case HeldName():
                        self._go_on(self.give_back(answer))
                        asking.request_id = secrets.token_hex(16)
                        free_at = now
                        if now >= give_up_at:
                            raise DatabaseUnavailable(
                                f"lease {asking.resource!r}: the answer took longer than a lease of {asking.ttl_seconds:g} s"
                            )
                    case Ended():  # it was ours, and over before we heard of it
                        asking.request_id = secrets.token_hex(16)
                        free_at = now
                    case Held():
                        free_in_seconds = answer.retry_after_ms / 1000
                        free_at = now + free_in_seconds if free_in_seconds else give_up_at
                        if now >= give_up_at:
                            raise LeaseHeld(
                                f"lease {asking.resource!r} is held by {answer.holder or 'somebody'}, for {free_in_seconds:g} s",
                                holder=answer.holder,
                                retry_after_seconds=free_in_seconds,
                            )
            # Whoever releases tells nobody: a NOTIFY would cost every release a lock that all commits share.
            pause_seconds = min(pause_seconds * 2, _LONGEST_PAUSE_SECONDS)
            until_seconds = min(free_at, give_up_at) - now if give_up_at > now else pause_seconds
            await asyncio.sleep(max(min(pause_seconds * random.uniform(0.5, 1), until_seconds), _LEAST_PAUSE_SECONDS))
        raise RuntimeError("nobody would renew it: Leases has been left meanwhile, or its keeper has failed (see the log)")

    async def _question(self, asking: Asking) -> HeldName | Held | Ended:
        """Ask once under the present request_id."""
        sent_at = local_seconds()
        before, asking.asked_at = asking.asked_at, sent_at
        try:
            answer = await self.transport.acquire(
                resource=asking.resource,
                holder=asking.holder,
                ttl_seconds=asking.ttl_seconds,
                request_id=asking.request_id,
                metadata=asking.metadata,
            )
        except ConnectFailed:  # not sent: nothing can have come of it
            asking.asked_at = before
            raise
        asking.asked_at = None
        if not isinstance(answer, Grant):
            return answer
        return HeldName(
            resource=asking.resource,
            holder=asking.holder,
            id=answer.id,
            fence=answer.fence,
            terms=terms_of(asking.ttl_seconds),
            asked_at=sent_at,
            remaining_seconds=answer.expires_in_ms / 1000,
        )

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """What waits in line has not been sent: its time does not run yet. Raises ConnectFailed when that takes too long."""
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise ConnectFailed(
                f"not sent within {_TURN_SECONDS:g} s: too much else is asked", sqlstate=None, refused=False
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    # --- giving back

    async def give_back(self, held: HeldName, *, awaited_seconds: float = math.inf) -> None:
        """Release, again and again until there is an answer or the lease has expired. Raises nothing. Somebody waits for it for so
        long; whom that has not helped, a longer wait in `close` would not help either."""
        self._begin(local_seconds() + awaited_seconds)
        self.names.remove(held)
        if held.lost == "lease_lost":
            return
        over_at = held.trusted_until + held.terms.margin_seconds
        pause_seconds = _FIRST_PAUSE_SECONDS
        while True:
            try:
                async with self._turn():
                    await self.transport.release(resource=held.resource, holder=held.holder, fence=held.fence)
                return
            except _TROUBLE as error:
                if isinstance(error, ConfigError) or local_seconds() >= over_at:
                    logs.emit(
                        events.LEASE_NOT_RELEASED,
                        lease=held.resource,
                        fence=held.fence,
                        error=error,
                        error_type=type(error).__name__,
                    )
                    return
            pause_seconds = min(pause_seconds * 2, _LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(pause_seconds * random.uniform(0.5, 1))

    async def _undo(self, asking: Asking) -> None:
        """The last question has no answer: ask again, as the same request, and give back what comes."""
        assert asking.asked_at is not None
        over_at = asking.asked_at + asking.ttl_seconds
        pause_seconds = _FIRST_PAUSE_SECONDS
        while local_seconds() < over_at:
            try:
                async with self._turn():
                    answer = await self._question(asking)
            except DATABASE_ERRORS:
                pause_seconds = min(pause_seconds * 2, _LONGEST_PAUSE_SECONDS)
                await asyncio.sleep(pause_seconds * random.uniform(0.5, 1))
            except (ConfigError, ValueError):
                return
            else:
                if isinstance(answer, HeldName):
                    await self.give_back(answer)
                return

    def _go_on(self, work: Coroutine[object, object, None]) -> None:
        """Finish this without anybody waiting for it, but `close`."""
        if self._is_closed:  # what is not given back expires
            work.close()
            return
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(work, name="lease desk")
        self._keep(task, math.inf)

    def _begin(self, patient_until: float = math.inf) -> asyncio.Task[object]:
        """The running task, for which `close` waits from now on."""
        task = asyncio.current_task()
        assert task is not None
        self._keep(task, patient_until)
        return task

    def _keep(self, task: asyncio.Task[object], patient_until: float) -> None:
        self._at_work[task] = patient_until
        task.add_done_callback(lambda ended: self._at_work.pop(ended, None))

    async def close(self, limit_seconds: float) -> None:
        """Whoever still holds a lease is told that nobody renews it any more; what is being given back has so much time."""
        self._is_broken = True
        self._lose_all()
        limit = local_seconds() + limit_seconds
        while patient := {one: min(until, limit) for one, until in self._at_work.items() if min(until, limit) > local_seconds()}:
            await asyncio.wait(patient, timeout=min(patient.values()) - local_seconds())  # who asks looks up every half second
        self._is_closed = True
        for task in self._at_work:
            task.cancel()
        await self.ended(limit_seconds)  # what they have opened is closed as they end

    async def ended(self, limit_seconds: float) -> None:
        """Whatever is under way has ended, or the time is over."""
        until = local_seconds() + limit_seconds
        while self._at_work and (left_seconds := until - local_seconds()) > 0:
            await asyncio.wait(set(self._at_work), timeout=left_seconds)
