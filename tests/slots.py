"""The slots of the generator as one instance of it sees and produces them, without its loop."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tests.waiting import await_for
from worker.clock import local_seconds
from worker.generation import NOTHING, Wish
from worker.store import generating, leases
from worker.store.connection import Database
from worker.store.generating import Production

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Instance:
    """A connection that believes it has the lease: the fixture `instance` has it, and a slot a second."""

    def __init__(self, database: Database, connection: Any) -> None:
        self.database = database
        self.db = connection
        self.holder = "test"
        self.fence = 0
        self._aged = (0.0, 0.0)

    async def acquire(self, ttl_seconds: float = 60) -> None:
        taken = await leases.take(self.db, self.database, resource=generating.NAME, holder=self.holder, ttl_seconds=ttl_seconds)
        assert isinstance(taken, leases.Grant)
        self.fence = taken.fence

    async def start(self, wish: Wish = NOTHING) -> generating.GeneratorStatus:
        return await generating.start(self.db, self.database, wish)

    async def produce(self, *, late_seconds: float = 60, most: int = 1000) -> Production:
        return await generating.produce(
            self.db, self.database, holder=self.holder, fence=self.fence, late_seconds=late_seconds, most=most
        )

    async def status(self) -> generating.GeneratorStatus:
        return await generating.status(self.db, self.database)

    async def age(self, seconds: float) -> None:
        """As if the last slot had been settled so many seconds ago."""
        self._aged = (seconds, local_seconds())
        await self.db.execute("UPDATE generators SET last_slot_at = now() - $1 * interval '1 second'", seconds)

    def seconds_since(self) -> float:
        """By now: time goes on while the test runs."""
        seconds, at = self._aged
        return seconds + local_seconds() - at

    def since_aged(self) -> range:
        """How many slots a second apart there can be since then."""
        return range(int(self._aged[0]), int(self.seconds_since()) + 2)

    async def slots(self) -> list[datetime]:
        """The moments of all slots that have a job, in order."""
        rows = await self.db.fetch("SELECT idempotency_key AS key FROM jobs ORDER BY id")
        return [slot_of(row["key"]) for row in rows]


def slot_of(key: str) -> datetime:
    name, _, moment = key.partition(":")
    assert name == "generator"
    return datetime.fromisoformat(moment)


async def due(instance: Instance) -> Production:
    """What is produced as soon as a slot is due."""

    async def produced() -> Production | None:
        made = await instance.produce()
        return made if made.produced else None

    made = await await_for(produced)
    assert made is not None
    return made


async def another(instance: Instance) -> Instance:
    other = Instance(instance.database, await instance.database.connect("test"))
    other.fence = instance.fence
    return other
