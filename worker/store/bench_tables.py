"""What single scenarios of `worker bench` need beside the tables of the product: single rows, a copy of the table, counters,
a long ledger."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

INSERT_ONE = "INSERT INTO {schema}.jobs (idempotency_key, kind, payload) VALUES ($1, $2, $3)"
TRIGGER = "ALTER TABLE {schema}.jobs {verb} TRIGGER jobs_wake"
COPY_OF_JOBS = "CREATE TABLE {schema}.jobs_copy (LIKE {schema}.jobs INCLUDING ALL)"
COPIED = ("idempotency_key", "kind", "queue", "payload")


async def insert_one(connection: Connection, database: Database, *, key: str, kind: str, payload: str) -> None:
    """The plainest way in: one row, one commit. `payload` is JSON text."""
    await connection.execute(database.sql(INSERT_ONE), key, kind, payload)


async def enable_trigger(connection: Connection, database: Database) -> None:
    await connection.execute(database.sql(TRIGGER).replace("{verb}", "ENABLE"))


async def disable_trigger(connection: Connection, database: Database) -> None:
    await connection.execute(database.sql(TRIGGER).replace("{verb}", "DISABLE"))


async def make_copy_table(connection: Connection, database: Database) -> None:
    """A table like `jobs`, with the same defaults, indexes and CHECKs, and no trigger."""
    await connection.execute(database.sql(COPY_OF_JOBS))


async def copy_rows(connection: Connection, database: Database, lines: bytes) -> None:
    """COPY text lines (columns of COPIED) into the copy of the table."""
    await connection.copy_to_table(
        "jobs_copy", schema_name=database.schema, columns=COPIED, source=io.BytesIO(lines), format="text"
    )


async def empty_copy(connection: Connection, database: Database) -> None:
    await connection.execute(database.sql("TRUNCATE {schema}.jobs_copy"))


# --- rows that several jobs update

COUNTERS = """
CREATE TABLE {schema}.bench_counters (id int PRIMARY KEY, hits bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50)
"""
FILL_COUNTERS = "INSERT INTO {schema}.bench_counters (id) SELECT generate_series(0, $1::int - 1)"


async def make_counters(connection: Connection, database: Database, rows: int) -> None:
    """`bench_counters` with so many rows, ids from 0, no hits."""
    await connection.execute(database.sql(COUNTERS))
    await connection.execute(database.sql(FILL_COUNTERS), rows)


async def count_hits(connection: Connection, database: Database) -> int:
    return int(await connection.fetchval(database.sql("SELECT sum(hits) FROM {schema}.bench_counters")))


# --- a long ledger

DROP_LEDGER_KEY = "ALTER TABLE {schema}.job_effects DROP CONSTRAINT job_effects_pkey"
FILL_LEDGER = """
INSERT INTO {schema}.job_effects (idempotency_key, job_id, fence)
SELECT gen_random_uuid()::text, -g, 0 FROM generate_series(1, $1::int) AS g
"""
MAKE_LEDGER_KEY = """
ALTER TABLE {schema}.job_effects ADD CONSTRAINT job_effects_pkey PRIMARY KEY (idempotency_key) WITH (fillfactor = 69)
"""


async def fill_ledger(connection: Connection, database: Database, rows: int) -> None:
    """So many rows with random keys.

    The index is built afterwards, which takes a minute instead of many, with its pages as full as insertions in random order
    would have left them (ln 2): fuller ones would be split by the first insertions, emptier ones would flatter.
    """
    await connection.execute(database.sql(DROP_LEDGER_KEY))
    await connection.execute(database.sql(FILL_LEDGER), rows)
    await connection.execute(database.sql(MAKE_LEDGER_KEY))
    await connection.execute(database.sql("VACUUM (ANALYZE) {schema}.job_effects"))


async def count_ledger(connection: Connection, database: Database) -> int:
    return int(await connection.fetchval(database.sql("SELECT count(*) FROM {schema}.job_effects")))
