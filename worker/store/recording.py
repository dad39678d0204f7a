"""Recording: what `worker torture` lets the database write down about itself.

Triggers write every change of a job, a named lease and the generator's mark, in the transaction that makes it: what was rolled back
has left nothing, what was committed cannot be missing. The row's lock puts the entries of a row in order. How it is read: audit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

# `at`: while the row is locked, so after whoever had it before has committed. `begun`: fences drawn in here are younger.
# `writer`: the application_name of the session, which the torture gives each daemon with its address.
# `said_fence`: the fence by which a result or an error names the attempt it belongs to; handlers of the torture write it.
# `owner_until`, `owner_seen`: the presence of the process from which a job was taken, as it was written last.
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
    said_fence bigint, old_due timestamptz, new_due timestamptz, owner_until timestamptz, owner_seen timestamptz
);
CREATE INDEX ON {schema}.torture_jobs (job_id, seq);
CREATE INDEX torture_jobs_done ON {schema}.torture_jobs (at) WHERE new_state = 'succeeded' AND old_state = 'running';

CREATE TABLE {schema}.torture_leases (
    seq bigint GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    begun timestamptz NOT NULL DEFAULT now(),
    txid bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    writer text NOT NULL DEFAULT current_setting('application_name'),
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
DECLARE
    owner_until timestamptz;
    owner_seen timestamptz;
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO {schema}.torture_jobs (job_id, key, kind, max_attempts,
            new_state, new_owner, new_fence, new_until, new_attempts, new_crashes)
        VALUES (NEW.id, NEW.idempotency_key, NEW.kind, NEW.max_attempts,
            NEW.state, NEW.lease_owner, NEW.fence, NEW.lease_until, NEW.attempts, NEW.crashes);
    ELSIF TG_OP = 'UPDATE' THEN
        IF OLD.state = 'running' AND NEW.state IN ('ready', 'dead') THEN
            SELECT p.expires_at, p.seen_at INTO owner_until, owner_seen FROM {schema}.processes AS p WHERE p.id = OLD.lease_owner;
        END IF;
        INSERT INTO {schema}.torture_jobs (job_id, key, kind, max_attempts,
            old_state, old_owner, old_fence, old_until, old_attempts, old_crashes,
            new_state, new_owner, new_fence, new_until, new_attempts, new_crashes, said_fence,
            old_due, new_due, owner_until, owner_seen)
        VALUES (NEW.id, NEW.idempotency_key, NEW.kind, NEW.max_attempts,
            OLD.state, OLD.lease_owner, OLD.fence, OLD.lease_until, OLD.attempts, OLD.crashes,
            NEW.state, NEW.lease_owner, NEW.fence, NEW.lease_until, NEW.attempts, NEW.crashes,
            CASE WHEN NEW.state = 'succeeded' THEN (NEW.result ->> 'fence')::bigint
                WHEN NEW.last_error IS DISTINCT FROM OLD.last_error THEN substring(NEW.last_error FROM 'fence (\\d+)')::bigint END,
            OLD.available_at, NEW.available_at, owner_until, owner_seen);
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
