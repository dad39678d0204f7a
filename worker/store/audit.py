"""Audit: what `worker torture` lets the database write down about itself, and how the checker reads it.

Triggers write every change of a job, a named lease and the generator's mark, in the transaction that makes it: what was rolled back
has left nothing, what was committed cannot be missing. The row's lock puts the entries of a row in order. Moments are microseconds
since 1970 by the database's clock, so that they compare exactly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

_FETCH = 2_000

# `at`: while the row is locked, so after whoever had it before has committed. `begun`: fences drawn in here are younger.
# `writer`: the application_name of the session, which the torture gives each daemon with its address.
# `said_fence`: the fence by which a result or an error names the attempt it belongs to; handlers of the torture write it.
INSTALL = """
CREATE TABLE {schema}.torture_jobs (
    seq bigint GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    begun timestamptz NOT NULL DEFAULT now(),
    txid bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    writer text NOT NULL DEFAULT current_setting('application_name'),
    job_id bigint NOT NULL, key text NOT NULL, kind text NOT NULL, max_attempts int NOT NULL,
    old_state text, old_owner text, old_fence bigint, old_until timestamptz, old_attempts int, old_crashes int,
    new_state text, new_owner text, new_fence bigint, new_until timestamptz, new_attempts int, new_crashes int,
    said_fence bigint
);
CREATE INDEX ON {schema}.torture_jobs (job_id, seq);
CREATE INDEX torture_jobs_done ON {schema}.torture_jobs (at) WHERE new_state = 'succeeded' AND old_state = 'running';

CREATE TABLE {schema}.torture_leases (
    seq bigint GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    txid bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    resource text NOT NULL,
    old_holder text, old_fence bigint, old_expires timestamptz, old_released timestamptz,
    new_holder text, new_fence bigint, new_expires timestamptz, new_released timestamptz
);

CREATE TABLE {schema}.torture_slots (
    seq bigint GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    txid bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    old_slot timestamptz, new_slot timestamptz,
    produced bigint NOT NULL
);

-- No key: a second effect is to be seen, not refused.
CREATE TABLE {schema}.torture_effects (
    seq bigint GENERATED ALWAYS AS IDENTITY,
    txid bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    key text NOT NULL,
    job_id bigint NOT NULL,
    fence bigint NOT NULL
);

-- What was written under a named lease, to a resource that checks its fence.
CREATE TABLE {schema}.torture_guarded (
    seq bigint GENERATED ALWAYS AS IDENTITY,
    resource text NOT NULL,
    fence bigint NOT NULL
);

CREATE FUNCTION {schema}.torture_job() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO {schema}.torture_jobs (job_id, key, kind, max_attempts,
            new_state, new_owner, new_fence, new_until, new_attempts, new_crashes)
        VALUES (NEW.id, NEW.idempotency_key, NEW.kind, NEW.max_attempts,
            NEW.state, NEW.lease_owner, NEW.fence, NEW.lease_until, NEW.attempts, NEW.crashes);
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO {schema}.torture_jobs (job_id, key, kind, max_attempts,
            old_state, old_owner, old_fence, old_until, old_attempts, old_crashes,
            new_state, new_owner, new_fence, new_until, new_attempts, new_crashes, said_fence)
        VALUES (NEW.id, NEW.idempotency_key, NEW.kind, NEW.max_attempts,
            OLD.state, OLD.lease_owner, OLD.fence, OLD.lease_until, OLD.attempts, OLD.crashes,
            NEW.state, NEW.lease_owner, NEW.fence, NEW.lease_until, NEW.attempts, NEW.crashes,
            CASE WHEN NEW.state = 'succeeded' THEN (NEW.result ->> 'fence')::bigint
                WHEN NEW.last_error IS DISTINCT FROM OLD.last_error THEN substring(NEW.last_error FROM 'fence (\\d+)')::bigint END);
    ELSE
        INSERT INTO {schema}.torture_jobs (job_id, key, kind, max_attempts,
            old_state, old_owner, old_fence, old_until, old_attempts, old_crashes)
        VALUES (OLD.id, OLD.idempotency_key, OLD.kind, OLD.max_attempts,
            OLD.state, OLD.lease_owner, OLD.fence, OLD.lease_until, OLD.attempts, OLD.crashes);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER torture_job AFTER INSERT OR UPDATE OR DELETE ON {schema}.jobs
    FOR EACH ROW EXECUTE FUNCTION {schema}.torture_job();

CREATE FUNCTION {schema}.torture_lease() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO {schema}.torture_leases (resource, new_holder, new_fence, new_expires, new_released)
        VALUES (NEW.resource, NEW.holder, NEW.fence, NEW.expires_at, NEW.released_at);
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO {schema}.torture_leases (resource, old_holder, old_fence, old_expires, old_released,
            new_holder, new_fence, new_expires, new_released)
        VALUES (NEW.resource, OLD.holder, OLD.fence, OLD.expires_at, OLD.released_at,
            NEW.holder, NEW.fence, NEW.expires_at, NEW.released_at);
    ELSE
        INSERT INTO {schema}.torture_leases (resource, old_holder, old_fence, old_expires, old_released)
        VALUES (OLD.resource, OLD.holder, OLD.fence, OLD.expires_at, OLD.released_at);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER torture_lease AFTER INSERT OR UPDATE OR DELETE ON {schema}.leases
    FOR EACH ROW EXECUTE FUNCTION {schema}.torture_lease();

CREATE FUNCTION {schema}.torture_slot() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO {schema}.torture_slots (old_slot, new_slot, produced)
    VALUES (OLD.last_slot_at, NEW.last_slot_at, NEW.produced - OLD.produced);
    RETURN NULL;
END $$;
CREATE TRIGGER torture_slot AFTER UPDATE ON {schema}.generators
    FOR EACH ROW WHEN (OLD.last_slot_at IS DISTINCT FROM NEW.last_slot_at) EXECUTE FUNCTION {schema}.torture_slot();
"""


async def install(connection: Connection, database: Database) -> None:
    """Begin to record, in a schema that holds our tables and nothing else yet."""
    await connection.execute(database.sql(INSTALL))


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


def _us(column: str) -> str:
    return f"(extract(epoch FROM {column}) * 1000000)::bigint"


# Index (job_id, seq). NULL: of every job.
CHANGES = f"""
SELECT seq, {_us("at")}, {_us("begun")}, txid, writer, job_id, key, kind, max_attempts,
    old_state, old_owner, old_fence, {_us("old_until")}, old_attempts, old_crashes,
    new_state, new_owner, new_fence, {_us("new_until")}, new_attempts, new_crashes, said_fence
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
            yield Change._make((*row[:9], *standings, row[21]))


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
    txid: int
    resource: str
    old: LeaseStanding | None
    new: LeaseStanding | None


LEASE_CHANGES = f"""
SELECT seq, {_us("at")}, txid, resource,
    old_holder, old_fence, {_us("old_expires")}, {_us("old_released")},
    new_holder, new_fence, {_us("new_expires")}, {_us("new_released")}
FROM {{schema}}.torture_leases
ORDER BY resource, seq
"""


async def lease_changes(connection: Connection, database: Database) -> list[LeaseChange]:
    """Every change of every named lease, resource by resource, in order."""
    found = []
    for row in await connection.fetch(database.sql(LEASE_CHANGES)):
        old, new = LeaseStanding(*row[4:8]), LeaseStanding(*row[8:12])
        standings = (old if old.holder is not None else None, new if new.holder is not None else None)
        found.append(LeaseChange._make((*row[:4], *standings)))
    return found


class Slots(NamedTuple):
    """The generator settled everything up to `new`, and made so many jobs of it."""

    seq: int
    at: int
    txid: int
    old: int
    new: int
    produced: int


SLOTS = f"SELECT seq, {_us('at')}, txid, {_us('old_slot')}, {_us('new_slot')}, produced FROM {{schema}}.torture_slots ORDER BY seq"


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


class FinalRow(NamedTuple):
    """A job as it stands in the end."""

    id: int
    key: str
    kind: str
    max_attempts: int
    standing: Standing


FINAL = f"""
SELECT id, idempotency_key, kind, max_attempts, state, lease_owner, fence, {_us("lease_until")}, attempts, crashes
FROM {{schema}}.jobs ORDER BY id
"""


async def final_rows(connection: Connection, database: Database) -> list[FinalRow]:
    return [FinalRow._make((*row[:4], Standing(*row[4:]))) for row in await connection.fetch(database.sql(FINAL))]


# --- while it goes on

UNFINISHED = """
SELECT count(*) FILTER (WHERE state = 'ready'), count(*) FILTER (WHERE state = 'running')
FROM {schema}.jobs WHERE state IN ('ready', 'running')
"""


async def count_unfinished(connection: Connection, database: Database) -> tuple[int, int]:
    """How many jobs are ready, and how many run."""
    ready, running = await connection.fetchrow(database.sql(UNFINISHED))
    return ready, running


# Index torture_jobs_done.
COMPLETED = f"""
SELECT count(*), {_us("clock_timestamp()")} FROM {{schema}}.torture_jobs
WHERE new_state = 'succeeded' AND old_state = 'running' AND at > clock_timestamp() - $1::float8 * interval '1 second'
"""


async def count_completed(connection: Connection, database: Database, *, seconds: float) -> tuple[int, int]:
    """How many jobs succeeded in the last so many seconds, and the database's clock."""
    completed, now = await connection.fetchrow(database.sql(COMPLETED), seconds)
    return completed, now


async def read_clock(connection: Connection) -> int:
    """Microseconds since 1970 by the database's clock."""
    now: int = await connection.fetchval(f"SELECT {_us('clock_timestamp()')}")
    return now


LEFT = "SELECT count(*) FROM {schema}.jobs WHERE kind = $1 AND state IN ('ready', 'running')"


async def count_unfinished_of(connection: Connection, database: Database, *, kind: str) -> int:
    """The same for one kind."""
    return int(await connection.fetchval(database.sql(LEFT), kind))


PROCESSES = "SELECT count(*) FROM {schema}.processes WHERE expires_at > now()"


async def count_processes(connection: Connection, database: Database) -> int:
    """How many daemons have said that they live."""
    return int(await connection.fetchval(database.sql(PROCESSES)))
