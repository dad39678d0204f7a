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
    IF check_fence.fence IS NULL THEN
        RAISE EXCEPTION 'fence: a number is needed' USING ERRCODE = '22004';
    END IF;
    INSERT INTO fences AS f (resource, fence) VALUES (check_fence.resource, check_fence.fence)
    ON CONFLICT (resource) DO UPDATE SET fence = EXCLUDED.fence WHERE f.fence <= EXCLUDED.fence;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'stale fence % for resource "%"', check_fence.fence, check_fence.resource USING ERRCODE = 'RW001';
    END IF;
    RETURN true;
END
$$;

COMMIT;
