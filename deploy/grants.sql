-- Least privilege: what the daemon's role needs, and what an application that enqueues needs. Run it as the owner of the schema:
--
--   psql "$DATABASE_URL" -v daemon=shop_worker -v application=shop_web -v schema=public -f deploy/grants.sql
--
-- `daemon`, `application` or both: roles that exist. `schema` is WORKER_SCHEMA, public if left out. The handlers' own tables are
-- not in here; grant those to the daemon's role as well. `worker check` names whatever is missing.

\set ON_ERROR_STOP on
\if :{?schema}
\else
    \set schema public
\endif

BEGIN;

\if :{?daemon}
GRANT USAGE ON SCHEMA :"schema" TO :"daemon";
GRANT SELECT ON :"schema".schema_version TO :"daemon";
GRANT SELECT, INSERT, UPDATE, DELETE ON :"schema".jobs, :"schema".processes, :"schema".leases TO :"daemon";
GRANT SELECT, INSERT ON :"schema".processed_messages TO :"daemon";
GRANT SELECT, INSERT, DELETE ON :"schema".job_effects, :"schema".job_failures, :"schema".open_transactions TO :"daemon";
GRANT SELECT, INSERT, UPDATE ON :"schema".fences, :"schema".generators TO :"daemon";
GRANT USAGE ON SEQUENCE :"schema".fence_seq TO :"daemon";
-- Everybody's by default, unless EXECUTE was revoked from PUBLIC.
GRANT EXECUTE ON FUNCTION
    :"schema".wake_channel, :"schema".wake_workers, :"schema".enqueue_job, :"schema".cancel_job, :"schema".retry_job,
    :"schema".check_fence, :"schema".refuse_open_transaction,
    :"schema".lease_expires_in_ms, :"schema".acquire_lease, :"schema".renew_lease, :"schema".release_lease,
    :"schema".produce_slots
    TO :"daemon";
-- Optional, and only an administrator may: without it `worker check`, `worker stats` and /metrics cannot say how old the oldest
-- transaction of the database is, since PostgreSQL hides the moments of other roles' sessions.
-- GRANT pg_read_all_stats TO :"daemon";
\endif

-- Enqueue by INSERT or enqueue_job, look the job up, wait for its end. Not what other applications have put into their jobs.
\if :{?application}
GRANT USAGE ON SCHEMA :"schema" TO :"application";
-- For `worker enqueue`, which looks first whether the tables are there.
GRANT SELECT ON :"schema".schema_version TO :"application";
GRANT INSERT (idempotency_key, kind, queue, priority, payload, available_at, max_attempts, meta) ON :"schema".jobs
    TO :"application";
GRANT SELECT (id, idempotency_key, state, result, last_error) ON :"schema".jobs TO :"application";
GRANT EXECUTE ON FUNCTION :"schema".enqueue_job TO :"application";
-- Named leases, and the fence in front of what they protect.
GRANT SELECT, INSERT, UPDATE ON :"schema".leases, :"schema".fences TO :"application";
GRANT USAGE ON SEQUENCE :"schema".fence_seq TO :"application";
GRANT EXECUTE ON FUNCTION
    :"schema".lease_expires_in_ms, :"schema".acquire_lease, :"schema".renew_lease, :"schema".release_lease, :"schema".check_fence
    TO :"application";
\endif

COMMIT;
