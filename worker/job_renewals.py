"""What the keeper of a worker process keeps: the leases of all its jobs, with one statement, and its presence.

What the answer leaves out is either lost (owner or fence moved on, cancelled, expired: the attempt is told at once) or its row is
locked: by somebody (it is tried again soon, and trusted only as long as before), or by the transaction of its own handler, which
needs no renewal. Should the server have ended that one, while the handler waits for a connection that has gone mute, the row is
there to be renewed again, or says that it has passed on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from worker.clock import local_seconds
from worker.domain import CancelReason, Lease
from worker.holding import Held, Holdings, Phase
from worker.measures import POOL_RIGHTS
from worker.store import leasing
from worker.store.connection import DATABASE_ERRORS, sqlstate

if TYPE_CHECKING:
    from worker.store.connection import Database, Lane
    from worker.store.leasing import Key, Presence, Standing

PRESENCE_SECONDS = 10.0
"""The presence is written at least this often, and lives for no more than six times as long, however long the leases are."""
_RETRIES_A_RENEWAL = 4


class JobRenewals:
    """`Renewals` of the jobs in `holdings`."""

    def __init__(
        self,
        database: Database,
        lane: Lane,
        *,
        presence: Presence,
        lease: Lease,
        holdings: Holdings,
        renew_seconds: float,
        statement_seconds: float,
        busy: Callable[[], int],
        hungry: Callable[[], bool],
        health: Callable[[], str],
    ) -> None:
        self._database = database
        self._lane = lane
        self._presence = presence
        self._presence_seconds = min(lease.seconds, PRESENCE_SECONDS * 6)
        self._lease = lease
        self._holdings = holdings
        self._renew_seconds = renew_seconds
        self._statement_seconds = statement_seconds
        self._busy = busy
        self._hungry = hungry
        self._health = health
        self._renew_at = 0.0
        self._renewed_at = 0.0
        """Local moment before the last beat that has renewed everything."""
        self._outlives_leases = False
        self.has_answer = True
        self._is_present = True
        self._presence_turn = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._holdings)

    @property
    def beat_seconds(self) -> float:
        return self._statement_seconds * 2 + self._database.connect_timeout_seconds

    def retry_seconds(self) -> float:
        return self._renew_seconds / 2

    def give_up(self) -> None:
        self._lane.drop()
        self._renew_at = 0.0
        self.has_answer = False

    async def beat(self, *, poked: bool) -> float:
        """One presence, and one renewal of everything held if it is time or somebody asked for it."""
        started_at = local_seconds()
        renews = poked or started_at >= self._renew_at
        again = await self._write(renews=renews)
        if renews:
            self._renewed_at = started_at
            self._renew_at = started_at + self._renew_seconds
        next_at = min(self._renew_at, started_at + PRESENCE_SECONDS)
        if again:
            self._renew_at = 0.0
            now = local_seconds()
            next_at = now + min(next_at - now, self._renew_seconds / _RETRIES_A_RENEWAL) * random.uniform(0.7, 1)
        return next_at

    async def _write(self, *, renews: bool) -> bool:
        """True if something is still to be written soon.

        The presence comes first, so that it never outlives the leases it stands for: a job is reaped only after its process counts
        as lost. But somebody who locks it must not keep anything from being renewed.
        """
        refused: BaseException | None = None
        try:
            async with self._presence_turn:
                if self._is_present:
                    await self._write_presence(self._presence_lives_seconds(renews=renews))
        except DATABASE_ERRORS as error:
            refused = error
            if sqlstate(error) is None:
                self._lane.drop()  # no answer: the next statement needs another connection
        held = self._to_renew() if renews else {}
        if not held:
            if refused is not None:
                raise refused
            return False
        connection = await self._lane.get()
        sent_at = local_seconds()
        async with asyncio.timeout(self._statement_seconds):
            renewed = await leasing.renew(
                connection,
                self._database,
                held=list(held),
                owner=self._presence.id,
                lease_seconds=self._lease.seconds,
            )
        self.has_answer = True
        POOL_RIGHTS.renew_seconds.observe(local_seconds() - sent_at)
        trusted_until = self._lease.trusted_until(sent_at)
        missing = []
        for key, one in held.items():
            if key in renewed:
                one.trusted_until = trusted_until
            elif one.phase is not Phase.FINISHED:
                missing.append(key)
        if not missing:
            return refused is not None
        async with asyncio.timeout(self._statement_seconds):
            standings = await leasing.look(connection, self._database, held=missing, owner=self._presence.id)
            expired = [
                key
                for key, standing in standings.items()
                if held[key].phase is Phase.OWN_TRANSACTION and standing.mine and not standing.live
            ]
            unlocked = (
                await leasing.unlocked(connection, self._database, held=expired, owner=self._presence.id) if expired else set()
            )
        is_locked = self._judge({key: held[key] for key in missing}, standings, unlocked, sent_at + 2 * self._renew_seconds)
        return is_locked or refused is not None

    def _presence_lives_seconds(self, *, renews: bool) -> float:
        """No longer than the leases that it stands for; a beat that renews nothing leaves them as they are."""
        if renews or self._outlives_leases:
            return self._presence_seconds
        return min(self._presence_seconds, self._lease.trusted_until(self._renewed_at) - local_seconds())

    async def _write_presence(self, lives_seconds: float) -> None:
        connection = await self._lane.get()
        async with asyncio.timeout(self._statement_seconds / 2):
            await leasing.write_presence(
                connection,
                self._database,
                self._presence,
                busy=self._busy(),
                hungry=self._hungry(),
                health=self._health(),
                lease_seconds=lives_seconds,
            )
        self.has_answer = True

    def _to_renew(self) -> dict[tuple[int, int], Held]:
        """Everything held, but for handlers past their own time-out."""
        now = local_seconds()
        return {
            one.key: one
            for one in self._holdings
            if one.lost is None
            and not (
                one.phase in (Phase.RUNNING, Phase.OWN_TRANSACTION)
                and one.renew_until is not None
                and now > one.renew_until + self._lease.margin_seconds
            )
        }

    def _judge(self, missing: dict[Key, Held], standings: dict[Key, Standing], unlocked: set[Key], locked_until: float) -> bool:
        """Tell the attempts whose lease is over; True if the rows of others are merely locked, by somebody else.

        `unlocked`: of those in transactions of their own whose lease has expired, the ones whose transaction is over.
        """
        locked = False
        for key, one in missing.items():
            standing = standings.get(key)
            if one.phase is Phase.FINISHED:
                continue  # it has ended while we looked
            is_out_of_sight = standing is None or standing.mine or standing.completed
            if one.phase is Phase.OWN_TRANSACTION and key not in unlocked and is_out_of_sight:
                one.locked_until = locked_until  # under the lock of its own transaction, or completed by it
                continue
            if standing is not None and standing.mine and standing.live:
                locked = True
            else:
                reason: CancelReason = "cancelled" if standing is not None and standing.state == "cancelled" else "lease_lost"
                POOL_RIGHTS.lost_leases += reason == "lease_lost"
                one.lose(reason)
        return locked

    def outlive_leases(self) -> None:
        """The process ends and leaves leases to expire (call it in the keeper's loop, and poke): from now on its presence is longer
        than they are, so that they are reaped as lost, not as a crash's victims."""
        self._outlives_leases = True
        self._presence_seconds = self._lease.seconds * 2 + PRESENCE_SECONDS

    async def end_presence(self) -> None:
        """Write no presence from now on (call it in the keeper's loop); returns when none is on its way any more."""
        self._is_present = False
        async with self._presence_turn:
            pass
