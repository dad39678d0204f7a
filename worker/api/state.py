"""What the routes share: the way to the database, and the four loops that write. Made in the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from worker import keeper
from worker.api.auth import Tokens
from worker.api.claims import Claims
from worker.api.heartbeats import Heartbeats
from worker.api.hosts import Host
from worker.api.name_beats import ROLE as NAMES_ROLE
from worker.api.name_beats import NameBeats
from worker.api.outcomes import FINISH_SETTINGS, Outcomes
from worker.api.problems import database_unavailable
from worker.clock import local_seconds
from worker.domain import Backoff
from worker.settings import Settings
from worker.store import claiming, task_claiming, tasks
from worker.store.connection import Connection, Database, Lane, Pool, SessionLimits
from worker.store.standbys import believe
from worker.store.waiting import HTTP_LANES

LANES = HTTP_LANES
"""Connections beside the pool: for claims, outcomes, heartbeats and renewals of names."""
_CLOSE_SECONDS = 0.2


@dataclass(slots=True, kw_only=True)
class Api:
    """One HTTP server's parts."""

    settings: Settings
    tokens: Tokens
    host: Host
    database: Database
    pool: Pool
    lanes: tuple[Lane, ...]
    claims: Claims
    outcomes: Outcomes
    heartbeats: Heartbeats
    name_beats: NameBeats
    is_verified: bool = False
    """The database has been reached, and its schema fits."""

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A pooled connection for one short request, which is limited as a whole.

        Leaving it raises ConnectionError when a synchronous standby is not known to have what was written.
        """
        self.require_database()
        limit_seconds = self.settings.query_timeout_seconds
        async with (
            self.pool.acquire(timeout_seconds=limit_seconds + self.settings.connect_timeout_seconds) as connection,
            asyncio.timeout(2 * limit_seconds),
        ):
            connection.take_cut_short_wait()  # a request before this one, which has had no answer
            yield connection
            believe(connection)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """The same, its statements in one transaction: what the first one writes is still so when the last one looks at it."""
        async with self.connection() as connection, connection.transaction(isolation="read_committed"):
            yield connection

    def require_database(self) -> None:
        """Raises Problem until the database has been verified."""
        if not self.is_verified:
            raise database_unavailable()

    async def run(self) -> None:
        """The loops, until cancelled; a bug in one ends them all."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.claims.run(), name="http claims")
            group.create_task(self.outcomes.run(), name="http outcomes")
            group.create_task(self.heartbeats.run(), name="http heartbeats")
            group.create_task(self.name_beats.run(), name="http names")

    async def finish(self, limit_seconds: float) -> bool:
        """Nothing more is asked for: what nobody has taken goes back, within the limit. The rest expires; returns whether there is
        none."""
        until = local_seconds() + limit_seconds
        claims_are_over = await self.claims.finish(limit_seconds)
        return await self.outcomes.finish(max(until - local_seconds(), 0)) and claims_are_over

    async def close(self) -> None:
        """Close the connections, in peace if that is quick."""
        for lane in self.lanes:
            await lane.close(_CLOSE_SECONDS)
        await self.pool.close(_CLOSE_SECONDS)


def make_api(settings: Settings, tokens: Tokens, host: Host) -> Api:
    """The parts, put together from the settings. Opens nothing yet."""
    of = settings
    limits = SessionLimits.of(lease_seconds=of.lease_seconds, query_timeout_seconds=of.query_timeout_seconds)
    database = Database(
        of.database_url.get_secret_value() if of.database_url else None,
        schema=of.schema_name,
        connect_timeout_seconds=of.connect_timeout_seconds,
        limits=limits,
        pooler=of.pooler == "transaction",
    )
    claim_lane = Lane(
        database,
        task_claiming.ROLE,
        statement_timeout_seconds=of.claim_timeout_seconds * 0.8,
        settings=claiming.CLAIM_SETTINGS,
    )
    finish_lane = Lane(database, tasks.FINISH_ROLE, settings=FINISH_SETTINGS)
    heartbeat_lane = Lane(database, tasks.HEARTBEAT_ROLE, settings=keeper.LEASE_SETTINGS)
    names_lane = Lane(database, NAMES_ROLE, settings=keeper.LEASE_SETTINGS)
    statement_seconds = limits.statement_timeout_seconds + 0.5
    # A request may come while a statement is in flight that will fail, and then need a connection.
    limit_seconds = 2 * statement_seconds + of.connect_timeout_seconds
    outcomes = Outcomes(
        database,
        finish_lane,
        backoff=Backoff(of.backoff_base_seconds, of.backoff_max_seconds),
        statement_seconds=statement_seconds,
        limit_seconds=limit_seconds,
    )
    return Api(
        settings=of,
        tokens=tokens,
        host=host,
        database=database,
        pool=database.pool(of.pool_size),
        lanes=(claim_lane, finish_lane, heartbeat_lane, names_lane),
        claims=Claims(
            database,
            claim_lane,
            claim_timeout_seconds=of.claim_timeout_seconds,
            limit_seconds=limit_seconds,
            give_back=outcomes.give_back,
        ),
        outcomes=outcomes,
        heartbeats=Heartbeats(
            database,
            heartbeat_lane,
            default_lease_seconds=of.lease_seconds,
            statement_seconds=statement_seconds,
            limit_seconds=limit_seconds,
        ),
        name_beats=NameBeats(database, names_lane, statement_seconds=statement_seconds, limit_seconds=limit_seconds),
    )
