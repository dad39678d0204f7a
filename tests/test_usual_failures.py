"""The README's table of usual failures: each row has a test of what prevents it. Those without another home are here."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from tests.documents import table
from tests.inprocess import quick, running, seen
from tests.processes import ROOT
from tests.waiting import await_for
from worker import Handlers, Job, Worker
from worker.store import claiming
from worker.store.claiming import CLAIM_SETTINGS, Cursor
from worker.store.connection import Connection, Database, read_moments_as_microseconds

# By the beginning of the row's first cell.
PREVENTION = {
    "The effect is committed and the completion is not": "test_effects_of_an_attempt_that_lost_its_lease_are_not_applied",
    "A frozen worker wakes up": "test_a_frozen_worker_can_write_nothing_when_it_wakes",
    "A handler blocks the event loop": "test_a_handler_that_blocks_the_loop_costs_no_lease",
    "One failed heartbeat": "test_one_failed_renewal_is_followed_by_the_next",
    "Handlers use up the connection pool": "test_handlers_that_keep_every_pooled_connection_starve_no_renewal",
    "The answer to COMMIT is lost": "test_a_commit_that_was_applied_but_not_answered_counts_once",
    "A deploy spends attempts": "test_a_deploy_costs_a_job_nothing",
    "A job that kills its process": "test_a_job_that_kills_its_process_ends_dead_and_takes_no_neighbours_with_it",
    "A slow job is taken for lost": "test_a_healthy_job_longer_than_every_limit_is_never_rescued",
    "A wrong or jumping clock": "test_no_code_of_the_package_asks_the_wall_clock",
    "A notification gets lost": "test_a_job_that_nobody_was_told_of_is_found_by_polling",
    "NOTIFY in every transaction": "test_an_insert_notifies_only_a_live_and_hungry_process_of_its_queue",
    "Dead rows at the front": "test_a_claim_behind_its_cursor_does_not_walk_over_dead_entries",
    "A million jobs scheduled": "test_a_claim_does_not_read_what_is_scheduled_for_later",
    "A claim takes more rows": "test_a_claim_never_takes_more_than_its_limit_under_any_plan",
    "Two batches lock the same rows": "test_processes_that_update_the_same_rows_do_not_block_each_other",
    "One bad effect fails its whole batch": "test_an_error_of_a_group_is_nobodys_until_it_is_repeated_alone",
    "A payload, result or error text": "test_no_exception_harms_more_than_its_own_job",
    "Retries without a limit": "test_failing_jobs_retry_with_growing_delays_and_end_dead",
    "A duplicate key aborts": "test_rival_inserts_of_one_key_abort_nobody",
    "The role's own defaults": "test_a_session_is_the_same_whatever_the_roles_defaults",
    "Reconnecting floods": "test_reconnecting_floods_neither_log_nor_network",
    "A shutdown hangs": "test_a_handler_that_does_not_end_cannot_keep_the_process",
    "A mistyped setting": "test_the_daemon_says_bad_settings_as_json_on_standard_output",
    "The history fills the disk": "test_each_state_has_its_own_retention_and_unfinished_jobs_have_none",
}


def test_every_usual_failure_has_a_test_of_what_prevents_it() -> None:
    rows = [row[0] for row in table("| what goes wrong | what prevents it |")]
    assert len(rows) == len(PREVENTION)
    for row, beginning in zip(rows, PREVENTION, strict=True):
        assert row.startswith(beginning)
    tests: set[str] = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        tests.update(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    assert set(PREVENTION.values()) <= tests


def test_no_code_of_the_package_asks_the_wall_clock() -> None:
    asked = []
    for path in (ROOT / "worker").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "time.time",
                "time.time_ns",
                "datetime.now",
                "datetime.utcnow",
                "datetime.today",
            ):
                asked.append((path.name, node.lineno))
    # What a log line is stamped with decides nothing.
    assert {name for name, _ in asked} <= {"log_lines.py"}


# --- waking


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[Connection]:
    opened = await Database(database_url, environ={}).connect("test", statement_timeout_seconds=60)
    yield opened
    opened.terminate()


async def test_an_insert_notifies_only_a_live_and_hungry_process_of_its_queue(connection: Connection, database_url: str) -> None:
    heard: list[str] = []
    listening = await asyncpg.connect(database_url)
    try:
        channel = await connection.fetchval("SELECT wake_channel()")
        await listening.add_listener(channel, lambda *said: heard.append(said[3]))

        async def insert(queue: str) -> None:
            await connection.execute("INSERT INTO jobs (payload, queue) SELECT '{}', $1 FROM generate_series(1, 3)", queue)

        async def settled() -> list[str]:
            await connection.execute("SELECT pg_notify($1, 'end')", channel)
            await await_for(lambda: heard[-1:] == ["end"])
            said = heard[:-1]
            heard.clear()
            return said

        await insert("default")
        assert await settled() == []
        presence = """
            INSERT INTO processes (id, name, hostname, pid, version, queues, slots, expires_at, hungry)
            VALUES ($1, 'n', 'h', 1, '0', ARRAY[$2], 1, now() + $3 * interval '1 second', $4)
        """
        await connection.execute(presence, "full-00000000", "default", 60, False)
        await connection.execute(presence, "gone-00000000", "default", -60, True)
        await connection.execute(presence, "hungry-00000000", "other", 60, True)
        await insert("default")
        assert await settled() == []
        await insert("other")
        assert await settled() == ["other"]
    finally:
        await listening.close()


async def test_a_job_that_nobody_was_told_of_is_found_by_polling(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("noop")
    async def noop(job: Job[Any]) -> None: ...

    async with running(database_url, handlers, poll_seconds=0.2) as run:
        await run.connection.execute("ALTER TABLE jobs DISABLE TRIGGER jobs_wake")
        assert (await run.ended(await run.enqueue("noop")))["state"] == "succeeded"


# --- claiming


JOBS = 20_000


async def fill(connection: Connection, due: str) -> None:
    """Many ready jobs, due at this SQL expression of their number `n`."""
    await connection.execute(
        f"INSERT INTO jobs (payload, available_at) SELECT '{{}}', {due} FROM generate_series(1, {JOBS}) AS n", timeout=60
    )
    await connection.execute("ANALYZE jobs", timeout=60)


async def pages_read(dsn: str, cursor: Cursor) -> int:
    """How many pages a claim of one job reads behind this cursor; the claim is rolled back."""
    connection = await Database(dsn, environ={}).connect("claim", settings=CLAIM_SETTINGS, statement_timeout_seconds=30)
    try:
        await read_moments_as_microseconds(connection)
        statement = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)" + claiming.CLAIM.format(limit=1, schema="public")
        async with connection.transaction():
            text = await connection.fetchval(statement, "default", 0, "test-00000000", 30.0, *cursor, 1_000_000)
        [explained] = json.loads(text)
        return int(explained["Plan"]["Shared Hit Blocks"]) + int(explained["Plan"]["Shared Read Blocks"])
    finally:
        connection.terminate()


async def test_a_claim_does_not_read_what_is_scheduled_for_later(connection: Connection, database_url: str) -> None:
    await fill(connection, "now() + interval '1 day' + n * interval '1 second'")
    await connection.execute("INSERT INTO jobs (payload) VALUES ('{}')")
    assert await pages_read(database_url, claiming.START) < 60


async def test_a_claim_behind_its_cursor_does_not_walk_over_dead_entries(connection: Connection, database_url: str) -> None:
    await fill(connection, "now() - interval '1 day' + n * interval '1 second'")
    snapshot = await asyncpg.connect(database_url)
    try:
        async with snapshot.transaction(isolation="repeatable_read"):
            assert await snapshot.fetchval("SELECT count(*) FROM jobs WHERE state = 'ready'") == JOBS
            last = await connection.fetchrow(
                """
                WITH taken AS (
                    UPDATE jobs SET state = 'running', lease_owner = 'test-00000000', lease_until = now() + interval '1 hour'
                    WHERE id IN (SELECT id FROM jobs ORDER BY available_at LIMIT $1 - 10)
                    RETURNING available_at, id)
                SELECT (extract(epoch FROM available_at - '2000-01-01 00:00+00') * 1000000)::bigint AS available_at, id
                FROM taken ORDER BY taken.available_at DESC LIMIT 1
                """,
                JOBS,
                timeout=60,
            )
            from_the_start = await pages_read(database_url, claiming.START)
            behind = await pages_read(database_url, Cursor(last["available_at"], last["id"]))
    finally:
        await snapshot.close()
    assert behind < 60
    assert from_the_start > 5 * behind, "else this is not the situation"


@pytest.mark.parametrize("spared", ["nestloop", "hashjoin", "mergejoin", "material", "memoize", "sort", "indexscan", "none"])
async def test_a_claim_never_takes_more_than_its_limit_under_any_plan(connection: Connection, spared: str) -> None:
    await read_moments_as_microseconds(connection)
    await connection.execute("INSERT INTO jobs (payload) SELECT '{}' FROM generate_series(1, 20)")
    for method in ("nestloop", "hashjoin", "mergejoin", "material", "memoize", "sort", "hashagg", "indexscan", "bitmapscan"):
        if method != spared:
            await connection.execute(f"SET enable_{method} = off")
    database = Database("postgresql://localhost/unused", environ={})
    for held in (1, 2, 3):
        claimed = await claiming.claim(
            connection,
            database,
            queue="default",
            priority=0,
            limit=1,
            owner="test-00000000",
            lease_seconds=30,
            payload_bytes=1_000_000,
        )
        assert len(claimed) == 1
        assert await connection.fetchval("SELECT count(*) FROM jobs WHERE state = 'running'") == held


# --- committing


async def test_processes_that_update_the_same_rows_do_not_block_each_other(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("count")
    async def count(job: Job[Any]) -> None:
        job.effect("UPDATE counters SET n = n + 1 WHERE id = $1", job.payload)

    jobs, counters = 600, 5
    async with seen(database_url) as run:
        await run.connection.execute("CREATE TABLE counters (id int PRIMARY KEY, n int NOT NULL)")
        await run.connection.execute("INSERT INTO counters SELECT id, 0 FROM generate_series(1, $1) AS id", counters)
        # In an order that differs from batch to batch.
        await run.connection.execute(
            "INSERT INTO jobs (kind, payload) SELECT 'count', to_jsonb(1 + (random() * ($1 - 1))::int) FROM generate_series(1, $2)",
            counters,
            jobs,
        )
        async with Worker(handlers, quick(database_url)), Worker(handlers, quick(database_url)):

            async def all_done() -> bool:
                return await run.value("SELECT count(*) FROM jobs WHERE state = 'succeeded'") == jobs

            await await_for(all_done, 60)
        assert await run.value("SELECT sum(n) FROM counters") == jobs
        assert await run.value("SELECT count(*) FROM job_failures") == 0
        assert await run.value("SELECT count(DISTINCT attempts) FROM jobs") == 1
