"""`worker jobs` and `worker stats`: the documented JSON, and what an operator does to jobs, one by one or in bulk."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import psycopg

from tests.commands import worker

LIST_KEYS = [
    "id", "key", "kind", "queue", "priority", "state", "attempts", "max_attempts", "fence", "worker", "available_at",
    "lease_until", "created_at", "started_at", "completed_at", "last_error",
]  # fmt: skip
STATS_KEYS = {
    "ready", "scheduled", "running", "expired", "succeeded", "dead", "cancelled", "oldest_ready_seconds", "retry_rate",
    "lost_leases", "throughput", "duration_seconds", "unknown_kinds", "oldest_transaction_seconds", "queues", "kinds",
    "processes", "estimated",
}  # fmt: skip


def test_list_and_show_print_the_documented_json(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE jobs ALTER COLUMN id RESTART WITH 9007199254740993")
        connection.execute("INSERT INTO jobs (payload, idempotency_key) VALUES ('{\"n\": 12345678901234567890123}', 'k')")
        connection.execute(
            "INSERT INTO job_failures (job_id, fence, attempt, worker, outcome, error)"
            " VALUES (9007199254740993, 4, 1, 'w', 'error', E'line 1\\nline 2')"
        )
    listed = worker("jobs", "list", "--json", directory=tmp_path, DATABASE_URL=database_url)
    [job] = json.loads(listed.stdout)
    assert list(job) == LIST_KEYS
    assert (job["id"], job["key"], job["state"]) == (9007199254740993, "k", "ready")
    assert datetime.fromisoformat(job["available_at"]).utcoffset() is not None
    shown = worker("jobs", "show", "9007199254740993", "--json", directory=tmp_path, DATABASE_URL=database_url)
    details = json.loads(shown.stdout)
    assert list(details) == [*LIST_KEYS, "payload", "result", "failures"]
    assert details["payload"] == {"n": 12345678901234567890123}
    [failure] = details["failures"]
    assert (failure["attempt"], failure["outcome"], failure["error"]) == (1, "error", "line 1\nline 2")
    missing = worker("jobs", "show", "1", directory=tmp_path, DATABASE_URL=database_url)
    assert (missing.returncode, missing.stdout, missing.stderr) == (1, "", "worker: there is no job 1\n")


def test_stats_prints_the_documented_json_and_a_readable_page(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload, queue) VALUES ('1', 'mail'), ('1', 'default')")
    document = json.loads(worker("stats", "--json", directory=tmp_path, DATABASE_URL=database_url).stdout)
    assert set(document) == STATS_KEYS
    assert (document["ready"], document["queues"]["mail"]["ready"]) == (2, 1)
    assert set(document["duration_seconds"]) == {"p50", "p95"}
    lines = worker("stats", directory=tmp_path, DATABASE_URL=database_url).stdout.splitlines()
    assert "ready\t2" in lines
    assert any(line.startswith("queue mail\t1\t") for line in lines)


def test_retry_and_cancel_by_id_say_each_state_and_fail_for_what_was_not_done(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload) VALUES ('1'), ('2')")
        connection.execute("INSERT INTO jobs (payload, state, completed_at) VALUES ('1', 'succeeded', now())")
    done = worker("jobs", "cancel", "2", "1", directory=tmp_path, DATABASE_URL=database_url)
    assert (done.returncode, done.stdout) == (0, "1 cancelled\n2 cancelled\n")
    done = worker("jobs", "retry", "1", "--json", directory=tmp_path, DATABASE_URL=database_url)
    assert (done.returncode, json.loads(done.stdout)) == (0, [{"id": 1, "state": "ready"}])
    failed = worker("jobs", "cancel", "3", "99", directory=tmp_path, DATABASE_URL=database_url)
    assert failed.returncode == 1
    assert failed.stdout == "3 succeeded\n"
    assert failed.stderr == "worker: job 3: is succeeded and stays so\nworker: job 99: there is no such job\n"


def test_bulk_retry_and_cancel_take_what_matches_and_a_dry_run_takes_nothing(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jobs (payload, kind, state, completed_at)"
            " SELECT '1', 'k' || n % 2, 'dead', now() FROM generate_series(1, 500) n"
        )
        connection.execute("INSERT INTO jobs (payload, kind, state, completed_at) VALUES ('1', 'k0', 'cancelled', now())")

        def states() -> dict[str, int]:
            return dict(connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())

        dry = worker("jobs", "retry", "--kind", "k0", "--dry-run", directory=tmp_path, DATABASE_URL=database_url)
        assert (dry.returncode, dry.stdout) == (0, "would retry 250 jobs\n")
        dry = worker("jobs", "retry", "1", "--dry-run", directory=tmp_path, DATABASE_URL=database_url)
        assert (dry.returncode, dry.stdout) == (0, "would retry 1 job\n")
        assert states() == {"dead": 500, "cancelled": 1}
        real = worker("jobs", "retry", "--kind", "k0", directory=tmp_path, DATABASE_URL=database_url)
        assert (real.returncode, real.stdout) == (0, "retried 250 jobs\n")
        assert states() == {"dead": 250, "cancelled": 1, "ready": 250}
        real = worker("jobs", "cancel", "--queue", "default", directory=tmp_path, DATABASE_URL=database_url)
        assert (real.returncode, real.stdout) == (0, "cancelled 250 jobs\n")
        assert states() == {"dead": 250, "cancelled": 251}


def test_prune_deletes_by_the_settings(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jobs (payload, state, created_at, completed_at)"
            " SELECT '1', 'succeeded', t, t FROM (VALUES (now() - interval '1 day'), (now())) AS v (t)"
        )
    result = worker("jobs", "prune", directory=tmp_path, DATABASE_URL=database_url, WORKER_RETENTION_SECONDS="3600")
    assert (result.returncode, result.stdout.split(",")[0]) == (0, "pruned 1 job")


def test_every_command_works_on_ids_beyond_32_bits(database_url: str, tmp_path: Path) -> None:
    """G2."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "ALTER TABLE jobs ALTER COLUMN id RESTART WITH 3000000000; ALTER SEQUENCE fence_seq RESTART WITH 3000000000"
        )
    enqueued = json.loads(worker("enqueue", "message", "1", directory=tmp_path, DATABASE_URL=database_url).stdout)
    assert enqueued["id"] == 3000000000
    for command in (["show"], ["cancel"], ["retry"]):
        assert worker("jobs", *command, "3000000000", directory=tmp_path, DATABASE_URL=database_url).returncode == 0
