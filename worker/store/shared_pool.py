"""A few connections that handlers and upkeep share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import asyncpg

from worker.clock import local_seconds
from worker.store.lane import IDLE_SECONDS, MAX_AGE_SECONDS
from worker.store.trouble import DATABASE_ERRORS, sqlstate

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

_READ_ONLY = "25006"
_PROOF_SECONDS = 1.0


class Pool:
    """At most `size` connections for short use, opened when needed, closed when idle or old.

    A connection is handed on only after its transaction was rolled back and its session reset, and in times of doubt only if its
    server takes writes.
    """

    def __init__(self, database: Database, size: int) -> None:
        self._database = database
        self._size = size
        self._pool: Any = None
        self._closed = False
        self._doubted_at = 0.0
        self._stale_before = 0.0

    @contextlib.asynccontextmanager
    async def acquire(self, *, timeout_seconds: float, leave_seconds: float | None = None) -> AsyncIterator[Connection]:
        """A connection for the block. `leave_seconds`: after a block that was cancelled, giving it back may take so long.

        Raises TimeoutError when none is free within the limit, `ConnectFailed` when none can be had.
        """
        if self._closed:
            raise asyncpg.InterfaceError("the pool is closed")
        if self._pool is None:
            # Not earlier: asyncpg's pool belongs to the loop that is running here. With no connection to
            # open, awaiting it waits for nothing.
            self._pool = await asyncpg.create_pool(
                min_size=0,
                max_size=self._size,
                max_inactive_connection_lifetime=IDLE_SECONDS,
                connect=self._connect,
                connection_class=self._database.connection_class,
                # Behind a pooler the session is somebody else's next; a rollback is all we may do to it.
                reset=_leave_session if self._database.pooler else None,
            )
        pool = self._pool
        connection = await self._borrow(timeout_seconds)
        opened_at = connection.opened_at
        release_seconds = self._database.limits.statement_timeout_seconds
        try:
            yield connection
        except asyncio.CancelledError:
            if leave_seconds is not None:
                release_seconds = min(release_seconds, leave_seconds)
            raise
        except DATABASE_ERRORS as error:
            if sqlstate(error) == _READ_ONLY:
                self.doubt()
            raise
        finally:
            # A connection that cannot be reset is gone; what the block did is not affected by that.
            with contextlib.suppress(*DATABASE_ERRORS):
                if self._closed or local_seconds() - opened_at > MAX_AGE_SECONDS:
                    connection.terminate()
                await pool.release(connection, timeout=release_seconds)

    def doubt(self) -> None:
        """What is open now may lead to a server that is no primary any more: it is asked before it is handed on. From any thread.

        A doubt costs a round trip. What a handler's own statement says is one at most: it may be about that statement.
        """
        self._doubted_at = local_seconds()

    async def close(self, timeout_seconds: float) -> None:
        """Wait for borrowers and close in peace within the limit, then by force. Raises nothing."""
        self._closed = True
        if self._pool is not None:
            with contextlib.suppress(*DATABASE_ERRORS):
                async with asyncio.timeout(timeout_seconds):
                    await self._pool.close()

    async def _borrow(self, timeout_seconds: float) -> Any:
        until = local_seconds() + timeout_seconds
        while True:
            try:
                connection = await self._pool.acquire(timeout=max(until - local_seconds(), 0.001))
            except TimeoutError:
                what = f"none of the {self._size} connections of the pool was to be had within {timeout_seconds:g} s"
                raise TimeoutError(what) from None
            is_fit = False
            try:
                is_fit = await self._is_fit(connection)
                if is_fit:
                    return connection
            finally:
                if not is_fit:
                    # Not `expire_connections`: that says goodbye in the background, without a limit, to a server that may be gone.
                    with contextlib.suppress(*DATABASE_ERRORS):  # the loan is void if the session has ended by itself
                        connection.terminate()
                        await self._pool.release(connection)

    async def _is_fit(self, connection: Any) -> bool:
        """Whether it may be handed on. One that fails the proof takes all with it that were open by then."""
        if connection.opened_at < self._stale_before:
            return False
        if connection.proven_at >= self._doubted_at:
            return True
        asked_at, prove = local_seconds(), connection.prove  # of the session, which may take the loan with it as it ends
        try:
            async with asyncio.timeout(_PROOF_SECONDS):
                await ping(connection)
        except DATABASE_ERRORS:
            self._stale_before = asked_at
            return False
        prove(asked_at)
        return True

    async def _connect(self, *_arguments: object, **_keywords: object) -> Connection:
        opened_at = local_seconds()
        connection = await self._database.connect("pool")
        connection.opened_at = opened_at
        connection.prove(opened_at)
        return connection


async def _leave_session(connection: Connection) -> None:
    pass


PING = "SELECT current_setting('transaction_read_only')::boolean"


async def ping(connection: Connection) -> None:
    """The database answers. Raises ReadOnlySQLTransactionError if it takes no writes, as one that is no primary any more."""
    if await connection.fetchval(PING):
        raise asyncpg.ReadOnlySQLTransactionError("the server takes no writes")
