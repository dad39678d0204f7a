"""How named leases reach the database: the one interface that `Leases` needs, and its implementation over a connection of our own.

All of it is called in the loop of the keeper's thread. No answer is one of DATABASE_ERRORS (a ConnectionError or TimeoutError will
do): nothing is known then, and the caller may ask again with the same request_id; of these a ConnectFailed means that nothing has
been sent. What asking again cannot mend is a ConfigError, and terms that are refused a ValueError.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from worker import keeper
from worker.errors import ConfigError, SchemaError
from worker.holding import HeldName
from worker.store import lease_renewals, leases
from worker.store.connection import DATABASE_ERRORS, ConnectFailed, Database, Lane, is_unavailable, safe_text, sqlstate
from worker.store.leases import Ended, Grant, Held

if TYPE_CHECKING:
    from worker.store.connection import Connection, Pool

_CONNECTIONS = 4
_NOT_OURS = {"3F000", "42P01", "42883"}  # no such schema, table, function
_NOT_GRANTED = "42501"


@dataclass(frozen=True, slots=True)
class Renewed:
    """What one round of renewals came to, by (id, fence). A lease in none of these: no answer about it, ask again soon."""

    expires_in_ms: Mapping[tuple[int, int], int]
    lost: frozenset[tuple[int, int]]
    unasked: frozenset[tuple[int, int]] = frozenset()
    """The time of this round did not suffice for them: the next one is for them."""


class LeaseTransport(Protocol):
    """The way to a lease service."""

    @property
    def where(self) -> str:
        """Which service: two transports that say the same lead to the same leases."""

    @property
    def connections(self) -> int:
        """How many acquisitions and releases may be on their way at a time: more would only wait for a connection."""

    @property
    def answer_seconds(self) -> float:
        """How long any of the calls below may take, a new connection included."""

    @property
    def silence_seconds(self) -> float:
        """How long to go on asking a service that does not answer, for a caller that has no time to wait."""

    async def acquire(
        self, *, resource: str, holder: str, ttl_seconds: float, request_id: str, metadata: Mapping[str, object] | None
    ) -> Grant | Held | Ended:
        """Acquire, or learn who has it; the same answer for a repeated request_id."""

    async def renew_many(self, held: Sequence[HeldName], *, limit_seconds: float) -> Renewed:
        """Renew each for as long as it was acquired for. `limit_seconds` is for each statement, once there is a connection.

        Raises one of DATABASE_ERRORS, whatever the reason: the caller goes on until the trust runs out.
        """

    async def release(self, *, resource: str, holder: str, fence: int) -> bool:
        """End it at once; also True when that had happened before. False: it was not this holder's any more."""

    def drop(self) -> None:
        """A renewal had no answer: forget its connection."""

    async def close(self, limit_seconds: float) -> None:
        """Let go of all connections within the limit. Raises nothing."""


class DatabaseTransport:
    """Leases in a database that this process reaches itself: renewals on a lane of their own, the rest on a small pool."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lane = Lane(database, keeper.ROLE, settings=keeper.LEASE_SETTINGS)
        self._pool: Pool = database.pool(_CONNECTIONS)

    @property
    def where(self) -> str:
        return f"{self._database.target.where} {self._database.schema}"

    @property
    def connections(self) -> int:
        return _CONNECTIONS

    @property
    def answer_seconds(self) -> float:
        return self._database.connect_timeout_seconds + self._database.limits.statement_timeout_seconds + 1.0

    @property
    def silence_seconds(self) -> float:
        return self._database.connect_timeout_seconds

    async def acquire(
        self, *, resource: str, holder: str, ttl_seconds: float, request_id: str, metadata: Mapping[str, object] | None
    ) -> Grant | Held | Ended:
        async with self._connection() as connection:
            return await leases.take(
                connection,
                self._database,
                resource=resource,
                holder=holder,
                ttl_seconds=ttl_seconds,
                request_id=request_id,
                metadata=metadata,
            )

    async def renew_many(self, held: Sequence[HeldName], *, limit_seconds: float) -> Renewed:
        connection = await self._lane.get()
        wanted = [(one.id, one.fence, one.holder) for one in held]
        async with asyncio.timeout(limit_seconds):
            renewed = await lease_renewals.renew_many(connection, self._database, wanted)
        missing = [(id, fence, holder) for id, fence, holder in wanted if (id, fence) not in renewed]
        if not missing:
            return Renewed(renewed, frozenset())
        async with asyncio.timeout(limit_seconds):
            live = await lease_renewals.look_many(connection, self._database, missing)
        return Renewed(renewed, frozenset((id, fence) for id, fence, _ in missing) - live)

    async def release(self, *, resource: str, holder: str, fence: int) -> bool:
        async with self._connection() as connection:
            return await leases.let_go(connection, self._database, resource=resource, holder=holder, fence=fence)

    def drop(self) -> None:
        self._lane.drop()

    async def close(self, limit_seconds: float) -> None:
        await self._lane.close(limit_seconds / 2)
        await self._pool.close(limit_seconds / 2)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """One for the block. Errors that asking again cannot mend become a ConfigError that says what can."""
        limit_seconds = self.answer_seconds
        try:
            async with asyncio.timeout(limit_seconds), self._pool.acquire(timeout_seconds=limit_seconds) as connection:
                yield connection
        except DATABASE_ERRORS as error:
            code = sqlstate(error)
            if isinstance(error, ConnectFailed) and error.refused:
                raise ConfigError(str(error)) from None
            if code in _NOT_OURS:
                raise SchemaError(f"schema {self._database.schema!r} holds no leases: apply it with `worker migrate`") from None
            if code == _NOT_GRANTED:
                raise SchemaError(f"{safe_text(error)}: see deploy/grants.sql") from None
            if code is None or is_unavailable(error) or code in leases.PASSING:
                raise
            raise ConfigError(f"{safe_text(error)} (SQLSTATE {code})") from None
