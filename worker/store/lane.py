"""One connection for one loop, so that no handler can starve claims, renewals, commits or LISTEN."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from worker.store.trouble import DATABASE_ERRORS

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

IDLE_SECONDS = 300.0
MAX_AGE_SECONDS = 1800.0


class Lane:
    """One connection, opened when asked for and replaced when broken, idle too long or old.

    Not to be shared: whoever called `get` is done with the connection before anybody calls it again.
    Nothing on it is ever cancelled: a caller that runs out of time loses the connection. `idle_seconds`
    None is for one that waits on purpose (LISTEN).
    """

    def __init__(
        self,
        database: Database,
        role: str,
        *,
        statement_timeout_seconds: float | None = None,
        settings: Mapping[str, str] | None = None,
        idle_seconds: float | None = IDLE_SECONDS,
        max_age_seconds: float = MAX_AGE_SECONDS,
    ) -> None:
        self._database = database
        self._role = role
        self._statement_timeout_seconds = statement_timeout_seconds
        self._settings = settings
        self._idle_seconds = idle_seconds
        self._max_age_seconds = max_age_seconds
        self._connection: Connection | None = None
        self._opened_at = 0.0
        self._used_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    async def get(self) -> Connection:
        """A connection that was sound when last used, or a new one; raises `ConnectFailed`."""
        loop = asyncio.get_running_loop()
        self._used_at = loop.time()
        connection = self._connection
        is_young = self._used_at - self._opened_at < self._max_age_seconds
        if connection is not None and not connection.is_closed() and is_young:
            return connection
        self.drop()
        connection = await self._database.connect(
            self._role,
            statement_timeout_seconds=self._statement_timeout_seconds,
            settings=self._settings,
        )
        connection.cancels_statements = False
        self._connection = connection
        self._opened_at = self._used_at = loop.time()
        if self._idle_seconds is not None:
            self._idle_timer = loop.call_later(self._idle_seconds, self._close_if_idle, self._idle_seconds)
        return connection

    def drop(self) -> None:
        """Forget the connection at once, whatever it is doing. No cancel request is sent."""
        connection, self._connection = self._connection, None
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if connection is not None:
            connection.terminate()

    async def close(self, timeout_seconds: float) -> None:
        """Say goodbye to the server if that works within the limit, else drop. Raises nothing."""
        connection = self._connection
        try:
            if connection is not None and not connection.is_closed():
                await connection.close(timeout=max(timeout_seconds, 0.001))
        except DATABASE_ERRORS:
            pass
        finally:
            self.drop()

    def _close_if_idle(self, idle_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._connection is not None and self._connection.is_in_transaction():
            self._used_at = loop.time()  # one of many statements: somebody has been at work since he got it
        remaining_seconds = self._used_at + idle_seconds - loop.time()
        if remaining_seconds <= 0:
            self._idle_timer = None
            self.drop()
        else:
            self._idle_timer = loop.call_later(remaining_seconds, self._close_if_idle, idle_seconds)
