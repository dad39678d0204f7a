"""Audit: what the database has written down of a torture (see recording), as the checker reads it.

Moments are microseconds since 1970 by the database's clock, so that they compare exactly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

_FETCH = 2_000


def microseconds(column: str) -> str:
    """SQL for a moment as microseconds since 1970."""
    return f"(extract(epoch FROM {column}) * 1000000)::bigint"


class Standing(NamedTuple):
    """What the lease core says of a job at one moment."""

    state: str
    owner: str | None
    fence: int
    until: int | None
    attempts: int
    crashes: int


class Change(NamedTuple):
    """One change of one job. `old` None: it was inserted; `new` None: deleted."""

    seq: int
    at: int
    begun: int
    txid: int
    writer: str
    job_id: int
    key: str
    kind: str
    max_attempts: int
    old: Standing | None
    new: Standing | None
    said_fence: int | None
    old_due: int | None = None
    new_due: int | None = None
    owner_until: int | None = None
    """How long the process from which the job was taken had said that it lives; None: it had said nothing, or has left."""
    owner_seen: int | None = None
    """When it had said so."""


# Index (job_id, seq). NULL: of every job.
CHANGES = f"""
SELECT seq, {microseconds("at")}, {microseconds("begun")}, txid, writer, job_id, key, kind, max_attempts,
    old_state, old_owner, old_fence, {microseconds("old_until")}, old_attempts, old_crashes,
    new_state, new_owner, new_fence, {microseconds("new_until")}, new_attempts, new_crashes, said_fence,
    {microseconds("old_due")}, {microseconds("new_due")}, {microseconds("owner_until")}, {microseconds("owner_seen")}
FROM {{schema}}.torture_jobs
WHERE $1::bigint[] IS NULL OR job_id = ANY ($1)
ORDER BY job_id, seq
"""


async def changes(connection: Connection, database: Database, *, of: Collection[int] | None = None) -> AsyncIterator[Change]:
    """Every change of every job (or of these), job by job, in the order in which they happened to it."""
    async with connection.transaction():
        async for row in connection.cursor(database.sql(CHANGES), None if of is None else list(of), prefetch=_FETCH):
            old, new = Standing(*row[9:15]), Standing(*row[15:21])
            standings = (old if old.state is not None else None, new if new.state is not None else None)
            yield Change._make((*row[:9], *standings, *row[21:]))


class LeaseStanding(NamedTuple):
    holder: str
    fence: int
    """0: a place for a lease that nobody has acquired yet."""
    expires: int
    released: int | None


class LeaseChange(NamedTuple):
    """One change of one named lease. `old` None: inserted; `new` None: deleted."""

    seq: int
    at: int
    begun: int
    txid: int
    writer: str
    resource: str
    old: LeaseStanding | None
    new: LeaseStanding | None


LEASE_CHANGES = f"""
SELECT seq, {microseconds("at")}, {microseconds("begun")}, txid, writer, resource,
    old_holder, old_fence, {microseconds("old_expires")}, {microseconds("old_released")},
    new_holder, new_fence, {microseconds("new_expires")}, {microseconds("new_released")}
FROM {{schema}}.torture_leases
ORDER BY resource, seq
"""


async def lease_changes(connection: Connection, database: Database) -> list[LeaseChange]:
    """Every change of every named lease, resource by resource, in order."""
    found = []
    for row in await connection.fetch(database.sql(LEASE_CHANGES)):
        old, new = LeaseStanding(*row[6:10]), LeaseStanding(*row[10:14])
        standings = (old if old.holder is not None else None, new if new.holder is not None else None)
        found.append(LeaseChange._make((*row[:6], *standings)))
    return found


class Slots(NamedTuple):
    """The generator settled everything up to `new`, and made so many jobs of it."""

    seq: int
    at: int
    txid: int
    old: int
    new: int
    produced: int


SLOTS = f"""
SELECT seq, {microseconds("at")}, txid, {microseconds("old_slot")}, {microseconds("new_slot")}, produced
FROM {{schema}}.torture_slots ORDER BY seq
"""


async def slots(connection: Connection, database: Database) -> list[Slots]:
    return [Slots(*row) for row in await connection.fetch(database.sql(SLOTS))]


class GuardedRow(NamedTuple):
    """One write that a resource let pass, in the order in which it did."""

    seq: int
    resource: str
    fence: int


GUARDED = "SELECT seq, resource, fence FROM {schema}.torture_guarded ORDER BY seq"


async def guarded(connection: Connection, database: Database) -> list[GuardedRow]:
    return [GuardedRow(*row) for row in await connection.fetch(database.sql(GUARDED))]


class EffectRow(NamedTuple):
    """One effect that a handler's statement left."""

    seq: int
    txid: int
    key: str
    job_id: int
    fence: int
    """Of the attempt whose handler recorded it."""


EFFECTS = "SELECT seq, txid, key, job_id, fence FROM {schema}.torture_effects ORDER BY seq"


async def effects(connection: Connection, database: Database) -> list[EffectRow]:
    return [EffectRow(*row) for row in await connection.fetch(database.sql(EFFECTS))]


class LedgerRow(NamedTuple):
    key: str
    job_id: int
    fence: int


LEDGER = "SELECT idempotency_key, job_id, fence FROM {schema}.job_effects"


async def ledger(connection: Connection, database: Database) -> list[LedgerRow]:
    return [LedgerRow(*row) for row in await connection.fetch(database.sql(LEDGER))]


FAILURES = "SELECT job_id, fence FROM {schema}.job_failures"


async def failures(connection: Connection, database: Database) -> list[tuple[int, int]]:
    """The attempts, by job and fence, that are on record as failed."""
    return [(row[0], row[1]) for row in await connection.fetch(database.sql(FAILURES))]


class FinalRow(NamedTuple):
    """A job as it stands in the end."""

    id: int
    key: str
    kind: str
    max_attempts: int
    standing: Standing


FINAL = f"""
SELECT id, idempotency_key, kind, max_attempts, state, lease_owner, fence, {microseconds("lease_until")}, attempts, crashes
FROM {{schema}}.jobs ORDER BY id
"""


async def final_rows(connection: Connection, database: Database) -> list[FinalRow]:
    return [FinalRow._make((*row[:4], Standing(*row[4:]))) for row in await connection.fetch(database.sql(FINAL))]
