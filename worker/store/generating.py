"""The generator in the database: the state that is wanted, and the production of slots. The rules are in schema.sql."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import asyncpg

from worker.generation import NOTHING, Wish, rate_of
from worker.store.enqueueing import refuse_oversized
from worker.store.reports import moment
from worker.store.standbys import believe

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

NAME = "generator"
"""Of its row, of its lease, and the first part of its jobs' keys."""

State = Literal["STARTED", "STOPPED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorStatus:
    """The wanted state, who produces, and what has come of it: the same from any instance."""

    state: State
    holder: str | None
    """Whoever has the live lease; None: nobody produces at the moment."""
    fence: int | None
    rate: float
    """Jobs a second."""
    produced: int
    skipped: int
    """Slots without a job: too late, or during an outage."""
    failed: int
    """Slots whose job the database refused."""
    last_error: str | None
    """Why the last slot was refused; None once a later one was not."""
    every_seconds: float
    kind: str
    min_seconds: float | None
    max_seconds: float | None
    last_slot_at: str | None
    """The last slot that is settled, ISO 8601 in UTC."""
    lease_expires_in_seconds: float | None


# Indexes generators_pkey and leases_resource_key. The defaults are those of the table.
STATUS = f"""
SELECT COALESCE(g.state, 'STOPPED') AS state, l.holder, l.fence, COALESCE(g.every_seconds, 1) AS every_seconds,
    COALESCE(g.produced, 0) AS produced, COALESCE(g.skipped, 0) AS skipped, COALESCE(g.failed, 0) AS failed, g.last_error,
    COALESCE(g.kind, 'sleep') AS kind,
    CASE WHEN g.name IS NULL THEN 1 ELSE g.min_seconds END AS min_seconds,
    CASE WHEN g.name IS NULL THEN 10 ELSE g.max_seconds END AS max_seconds,
    {moment("g.last_slot_at")} AS last_slot_at,
    CASE WHEN l.id IS NOT NULL THEN {{schema}}.lease_expires_in_ms(l.expires_at, NULL) / 1000::float8 END
        AS lease_expires_in_seconds
FROM (SELECT $1::text AS name) AS wanted
LEFT JOIN {{schema}}.generators AS g ON g.name = wanted.name
LEFT JOIN {{schema}}.leases AS l ON l.resource = wanted.name AND l.released_at IS NULL AND l.expires_at > clock_timestamp()
"""


async def status(connection: Connection, database: Database) -> GeneratorStatus:
    """What is wanted and how it goes. Before anybody has started it: STOPPED, with the defaults."""
    row = await connection.fetchrow(database.sql(STATUS), NAME)
    return GeneratorStatus(rate=rate_of(row["every_seconds"]), **dict(row))


async def start(connection: Connection, database: Database, wish: Wish = NOTHING) -> GeneratorStatus:
    """Want it STARTED, with `wish`. What was due while it was stopped stays undone. ValueError for a wish that does not fit."""
    await _change(connection, database, "STARTED", wish)
    return await status(connection, database)


async def stop(connection: Connection, database: Database) -> GeneratorStatus:
    """Want it STOPPED. Once this has committed nothing more is produced."""
    await _change(connection, database, "STOPPED", NOTHING)
    return await status(connection, database)


async def prepare(connection: Connection, database: Database, wish: Wish) -> GeneratorStatus:
    """What an instance does as it starts: STARTED if nobody has ever wanted anything, else only `wish` is put in."""
    await _change(connection, database, None, wish)
    return await status(connection, database)


CREATE = """
INSERT INTO {schema}.generators (name, state)
VALUES ($1, COALESCE($2, 'STARTED'))
ON CONFLICT (name) DO NOTHING
"""

# A production in flight has the row: it ends soon, and statement_timeout bounds this as well.
WAIT_FOR_A_PRODUCTION = "SELECT set_config('lock_timeout', '0', true)"

# A new spacing, or a new start, counts from now on: slots of before are not due in hindsight. The mark never goes back.
CHANGE = """
UPDATE {schema}.generators AS g
SET state = COALESCE($2, g.state),
    every_seconds = COALESCE($3, g.every_seconds),
    kind = CASE WHEN $4::text IS NOT NULL THEN $4 WHEN pauses THEN 'sleep' ELSE g.kind END,
    payload = CASE WHEN $4::text IS NOT NULL THEN $5::text::jsonb WHEN NOT pauses THEN g.payload END,
    min_seconds = CASE WHEN $4::text IS NOT NULL THEN NULL WHEN pauses THEN COALESCE($6, g.min_seconds, 1) ELSE g.min_seconds END,
    max_seconds = CASE WHEN $4::text IS NOT NULL THEN NULL WHEN pauses THEN COALESCE($7, g.max_seconds, 10) ELSE g.max_seconds END,
    last_slot_at = CASE
        WHEN g.state = 'STOPPED' AND $2 = 'STARTED' OR $3 <> g.every_seconds THEN GREATEST(g.last_slot_at, clock_timestamp())
        ELSE g.last_slot_at END,
    last_error = CASE WHEN $2 = 'STARTED' THEN NULL ELSE g.last_error END
FROM (SELECT $6::float8 IS NOT NULL OR $7::float8 IS NOT NULL AS pauses) AS wish
WHERE g.name = $1
"""


async def _change(connection: Connection, database: Database, state: State | None, wish: Wish) -> None:
    if wish.job is not None:
        await refuse_oversized(connection, wish.job)
    kind, payload = (None, None) if wish.job is None else (wish.job.kind, wish.job.payload)
    try:
        # In one, so that nothing is produced from what stands there in between.
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(database.sql(CREATE), NAME, state)
            if state is None and wish == NOTHING:
                return
            await connection.execute(WAIT_FOR_A_PRODUCTION)
            await connection.execute(
                database.sql(CHANGE), NAME, state, wish.every_seconds, kind, payload, wish.min_seconds, wish.max_seconds
            )
    except asyncpg.CheckViolationError as error:
        if error.constraint_name != "generators_bounds":
            raise
        raise ValueError("min, max: beside the bound that stays as it is, the shortest pause would be the longer one") from None
    believe(connection)


class Production(NamedTuple):
    """What came of one look at the slots."""

    outcome: Literal["produced", "not_due", "stopped", "lost"]
    """`stopped`: it is not wanted any more. `lost`: the lease is not, or no longer, this holder's."""
    produced: int
    skipped: int
    failed: int
    error: str | None
    next_in_seconds: float | None
    """Until the next slot is due; 0 when more are due now."""


PRODUCE = """
SELECT outcome, produced, skipped, failed, error, next_in_seconds
FROM {schema}.produce_slots($1, $2, $3, $4, $5)
"""


async def produce(
    connection: Connection, database: Database, *, holder: str, fence: int, late_seconds: float, most: int
) -> Production:
    """Produce up to `most` slots that are due, in one transaction with the check of the lease: each slot once, or not at all."""
    row = await connection.fetchrow(database.sql(PRODUCE), NAME, holder, fence, late_seconds, most)
    return Production(*row)
