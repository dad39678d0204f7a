"""What `/metrics` asks beside `statistics`: the named leases."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

COUNT_LEASES = """
SELECT count(*) FILTER (WHERE released_at IS NULL AND expires_at > clock_timestamp()) AS active,
    count(*) FILTER (WHERE released_at IS NULL AND expires_at <= clock_timestamp()) AS expired,
    count(*) FILTER (WHERE released_at IS NOT NULL) AS released
FROM {schema}.leases
"""


class LeaseCounts(NamedTuple):
    active: int
    expired: int
    released: int


async def count_leases(connection: Connection, database: Database) -> LeaseCounts:
    """The rows of the table, which retention keeps small."""
    return LeaseCounts(*await connection.fetchrow(database.sql(COUNT_LEASES)))
