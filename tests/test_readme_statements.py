"""The SQL and the JSON that the README shows are run as they stand there, and find what they are for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import psycopg
import pytest
from psycopg.rows import dict_row

from tests.documents import BLOCKS, FLOWING, block
from tests.processes import Daemon
from tests.psql import GRANTS, grant, psql
from tests.roles import role, url_as
from tests.servers import Server, execute
from tests.waiting import wait_for
from worker.new_job import new_job_from
from worker.settings import load_settings
from worker.store.connection import SessionLimits


@pytest.mark.slow
def test_the_walk_through_ends_as_it_says(database_url: str, daemon: Callable[..., Daemon]) -> None:
    (text,) = [each.text for each in BLOCKS if each.marker == "walk-through"]
    assert psql(database_url, "-c", text).returncode == 0
    daemon(DATABASE_URL=database_url).wait_for_event("daemon_ready", 20)
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as db:
        query = "SELECT * FROM jobs WHERE state IN ('succeeded', 'dead') ORDER BY idempotency_key"
        invalid, valid = wait_for(lambda: len(rows := db.execute(query).fetchall()) == 2 and rows, 30)
        assert (valid["idempotency_key"], valid["state"], valid["attempts"]) == ("welcome-1001", "succeeded", 1)
        assert (valid["completed_at"] - valid["started_at"]).total_seconds() >= 8
        assert (invalid["idempotency_key"], invalid["state"], invalid["attempts"]) == ("invalid-1002", "dead", 3)
        assert "message" in invalid["last_error"]
        assert {row["lease_owner"] for row in (valid, invalid)} == {row["lease_until"] for row in (valid, invalid)} == {None}
        effects = db.execute("SELECT idempotency_key, message FROM processed_messages").fetchall()
        assert effects == [{"idempotency_key": "welcome-1001", "message": "welcome"}]


def test_the_statements_for_three_in_the_morning_find_what_they_are_for(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as db, psycopg.connect(database_url) as open_one:
        open_one.execute("SELECT 1")
        db.execute(
            """
            INSERT INTO jobs (idempotency_key, payload, available_at) VALUES ('waits', '{}', now() - interval '1 hour');
            INSERT INTO jobs (idempotency_key, payload, state, lease_owner, lease_until, crashes)
            VALUES ('stuck', '{}', 'running', 'gone-00000000', now() - interval '1 minute', 1);
            INSERT INTO job_failures (job_id, fence, attempt, worker, outcome, error)
            SELECT id, 1, 1, 'gone-00000000', 'crashed', 'worker lost' FROM jobs WHERE idempotency_key = 'stuck';
            """
        )
        *texts, oldest_transactions = [text for text in block("sql", "-- stuck").split(";\n") if text.strip()]
        waiting, stuck, suspects, failures = [db.execute(text).fetchall() for text in texts]
        [oldest] = waiting
        assert (oldest["queue"], oldest["count"]) == ("default", 1)
        assert oldest["oldest"].total_seconds() >= 3600
        assert [row["lease_owner"] for row in stuck] == ["gone-00000000"]
        assert [row["crashes"] for row in suspects] == [1]
        assert [(row["outcome"], row["count"]) for row in failures] == [("crashed", 1)]
        # It shows five, of the whole server: those of other tests end, this one only grows older.
        wait_for(lambda: open_one.info.backend_pid in {row["pid"] for row in db.execute(oldest_transactions)}, 30)


def test_transactions_of_other_roles_show_with_the_optional_grant_only(server: Server, database_url: str) -> None:
    *_, oldest = [text for text in block("sql", "-- stuck").split(";\n") if text.strip()]
    (optional,) = re.findall(r"^-- (GRANT pg_read_all_stats .+;)$", GRANTS.read_text("utf-8"), re.MULTILINE)
    with role(server, database_url) as name, psycopg.connect(database_url) as open_one:
        open_one.execute("SELECT 1")
        grant(database_url, "daemon", name)
        with psycopg.connect(url_as(name, database_url), autocommit=True, row_factory=dict_row) as db:

            def is_shown() -> bool:
                return open_one.info.backend_pid in {row["pid"] for row in db.execute(oldest)}

            assert not is_shown()
            execute(server.dsn, optional.replace(':"daemon"', "{}"), name)
            wait_for(is_shown, 30)  # among the five oldest of the whole server, when those of other tests have ended


def test_fences_jump_ahead_and_a_stale_one_is_refused_as_it_says(database_url: str) -> None:
    (jump,) = re.findall(r"`(SELECT setval[^`]+)`", FLOWING)
    (check,) = re.findall(r"`(SELECT check_fence[^`]+)`", FLOWING)
    with psycopg.connect(database_url, autocommit=True) as db:
        before = db.execute("SELECT nextval('fence_seq')").fetchone()
        db.execute(jump)
        after = db.execute("SELECT nextval('fence_seq')").fetchone()
        assert before is not None
        assert after is not None
        assert after[0] > before[0] + 1_000_000
        assert db.execute(check).fetchone() == (True,)
        with pytest.raises(psycopg.Error) as refused:
            db.execute(check.replace("1234", "1233"))
        assert refused.value.sqlstate == "RW001"


def test_the_limits_for_a_pooler_are_those_of_the_default_settings() -> None:
    settings = load_settings({"DATABASE_URL": "postgresql://localhost/app"})
    limits = SessionLimits.of(lease_seconds=settings.lease_seconds, query_timeout_seconds=settings.query_timeout_seconds)
    shown = dict(re.findall(r"SET (\w+) = '(\d+)s'", block("sql", "ALTER ROLE")))
    assert {name: float(seconds) for name, seconds in shown.items()} == {
        "statement_timeout": limits.statement_timeout_seconds,
        "lock_timeout": limits.lock_timeout_seconds,
        "idle_in_transaction_session_timeout": limits.idle_in_transaction_seconds,
    }


def test_the_line_of_json_is_one_that_the_command_takes() -> None:
    (line,) = re.findall(r"A line of `jobs\.jsonl` is `([^`]+)`", FLOWING)
    assert new_job_from(json.loads(line)).key == "hello-1001"
