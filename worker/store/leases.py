"""Named leases: acquire, renew, release, look, list. What a statement does to a lease stands in schema.sql.

The database's clock judges; times in answers are relative. Every write matches holder and fence. Terms that the schema
refuses raise ValueError here, before anything is sent, but for the size of metadata, which only the database can measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


_COLUMNS = """l.id, l.resource, l.holder, l.fence, l.ttl_seconds, l.metadata, l.created_at, l.renewed_at, l.released_at,
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


class Renewal(NamedTuple):
    """What a holder asks for that knows its lease by name."""

    resource: str
    holder: str
    fence: int


# Index leases_resource_key. `renew_lease` for many, each for as long as it was acquired for; a row that somebody keeps locked is
# passed over: it must not hold up the other renewals.
RENEW_NAMED = f"""
WITH mine AS MATERIALIZED (
    SELECT l.id, l.fence, l.holder, asked.place
    FROM unnest($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS asked(resource, holder, fence, place)
    JOIN {{schema}}.leases AS l ON l.resource = asked.resource
    WHERE l.fence = asked.fence AND l.holder = asked.holder AND l.released_at IS NULL AND l.expires_at > clock_timestamp()
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {{schema}}.leases AS l
SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + l.ttl_seconds * interval '1 second'
FROM mine
WHERE l.id = mine.id AND l.fence = mine.fence AND l.holder = mine.holder
RETURNING mine.place, {_COLUMNS}
"""
# Index leases_resource_key. A plain read: it sees the last committed row and waits for nobody.
LOOK_NAMED = """
SELECT asked.place
FROM unnest($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS asked(resource, holder, fence, place)
JOIN {schema}.leases AS l ON l.resource = asked.resource
WHERE l.fence = asked.fence AND l.holder = asked.holder AND l.released_at IS NULL AND l.expires_at > clock_timestamp()
"""


async def renew_named(connection: Connection, database: Database, asked: Sequence[Renewal]) -> dict[Renewal, Lease | None]:
    """Renew every live lease of `asked`, which are all different, in one statement. None: somebody keeps its row locked. Missing
    from the answer: this holder has no such live lease."""
    resources, holders, fences = map(list, zip(*asked, strict=True))
    rows = await connection.fetch(database.sql(RENEW_NAMED), resources, holders, fences)
    answer: dict[Renewal, Lease | None] = {asked[row["place"] - 1]: _lease(row) for row in rows}
    if len(answer) < len(asked):
        for row in await connection.fetch(database.sql(LOOK_NAMED), resources, holders, fences):
            answer.setdefault(asked[row["place"] - 1], None)
    return answer


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


# Index leases_pkey. Each by its id, holder and fence, for as long as it was acquired for. A row that somebody keeps locked
# is passed over: it must not hold up the other renewals.
RENEW_MANY = """
WITH mine AS MATERIALIZED (
    SELECT l.id, l.fence, l.holder
    FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS held(id, fence, holder)
    JOIN {schema}.leases AS l ON l.id = held.id
    WHERE l.fence = held.fence AND l.holder = held.holder AND l.released_at IS NULL AND l.expires_at > clock_timestamp()
    FOR NO KEY UPDATE OF l SKIP LOCKED
)
UPDATE {schema}.leases AS l
SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + l.ttl_seconds * interval '1 second'
FROM mine
WHERE l.id = mine.id AND l.fence = mine.fence AND l.holder = mine.holder
RETURNING l.id, l.fence, {schema}.lease_expires_in_ms(l.expires_at, l.released_at)
"""


async def renew_many(
    connection: Connection, database: Database, held: Sequence[tuple[int, int, str]]
) -> dict[tuple[int, int], int]:
    """Renew every live lease of `held` (id, fence, holder) in one statement: its `expires_in_ms` by (id, fence).

    Those missing from the answer are lost, or their row is locked (see `look_many`).
    """
    ids, fences, holders = zip(*held, strict=True)
    rows = await connection.fetch(database.sql(RENEW_MANY), list(ids), list(fences), list(holders))
    return {(row[0], row[1]): row[2] for row in rows}


# Index leases_pkey. A plain read: it sees the last committed row and waits for nobody.
LOOK_MANY = """
SELECT l.id, l.fence
FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS held(id, fence, holder)
JOIN {schema}.leases AS l ON l.id = held.id
WHERE l.fence = held.fence AND l.holder = held.holder AND l.released_at IS NULL AND l.expires_at > clock_timestamp()
"""


async def look_many(connection: Connection, database: Database, held: Sequence[tuple[int, int, str]]) -> set[tuple[int, int]]:
    """Which of `held` (id, fence, holder) are still live, by (id, fence)."""
    ids, fences, holders = zip(*held, strict=True)
    rows = await connection.fetch(database.sql(LOOK_MANY), list(ids), list(fences), list(holders))
    return {(row[0], row[1]) for row in rows}


GET = f"""
SELECT {_COLUMNS}
FROM {{schema}}.leases AS l
WHERE l.id = $1
"""


async def get(connection: Connection, database: Database, *, id: int) -> Lease | None:
    """The lease of this row, whatever its state; None when there is no such row."""
    row = await connection.fetchrow(database.sql(GET), id)
    return None if row is None else _lease(row)


# Index leases_resource_key.
GET_NAMED = f"""
SELECT {_COLUMNS}
FROM {{schema}}.leases AS l
WHERE l.resource = $1 AND l.fence = $2
"""


async def _get_named(connection: Connection, database: Database, *, resource: str, fence: int) -> Lease | None:
    row = await connection.fetchrow(database.sql(GET_NAMED), resource, fence)
    return None if row is None else _lease(row)


# Index leases_pkey, in its order. `renewed`: renewed at least once since it was acquired, whatever became of it.
LIST = f"""
SELECT {_COLUMNS}
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
    return [_lease(row) for row in rows]


async def _is_held(connection: Connection, statement: str, *arguments: object) -> bool:
    try:
        return await connection.fetchval(statement, *arguments) is not None
    except asyncpg.PostgresError as error:
        if error.sqlstate == NOT_HELD:
            return False
        raise


def _lease(row: Any) -> Lease:
    try:
        metadata = decode_json(row["metadata"])
    except ValueError:  # written by hand, in SQL: a number that only PostgreSQL can read. It must make no list unreadable
        metadata = {}
    assert isinstance(metadata, dict)  # the schema's CHECK
    return Lease(**{name: row[name] for name in Lease.__slots__} | {"metadata": metadata})
