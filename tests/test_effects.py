"""Effects of many jobs in one transaction: as if they had been committed one after the other, and once per key."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.inprocess import SHAPES, Run, both_shapes, quick, running, seen
from tests.servers import ADVISORY_LOCKS, Server
from tests.waiting import await_for
from worker import Handlers, Job, Worker, events

TABLE = "CREATE TABLE applied (key text, note int)"
APPLY = "INSERT INTO applied VALUES ($1, $2)"


async def enqueue_many(run: Run, kind: str, count: int, **columns: Any) -> None:
    """Keys `job-0001` and so on, in one statement; what is to happen is the payload."""
    await run.connection.execute(
        "INSERT INTO jobs (idempotency_key, kind, payload, max_attempts)"
        " SELECT 'job-' || lpad(n::text, 4, '0'), $1, to_jsonb(n), $3 FROM generate_series(1, $2) AS n",
        kind,
        count,
        columns.get("max_attempts", 1),
    )


async def all_ended(run: Run, timeout_seconds: float = 30) -> dict[str, int]:
    """How many jobs are in which state, once all are terminal."""

    async def over() -> bool:
        return not await run.value("SELECT EXISTS (SELECT FROM jobs WHERE state IN ('ready', 'running'))")

    await await_for(over, timeout_seconds)
    return {row[0]: row[1] for row in await run.connection.fetch("SELECT state, count(*) FROM jobs GROUP BY 1")}


# --- whose fault


@pytest.mark.parametrize(
    ("text", "arguments", "same_text"),
    [
        (APPLY, ("key", 2**40), True),
        (APPLY, ("key", 2**40), False),
        (APPLY, ("key", "not a number"), True),
        ("INSERT INTO applied VALUES ($1, 1 / $2::int)", ("key", 0), True),
        ("INSERT INTO refused VALUES ($1)", ("key",), False),
    ],
    ids=["out of range", "out of range, its own text", "wrong type", "division by zero", "missing table, its own text"],
)
async def test_one_guilty_of_101_fails_alone_and_the_other_100_are_applied(
    database_url: str, text: str, arguments: tuple[object, ...], same_text: bool
) -> None:
    handlers, all_in = Handlers(), asyncio.Barrier(101)

    @handlers.job("write")
    async def write(job: Job[int]) -> None:
        await all_in.wait()  # they finish together, and go to the committer together
        if job.payload == 51:
            job.effect(text, *arguments)
        else:
            job.effect(text if same_text else "INSERT INTO applied VALUES ($1, $2) -- innocent", job.key, job.payload)

    async with seen(database_url) as run:
        await run.connection.execute(TABLE)
        await enqueue_many(run, "write", 101)
        async with Worker(handlers, quick(database_url, workers=101)) as worker:
            assert await all_ended(run) == {"dead": 1, "succeeded": 100}
            assert not worker.is_stopping
        assert await run.value("SELECT payload FROM jobs WHERE state = 'dead'") == "51"
        assert "effect 1 (INSERT INTO" in await run.value("SELECT last_error FROM jobs WHERE state = 'dead'")
        assert await run.value("SELECT count(DISTINCT key) FROM applied WHERE key LIKE 'job-%'") == 100
        assert await run.value("SELECT count(*) FROM applied") == 100
        assert await run.value("SELECT count(*) FROM job_effects") == 100


async def test_finished_jobs_share_transactions_and_the_textbook_shape_gives_each_its_own(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[int]) -> None:
        await all_in.wait()
        job.effect(APPLY, job.key, job.payload)

    async with seen(database_url) as run:
        await run.connection.execute(TABLE)
        for shape, few in (("batches", True), ("single", False)):
            all_in = asyncio.Barrier(40)
            await enqueue_many(run, "write", 40)
            async with Worker(handlers, quick(database_url, workers=40, **SHAPES[shape])):
                assert await all_ended(run) == {"succeeded": 40}
            transactions = await run.value("SELECT count(DISTINCT xmin::text) FROM applied")
            assert (transactions < 10) if few else (transactions == 40)
            await run.connection.execute("TRUNCATE applied, jobs, job_effects")


async def test_a_deferred_constraint_that_fails_at_commit_is_that_jobs_own(database_url: str) -> None:
    handlers, all_in = Handlers(), asyncio.Barrier(12)

    @handlers.job("write")
    async def write(job: Job[int]) -> None:
        await all_in.wait()
        job.effect("INSERT INTO children VALUES ($1)", 99 if job.payload == 7 else job.payload)

    async with seen(database_url) as run:
        await run.connection.execute(
            "CREATE TABLE parents (id int PRIMARY KEY); INSERT INTO parents SELECT generate_series(1, 12);"
            "CREATE TABLE children (id int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)"
        )
        await enqueue_many(run, "write", 12)
        async with Worker(handlers, quick(database_url, workers=12)):
            assert await all_ended(run) == {"dead": 1, "succeeded": 11}
        error = await run.value("SELECT last_error FROM jobs WHERE state = 'dead' AND payload = '7'")
        assert error.startswith("ForeignKeyViolationError: COMMIT: ")
        assert await run.value("SELECT count(*) FROM children") == 11


async def test_an_unstorable_result_harms_only_its_own_job(database_url: str) -> None:
    handlers, all_in = Handlers(), asyncio.Barrier(20)

    @handlers.job("give")
    async def give(job: Job[int]) -> object:
        await all_in.wait()
        if isinstance(job.payload, int) and job.payload % 2:
            job.effect(APPLY, job.key, job.payload)
        return "x" * 1_100_000 if job.payload in (5, 6) else job.payload

    async with seen(database_url) as run:
        await run.connection.execute(TABLE)
        await enqueue_many(run, "give", 20)
        async with Worker(handlers, quick(database_url, workers=20)):
            assert await all_ended(run) == {"dead": 2, "succeeded": 18}
        assert await run.column("SELECT payload FROM jobs WHERE state = 'dead' ORDER BY id") == ["5", "6"]
        assert await run.value("SELECT count(*) FROM applied") == 9
        assert await run.value("SELECT count(*) FROM jobs WHERE state = 'succeeded' AND result = payload") == 18


async def test_a_group_with_slow_statements_is_taken_apart_and_everybody_succeeds(database_url: str) -> None:
    """Each statement is within the limit, all of them in one transaction are far beyond it."""
    handlers, all_in = Handlers(), asyncio.Barrier(30)

    @handlers.job("slow")
    async def slow(job: Job[int]) -> None:
        await all_in.wait()
        job.effect("INSERT INTO applied SELECT $1, $2 FROM pg_sleep(0.1)", job.key, job.payload)

    async with seen(database_url) as run:
        await run.connection.execute(TABLE)
        await enqueue_many(run, "slow", 30)
        async with Worker(handlers, quick(database_url, workers=30, lease_seconds=4, query_timeout_seconds=0.8)):
            assert await all_ended(run) == {"succeeded": 30}
        assert await run.value("SELECT max(attempts) FROM jobs") == 1
        assert await run.value("SELECT count(*) FROM applied") == 30
        assert len(run.log.find(events.COMPLETION_DEFERRED)) <= 2


async def test_a_statement_slower_than_the_limit_is_that_jobs_failure(database_url: str) -> None:
    handlers, all_in = Handlers(), asyncio.Barrier(6)

    @handlers.job("slow")
    async def slow(job: Job[int]) -> None:
        await all_in.wait()
        job.effect("INSERT INTO applied SELECT $1, $2 FROM pg_sleep($3)", job.key, job.payload, 30 if job.payload == 3 else 0)

    async with seen(database_url) as run:
        await run.connection.execute(TABLE)
        await enqueue_many(run, "slow", 6)
        async with Worker(handlers, quick(database_url, workers=6, query_timeout_seconds=0.3)):
            assert await all_ended(run) == {"dead": 1, "succeeded": 5}
        assert "statement timeout" in await run.value("SELECT last_error FROM jobs WHERE state = 'dead' AND payload = '3'")
        assert await run.value("SELECT count(*) FROM applied") == 5


# --- as if one after the other


async def test_a_job_that_reads_or_sets_something_leaks_nothing_into_its_neighbours(database_url: str) -> None:
    handlers, all_in = Handlers(), asyncio.Barrier(20)

    @handlers.job("tenant")
    async def tenant(job: Job[int]) -> None:
        await all_in.wait()
        if isinstance(job.payload, int) and job.payload % 2:
            job.effect("SELECT set_config('app.tenant', $1, false), pg_advisory_lock(42)", str(job.payload))
            job.effect("SELECT 1 AS n INTO TEMP leftover")
        for _ in range(2):  # job after job, not all of one text together
            job.effect("INSERT INTO seen VALUES ($1, current_setting('app.tenant', true))", job.payload)

    async with seen(database_url) as run:
        await run.connection.execute("CREATE TABLE seen (n int, tenant text)")
        await enqueue_many(run, "tenant", 20)
        async with Worker(handlers, quick(database_url, workers=20)):
            assert await all_ended(run) == {"succeeded": 20}
            assert await run.value(ADVISORY_LOCKS) == 0
        rows = await run.connection.fetch("SELECT DISTINCT n, NULLIF(tenant, '') FROM seen")
        assert sorted(tuple(row) for row in rows) == [(n, str(n) if n % 2 else None) for n in range(1, 21)]


async def test_a_failed_job_that_took_a_session_lock_leaves_none(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("lock")
    async def lock(job: Job[object]) -> None:
        job.effect("SELECT pg_advisory_lock(42)")
        job.effect("INSERT INTO no_such_table VALUES (1)")

    async with running(database_url, handlers) as run:
        assert (await run.run("lock", max_attempts=1))["state"] == "dead"
        assert await run.value(ADVISORY_LOCKS) == 0


@both_shapes
async def test_several_effects_run_job_after_job(database_url: str, shape: dict[str, Any]) -> None:
    """What one job has counted up it also writes down, whoever else counts in the same transaction."""
    handlers, all_in = Handlers(), asyncio.Barrier(15)

    @handlers.job("count")
    async def count(job: Job[int]) -> None:
        await all_in.wait()
        job.effect("UPDATE counter SET n = n + 1")
        job.effect("INSERT INTO applied SELECT $1, n FROM counter", job.key)

    async with seen(database_url) as run:
        await run.connection.execute(TABLE)
        await run.connection.execute("CREATE TABLE counter (n int); INSERT INTO counter VALUES (0)")
        await enqueue_many(run, "count", 15)
        async with Worker(handlers, quick(database_url, workers=15, **shape)):
            assert await all_ended(run) == {"succeeded": 15}
        assert await run.column("SELECT note FROM applied ORDER BY note") == list(range(1, 16))


async def test_effects_of_one_text_run_in_the_order_of_their_arguments(database_url: str) -> None:
    """So that two committers lock the rows that they share in the same order."""
    handlers, all_in = Handlers(), asyncio.Barrier(60)

    @handlers.job("write")
    async def write(job: Job[int]) -> None:
        await all_in.wait()
        job.effect("INSERT INTO ordered (n, thing) VALUES ($1, $2)", int(str(job.payload)) * 7919 % 61, None)

    async with seen(database_url) as run:
        await run.connection.execute("CREATE TABLE ordered (place int GENERATED ALWAYS AS IDENTITY, n int, thing int)")
        await enqueue_many(run, "write", 60)
        async with Worker(handlers, quick(database_url, workers=60)):
            assert await all_ended(run) == {"succeeded": 60}
        by_transaction = await run.connection.fetch(
            "SELECT array_agg(n ORDER BY place) AS numbers FROM ordered GROUP BY xmin::text"
        )
        assert max(len(row["numbers"]) for row in by_transaction) > 10
        assert all(row["numbers"] == sorted(row["numbers"]) for row in by_transaction)


async def test_two_committers_that_update_shared_rows_both_get_on(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("bump")
    async def bump(job: Job[int]) -> None:
        job.effect("UPDATE shared SET n = n + 1 WHERE id = $1", int(str(job.payload)) * 7919 % 40)

    async with seen(database_url) as run:
        await run.connection.execute("CREATE TABLE shared (id int PRIMARY KEY, n int)")
        await run.connection.execute("INSERT INTO shared SELECT g, 0 FROM generate_series(0, 39) AS g")
        await enqueue_many(run, "bump", 600)
        async with Worker(handlers, quick(database_url)), Worker(handlers, quick(database_url)):
            assert await all_ended(run) == {"succeeded": 600}
        assert await run.value("SELECT sum(n) FROM shared") == 600
        assert await run.value("SELECT max(attempts) FROM jobs") == 1


async def test_effects_that_wait_for_a_locked_row_do_not_hold_up_the_others(database_url: str) -> None:
    handlers, all_in = Handlers(), asyncio.Barrier(10)

    @handlers.job("bump")
    async def bump(job: Job[int]) -> None:
        await all_in.wait()
        job.effect("UPDATE shared SET n = n + 1 WHERE id = $1", job.payload)

    async with seen(database_url) as run, seen(database_url) as other:
        await run.connection.execute("CREATE TABLE shared (id int PRIMARY KEY, n int)")
        await run.connection.execute("INSERT INTO shared SELECT g, 0 FROM generate_series(1, 10) AS g")
        await enqueue_many(run, "bump", 10)
        async with other.connection.transaction():
            await other.connection.execute("SELECT FROM shared WHERE id = 4 FOR UPDATE")
            async with Worker(handlers, quick(database_url, workers=10, lease_seconds=3)) as worker:

                async def others_done() -> bool:
                    return bool(await run.value("SELECT count(*) FROM jobs WHERE state = 'succeeded'") == 9)

                await await_for(others_done, 20)
                await other.connection.execute("COMMIT; BEGIN")
                assert await all_ended(run) == {"succeeded": 10}
                assert not worker.is_stopping
        assert await run.value("SELECT sum(n) FROM shared") == 10


async def test_a_job_with_more_effects_than_a_group_holds_is_committed(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("many")
    async def many(job: Job[object]) -> None:
        for number in range(700):
            job.effect(APPLY, job.key, number)

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        assert (await run.run("many", max_attempts=1))["state"] == "succeeded"
        assert await run.value("SELECT count(DISTINCT note) FROM applied") == 700
        assert not run.worker.is_stopping


# --- once per key


@both_shapes
@pytest.mark.parametrize("deletes", [False, True], ids=["", "retention 0"])
async def test_whatever_is_done_to_the_jobs_table_a_key_has_one_effect(
    database_url: str, shape: dict[str, Any], deletes: bool
) -> None:
    handlers, ran = Handlers(), []

    @handlers.job("write")
    async def write(job: Job[object]) -> str:
        ran.append(job.fence)
        job.effect(APPLY, job.key, 1)
        return "done"

    options = {"retention_seconds": 0} if deletes else {}
    async with running(database_url, handlers, **shape, **options) as run:
        await run.connection.execute(TABLE)

        async def again(times: int) -> None:
            await await_for(lambda: len(run.log.find(events.JOB_SUCCEEDED)) == times)

        await run.enqueue("write", key="k")
        await again(1)
        assert await run.value("SELECT count(*) FROM jobs") == (0 if deletes else 1)
        if not deletes:  # requeue by plain SQL
            await run.connection.execute("UPDATE jobs SET state = 'ready', completed_at = NULL, attempts = 0")
            await again(2)
            await run.connection.execute("DELETE FROM jobs")  # prune by plain SQL
        else:
            await run.enqueue("write", key="k")
            await again(2)
        await run.enqueue("write", key="k")
        await again(3)
        said = run.log.find(events.EFFECT_ALREADY_APPLIED, key="k")
        assert len(said) == 2
        assert len(ran) == 3
        assert await run.value("SELECT count(*) FROM applied") == 1
        assert await run.value("SELECT fence FROM job_effects WHERE idempotency_key = 'k'") == ran[0]
        # Only as long as the ledger row lives.
        await run.connection.execute("DELETE FROM job_effects; DELETE FROM jobs")
        await run.enqueue("write", key="k")
        await again(4)
        assert await run.value("SELECT count(*) FROM applied") == 2


async def test_a_follow_up_alone_is_an_effect_too(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("first")
    async def first(job: Job[object]) -> None:
        job.enqueue("second", {"of": job.key}, queue="elsewhere")

    async with running(database_url, handlers) as run:
        id = (await run.run("first", key="k"))["id"]
        await run.connection.execute("UPDATE jobs SET state = 'ready', completed_at = NULL WHERE id = $1", id)
        await run.said(events.EFFECT_ALREADY_APPLIED, job_id=id)
        assert await run.value("SELECT count(*) FROM jobs WHERE kind = 'second'") == 1


async def test_generated_keys_leave_no_ledger_row_and_jobs_without_effects_neither(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        job.effect(APPLY, job.key, 1)

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        async with job.transaction() as tx:
            await tx.execute(APPLY, job.key, 1)

    @handlers.job("nothing")
    async def nothing(job: Job[object]) -> None: ...

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        for kind, key in (("write", None), ("own", None), ("nothing", "chosen")):
            assert (await run.run(kind, key=key))["state"] == "succeeded"
        assert await run.value("SELECT count(*) FROM applied WHERE key LIKE 'auto:%'") == 2
        assert await run.value("SELECT count(*) FROM job_effects") == 0


async def test_a_retention_of_zero_deletes_what_succeeds_and_keeps_what_failed(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("work")
    async def work(job: Job[object]) -> None:
        if job.payload == "own":
            async with job.transaction() as tx:
                await tx.execute(APPLY, job.key, 1)
                job.result = "nowhere to go"
            return
        job.effect(APPLY, job.key, 1)
        if job.payload == "fail" or (job.payload == "second" and job.attempt == 1):
            raise ValueError("no")

    async with running(database_url, handlers, retention_seconds=0) as run:
        await run.connection.execute(TABLE)
        for payload in ("own", "fine", "second"):
            await run.enqueue("work", payload, key=payload)
        await run.run("work", "fail", key="fail", max_attempts=1)
        await await_for(lambda: len(run.log.find(events.JOB_SUCCEEDED)) == 3)
        assert await run.column("SELECT idempotency_key FROM jobs") == ["fail"]
        assert await run.column("SELECT DISTINCT key FROM applied ORDER BY 1") == ["fine", "own", "second"]
        assert await run.value("SELECT count(*) FROM job_effects") == 3
        assert await run.column("SELECT job_id FROM job_failures") == await run.column("SELECT id FROM jobs")


async def test_a_lost_connection_while_committing_loses_and_doubles_nothing(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        job.effect(APPLY, job.key, 1)

    terminate = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE '% commit'"
    )
    async with running(database_url, handlers, lease_seconds=6) as run:
        await run.connection.execute(TABLE)
        await enqueue_many(run, "write", 1_500)
        killed = 0
        while await run.value("SELECT EXISTS (SELECT FROM jobs WHERE state IN ('ready', 'running'))") and killed < 8:
            killed += await run.value(terminate)
        assert await all_ended(run) == {"succeeded": 1_500}
        assert killed > 0
        assert await run.value("SELECT count(*) FROM applied") == 1_500
        assert await run.value("SELECT count(DISTINCT key) FROM applied") == 1_500


async def test_outcomes_are_kept_while_the_database_lets_nobody_in(server: Server, database_url: str) -> None:
    handlers, go = Handlers(), asyncio.Event()

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        await go.wait()
        job.effect(APPLY, job.key, 1)

    name = urlsplit(database_url).path.removeprefix("/")
    async with seen(database_url) as run, seen(server.dsn) as admin:
        await run.connection.execute(TABLE)
        await enqueue_many(run, "write", 4)
        async with Worker(handlers, quick(database_url)):

            async def all_run() -> bool:
                return bool(await run.value("SELECT count(*) FROM jobs WHERE state = 'running'") == 4)

            await await_for(all_run)
            await admin.connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            try:
                await admin.connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = $1 AND application_name NOT LIKE '% test'",
                    name,
                )
                go.set()
                await await_for(lambda: run.log.find(events.COMPLETION_DEFERRED))
                assert await run.value("SELECT count(*) FROM applied") == 0
            finally:
                await admin.connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            assert await all_ended(run) == {"succeeded": 4}
        assert await run.value("SELECT count(*) FROM applied") == 4
        assert await run.value("SELECT max(attempts) FROM jobs") == 1
