"""What a run of `worker bench` cost the server, as its own counters tell.

Statements that run while something is measured carry a comment by which pg_stat_statements can leave them out.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint /* worker bench */"


async def wal_bytes(connection: Connection) -> int:
    """The position of the server's write-ahead log."""
    return int(await connection.fetchval(WAL))


COUNTERS = """
SELECT sum(n_tup_upd + n_tup_del)::bigint, sum(n_tup_hot_upd)::bigint,
    (SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database())
FROM pg_stat_all_tables
WHERE schemaname = $1
"""


class Counters(NamedTuple):
    """What the server's statistics know by now; a session that has ended is in them."""

    dead: int
    """Row versions of the schema's tables that updates and deletions have left behind, vacuumed since or not."""
    hot: int
    transactions: int
    """Of the whole database: each statement outside a transaction is one."""


async def counters(connection: Connection, database: Database) -> Counters:
    return Counters(*await connection.fetchrow(COUNTERS, database.schema))


REPORT = "SELECT pg_stat_force_next_flush()"
_REPORT_SECONDS = 1.1


async def report(connection: Connection) -> None:
    """Let the statistics know at once what this session has done; others report at most once a second, and when they end."""
    try:
        await connection.execute(REPORT)
    except asyncpg.UndefinedFunctionError:  # before PostgreSQL 15: it reports with the next statement after a second
        await asyncio.sleep(_REPORT_SECONDS)
        await connection.execute("SELECT 1")


STATEMENTS_VIEW = """
SELECT format('%I.pg_stat_statements', n.nspname)
FROM pg_extension AS e JOIN pg_namespace AS n ON n.oid = e.extnamespace
WHERE e.extname = 'pg_stat_statements'
"""
STATEMENTS = """
SELECT COALESCE(sum(calls) FILTER (WHERE query NOT LIKE ALL ({effects})), 0)::bigint,
    COALESCE(sum(calls) FILTER (WHERE query LIKE ANY ({effects})), 0)::bigint
FROM {view}
WHERE userid = current_user::regrole AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND query NOT LIKE '%worker bench%' AND query NOT LIKE '%pg_stat_statements%'
""".replace("{effects}", "ARRAY['%processed_messages%', '%bench_counters%', '%yardstick_effects%']")


class Statements(NamedTuple):
    ours: int
    effects: int


async def statements_view(connection: Connection) -> str | None:
    """The view of pg_stat_statements, quoted, if it is installed here and may be read."""
    view: str | None = await connection.fetchval(STATEMENTS_VIEW)
    if view is not None:
        try:
            await count_statements(connection, view)
        except asyncpg.PostgresError:  # installed but not preloaded, or no right to see it
            return None
    return view


async def count_statements(connection: Connection, view: str) -> Statements:
    """Statements of this role in this database so far."""
    return Statements(*await connection.fetchrow(STATEMENTS.replace("{view}", view)))
