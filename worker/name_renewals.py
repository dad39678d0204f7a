"""What the keeper of `Leases` keeps: all named leases of a process, and the trust in them.

Each is due at a third of its length; who is due takes along whoever has a quarter of its interval behind it, so that after two
rounds the renewals of many leases are one statement.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from worker.clock import local_seconds
from worker.domain import Lease
from worker.holding import HeldName

if TYPE_CHECKING:
    from worker.lease_transport import LeaseTransport

RENEWALS_A_LEASE = 3
MARGINS_A_LEASE = 10
_RETRIES_A_RENEWAL = 4
_TAKEN_ALONG = 0.25
_STATEMENT_SECONDS = 3.0
_IDLE_SECONDS = 60.0
_LOOK_SECONDS = 1.0


def terms_of(ttl_seconds: float) -> Lease:
    """How long a lease of this length is believed."""
    return Lease(ttl_seconds, ttl_seconds / MARGINS_A_LEASE)


class NameRenewals:
    """`Renewals` of named leases. All of it is called in the keeper's loop; poke the keeper after `add`."""

    def __init__(self, transport: LeaseTransport) -> None:
        self._transport = transport
        self._held: dict[tuple[int, int], HeldName] = {}
        self._retry: set[tuple[int, int]] = set()
        self.has_answer = True
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: HeldName) -> None:
        """Renew it from now on."""
        self._held[held.key] = held
        self._changed.set()

    def remove(self, held: HeldName) -> None:
        """Renew it no more."""
        self._held.pop(held.key, None)
        self._retry.discard(held.key)

    def all(self) -> list[HeldName]:
        return list(self._held.values())

    @property
    def beat_seconds(self) -> float:
        return self._transport.answer_seconds

    def retry_seconds(self) -> float:
        return min(map(_renew_seconds, self._held.values()), default=_IDLE_SECONDS) / _RETRIES_A_RENEWAL

    def give_up(self) -> None:
        self._transport.drop()
        self._retry.update(self._held)
        self.has_answer = False

    async def beat(self, *, poked: bool) -> float:
        """One statement for all that are due, if any is. `poked` changes nothing: what is new is not due."""
        sent_at = local_seconds()
        if self._next_at() <= sent_at:
            await self._renew([one for one in self.all() if self._due_at(one, share=_TAKEN_ALONG) <= sent_at], sent_at)
        if not self._retry:
            return self._next_at()
        others = [self._due_at(one) for key, one in self._held.items() if key not in self._retry]
        return min([*others, local_seconds() + self.retry_seconds() * random.uniform(0.7, 1)])

    def _next_at(self) -> float:
        return min(map(self._due_at, self._held.values()), default=local_seconds() + _IDLE_SECONDS)

    async def _renew(self, due: list[HeldName], sent_at: float) -> None:
        limit_seconds = min(_STATEMENT_SECONDS, min(_renew_seconds(one) for one in due) / 2)
        renewed = await self._transport.renew_many(due, limit_seconds=limit_seconds)
        self.has_answer = True
        for one in due:
            self._retry.discard(one.key)
            if local_seconds() >= one.trusted_until:  # this thread was frozen: the holder may have been stopped already
                one.lose("lease_untrusted")
            if one.key in renewed.expires_in_ms:
                one.renewed(sent_at, renewed.expires_in_ms[one.key] / 1000)
            elif one.key in renewed.lost:
                self.remove(one)
                one.lose("lease_lost")
            elif one.key in self._held and one.key not in renewed.unasked:
                self._retry.add(one.key)

    def _due_at(self, one: HeldName, *, share: float = 1.0) -> float:
        """The local moment when this share of its interval is over."""
        return 0.0 if one.key in self._retry else one.begun_at + _renew_seconds(one) * share

    async def watch_trust(self) -> None:
        """Tell each holder when its lease is no longer trusted, until cancelled. It is renewed nevertheless, for as long as the
        database says that it is ours: what the holder cleans up is protected by it."""
        while True:
            self._changed.clear()
            now = local_seconds()
            for one in self._held.values():
                if now >= one.trusted_until:
                    one.lose("lease_untrusted")
            trusted = [one.trusted_until for one in self._held.values() if one.lost is None]
            # Now and then in any case: the host may sleep, which timers do not count.
            pause_seconds = min(min(trusted) - now, _LOOK_SECONDS) if trusted else _IDLE_SECONDS
            try:
                async with asyncio.timeout(max(pause_seconds, 0)):
                    await self._changed.wait()
            except TimeoutError:
                pass


def _renew_seconds(one: HeldName) -> float:
    return one.terms.seconds / RENEWALS_A_LEASE
