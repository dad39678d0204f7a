"""Pruning: what is past its retention goes, in small steps; nothing that is unfinished, young, locked or needed does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from tests.processes import environment
from tests.waiting import await_for
from worker.store import pruning
from worker.store.connection import Connection, Database
from worker.store.pruning import Pruned, PruneStep

HOUR = 3_600.0


@pytest_asyncio.fixture
async def connection(database_url: str) -> AsyncIterator[Connection]:
    connection = await Database(database_url, environ={}).connect("test", statement_timeout_seconds=30)
    yield connection
    await connection.close()


@pytest.fixture
def database(database_url: str) -> Database:
    return Database(database_url, environ={})


async def insert(connection: Connection, key: str, state: str, age_hours: float) -> None:
    terminal = state in ("succeeded", "dead", "cancelled")
    await connection.execute(
        """
        INSERT INTO jobs (idempotency_key, payload, state, created_at, completed_at, lease_owner, lease_until)
        VALUES ($1, '1', $2, now() - $3 * interval '1 hour', CASE WHEN $4 THEN now() - $3 * interval '1 hour' END,
            CASE WHEN $2 = 'running' THEN 'w' END, CASE WHEN $2 = 'running' THEN now() END)
        """,
        key,
        state,
        age_hours,
        terminal,
    )


async def keys(connection: Connection, table: str = "jobs") -> set[str]:
    return {row[0] for row in await connection.fetch(f"SELECT idempotency_key FROM {table}")}


async def prune(connection: Connection, database: Database, **changes: float | None) -> Pruned:
    retention: dict[str, float | None] = {
        "retention_seconds": 2 * HOUR,
        "dead_retention_seconds": None,
        "ledger_retention_seconds": None,
    }
    return await pruning.prune_all(connection, database, **(retention | changes))


async def test_each_state_has_its_own_retention_and_unfinished_jobs_have_none(connection: Connection, database: Database) -> None:
    for age_hours in (1, 5, 100):
        for state in ("ready", "running", "succeeded", "dead", "cancelled"):
            await insert(connection, f"{state}-{age_hours}", state, age_hours)
    assert (await prune(connection, database, dead_retention_seconds=50 * HOUR)).jobs == 5
    assert await keys(connection) == {
        *(f"{state}-{age}" for state in ("ready", "running") for age in (1, 5, 100)),
        "succeeded-1",
        "cancelled-1",
        "dead-1",
        "dead-5",
    }


async def test_never_means_never(connection: Connection, database: Database) -> None:
    for state in ("succeeded", "dead", "cancelled"):
        await insert(connection, state, state, 100_000)
    await connection.execute("INSERT INTO job_effects VALUES ('gone', 1, 1, now() - interval '10 years')")
    assert await prune(connection, database, retention_seconds=None) == Pruned(0, 0, 0, 0, 0)


async def test_old_jobs_behind_a_page_of_kept_ones_are_found(connection: Connection, database: Database) -> None:
    await connection.execute(
        "INSERT INTO jobs (payload, state, created_at, completed_at)"
        " SELECT '1', 'dead', now() - interval '1 day', now() - interval '1 day' FROM generate_series(1, 2500)"
    )
    await insert(connection, "old", "succeeded", 20)
    await insert(connection, "young", "succeeded", 1)
    assert (await prune(connection, database)).jobs == 1
    assert "young" in await keys(connection)


async def test_a_step_is_one_page_and_a_young_table_ends_the_walk_at_once(connection: Connection, database: Database) -> None:
    await connection.execute(
        "INSERT INTO jobs (payload, state, created_at, completed_at)"
        " SELECT '1', 'succeeded', now() - interval '1 day', now() - interval '1 day' FROM generate_series(1, 1500)"
    )
    await connection.execute("INSERT INTO jobs (payload) SELECT '1' FROM generate_series(1, 5000)")
    steps: list[PruneStep] = []
    while not steps or steps[-1].next_cursor is not None:
        cursor = (steps[-1].next_cursor if steps else None) or pruning.FROM_THE_START
        steps.append(
            await pruning.prune_jobs(connection, database, cursor=cursor, retention_seconds=HOUR, dead_retention_seconds=None)
        )
    assert [step.deleted for step in steps] == [1000, 500, 0]


async def test_the_failures_of_a_pruned_job_go_with_it_and_orphans_later(connection: Connection, database: Database) -> None:
    await insert(connection, "old", "succeeded", 5)
    await insert(connection, "young", "succeeded", 1)
    await connection.execute(
        "INSERT INTO job_failures (job_id, fence, attempt, worker, outcome, error)"
        " SELECT id, 1, 1, 'w', 'error', 'x' FROM jobs"
        " UNION ALL SELECT 999999, f, 1, 'w', 'error', 'x' FROM generate_series(1, 3) f"
    )
    assert await prune(connection, database) == Pruned(jobs=1, failures=3, ledger=0, processes=0, leases=0)
    assert await connection.fetchval("SELECT count(*) FROM job_failures") == 1


async def test_a_locked_row_is_passed_over_and_goes_next_time(
    connection: Connection, database: Database, database_url: str
) -> None:
    for key in ("locked", "free"):
        await insert(connection, key, "succeeded", 5)
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            await other.execute("SELECT FROM jobs WHERE idempotency_key = 'locked' FOR NO KEY UPDATE")
            async with asyncio.timeout(30):
                assert (await prune(connection, database)).jobs == 1
            assert await keys(connection) == {"locked"}
    finally:
        await other.close()
    assert (await prune(connection, database)).jobs == 1


async def test_a_ledger_row_stays_while_it_is_young_or_an_unfinished_job_has_its_key(
    connection: Connection, database: Database
) -> None:
    for state in ("ready", "running", "succeeded", "dead"):
        await insert(connection, state, state, 1)
    await connection.execute(
        "INSERT INTO job_effects SELECT key, 1, 1, now() - interval '5 hours'"
        " FROM unnest(ARRAY['ready', 'running', 'succeeded', 'dead', 'no-job']) AS key"
    )
    await connection.execute("INSERT INTO job_effects VALUES ('young', 1, 1, now() - interval '1 hour')")
    assert (await prune(connection, database, ledger_retention_seconds=2 * HOUR)).ledger == 3
    assert await keys(connection, "job_effects") == {"ready", "running", "young"}


async def test_a_large_ledger_is_pruned_to_the_end_in_batches(connection: Connection, database: Database) -> None:
    # Three thousand of the same moment: the cursor must not stand still, nor pass over any.
    await connection.execute(
        "INSERT INTO job_effects SELECT 'k' || n, n, n, now() - interval '5 hours' FROM generate_series(1, 3000) n"
    )
    await connection.execute(
        "INSERT INTO job_effects SELECT 'l' || n, n, n, now() - interval '4 hours' + n * interval '1 s'"
        " FROM generate_series(1, 1500) n"
    )
    assert (await prune(connection, database, ledger_retention_seconds=HOUR)).ledger == 4500


async def test_only_processes_that_are_long_gone_are_forgotten(connection: Connection, database: Database) -> None:
    await connection.execute(
        "INSERT INTO processes (id, name, hostname, pid, version, queues, slots, expires_at)"
        " SELECT 'p' || n, 'p', 'h', n, '1', '{default}', 1, now() - n * interval '1 minute'"
        " FROM generate_series(0, 10, 2) n"
    )
    assert (await prune(connection, database)).processes == 3
    rows = await connection.fetch("SELECT id FROM processes ORDER BY pid")
    assert [row["id"] for row in rows] == ["p0", "p2", "p4"]


async def test_pruning_reads_finished_rows_by_primary_key_whatever_the_statistics(
    connection: Connection, database: Database
) -> None:
    """G9: a sequential scan of jobs in each step would read the whole table a thousand times."""
    await connection.execute(
        "INSERT INTO jobs (payload, state, created_at, completed_at)"
        " SELECT '1', 'succeeded', now() - interval '1 day', now() - interval '1 day' FROM generate_series(1, 30000)"
    )
    for analyze in (False, True):
        if analyze:
            await connection.execute("ANALYZE jobs")
        text = database.sql(pruning.PRUNE_JOBS).replace("$1", "0").replace("$2", "3600").replace("$3", "NULL")
        plan = "\n".join(row[0] for row in await connection.fetch("EXPLAIN " + text))
        assert "Seq Scan on jobs" not in plan, plan
        text = database.sql(pruning.PRUNE_LEDGER).replace("$1", "0").replace("$2", "3600")
        plan = "\n".join(row[0] for row in await connection.fetch("EXPLAIN " + text))
        assert "Seq Scan on jobs" not in plan, plan


SLOW_PAGES = """
CREATE FUNCTION wait_a_moment() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$;
CREATE TRIGGER slow_pages AFTER DELETE ON jobs FOR EACH STATEMENT EXECUTE FUNCTION wait_a_moment();
"""


async def test_a_prune_that_is_killed_has_deleted_whole_pages_and_the_next_one_goes_on(
    connection: Connection, database: Database, database_url: str, tmp_path: Path
) -> None:
    """G9: and no page holds a lock that a claim or a completion could wait for."""
    await connection.execute(
        "INSERT INTO jobs (payload, state, created_at, completed_at)"
        " SELECT '1', 'succeeded', now() - interval '1 day', now() - interval '1 day' FROM generate_series(1, 5000)"
    )
    await connection.execute(SLOW_PAGES)
    environ = environment(tmp_path, DATABASE_URL=database_url, WORKER_RETENTION_SECONDS="3600")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "worker", "jobs", "prune", env=environ)
    try:

        async def is_under_way() -> bool:
            return 0 < await connection.fetchval("SELECT count(*) FROM jobs") < 5000

        await await_for(is_under_way, 30)
        await connection.execute("SET lock_timeout = '300ms'")  # far less than a page takes
        id = await connection.fetchval("INSERT INTO jobs (payload) VALUES ('1') RETURNING id")
        await connection.execute("UPDATE jobs SET state = 'cancelled', completed_at = now() WHERE id = $1", id)
    finally:
        process.kill()
        await process.wait()

    async def is_gone() -> bool:
        backends = "FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ 'command'"
        await connection.execute(f"SELECT pg_terminate_backend(pid) {backends}")
        return not await connection.fetchval(f"SELECT count(*) {backends}")

    await await_for(is_gone)
    left = await connection.fetchval("SELECT count(*) FROM jobs WHERE state = 'succeeded'")
    assert left % 1000 == 0
    await connection.execute("DROP TRIGGER slow_pages ON jobs")
    assert (await prune(connection, database)).jobs == left
    assert await connection.fetchval("SELECT array_agg(id) FROM jobs") == [id]
