"""Named leases: acquire, renew, release, look, list. What a statement does to a lease stands in schema.sql; renewals of many at
once are in `lease_renewals`.

The database's clock judges; times in answers are relative. Every write matches holder and fence. Terms that the schema
refuses raise ValueError here, before anything is sent, but for the size of metadata, which only the database can measure. What a
synchronous standby is not known to have is a ConnectionError, as a lost answer is: asked again, the answer waits for the standby.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import asyncpg

from worker.domain_json import decode_json
from worker.lease_terms import (
    DEFAULT_TTL_SECONDS,
    MAX_HOLDER_BYTES,
    MAX_REQUEST_ID_BYTES,
    MAX_RESOURCE_BYTES,
    check_name,
    check_ttl,
    metadata_text,
)
from worker.store.standbys import believe

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

State = Literal["active", "expired", "released"]
Which = Literal["all", "active", "expired", "renewed", "released"]

NOT_HELD = "RW001"
PASSING = frozenset({"40001", "40P01", "55P03", "57014"})
"""Lost to another transaction or to a time limit: worth another try."""
_INVALID = "22023"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One lease as the database saw it while it answered."""

    id: int
    """The resource's row; it stays the same from one acquisition to the next, until it is pruned."""
    resource: str
    holder: str
    fence: int
    ttl_seconds: float
    metadata: dict[str, object]
    state: State
    expires_in_ms: int
    """Rounded down; 0 when it is over."""
    created_at: datetime
    """When this holder acquired it."""
    renewed_at: datetime | None
    released_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Somebody has it. `holder` None: somebody whose acquisition cannot be seen yet."""

    holder: str | None
    retry_after_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What this request_id acquired is over, and nobody else has acquired the resource since."""

    id: int
    fence: int


COLUMNS = """l.id, l.resource, l.holder, l.fence, l.ttl_seconds, l.metadata, l.created_at, l.renewed_at, l.released_at,
    {schema}.lease_expires_in_ms(l.expires_at, l.released_at) AS expires_in_ms,
    CASE WHEN l.released_at IS NOT NULL THEN 'released' WHEN l.expires_at > clock_timestamp() THEN 'active' ELSE 'expired' END
        AS state"""

ACQUIRE = """
SELECT outcome, id, fence, holder, expires_in_ms
FROM {schema}.acquire_lease($1, $2, $3, $4, $5::text::jsonb)
"""


class Grant(NamedTuple):
    """What an acquisition gave: enough to hold it."""

    id: int
    fence: int
    expires_in_ms: int


async def take(
    connection: Connection,
    database: Database,
    *,
    resource: str,
    holder: str,
    ttl_seconds: float,
    request_id: str | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Grant | Held | Ended:
    """Acquire; only what is needed to hold it. Raises ValueError for terms that are refused."""
    arguments = (
        check_name("resource", resource, MAX_RESOURCE_BYTES),
        check_name("holder", holder, MAX_HOLDER_BYTES),
        check_ttl(ttl_seconds),
        None if request_id is None else check_name("request_id", request_id, MAX_REQUEST_ID_BYTES),
        metadata_text(metadata),
    )
    try:
        row = await connection.fetchrow(database.sql(ACQUIRE), *arguments)
    except asyncpg.PostgresError as error:
        if error.sqlstate == _INVALID:
            raise ValueError(str(error)) from None
        raise
    believe(connection)
    match row["outcome"]:
        case "acquired":
            return Grant(row["id"], row["fence"], row["expires_in_ms"])
        case "ended":
            return Ended(id=row["id"], fence=row["fence"])
    return Held(holder=row["holder"], retry_after_ms=row["expires_in_ms"] or 0)


async def acquire(
    connection: Connection,
    database: Database,
    *,
    resource: str,
    holder: str,
    ttl_seconds: float = DEFAULT_TTL_SECONDS,
    request_id: str | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Lease | Held | Ended:
    """Acquire, and look at what was acquired. Raises ValueError for terms that are refused."""
    taken = await take(
        connection,
        database,
        resource=resource,
        holder=holder,
        ttl_seconds=ttl_seconds,
        request_id=request_id,
        metadata=metadata,
    )
    if not isinstance(taken, Grant):
        return taken
    lease = await get(connection, database, id=taken.id)
    if lease is None or lease.fence != taken.fence:  # it has passed on between the two statements
        return Held(holder=None if lease is None else lease.holder, retry_after_ms=0 if lease is None else lease.expires_in_ms)
    return lease


RENEW = "SELECT {schema}.renew_lease($1, $2, $3, $4)"


async def renew(
    connection: Connection,
    database: Database,
    *,
    resource: str,
    holder: str,
    fence: int,
    ttl_seconds: float | None = None,
) -> Lease | None:
    """Go on for `ttl_seconds` (None: as long as before) from now; None when this holder has no such live lease."""
    seconds = None if ttl_seconds is None else check_ttl(ttl_seconds)
    if not await _is_held(connection, database.sql(RENEW), resource, holder, fence, seconds):
        return None
    return await _get_named(connection, database, resource=resource, fence=fence)


RELEASE = "SELECT {schema}.release_lease($1, $2, $3)"


async def release(connection: Connection, database: Database, *, resource: str, holder: str, fence: int) -> Lease | None:
    """End the lease at once, or find it released under this fence before; None when this holder has no such lease."""
    if not await _is_held(connection, database.sql(RELEASE), resource, holder, fence):
        return None
    return await _get_named(connection, database, resource=resource, fence=fence)


async def let_go(connection: Connection, database: Database, *, resource: str, holder: str, fence: int) -> bool:
    """Release, without a look at what was released; False when this holder has no such lease."""
    return await _is_held(connection, database.sql(RELEASE), resource, holder, fence)


# Index leases_pkey.
RELEASE_BY_ID = """
SELECT {schema}.release_lease(l.resource, $2, $3)
FROM {schema}.leases AS l
WHERE l.id = $1
"""


async def release_by_id(connection: Connection, database: Database, *, id: int, holder: str, fence: int) -> Lease | None:
    """`release`, for who knows the id."""
    if not await _is_held(connection, database.sql(RELEASE_BY_ID), id, holder, fence):
        return None
    lease = await get(connection, database, id=id)
    return None if lease is None or lease.fence != fence else lease


GET = f"""
SELECT {COLUMNS}
FROM {{schema}}.leases AS l
WHERE l.id = $1
"""


async def get(connection: Connection, database: Database, *, id: int) -> Lease | None:
    """The lease of this row, whatever its state; None when there is no such row."""
    row = await connection.fetchrow(database.sql(GET), id)
    return None if row is None else read_lease(row)


# Index leases_resource_key.
GET_NAMED = f"""
SELECT {COLUMNS}
FROM {{schema}}.leases AS l
WHERE l.resource = $1 AND l.fence = $2
"""


async def _get_named(connection: Connection, database: Database, *, resource: str, fence: int) -> Lease | None:
    row = await connection.fetchrow(database.sql(GET_NAMED), resource, fence)
    return None if row is None else read_lease(row)


# Index leases_pkey, in its order. `renewed`: renewed at least once since it was acquired, whatever became of it.
LIST = f"""
SELECT {COLUMNS}
FROM {{schema}}.leases AS l
WHERE l.id > $1 AND CASE $2
    WHEN 'active' THEN l.released_at IS NULL AND l.expires_at > clock_timestamp()
    WHEN 'expired' THEN l.released_at IS NULL AND l.expires_at <= clock_timestamp()
    WHEN 'renewed' THEN l.renewed_at IS NOT NULL
    WHEN 'released' THEN l.released_at IS NOT NULL
    ELSE true END
ORDER BY l.id
LIMIT $3
"""


async def list_leases(
    connection: Connection,
    database: Database,
    *,
    which: Which = "all",
    after_id: int | None = None,
    limit: int,
) -> list[Lease]:
    """At most `limit` leases in the order of their ids, from behind `after_id`."""
    rows = await connection.fetch(database.sql(LIST), after_id or 0, which, limit)
    return [read_lease(row) for row in rows]


async def _is_held(connection: Connection, statement: str, *arguments: object) -> bool:
    try:
        found = await connection.fetchval(statement, *arguments) is not None
    except asyncpg.PostgresError as error:
        if error.sqlstate == NOT_HELD:
            return False
        raise
    believe(connection)
    return found


def read_lease(row: Any) -> Lease:
    """The lease of a row of COLUMNS."""
    try:
        metadata = decode_json(row["metadata"])
    except ValueError:  # written by hand, in SQL: a number that only PostgreSQL can read. It must make no list unreadable
        metadata = {}
    assert isinstance(metadata, dict)  # the schema's CHECK
    return Lease(**{name: row[name] for name in Lease.__slots__} | {"metadata": metadata})
