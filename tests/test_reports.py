"""What operators read about jobs is right and quick, also from a table that is mostly history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from tests.psql import grant
from tests.roles import role, url_as
from tests.servers import Server
from worker.store import reports, statistics
from worker.store.connection import Connection, Database
from worker.store.reports import Answer, JobFilter


@pytest.fixture
def database(database_url: str) -> Database:
    return Database(database_url, environ={})


@pytest_asyncio.fixture
async def connection(database: Database) -> AsyncIterator[Connection]:
    connection = await database.connect("test", statement_timeout_seconds=30)
    yield connection
    await connection.close()


async def insert(connection: Connection, kind: str, state: str, *, queue: str = "default") -> int:
    id: int = await connection.fetchval(
        """
        INSERT INTO jobs (kind, queue, payload, state, completed_at, lease_owner, lease_until)
        VALUES ($1, $2, '1', $3, CASE WHEN $3 IN ('succeeded', 'dead', 'cancelled') THEN now() END,
            CASE WHEN $3 = 'running' THEN 'w' END, CASE WHEN $3 = 'running' THEN now() + interval '1 minute' END)
        RETURNING id
        """,
        kind,
        queue,
        state,
    )
    return id


async def test_a_list_is_newest_first_and_narrowed_by_each_filter(connection: Connection, database: Database) -> None:
    ids = [await insert(connection, kind, state) for kind in ("a", "b") for state in reports.STATES]
    other = await insert(connection, "a", "ready", queue="other")

    async def listed(limit: int = 50, **wanted: object) -> list[int]:
        summaries = await reports.list_jobs(connection, database, JobFilter(**wanted), limit=limit)  # type: ignore[arg-type]
        return [summary.id for summary in summaries]

    assert await listed() == [other, *ids[::-1]]
    assert await listed(limit=2) == [other, ids[-1]]
    assert await listed(kind="b") == ids[:4:-1]
    assert await listed(queue="other") == [other]
    assert await listed(states=("dead", "running"), kind="a") == [ids[3], ids[1]]
    key = await connection.fetchval("SELECT idempotency_key FROM jobs WHERE id = $1", ids[2])
    assert await listed(key=key) == [ids[2]]
    with pytest.raises(ValueError, match="'ended' is none of ready, running"):
        JobFilter(states=("ended",))


async def test_odd_rows_do_not_break_a_list(connection: Connection, database: Database) -> None:
    """I14: dates that no Python can hold, numbers beyond floats, nothing where something was expected."""
    await connection.execute(
        "INSERT INTO jobs (payload, available_at, created_at, last_error) VALUES"
        " ('null', 'infinity', '-infinity', E'\\u0001'), ('1e400', '200000-01-01', '4000-01-01 BC', NULL)"
    )
    far, endless = await reports.list_jobs(connection, database, JobFilter(), limit=50)
    assert (endless.available_at, endless.created_at) == ("infinity", "-infinity")
    assert far.available_at == "200000-01-01T00:00:00.000000Z"
    details = await reports.show_job(connection, database, far.id)
    assert details is not None
    assert details.payload == "1" + "0" * 400
    assert await reports.show_job(connection, database, 12345) is None


async def test_moments_are_utc_whatever_the_session(database_url: str, database: Database) -> None:
    connection = await asyncpg.connect(database_url, server_settings={"TimeZone": "Pacific/Kiritimati", "DateStyle": "German"})
    try:
        await connection.execute("INSERT INTO jobs (payload, available_at) VALUES ('1', '2030-01-31T10:00:00.5+02:00')")
        [job] = await reports.list_jobs(connection, database, JobFilter(), limit=1)
        assert job.available_at == "2030-01-31T08:00:00.500000Z"
    finally:
        await connection.close()


async def test_retry_and_cancel_answer_for_each_id(connection: Connection, database: Database) -> None:
    ids = {state: await insert(connection, "a", state) for state in reports.STATES}
    answers = await reports.retry_jobs(connection, database, [*ids.values(), 999])
    assert {answer.id: answer.state for answer in answers} == {
        ids["ready"]: "ready",
        ids["running"]: "running",
        ids["succeeded"]: "succeeded",
        ids["dead"]: "ready",
        ids["cancelled"]: "ready",
        999: None,
    }
    answers = await reports.cancel_jobs(connection, database, [ids["succeeded"], ids["running"], ids["dead"]])
    assert answers == [
        Answer(ids["running"], "cancelled", False),
        Answer(ids["succeeded"], "succeeded", False),
        Answer(ids["dead"], "cancelled", False),
    ]


async def test_a_locked_row_holds_up_itself_alone(database_url: str, database: Database, connection: Connection) -> None:
    ids = [await insert(connection, "a", "ready") for _ in range(3)]
    await connection.execute("SET lock_timeout = '100ms'")
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            await other.execute("SELECT FROM jobs WHERE id = $1 FOR NO KEY UPDATE", ids[1])
            answers = await reports.cancel_jobs(connection, database, ids)
    finally:
        await other.close()
    assert [(answer.state, answer.locked) for answer in answers] == [
        ("cancelled", False),
        (None, True),
        ("cancelled", False),
    ]


async def test_cancel_all_and_retry_all_at_once_never_deadlock(database_url: str, database: Database) -> None:
    """G4: two operators over the same rows; a lock that is not had in time is said, never thrown."""
    connection = await database.connect("test")
    await connection.execute("INSERT INTO jobs (payload) SELECT '1' FROM generate_series(1, 400)")
    ids = [row["id"] for row in await connection.fetch("SELECT id FROM jobs")]
    await connection.close()

    async def operator(act: object, order: list[int]) -> None:
        connection = await database.connect("test", statement_timeout_seconds=60)
        try:
            for start in range(0, len(order), 100):
                await act(connection, database, order[start : start + 100])  # type: ignore[operator]
        finally:
            await connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(operator(reports.cancel_jobs, ids))
            group.create_task(operator(reports.retry_jobs, ids[::-1]))


async def test_pages_of_ids_cover_all_that_match_once(connection: Connection, database: Database) -> None:
    await connection.execute("INSERT INTO jobs (payload, kind) SELECT '1', 'k' || n % 2 FROM generate_series(1, 500) n")
    found: list[int] = []
    while page := await reports.find_ids(connection, database, JobFilter(kind="k0"), after_id=found[-1] if found else 0):
        assert len(page) <= reports.BATCH_JOBS
        found += page
    assert len(found) == len(set(found)) == await reports.count_jobs(connection, database, JobFilter(kind="k0")) == 250


async def test_statistics_count_each_state_queue_and_kind(connection: Connection, database: Database) -> None:
    for state, times in (("ready", 3), ("running", 2), ("succeeded", 4), ("dead", 1), ("cancelled", 5)):
        for _ in range(times):
            await insert(connection, "a", state)
    await connection.execute("UPDATE jobs SET available_at = now() - interval '90 s' WHERE id = (SELECT min(id) FROM jobs)")
    await connection.execute(
        "INSERT INTO jobs (kind, queue, payload, available_at, crashes) VALUES"
        " ('b', 'other', '1', now() + interval '1 h', 0), ('b', 'other', '1', now(), 1)"
    )
    await connection.execute(
        "UPDATE jobs SET lease_until = now() - interval '1 s' WHERE id = (SELECT max(id) FROM jobs WHERE state = 'running')"
    )
    await connection.execute(
        "UPDATE jobs SET started_at = completed_at - interval '2 s' WHERE state = 'succeeded';"
        "INSERT INTO job_failures (job_id, fence, attempt, worker, outcome, error)"
        " SELECT id, 1, 1, 'w', CASE WHEN state = 'dead' THEN 'error' ELSE 'crashed' END, 'x'"
        " FROM jobs WHERE state IN ('dead', 'cancelled')"
    )
    numbers = await statistics.statistics(connection, database)
    assert (numbers.ready, numbers.scheduled, numbers.running, numbers.expired) == (4, 1, 2, 1)
    assert (numbers.succeeded, numbers.dead, numbers.cancelled) == (4, 1, 5)
    assert "succeeded" not in numbers.estimated
    assert numbers.oldest_ready_seconds is not None
    assert (
        90
        <= numbers.oldest_ready_seconds
        <= await connection.fetchval(
            "SELECT extract(epoch FROM clock_timestamp() - min(available_at))::float8 FROM jobs WHERE state = 'ready'"
        )
    )
    assert (numbers.lost_leases, numbers.retry_rate) == (5, 6 / 10)
    assert numbers.throughput * 3600 == pytest.approx(4)
    assert numbers.duration_seconds == {"p50": pytest.approx(2), "p95": pytest.approx(2)}
    other, default = numbers.queues["other"], numbers.queues["default"]
    assert (other.ready, other.scheduled, other.running, other.failures) == (1, 1, 0, 0)
    assert (default.ready, default.running, default.expired, default.failures) == (3, 2, 1, 6)
    assert numbers.kinds["b"].ready == 1
    assert numbers.unknown_kinds == {}


async def test_a_kind_that_no_live_process_knows_is_counted_as_unknown(connection: Connection, database: Database) -> None:
    for kind in ("known", "unknown", "unknown"):
        await insert(connection, kind, "ready")
    for id, kinds, minutes in (("live", '["known"]', 1), ("gone", '["unknown"]', -1)):
        await connection.execute(
            "INSERT INTO processes (id, name, hostname, pid, version, queues, slots, expires_at, health)"
            " VALUES ($1, 'p', 'h', 1, '1', '{default}', 4, now() + $2 * interval '1 minute', $3)",
            id,
            minutes,
            f'{{"kinds": {kinds}}}',
        )
    numbers = await statistics.statistics(connection, database)
    assert numbers.unknown_kinds == {"unknown": 2}
    assert {process.id: process.live for process in numbers.processes} == {"live": True, "gone": False}


async def test_the_oldest_transaction_in_the_database_shows(database_url: str, connection: Connection, database: Database) -> None:
    other = await asyncpg.connect(database_url)
    try:
        await other.execute("BEGIN; SELECT 1")
        numbers = await statistics.statistics(connection, database)
        assert numbers.oldest_transaction_seconds is not None
        assert 0 <= numbers.oldest_transaction_seconds < 60
    finally:
        await other.close()


async def test_a_role_that_is_shown_its_own_sessions_only_is_told_so(server: Server, database_url: str) -> None:
    """With exactly deploy/grants.sql: no transaction that shows is not the same as none."""
    with role(server, database_url) as name:
        grant(database_url, "daemon", name)
        database = Database(url_as(name, database_url), environ={})
        owner, connection = await asyncpg.connect(database_url), await database.connect("test")
        try:
            await owner.execute("BEGIN; SELECT 1")
            numbers = await statistics.statistics(connection, database)
            assert (numbers.oldest_transaction_seconds, numbers.sees_all_transactions) == (None, False)
            assert not await statistics.sees_all_sessions(connection)
            await owner.execute(f"GRANT pg_read_all_stats TO {name}; COMMIT")
            await owner.execute("BEGIN; SELECT 1")
            numbers = await statistics.statistics(connection, database)
            assert numbers.oldest_transaction_seconds is not None
            assert numbers.sees_all_transactions
            assert await statistics.sees_all_sessions(connection)
        finally:
            await owner.close()
            await connection.close()


async def test_statistics_of_a_table_of_history_are_estimates(
    connection: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G10: what would have to count all finished rows is estimated, and marked so."""
    monkeypatch.setattr(statistics, "COUNTED_BYTES", 8 * 1024 * 1024)
    await connection.execute("SET statement_timeout = 0")
    await connection.execute(
        "INSERT INTO jobs (kind, payload, state, created_at, started_at, completed_at)"
        " SELECT 'k' || n % 3, '{\"message\": \"hello\"}', 'succeeded', now() - interval '2 hours', t - interval '5 ms', t"
        " FROM (SELECT n, now() - interval '2 hours' + n * interval '70 ms' AS t FROM generate_series(1, 100000) n) AS rows"
    )
    await connection.execute("INSERT INTO jobs (payload) SELECT '1' FROM generate_series(1, 1000)")
    await connection.execute("ANALYZE jobs")
    numbers = await statistics.statistics(connection, database)
    assert numbers.ready == 1000
    assert {"succeeded", "throughput"} <= set(numbers.estimated)
    assert numbers.succeeded == pytest.approx(100_000, rel=0.1)
    # One every 70 ms, as the sample sees it; the last ended some minutes ago.
    assert 1 < numbers.throughput < 20
