-- reliable-worker, schema version 1. PostgreSQL 14 to 18, no extension.
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f schema.sql        into the first schema of the search_path
--   worker migrate                                               the same, versioned, into WORKER_SCHEMA
--
-- It applies whole or not at all. Text that only machines compare is COLLATE "C": cheaper, and the same order everywhere.

BEGIN;

-- Functions keep the search_path of this transaction (SET search_path FROM CURRENT), so that no caller's path, and no decoy
-- in another schema, can change what they mean.
DO $$ BEGIN PERFORM set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true); END $$;

CREATE TABLE schema_version (
    version int PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO schema_version (version) VALUES (1);

-- One sequence for every claim of a job and every acquisition of a named lease: fencing tokens that are comparable for any
-- resource, rise for ever, and survive the deletion of the rows they were drawn for.
CREATE SEQUENCE fence_seq AS bigint;

CREATE TABLE jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    idempotency_key text COLLATE "C" NOT NULL DEFAULT 'auto:' || gen_random_uuid() UNIQUE
        CONSTRAINT jobs_idempotency_key_size CHECK (octet_length(idempotency_key) BETWEEN 1 AND 512),
    kind text COLLATE "C" NOT NULL DEFAULT 'message'
        CONSTRAINT jobs_kind_size CHECK (octet_length(kind) BETWEEN 1 AND 128),
    queue text COLLATE "C" NOT NULL DEFAULT 'default'
        CONSTRAINT jobs_queue_size CHECK (octet_length(queue) BETWEEN 1 AND 128),
    -- Higher runs first, then the older available_at, then the lower id.
    priority smallint NOT NULL DEFAULT 0,
    -- As stored: a new value is measured before it is compressed.
    payload jsonb NOT NULL
        CONSTRAINT jobs_payload_size CHECK (pg_column_size(payload) <= 1048576),
    state text COLLATE "C" NOT NULL DEFAULT 'ready'
        CONSTRAINT jobs_state CHECK (state IN ('ready', 'running', 'succeeded', 'dead', 'cancelled')),
    attempts int NOT NULL DEFAULT 0
        CONSTRAINT jobs_attempts CHECK (attempts >= 0),
    max_attempts int NOT NULL DEFAULT 5
        CONSTRAINT jobs_max_attempts CHECK (max_attempts > 0),
    -- How often the process that ran this job was lost with it; above 0 the job is a suspect and runs as the only one of its sort.
    crashes smallint NOT NULL DEFAULT 0
        CONSTRAINT jobs_crashes CHECK (crashes >= 0),
    fence bigint NOT NULL DEFAULT 0,
    available_at timestamptz NOT NULL DEFAULT now(),
    lease_owner text COLLATE "C"
        CONSTRAINT jobs_lease_owner_size CHECK (octet_length(lease_owner) BETWEEN 1 AND 192),
    lease_until timestamptz,
    last_error text
        CONSTRAINT jobs_last_error_size CHECK (char_length(last_error) <= 1000),
    result jsonb
        CONSTRAINT jobs_result_size CHECK (pg_column_size(result) <= 1048576),
    meta jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    completed_at timestamptz,
    CONSTRAINT jobs_running_is_leased CHECK
        ((state = 'running') = (lease_owner IS NOT NULL) AND (state = 'running') = (lease_until IS NOT NULL)),
    CONSTRAINT jobs_terminal_is_completed CHECK
        (state IN ('ready', 'running') OR completed_at IS NOT NULL)
) WITH (
    -- Every job is updated twice: vacuum by a share of a table that is mostly history would come too late for its hot end.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.05
);

-- The claim: one range a queue and priority, read in order.
CREATE INDEX jobs_ready ON jobs (queue, priority, available_at, id) WHERE state = 'ready' AND crashes = 0;
-- The claim of a suspect, one at a time.
CREATE INDEX jobs_suspect ON jobs (queue, priority, available_at, id) WHERE state = 'ready' AND crashes > 0;
-- The reaper: leases that have expired.
CREATE INDEX jobs_running ON jobs (lease_until, id) WHERE state = 'running';
-- The reaper: ready rows whose attempts somebody used up by hand. Always empty otherwise.
CREATE INDEX jobs_exhausted ON jobs (id) WHERE state = 'ready' AND attempts >= max_attempts;
-- Operators: the dead letters and the cancelled, newest first.
CREATE INDEX jobs_unsuccessful ON jobs (state, id) WHERE state IN ('dead', 'cancelled');

-- The sample effect of the built-in `message` handler.
CREATE TABLE processed_messages (
    idempotency_key text COLLATE "C" PRIMARY KEY,
    message text NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now()
);

-- The ledger: one row an idempotency key whose effect has been committed. It outlives the job.
CREATE TABLE job_effects (
    idempotency_key text COLLATE "C" PRIMARY KEY,
    job_id bigint NOT NULL,
    fence bigint NOT NULL,
    committed_at timestamptz NOT NULL DEFAULT now()
);
-- Pruning by age. The table only grows at its end, so a block range index is enough and costs nothing at insert.
CREATE INDEX job_effects_committed_at ON job_effects USING brin (committed_at);

CREATE TABLE job_failures (
    job_id bigint NOT NULL,
    fence bigint NOT NULL,
    attempt int NOT NULL,
    worker text COLLATE "C" NOT NULL,
    failed_at timestamptz NOT NULL DEFAULT now(),
    outcome text COLLATE "C" NOT NULL
        CONSTRAINT job_failures_outcome CHECK (outcome IN ('error', 'timeout', 'lease_lost', 'crashed')),
    error text NOT NULL
        CONSTRAINT job_failures_error_size CHECK (octet_length(error) <= 8192),
    PRIMARY KEY (job_id, fence)
);
-- Rates over the last hour.
CREATE INDEX job_failures_failed_at ON job_failures (failed_at);

-- One row a daemon or embedded Worker: its presence. `hungry` is what an INSERT looks at before it sends a NOTIFY.
CREATE TABLE processes (
    id text COLLATE "C" PRIMARY KEY,
    name text NOT NULL,
    hostname text NOT NULL,
    pid int NOT NULL,
    version text NOT NULL,
    queues text[] COLLATE "C" NOT NULL,
    slots int NOT NULL,
    busy int NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT now(),
    seen_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    hungry boolean NOT NULL DEFAULT false,
    health jsonb NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- What check_fence remembers: the highest fence that each resource has seen.
CREATE TABLE fences (
    resource text COLLATE "C" PRIMARY KEY
        CONSTRAINT fences_resource_size CHECK (octet_length(resource) BETWEEN 1 AND 512),
    fence bigint NOT NULL
) WITH (fillfactor = 50);

-- A row stands here only while a handler's own transaction (job.transaction()) is open. It is checked at COMMIT, so that a
-- COMMIT which the handler sends by hand fails whole instead of letting what follows run without the fence.
CREATE TABLE open_transactions (
    job_id bigint,
    fence bigint,
    PRIMARY KEY (job_id, fence)
);

CREATE FUNCTION refuse_open_transaction() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (SELECT FROM open_transactions AS o WHERE o.job_id = NEW.job_id AND o.fence = NEW.fence) THEN
        RAISE EXCEPTION 'the transaction of job % was committed by hand inside job.transaction()', NEW.job_id
            USING ERRCODE = 'RW002', HINT = 'leave the block: it commits the effect and the completion together';
    END IF;
    RETURN NULL;
END
$$;

CREATE CONSTRAINT TRIGGER open_transactions_end AFTER INSERT ON open_transactions
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse_open_transaction();

-- Waking. NOTIFY holds a database-wide lock until its commit is flushed, so it is sent only when a live process that serves
-- the queue has said that it sleeps. The payload is the queue's name, the channel belongs to the schema.

CREATE FUNCTION wake_channel() RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT 'worker_' || md5(current_schema())
$$;

CREATE FUNCTION wake_workers(queue text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (
        SELECT FROM processes AS p
        WHERE p.hungry AND p.expires_at > clock_timestamp() AND wake_workers.queue = ANY (p.queues))
    THEN
        PERFORM pg_notify(wake_channel(), wake_workers.queue);
    END IF;
END
$$;

-- SECURITY DEFINER: a role that may only INSERT INTO jobs can enqueue. An error in here means "notify", never a failed INSERT.
CREATE FUNCTION wake_on_insert() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (SELECT FROM processes AS p WHERE p.hungry AND p.expires_at > clock_timestamp()) THEN
        PERFORM wake_workers(i.queue) FROM (SELECT DISTINCT inserted.queue FROM inserted) AS i;
    END IF;
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    BEGIN
        PERFORM pg_notify('worker_' || md5(TG_TABLE_SCHEMA), '');
    EXCEPTION WHEN OTHERS THEN
        NULL;  -- even the notification queue is full: the workers poll
    END;
    RETURN NULL;
END
$$;

CREATE TRIGGER jobs_wake AFTER INSERT ON jobs
    REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION wake_on_insert();

-- Enqueue from any language, inside the caller's own transaction. The same key twice returns the first job's id, created =
-- false and its state. Exactly one row comes back, also when a rival with the same key is in flight or rolls back.
CREATE FUNCTION enqueue_job(
    kind text,
    payload jsonb,
    key text DEFAULT NULL,
    queue text DEFAULT 'default',
    priority int DEFAULT 0,
    run_at timestamptz DEFAULT clock_timestamp(),
    max_attempts int DEFAULT 5
) RETURNS TABLE (id bigint, created boolean, state text)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    IF enqueue_job.key LIKE 'auto:%' THEN
        RAISE EXCEPTION 'key: "auto:" is reserved for generated keys' USING ERRCODE = '22023';
    END IF;
    IF enqueue_job.priority NOT BETWEEN -32768 AND 32767 THEN
        RAISE EXCEPTION 'priority: % is not between -32768 and 32767', enqueue_job.priority USING ERRCODE = '22023';
    END IF;
    IF enqueue_job.max_attempts < 1 THEN
        RAISE EXCEPTION 'max_attempts: % is less than 1', enqueue_job.max_attempts USING ERRCODE = '22023';
    END IF;
    FOR round IN 1..100 LOOP
        INSERT INTO jobs (idempotency_key, kind, queue, priority, payload, available_at, max_attempts)
        VALUES (
            COALESCE(enqueue_job.key, 'auto:' || gen_random_uuid()),
            enqueue_job.kind,
            COALESCE(enqueue_job.queue, 'default'),
            COALESCE(enqueue_job.priority, 0),
            enqueue_job.payload,
            COALESCE(enqueue_job.run_at, clock_timestamp()),
            COALESCE(enqueue_job.max_attempts, 5))
        ON CONFLICT (idempotency_key) DO NOTHING
        RETURNING jobs.id, true, jobs.state INTO enqueue_job.id, enqueue_job.created, enqueue_job.state;
        IF FOUND THEN
            RETURN NEXT;
            RETURN;
        END IF;
        SELECT j.id, false, j.state INTO enqueue_job.id, enqueue_job.created, enqueue_job.state
        FROM jobs AS j WHERE j.idempotency_key = enqueue_job.key;
        IF FOUND THEN
            RETURN NEXT;
            RETURN;
        END IF;
        -- The row that was in the way has gone between the two statements (pruned): insert again.
    END LOOP;
    RAISE EXCEPTION 'key "%" comes and goes, giving up', enqueue_job.key USING ERRCODE = '40001';
END
$$;

-- Cancel a ready or running job; returns the state after the call, NULL for no such job. The fence stays, the lease goes: the
-- worker that runs it can write nothing more, and is told so at once.
CREATE FUNCTION cancel_job(id bigint) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    found_state text;
    found_owner text;
BEGIN
    SELECT j.state, j.lease_owner INTO found_state, found_owner
    FROM jobs AS j WHERE j.id = cancel_job.id FOR NO KEY UPDATE;
    IF NOT FOUND OR found_state NOT IN ('ready', 'running') THEN
        RETURN found_state;
    END IF;
    UPDATE jobs AS j
    SET state = 'cancelled', completed_at = clock_timestamp(), lease_owner = NULL, lease_until = NULL
    WHERE j.id = cancel_job.id;
    IF found_owner IS NOT NULL THEN
        PERFORM pg_notify(wake_channel() || '_cancel', found_owner);
    END IF;
    RETURN 'cancelled';
END
$$;

-- Give a dead or cancelled job fresh attempts; returns the state after the call, NULL for no such job. What crashed a process
-- before stays a suspect.
CREATE FUNCTION retry_job(id bigint) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    found_state text;
    found_queue text;
BEGIN
    SELECT j.state, j.queue INTO found_state, found_queue
    FROM jobs AS j WHERE j.id = retry_job.id FOR NO KEY UPDATE;
    IF NOT FOUND OR found_state NOT IN ('dead', 'cancelled') THEN
        RETURN found_state;
    END IF;
    UPDATE jobs AS j
    SET state = 'ready', attempts = 0, available_at = clock_timestamp(), completed_at = NULL
    WHERE j.id = retry_job.id;
    PERFORM wake_workers(found_queue);
    RETURN 'ready';
END
$$;

-- The resource's side of the fencing pattern: passes (true) on a fence that is equal to or higher than the highest seen,
-- remembers it and keeps the resource's row locked until the transaction ends; a stale fence raises RW001.
CREATE FUNCTION check_fence(resource text, fence bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    IF (octet_length(check_fence.resource) BETWEEN 1 AND 512) IS NOT TRUE THEN
        RAISE EXCEPTION 'resource: 1 to 512 bytes of text are needed' USING ERRCODE = '22023';
    END IF;
    IF (check_fence.fence >= 1) IS NOT TRUE THEN
        RAISE EXCEPTION 'fence: % is none: they begin at 1', COALESCE(check_fence.fence::text, 'NULL') USING ERRCODE = '22023';
    END IF;
    INSERT INTO fences AS f (resource, fence) VALUES (check_fence.resource, check_fence.fence)
    ON CONFLICT (resource) DO UPDATE SET fence = EXCLUDED.fence WHERE f.fence <= EXCLUDED.fence;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'stale fence % for resource "%"', check_fence.fence, check_fence.resource USING ERRCODE = 'RW001';
    END IF;
    RETURN true;
END
$$;

-- Named leases: one row a resource, which remembers its last acquisition. A lease is live while it is neither released nor past
-- expires_at, by clock_timestamp(): these functions may be called in a transaction that began long ago. A renewal changes
-- nothing that is indexed, on purpose: there is room in the page, and no index on expires_at.
CREATE TABLE leases (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    resource text COLLATE "C" NOT NULL UNIQUE
        CONSTRAINT leases_resource_size CHECK (octet_length(resource) BETWEEN 1 AND 512),
    holder text COLLATE "C" NOT NULL
        CONSTRAINT leases_holder_size CHECK (octet_length(holder) BETWEEN 1 AND 128),
    fence bigint NOT NULL,
    ttl_seconds double precision NOT NULL
        CONSTRAINT leases_ttl CHECK (ttl_seconds BETWEEN 1 AND 86400),
    -- When the present holder acquired it.
    created_at timestamptz NOT NULL,
    renewed_at timestamptz,
    released_at timestamptz,
    expires_at timestamptz NOT NULL,
    -- What the acquisition was called by whoever asked, so that asking again after a lost answer is safe.
    request_id text COLLATE "C"
        CONSTRAINT leases_request_id_size CHECK (octet_length(request_id) BETWEEN 1 AND 128),
    metadata jsonb NOT NULL
        CONSTRAINT leases_metadata_size CHECK (jsonb_typeof(metadata) = 'object' AND pg_column_size(metadata) <= 8192)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200);

-- Milliseconds that a lease goes on, rounded down; 0 when it is over.
CREATE FUNCTION lease_expires_in_ms(expires_at timestamptz, released_at timestamptz) RETURNS bigint
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    -- A day is the most there can be; somebody may have written infinity.
    SELECT CASE WHEN released_at IS NULL AND expires_at > clock_timestamp()
        THEN GREATEST(floor(extract(epoch FROM
            LEAST(expires_at, clock_timestamp() + interval '1 day') - clock_timestamp()) * 1000), 0)::bigint
        ELSE 0 END
$$;

-- Acquire: `acquired` when the resource is free, released or expired; `held` by somebody (also by the same holder: a lease is
-- not re-entrant) with the time it has left. The same request_id of the same holder again: `acquired` with the same fence and
-- the remaining time while that lease lives, `ended` afterwards, until somebody else has acquired the resource. Always one row;
-- a lost race at repeatable read or serializable, a deadlock with another acquisition and a wait beyond lock_timeout are `held`
-- (by NULL: that rival cannot be seen from here), never an error.
CREATE FUNCTION acquire_lease(
    resource text,
    OUT outcome text,
    OUT id bigint,
    OUT fence bigint,
    INOUT holder text,
    ttl_seconds double precision DEFAULT 30,
    request_id text DEFAULT NULL,
    metadata jsonb DEFAULT '{}',
    OUT expires_in_ms bigint
) RETURNS record
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    asking text := acquire_lease.holder;
    details jsonb := COALESCE(acquire_lease.metadata, '{}');
    is_over boolean;
    is_same boolean;
BEGIN
    IF (octet_length(acquire_lease.resource) BETWEEN 1 AND 512) IS NOT TRUE THEN
        RAISE EXCEPTION 'resource: 1 to 512 bytes of text are needed' USING ERRCODE = '22023';
    END IF;
    IF (octet_length(asking) BETWEEN 1 AND 128) IS NOT TRUE THEN
        RAISE EXCEPTION 'holder: 1 to 128 bytes of text are needed' USING ERRCODE = '22023';
    END IF;
    IF (acquire_lease.ttl_seconds BETWEEN 1 AND 86400) IS NOT TRUE THEN
        RAISE EXCEPTION 'ttl_seconds: % is not from 1 to 86400', COALESCE(acquire_lease.ttl_seconds::text, 'NULL')
            USING ERRCODE = '22023';
    END IF;
    IF octet_length(acquire_lease.request_id) NOT BETWEEN 1 AND 128 THEN
        RAISE EXCEPTION 'request_id: 1 to 128 bytes of text, or NULL' USING ERRCODE = '22023';
    END IF;
    IF jsonb_typeof(details) <> 'object' OR pg_column_size(details) > 8192 THEN
        RAISE EXCEPTION 'metadata: a JSON object of at most 8192 bytes is needed' USING ERRCODE = '22023';
    END IF;
    FOR round IN 1..100 LOOP
        -- The fence is drawn and the time is read under the row's lock (a row that changed while we waited for it is looked at
        -- again), so that fences of one resource rise in the order of its acquisitions.
        UPDATE leases AS l
        SET holder = asking, fence = nextval('fence_seq'), ttl_seconds = acquire_lease.ttl_seconds,
            created_at = clock_timestamp(), renewed_at = NULL, released_at = NULL,
            expires_at = clock_timestamp() + acquire_lease.ttl_seconds * interval '1 second',
            request_id = acquire_lease.request_id, metadata = details
        WHERE l.resource = acquire_lease.resource
            AND (l.released_at IS NOT NULL OR l.expires_at <= clock_timestamp())
            AND (l.request_id = acquire_lease.request_id AND l.holder = asking) IS NOT TRUE
        RETURNING 'acquired', l.id, l.fence, l.holder, lease_expires_in_ms(l.expires_at, l.released_at)
        INTO acquire_lease.outcome, acquire_lease.id, acquire_lease.fence, acquire_lease.holder, acquire_lease.expires_in_ms;
        IF FOUND THEN
            RETURN;
        END IF;
        SELECT l.id, l.fence, l.holder, lease_expires_in_ms(l.expires_at, l.released_at),
            l.released_at IS NOT NULL OR l.expires_at <= clock_timestamp(),
            (l.request_id = acquire_lease.request_id AND l.holder = asking) IS TRUE
        INTO acquire_lease.id, acquire_lease.fence, acquire_lease.holder, acquire_lease.expires_in_ms, is_over, is_same
        FROM leases AS l WHERE l.resource = acquire_lease.resource;
        IF NOT FOUND THEN
            -- A place to acquire, released from the start, in the next round. Not acquired in here: the fence would be drawn
            -- before the row is ours, and could be lower than one that came and was pruned meanwhile.
            INSERT INTO leases (resource, holder, fence, ttl_seconds, created_at, released_at, expires_at, metadata)
            VALUES (acquire_lease.resource, asking, 0, acquire_lease.ttl_seconds, clock_timestamp(), clock_timestamp(),
                clock_timestamp(), '{}')
            ON CONFLICT (resource) DO NOTHING;
        ELSIF is_same THEN
            -- Locked, so that no old snapshot answers for a lease that has passed on since.
            PERFORM FROM leases AS l
            WHERE l.id = acquire_lease.id AND l.fence = acquire_lease.fence AND (is_over OR l.released_at IS NULL)
            FOR NO KEY UPDATE;
            IF FOUND THEN
                acquire_lease.outcome := CASE WHEN is_over THEN 'ended' ELSE 'acquired' END;
                RETURN;
            END IF;
        ELSIF NOT is_over THEN
            acquire_lease.outcome := 'held';
            acquire_lease.fence := NULL;
            RETURN;
        END IF;
        -- Over by now, or there is a place: ask again.
    END LOOP;
    -- It comes and goes: whoever has it now, it is not the caller.
    RAISE serialization_failure;
EXCEPTION WHEN serialization_failure OR deadlock_detected OR lock_not_available THEN
    SELECT 'held' INTO acquire_lease.outcome, acquire_lease.id, acquire_lease.fence, acquire_lease.holder,
        acquire_lease.expires_in_ms;
END
$$;

-- Renew: for ttl_seconds from now, by default as long as before; returns the milliseconds until it expires. RW001 unless this
-- holder has the live lease under this fence.
CREATE FUNCTION renew_lease(resource text, holder text, fence bigint, ttl_seconds double precision DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    remaining_ms bigint;
BEGIN
    IF renew_lease.ttl_seconds NOT BETWEEN 1 AND 86400 THEN
        RAISE EXCEPTION 'ttl_seconds: % is not from 1 to 86400', renew_lease.ttl_seconds USING ERRCODE = '22023';
    END IF;
    UPDATE leases AS l
    SET ttl_seconds = COALESCE(renew_lease.ttl_seconds, l.ttl_seconds), renewed_at = clock_timestamp(),
        expires_at = clock_timestamp() + COALESCE(renew_lease.ttl_seconds, l.ttl_seconds) * interval '1 second'
    WHERE l.resource = renew_lease.resource AND l.holder = renew_lease.holder AND l.fence = renew_lease.fence
        AND l.released_at IS NULL AND l.expires_at > clock_timestamp()
    RETURNING lease_expires_in_ms(l.expires_at, l.released_at) INTO remaining_ms;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no live lease of "%" by "%" with fence %', renew_lease.resource, renew_lease.holder, renew_lease.fence
            USING ERRCODE = 'RW001';
    END IF;
    RETURN remaining_ms;
END
$$;

-- Release: the lease ends at once and can be acquired again at once. Repeated with the same fence: true again. RW001 unless this
-- holder has, or released, the lease under this fence.
CREATE FUNCTION release_lease(resource text, holder text, fence bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    UPDATE leases AS l
    SET released_at = clock_timestamp()
    WHERE l.resource = release_lease.resource AND l.holder = release_lease.holder AND l.fence = release_lease.fence
        AND l.released_at IS NULL AND l.expires_at > clock_timestamp();
    IF NOT FOUND AND NOT EXISTS (
        SELECT FROM leases AS l
        WHERE l.resource = release_lease.resource AND l.holder = release_lease.holder AND l.fence = release_lease.fence
            AND l.released_at IS NOT NULL)
    THEN
        RAISE EXCEPTION 'no live lease of "%" by "%" with fence %',
            release_lease.resource, release_lease.holder, release_lease.fence
            USING ERRCODE = 'RW001';
    END IF;
    RETURN true;
END
$$;

-- The generator: the state that is wanted, what it produces, and how far it has come. No row: nobody has started it yet. Its
-- slots are the multiples of the spacing since 1970-01-01 UTC, by this server's clock; `name` is the resource of its lease, too.
CREATE TABLE generators (
    name text COLLATE "C" PRIMARY KEY
        CONSTRAINT generators_name CHECK (octet_length(name) BETWEEN 1 AND 128 AND name <> 'auto'),
    state text COLLATE "C" NOT NULL
        CONSTRAINT generators_state CHECK (state IN ('STARTED', 'STOPPED')),
    every_seconds double precision NOT NULL DEFAULT 1
        CONSTRAINT generators_every CHECK (every_seconds BETWEEN 0.0001 AND 2592000),
    kind text COLLATE "C" NOT NULL DEFAULT 'sleep'
        CONSTRAINT generators_kind_size CHECK (octet_length(kind) BETWEEN 1 AND 128),
    -- NULL: a pause of random length, from the two bounds.
    payload jsonb
        CONSTRAINT generators_payload_size CHECK (pg_column_size(payload) <= 1048576),
    min_seconds double precision DEFAULT 1,
    max_seconds double precision DEFAULT 10,
    -- The last slot that is settled: produced, refused or skipped. Only rises.
    last_slot_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    produced bigint NOT NULL DEFAULT 0,
    skipped bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    last_error text
        CONSTRAINT generators_last_error_size CHECK (char_length(last_error) <= 1000),
    CONSTRAINT generators_bounds CHECK (
        CASE WHEN payload IS NULL THEN COALESCE(0 <= min_seconds AND min_seconds <= max_seconds AND max_seconds <= 86400, false)
        ELSE min_seconds IS NULL AND max_seconds IS NULL END)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Produce the slots that are due, at most `most`: their jobs and the mark of the last slot in one transaction, each slot once,
-- for whoever holds the lease under this fence. Slots that are late by more than `late_seconds` are skipped, but for the newest.
-- outcome: `produced` · `not_due` · `stopped` · `lost` (this holder has no live lease under this fence).
CREATE FUNCTION produce_slots(
    name text,
    holder text,
    fence bigint,
    late_seconds double precision,
    most int,
    OUT outcome text,
    OUT produced int,
    OUT skipped bigint,
    OUT failed int,
    OUT error text,
    OUT next_in_seconds double precision
) RETURNS record
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    lease leases;
    wanted generators;
    now_at timestamptz;
    now_us bigint;  -- microseconds since 1970
    spacing bigint;  -- microseconds
    first_slot bigint;
    last_slot bigint;
    from_slot bigint;
    to_slot bigint;
BEGIN
    IF (produce_slots.late_seconds BETWEEN 0 AND 1e9) IS NOT TRUE OR (produce_slots.most >= 1) IS NOT TRUE THEN
        RAISE EXCEPTION 'late_seconds, most: 0 to 1e9 and 1 or more are needed' USING ERRCODE = '22023';
    END IF;
    SELECT 0, 0, 0 INTO produce_slots.produced, produce_slots.skipped, produce_slots.failed;
    -- Locked to the end of this transaction: meanwhile nobody acquires the lease, and its release waits.
    SELECT l.* INTO lease FROM leases AS l WHERE l.resource = produce_slots.name FOR NO KEY UPDATE;
    -- The time is read when the row is ours: it may have expired while we waited for it.
    IF (lease.holder = produce_slots.holder AND lease.fence = produce_slots.fence
        AND lease.released_at IS NULL AND lease.expires_at > clock_timestamp()) IS NOT TRUE
    THEN
        produce_slots.outcome := 'lost';
        RETURN;
    END IF;
    SELECT g.* INTO wanted FROM generators AS g WHERE g.name = produce_slots.name FOR NO KEY UPDATE;
    IF (wanted.state = 'STARTED') IS NOT TRUE THEN
        produce_slots.outcome := 'stopped';
        RETURN;
    END IF;
    spacing := round(wanted.every_seconds * 1000000)::bigint;
    now_at := clock_timestamp();  -- now() may be before the slot
    now_us := (extract(epoch FROM now_at) * 1000000)::bigint;
    first_slot := (extract(epoch FROM wanted.last_slot_at) * 1000000)::bigint / spacing + 1;
    last_slot := now_us / spacing;
    IF last_slot < first_slot THEN
        produce_slots.outcome := 'not_due';
        produce_slots.next_in_seconds := (first_slot * spacing - now_us) / 1000000.0;
        RETURN;
    END IF;
    produce_slots.outcome := 'produced';
    from_slot := GREATEST(
        first_slot, LEAST(last_slot, (now_us - (produce_slots.late_seconds * 1000000)::bigint + spacing - 1) / spacing));
    -- All of them are in one transaction, and should fit into a few megabytes.
    to_slot := LEAST(
        last_slot, from_slot - 1 + LEAST(produce_slots.most, GREATEST(4194304 / COALESCE(pg_column_size(wanted.payload), 64), 1)));
    BEGIN
        -- The slot's own moment is the key: moments only rise, so no slot of another spacing or another year has the same.
        INSERT INTO jobs (idempotency_key, available_at, created_at, kind, payload)
        SELECT wanted.name || ':' || to_char(
                (timestamptz 'epoch' + s.slot * spacing * interval '1 microsecond') AT TIME ZONE 'UTC',
                'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
            now_at,
            now_at,
            wanted.kind,
            COALESCE(wanted.payload, jsonb_build_object('sleep_duration_seconds', CASE
                WHEN wanted.min_seconds = floor(wanted.min_seconds) AND wanted.max_seconds = floor(wanted.max_seconds)
                THEN (wanted.min_seconds + floor(random() * (wanted.max_seconds - wanted.min_seconds + 1)))::numeric
                ELSE LEAST(GREATEST(round((wanted.min_seconds + random() * (wanted.max_seconds - wanted.min_seconds))::numeric, 3),
                    wanted.min_seconds::numeric), wanted.max_seconds::numeric)
                END))
        FROM generate_series(from_slot, to_slot) AS s (slot)
        ON CONFLICT (idempotency_key) DO NOTHING;
        GET DIAGNOSTICS produced = ROW_COUNT;
        SET CONSTRAINTS ALL IMMEDIATE;  -- what would be refused at COMMIT is refused here
    EXCEPTION WHEN OTHERS THEN
        -- Trouble with the server, or a lock: these slots are tried again. Anything else would only come again.
        IF left(SQLSTATE, 2) IN ('08', '25', '40', '53', '55', '57', '58', 'XX') THEN
            RAISE;
        END IF;
        produce_slots.produced := 0;
        produce_slots.failed := to_slot - from_slot + 1;
        produce_slots.error := left(SQLERRM || ' (SQLSTATE ' || SQLSTATE || ')', 1000);
    END;
    -- A slot whose job is there already (somebody has put the mark back) is skipped like one that is too late.
    produce_slots.skipped := to_slot - first_slot + 1 - produce_slots.produced - produce_slots.failed;
    UPDATE generators AS g
    SET last_slot_at = timestamptz 'epoch' + to_slot * spacing * interval '1 microsecond',
        produced = g.produced + produce_slots.produced,
        skipped = g.skipped + produce_slots.skipped,
        failed = g.failed + produce_slots.failed,
        last_error = produce_slots.error
    WHERE g.name = produce_slots.name;
    produce_slots.next_in_seconds := GREATEST(
        (to_slot + 1) * spacing - (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, 0) / 1000000.0;
END
$$;

COMMIT;
