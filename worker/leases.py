"""Leases: named leases for any program, renewed for as long as a block runs.

    async with Leases(dsn) as leases:
        async with leases.hold("nightly", ttl_seconds=30, wait_seconds=5) as held:
            ...                                                      # held.fence goes with everything that is written
            held.ensure_lease(for_seconds=10)                        # right before an external side effect

Renewals, acquisitions and releases run in a thread of their own, so that a block that keeps its event loop busy loses nothing, and
an acquisition whose caller was cancelled still finds out whether it has something to give back. The block itself is a part of the
caller's task: it is cancelled when the lease is lost or no longer trusted, and the lease is released only after it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Literal, Self, TypeVar

from worker.cancellation import is_cancelled
from worker.clock import local_seconds
from worker.domain import CancelReason, clean_text
from worker.errors import LeaseLost
from worker.holding import HeldName
from worker.lease_desk import Asking, LeaseDesk
from worker.lease_terms import (
    DEFAULT_TTL_SECONDS,
    HOST_CHARACTERS,
    MAX_HOLDER_BYTES,
    MAX_RESOURCE_BYTES,
    check_name,
    check_ttl,
    check_wait,
    metadata_text,
)
from worker.lease_transport import DatabaseTransport, LeaseTransport
from worker.rights import RightsThread
from worker.store.connection import Database

T = TypeVar("T")

_RELEASE_SECONDS = 5.0
_LOST_RELEASE_SECONDS = 0.2
_CLOSE_SECONDS = 1.0

_held_here: contextvars.ContextVar[tuple[Hold, ...]] = contextvars.ContextVar("held_here", default=())


class HeldLease:
    """A lease while its block runs. It stays trusted for as long as renewals succeed."""

    def __init__(self, right: HeldName) -> None:
        self._right = right
        self._is_over = False
        """Its block has ended: from before it is released, whatever a renewal under way still says."""
        self.name = right.resource
        self.holder = right.holder
        self.fence = right.fence
        """The fencing token: it rises over all leases and jobs. Whoever guards a resource refuses a lower one (`check_fence`)."""

    def __repr__(self) -> str:
        return f"<HeldLease {self.name!r} fence {self.fence}>"

    def remaining_seconds(self) -> float:
        """How long the lease may still be trusted without another renewal; 0 once it is lost or its block has ended."""
        if self._is_over or self._right.lost is not None:
            return 0.0
        return max(self._right.trusted_until - local_seconds(), 0.0)

    def ensure_lease(self, for_seconds: float = 0) -> None:
        """Raise LeaseLost unless the lease is trusted for that long. Call it right before an external side effect."""
        doubt, lost = self._right.doubt(for_seconds), self._right.lost
        if lost is None and self._is_over:
            doubt, lost = "its block has ended", "lease_lost"
        if doubt is not None:
            raise LeaseLost(f"lease {self.name!r}: {doubt}", _reason(lost or "lease_untrusted"))


class Leases:
    """The named leases of one database, or of a `worker serve`. Use it with `async with`, and `hold` inside.

    `dsn`: a database whose schema is applied; or `url` and `bearer`, the address and a token of `worker serve`. `holder`: who
    holds, unless `hold` says otherwise; by default the host's name and eight random digits. `pooler="transaction"`: the dsn leads
    to a connection pooler in transaction mode, where sessions cannot be set: give the role their time limits (see the README).
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        schema: str = "public",
        holder: str | None = None,
        url: str | None = None,
        bearer: str | None = None,
        pooler: Literal["transaction"] | None = None,
        transport: Callable[[], LeaseTransport] | None = None,
    ) -> None:
        if [dsn, url, transport].count(None) != 2:
            raise TypeError("Leases: the dsn of a database or the url of a lease service is needed, not both")
        if pooler not in (None, "transaction") or (pooler is not None and dsn is None):
            raise TypeError("Leases: pooler is 'transaction' or None, and belongs to a dsn")
        if dsn is not None:
            database = Database(dsn, schema=schema, pooler=pooler is not None, variable="Leases: dsn")
            transport = functools.partial(DatabaseTransport, database)
        elif url is not None:
            transport = _http_transport(url, bearer)
        assert transport is not None
        self._make_transport = transport
        drawn = f"{clean_text(socket.gethostname(), HOST_CHARACTERS)}-{secrets.token_hex(4)}"
        self.holder = drawn if holder is None else check_name("holder", holder, MAX_HOLDER_BYTES)
        self.where = ""
        """Which service it is, once entered."""
        self._rights: RightsThread | None = None
        self._desk: LeaseDesk | None = None

    async def __aenter__(self) -> Self:
        if self._rights is not None:
            raise RuntimeError("Leases can be entered once")
        transport = self._make_transport()
        self._rights = rights = RightsThread()
        rights.start()
        self.where = transport.where
        self._desk = desk = LeaseDesk(transport)
        rights.spawn("keeper", lambda: desk.guard("keeper", desk.keeper.run()))
        rights.spawn("trust", lambda: desk.guard("trust", desk.names.watch_trust()))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        rights, desk = self._rights, self._desk
        assert rights is not None
        assert desk is not None
        self._desk = None

        async def close() -> None:
            await desk.close(_CLOSE_SECONDS)
            await rights.cancel_all()
            await desk.transport.close(_CLOSE_SECONDS)
            await desk.ended(_CLOSE_SECONDS)  # what waited for a connection that is closed now

        try:
            with contextlib.suppress(TimeoutError):  # it is a daemon thread, and what it holds expires
                await rights.run(close(), timeout_seconds=_CLOSE_SECONDS * 5)
        finally:
            rights.stop(timeout_seconds=_CLOSE_SECONDS)

    def hold(
        self,
        name: str,
        *,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        wait_seconds: float = 0,
        holder: str | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> Hold:
        """Hold the lease for the block: `async with leases.hold("nightly") as held`.

        Entering raises LeaseHeld when somebody else has it for the whole `wait_seconds`, DatabaseUnavailable when there was no
        answer, RuntimeError when the block stands inside another one that holds the same name or Leases is left meanwhile,
        ValueError for terms that are refused (names of 1 to 512 bytes, 1 s to 24 h). Leaving it after a loss raises LeaseLost,
        unless the block ended by an exception of its own or was cancelled by somebody else.
        """
        metadata_text(metadata)
        asking = Asking(
            resource=check_name("name", name, MAX_RESOURCE_BYTES),
            holder=self.holder if holder is None else check_name("holder", holder, MAX_HOLDER_BYTES),
            ttl_seconds=check_ttl(ttl_seconds),
            wait_seconds=check_wait(wait_seconds),
            metadata=metadata,
        )
        return Hold(self, asking)

    def _in_thread(self, work: Callable[[LeaseDesk], Coroutine[object, object, T]]) -> asyncio.Future[T]:
        """Start this in the thread. Cancelling whoever awaits the answer behind a shield leaves it alone."""
        if self._rights is None or self._desk is None:
            raise RuntimeError("leases.hold: enter `async with Leases(…)` first, and stay inside")
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(self._desk), self._rights.loop))

    def _abandon(self, asking: Asking) -> None:
        if self._rights is not None and self._desk is not None:
            self._rights.call(functools.partial(self._desk.abandon, asking))


class Hold:
    """One `async with leases.hold(…)`: the block is a part of the task that enters it."""

    def __init__(self, leases: Leases, asking: Asking) -> None:
        self._leases = leases
        self._asking = asking
        self._right: HeldName | None = None
        self._held: HeldLease | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelling_before = 0
        self._has_cancelled = False

    async def __aenter__(self) -> HeldLease:
        if self._task is not None:
            raise RuntimeError("leases.hold: enter it once; call hold again for another time")
        self._task = task = asyncio.current_task()
        assert task is not None
        self._refuse_nesting()
        answer = self._leases._in_thread(lambda desk: desk.ask(self._asking))
        try:
            self._right = right = await asyncio.shield(answer)
        except asyncio.CancelledError:
            # The answer may be on its way, or may never come: the thread finds out, and gives back what it got.
            self._leases._abandon(self._asking)
            if not is_cancelled():  # the thread's own has come through: it has ended with the question open
                raise RuntimeError(f"lease {self._asking.resource!r} was not acquired: Leases has been left meanwhile") from None
            raise
        self._cancelling_before = task.cancelling()
        right.on_lost = functools.partial(self._tell, asyncio.get_running_loop())
        if right.lost is not None:
            right.on_lost(right.lost)
        _held_here.set((*_held_here.get(), self))
        self._held = held = HeldLease(right)
        return held

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        right, held, task = self._right, self._held, self._task
        assert right is not None
        assert held is not None
        assert task is not None
        if right.doubt(0) is not None:
            right.lose("lease_untrusted")
        lost = right.lost
        held._is_over = True
        self._right = None  # from now on nobody cancels
        _held_here.set(tuple(hold for hold in _held_here.get() if hold is not self))
        is_ours = not self._has_cancelled or task.uncancel() <= self._cancelling_before
        await self._give_back(right)
        if lost is not None and (error is None or (isinstance(error, asyncio.CancelledError) and self._has_cancelled and is_ours)):
            raise LeaseLost(f"lease {right.resource!r}: {lost}", _reason(lost)) from error

    async def _give_back(self, right: HeldName) -> None:
        """Release, and wait for it a while; after that, and when this task is cancelled, the thread goes on alone."""
        limit_seconds = _RELEASE_SECONDS if right.lost is None else _LOST_RELEASE_SECONDS
        try:
            answer = self._leases._in_thread(lambda desk: desk.give_back(right, awaited_seconds=limit_seconds))
        except RuntimeError:  # Leases has been left meanwhile: it expires
            return
        await asyncio.wait({answer}, timeout=limit_seconds)
        if answer.done() and not answer.cancelled():  # it is cancelled when Leases is being left meanwhile
            answer.result()

    def _refuse_nesting(self) -> None:
        for outer in _held_here.get():
            if outer._right is not None and outer._key == self._key:
                raise RuntimeError(f"lease {self._asking.resource!r} is held by an outer block already: it would wait for itself")

    @property
    def _key(self) -> tuple[str, str]:
        return self._leases.where, self._asking.resource

    def _tell(self, loop: asyncio.AbstractEventLoop, _reason: CancelReason) -> None:
        """Called by the keeper's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the block with it
            loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._right is not None and self._task is not None and not self._has_cancelled:
            self._has_cancelled = True
            self._task.cancel(f"lease {self._asking.resource!r}: {self._right.lost}")


def _reason(reason: CancelReason) -> Literal["lease_lost", "lease_untrusted"]:
    return "lease_untrusted" if reason == "lease_untrusted" else "lease_lost"


def _http_transport(url: str, bearer: str | None) -> Callable[[], LeaseTransport]:
    try:
        from worker.lease_http import HttpTransport
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("worker"):
            raise
        raise ImportError("Leases(url=…) needs the extra http: pip install 'reliable-worker[http]'") from None
    return functools.partial(HttpTransport, url, bearer=bearer)
