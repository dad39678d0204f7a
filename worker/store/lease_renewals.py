"""Renewals of many named leases in one statement: by their names for a server that many holders ask, by their ids for a process
that holds them all.

Each goes on for as long as it was acquired for. A row that somebody keeps locked is passed over, since it must not hold up the
other renewals; it is not lost. A renewal that a synchronous standby is not known to have is a ConnectionError, as a lost answer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker.store.leases import COLUMNS, Lease, read_lease
from worker.store.standbys import believe

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database


class Renewal(NamedTuple):
    """What a holder asks for that knows its lease by name."""

    resource: str
    holder: str
    fence: int


# Index leases_resource_key.
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
RETURNING mine.place, {COLUMNS}
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
    believe(connection)
    answer: dict[Renewal, Lease | None] = {asked[row["place"] - 1]: read_lease(row) for row in rows}
    if len(answer) < len(asked):
        for row in await connection.fetch(database.sql(LOOK_NAMED), resources, holders, fences):
            answer.setdefault(asked[row["place"] - 1], None)
    return answer


# Index leases_pkey.
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
    believe(connection)
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
