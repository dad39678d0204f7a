"""Effects of many jobs in one transaction: who is guilty fails alone, and an outage loses and doubles nothing."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta, tzinfo
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.effect_rows import APPLY, TABLE, enqueue_many
from tests.inprocess import SHAPES, quick, running, seen
from tests.servers import Server
from tests.waiting import await_for
from worker import Handlers, Job, Worker, events
from worker.store import effects


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
            assert await run.all_ended() == {"dead": 1, "succeeded": 100}
            assert not worker.is_stopping
        assert await run.value("SELECT payload FROM jobs WHERE state = 'dead'") == "51"
        assert "effect 1 (INSERT INTO" in await run.value("SELECT last_error FROM jobs WHERE state = 'dead'")
        assert await run.value("SELECT count(DISTINCT key) FROM applied WHERE key LIKE 'job-%'") == 100
        assert await run.value("SELECT count(*) FROM applied") == 100
        assert await run.value("SELECT count(*) FROM job_effects") == 100


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("columns", ["at, key", "key, at"], ids=["compared", "sent"])
@pytest.mark.parametrize("jobs", [1, 20])
async def test_an_argument_whose_own_code_raises_anything_is_that_jobs_failure(
    database_url: str, jobs: int, columns: str, raised: type[BaseException]
) -> None:
    """It is compared and sent where leases are renewed: one such loop ended would be all of them."""
    handlers, all_in = Handlers(), asyncio.Barrier(jobs)

    class Zone(tzinfo):
        def utcoffset(self, moment: datetime | None) -> timedelta:
            if threading.current_thread().name == "rights":
                raise raised("of its own making")
            return timedelta(0)

    @handlers.job("write")
    async def write(job: Job[int]) -> None:
        await all_in.wait()
        moment = datetime(2026, 1, 1, tzinfo=Zone() if job.payload == 1 else UTC)
        arguments = (moment, job.key) if columns == "at, key" else (job.key, moment)
        job.effect(f"INSERT INTO moments ({columns}) VALUES ($1, $2)", *arguments)

    async with seen(database_url) as run:
        await run.connection.execute("CREATE TABLE moments (at timestamptz, key text)")
        await enqueue_many(run, "write", jobs)
        async with Worker(handlers, quick(database_url, workers=jobs)) as worker:
            assert await run.all_ended() == Counter(dead=1, succeeded=jobs - 1)
            assert not worker.is_stopping
            all_in = asyncio.Barrier(1)
            assert (await run.run("write", 2))["state"] == "succeeded"
        assert worker.status == 0
        assert f"an argument cannot be sent: {raised.__name__}" in await run.value(
            "SELECT last_error FROM jobs WHERE state = 'dead'"
        )


async def test_the_server_itself_refuses_a_second_statement_in_an_effect(database_url: str) -> None:
    """Should a text ever be read in another way than the server does: the neighbours' fence must not be committed by it."""
    async with seen(database_url) as run:
        await run.connection.execute("CREATE TABLE a (n int)")
        with pytest.raises(asyncpg.PostgresSyntaxError):
            await effects.apply(run.connection, "INSERT INTO a VALUES (1); COMMIT", ())
        assert await run.value("SELECT count(*) FROM a") == 0


async def test_what_an_effect_without_arguments_returns_is_nobodys_business(database_url: str) -> None:
    """Not even where Python has no such value."""
    handlers = Handlers()

    @handlers.job("read")
    async def read(job: Job[object]) -> None:
        job.effect("SELECT '0044-03-15 BC'::timestamptz FROM generate_series(1, 10000)")

    async with running(database_url, handlers) as run:
        assert (await run.run("read", max_attempts=1))["state"] == "succeeded"


@pytest.mark.parametrize("jobs", [1, 3], ids=["alone", "in a group"])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("INSERT INTO applied VALUES ('a', 1) RETURNING *", ()),
        ("INSERT INTO applied VALUES ($1, 1) RETURNING *", ("a",)),
        ("INSERT INTO applied VALUES ($1, 1) RETURNING applied", ("a",)),
    ],
    ids=["without arguments", "with one", "a row as one value"],
)
async def test_a_migration_of_the_tables_of_an_effect_costs_no_attempt(
    database_url: str, text: str, arguments: tuple[object, ...], jobs: int
) -> None:
    """What is prepared here returns other columns from one moment to the next."""
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        await all_in.wait()
        job.effect(text, *arguments)

    async with seen(database_url) as run:
        await run.connection.execute(TABLE)
        async with Worker(handlers, quick(database_url, workers=jobs)):
            for altered in (False, True):
                all_in = asyncio.Barrier(jobs)
                ids = [await run.enqueue("write", max_attempts=1) for _ in range(jobs)]
                assert [(await run.ended(id))["last_error"] for id in ids] == [None] * jobs
                if not altered:
                    await run.connection.execute("ALTER TABLE applied ADD COLUMN more int")
        assert await run.value("SELECT count(*) FROM applied") == 2 * jobs


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
                assert await run.all_ended() == {"succeeded": 40}
            transactions = await run.value("SELECT count(DISTINCT xmin::text) FROM applied")
            assert (transactions < 20) if few else (transactions == 40)
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
            assert await run.all_ended() == {"dead": 1, "succeeded": 11}
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
            assert await run.all_ended() == {"dead": 2, "succeeded": 18}
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
        async with Worker(handlers, quick(database_url, workers=30, query_timeout_seconds=1.5)):
            assert await run.all_ended() == {"succeeded": 30}
        assert await run.value("SELECT max(attempts) FROM jobs") == 1
        assert await run.value("SELECT count(*) FROM applied") == 30
        assert len(run.log.find(events.COMPLETION_DEFERRED)) < 10, "a line for a group, not for a job"


async def test_a_statement_slower_than_the_limit_is_that_jobs_failure(database_url: str) -> None:
    handlers, all_in = Handlers(), asyncio.Barrier(6)

    @handlers.job("slow")
    async def slow(job: Job[int]) -> None:
        await all_in.wait()
        job.effect("INSERT INTO applied SELECT $1, $2 FROM pg_sleep($3)", job.key, job.payload, 30 if job.payload == 3 else 0)

    async with seen(database_url) as run:
        await run.connection.execute(TABLE)
        await enqueue_many(run, "slow", 6)
        async with Worker(handlers, quick(database_url, workers=6, query_timeout_seconds=2)):
            assert await run.all_ended() == {"dead": 1, "succeeded": 5}
        assert "statement timeout" in await run.value("SELECT last_error FROM jobs WHERE state = 'dead' AND payload = '3'")
        assert await run.value("SELECT count(*) FROM applied") == 5


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
        assert await run.all_ended() == {"succeeded": 1_500}
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
            assert await run.all_ended() == {"succeeded": 4}
        assert await run.value("SELECT count(*) FROM applied") == 4
        assert await run.value("SELECT max(attempts) FROM jobs") == 1
