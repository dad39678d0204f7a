"""The keeper of named leases, without a database: when it renews, and when it says that the database is back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.inprocess import listening
from tests.waiting import await_for
from worker import events
from worker.clock import local_seconds
from worker.holding import HeldName
from worker.keeper import Keeper
from worker.lease_transport import Renewed
from worker.name_renewals import NameRenewals, terms_of
from worker.patience import Patience


class Fickle:
    """A transport that answers, or does not."""

    answer_seconds = 60.0
    is_away = False

    async def renew_many(self, held: Sequence[HeldName], *, limit_seconds: float) -> Renewed:
        if self.is_away:
            raise ConnectionError("away")
        return Renewed({one.key: 60_000 for one in held}, frozenset())

    def drop(self) -> None: ...


async def test_a_database_that_nobody_asks_is_not_called_restored() -> None:
    """The last lease has gone while it was away: the beats go on, with nothing to ask."""
    transport: Any = Fickle()
    names = NameRenewals(transport)
    keeper = Keeper(names, patience=Patience(events.RENEW_FAILED, first_seconds=0.01, longest_seconds=0.01))
    due = {"holder": "me", "id": 1, "terms": terms_of(60), "asked_at": 0.0, "remaining_seconds": 60.0}

    async def beaten() -> None:
        keeper.poke()
        await await_for(lambda: not keeper._poked.is_set())

    with listening() as log:
        running = asyncio.create_task(keeper.run())
        transport.is_away = True
        names.add(last := HeldName(resource="last", fence=1, **due))  # type: ignore[arg-type]
        await beaten()
        await await_for(lambda: log.find(events.DATABASE_LOST))
        names.remove(last)
        await beaten()
        await beaten()
        assert (keeper.database_up, log.find(events.DATABASE_RESTORED)) == (False, [])
        transport.is_away = False
        names.add(HeldName(resource="next", fence=2, **due))  # type: ignore[arg-type]
        await beaten()
        await await_for(lambda: log.find(events.DATABASE_RESTORED))
        running.cancel()
        await asyncio.wait({running})


async def test_a_lease_that_was_heard_of_late_is_renewed_at_once() -> None:
    """The first answer to the acquisition was lost, and most of the lease was over when the second one came."""
    transport: Any = Fickle()
    names = NameRenewals(transport)
    now = local_seconds()
    names.add(
        held := HeldName(resource="r", holder="me", id=1, fence=1, terms=terms_of(60), asked_at=now, remaining_seconds=10),
    )
    assert held.trusted_until == now + 10 - 6
    await names.beat(poked=True)
    assert held.trusted_until >= now + 60 - 6
