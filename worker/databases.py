"""The databases of a Worker: where everything goes, and where LISTEN goes, which differ where a pooler stands in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from worker.clock import local_seconds
from worker.drain import close_quietly
from worker.reaching import reach_database
from worker.store import schema, waiting
from worker.store.connection import Database, SessionLimits

if TYPE_CHECKING:
    from pydantic import SecretStr

    from worker.settings import Settings

_LET_GO_SECONDS = 0.1


class Databases:
    """Opens nothing before `reach`."""

    def __init__(self, settings: Settings) -> None:
        of = settings
        self._settings = settings
        self._limits = SessionLimits.of(lease_seconds=of.lease_seconds, query_timeout_seconds=of.query_timeout_seconds)
        self.main = self._database(of.database_url, "DATABASE_URL", pooler=of.pooler == "transaction")
        self.listen = self.main
        if of.listen_database_url is not None:
            self.listen = self._database(of.listen_database_url, "WORKER_LISTEN_DATABASE_URL", pooler=False)
        self.has_spare_connection = False
        """Whether the server has room for a second committer; known once it was reached."""

    def _database(self, dsn: SecretStr | None, variable: str, *, pooler: bool) -> Database:
        return Database(
            None if dsn is None else dsn.get_secret_value(),
            schema=self._settings.schema_name,
            connect_timeout_seconds=self._settings.connect_timeout_seconds,
            limits=self._limits,
            pooler=pooler,
            variable=variable,
        )

    async def reach(self, stop: asyncio.Event, *, connections_beside: int, on_waiting: Callable[[str], None]) -> None:
        """Until the main one answers and fits, or `stop` is set: a host that answers nothing must not hold that up.

        `connections_beside`: what else in this process connects to it. Raises DatabaseUnavailable after CONNECT_WAIT_SECONDS,
        ConfigError when schema, grants or session do not fit.
        """
        reaching = asyncio.create_task(
            reach_database(
                lambda: self._verify(connections_beside),
                wait_seconds=self._settings.connect_wait_seconds,
                on_waiting=on_waiting,
            ),
            name="reach the database",
        )
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({reaching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            reaching.cancel()
            await asyncio.wait({reaching}, timeout=_LET_GO_SECONDS)
        if reaching.done() and not reaching.cancelled():
            reaching.result()

    async def _verify(self, connections_beside: int) -> None:
        of = self._settings
        connection = await self.main.connect("start")
        try:
            async with asyncio.timeout(of.query_timeout_seconds * 2):
                await schema.verify(connection, of.schema_name)
                await waiting.verify_session(connection, self.main)
                lanes = waiting.LANES if self.listen is self.main else waiting.LANES - 1
                self.has_spare_connection = await waiting.verify_room(
                    connection, self.main, pool_size=of.pool_size, lanes=lanes, beside=connections_beside
                )
        finally:
            await close_quietly(connection, local_seconds() + 1.0)
