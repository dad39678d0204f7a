"""The keeper: one a process, in a thread of its own, it renews every lease the process holds with one statement an interval.

    trusted_until = local moment before sending + min(T, remaining) - M

It writes that moment into each lease; the attempt that runs under it stops its handler when the moment has passed. What the answer
leaves out is either lost (owner or fence moved on, cancelled, expired: the attempt is told at once) or its row is locked by
somebody (it is tried again soon, and trusted only as long as before). An error or a time-out means nothing is known: try again,
with jitter, until the trust runs out by itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from worker import events, logs
from worker.clock import local_seconds
from worker.domain import CancelReason, Lease
from worker.holding import Held, Holdings, Phase
from worker.patience import Patience
from worker.store import leasing
from worker.store.connection import DATABASE_ERRORS, sqlstate

if TYPE_CHECKING:
    from worker.store.connection import Database, Lane
    from worker.store.leasing import Presence, Standing

ROLE = "leases"
LEASE_SETTINGS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_hashjoin": "off"}
PRESENCE_SECONDS = 10.0
"""The presence is written at least this often, and lives for no more than six times as long, however long the leases are."""
_RETRIES_A_RENEWAL = 4


class Keeper:
    """Runs in the rights thread's loop."""

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
        on_return: Callable[[], None],
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
        self._on_return = on_return
        self._patience = Patience(
            events.RENEW_FAILED, first_seconds=min(renew_seconds / 16, 1.0), longest_seconds=min(renew_seconds / 2, 5.0)
        )
        self._poked = asyncio.Event()
        self._lost_at: float | None = None
        self.answered_at = local_seconds()
        """When the database last answered a renewal."""

    @property
    def database_up(self) -> bool:
        return self._lost_at is None

    def poke(self) -> None:
        """Renew now (call it in the keeper's loop): somebody cancelled a job, or another loop has lost the database."""
        self._poked.set()

    async def run(self) -> None:
        """Renew until cancelled. Ends last at a shutdown: renewals go on until nothing is held."""
        renew_at = 0.0
        while True:
            renews = self._poked.is_set() or local_seconds() >= renew_at
            self._poked.clear()
            started_at = local_seconds()
            try:
                async with asyncio.timeout(self._statement_seconds * 2 + self._database.connect_timeout_seconds):
                    again = await self._beat(renews=renews)
            except DATABASE_ERRORS as error:
                self._lane.drop()
                self._note_loss(error)
                renew_at = 0.0
                pause_seconds = self._patience.delay_seconds(error, held=len(self._holdings))
            else:
                self._patience.reset()
                self._note_return()
                if renews:
                    renew_at = started_at + self._renew_seconds
                pause_seconds = min(renew_at, started_at + PRESENCE_SECONDS) - local_seconds()
                if again:
                    renew_at = 0.0
                    pause_seconds = min(pause_seconds, self._renew_seconds / _RETRIES_A_RENEWAL) * random.uniform(0.7, 1)
            try:
                async with asyncio.timeout(max(pause_seconds, 0.01)):
                    await self._poked.wait()
            except TimeoutError:
                pass

    async def _beat(self, *, renews: bool) -> bool:
        """One presence, one renewal of everything held; True if something is still to be written soon.

        The presence comes first, so that it never outlives the leases it stands for: a job is reaped only after its process
        counts as lost. But somebody who locks it must not keep anything from being renewed.
        """
        refused: BaseException | None = None
        try:
            connection = await self._lane.get()
            async with asyncio.timeout(self._statement_seconds / 2):
                await leasing.write_presence(
                    connection,
                    self._database,
                    self._presence,
                    busy=self._busy(),
                    hungry=self._hungry(),
                    health=self._health(),
                    lease_seconds=self._presence_seconds,
                )
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
        self.answered_at = local_seconds()
        trusted_until = self._lease.trusted_until(sent_at)
        missing = []
        for key, one in held.items():
            if key in renewed:
                one.trusted_until = trusted_until
            elif one.phase not in (Phase.FINISHED, Phase.OWN_TRANSACTION):
                missing.append(key)
        if not missing:
            return refused is not None
        async with asyncio.timeout(self._statement_seconds):
            standings = await leasing.look(connection, self._database, held=missing, owner=self._presence.id)
        return self._judge({key: held[key] for key in missing}, standings) or refused is not None

    def _to_renew(self) -> dict[tuple[int, int], Held]:
        """Everything held, but for handlers past their own time-out and jobs whose row their own transaction has locked."""
        now = local_seconds()
        return {
            one.key: one
            for one in self._holdings
            if one.lost is None
            and one.phase is not Phase.OWN_TRANSACTION
            and not (
                one.phase is Phase.RUNNING and one.renew_until is not None and now > one.renew_until + self._lease.margin_seconds
            )
        }

    def _judge(self, missing: dict[tuple[int, int], Held], standings: dict[tuple[int, int], Standing]) -> bool:
        """Tell the attempts whose lease is over; True if the rows of others are merely locked."""
        locked = False
        for key, one in missing.items():
            standing = standings.get(key)
            if standing is not None and standing.mine and standing.live:
                locked = True
            elif one.phase not in (
                Phase.FINISHED,
                Phase.OWN_TRANSACTION,
            ):  # it may have ended while we looked
                reason: CancelReason = "cancelled" if standing is not None and standing.state == "cancelled" else "lease_lost"
                one.lose(reason)
        return locked

    def _note_loss(self, error: BaseException) -> None:
        if self._lost_at is None:
            self._lost_at = local_seconds()
            logs.emit(events.DATABASE_LOST, error=error, error_type=type(error).__name__)

    def _note_return(self) -> None:
        self.answered_at = local_seconds()
        if self._lost_at is not None:
            logs.emit(events.DATABASE_RESTORED, lost_seconds=round(self.answered_at - self._lost_at, 3))
            self._lost_at = None
            self._on_return()

    def outlive_leases(self) -> None:
        """The process ends and leaves leases to expire (call it in the keeper's loop): from now on its presence is longer than they
        are, so that they are reaped as lost, not as a crash's victims."""
        self._presence_seconds = self._lease.seconds * 2 + PRESENCE_SECONDS
        self.poke()
