"""Effects that share a transaction are as if they had been committed one after the other."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.effect_rows import TABLE, enqueue_many
from tests.inprocess import Run, both_shapes, quick, running, seen
from tests.servers import ADVISORY_LOCKS
from tests.waiting import await_for
from worker import Handlers, Job, Worker


async def no_lock_is_left(run: Run) -> None:
    """The session is tidied up behind the COMMIT by which the row can be seen."""

    async def none() -> bool:
        return bool(await run.value(ADVISORY_LOCKS) == 0)

    await await_for(none)


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
            assert await run.all_ended() == {"succeeded": 20}
            await no_lock_is_left(run)
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
        await no_lock_is_left(run)


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
            assert await run.all_ended() == {"succeeded": 15}
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
            assert await run.all_ended() == {"succeeded": 60}
        by_transaction = await run.connection.fetch(
            "SELECT array_agg(n ORDER BY place) AS numbers FROM ordered GROUP BY xmin::text"
        )
        assert max(len(row["numbers"]) for row in by_transaction) > 3
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
            assert await run.all_ended() == {"succeeded": 600}
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
        await other.connection.execute("SET idle_in_transaction_session_timeout = 0")
        async with other.connection.transaction():
            await other.connection.execute("SELECT FROM shared WHERE id = 4 FOR UPDATE")
            async with Worker(handlers, quick(database_url, workers=10)) as worker:

                async def others_done() -> bool:
                    return bool(await run.value("SELECT count(*) FROM jobs WHERE state = 'succeeded'") == 9)

                await await_for(others_done, 20)
                await other.connection.execute("COMMIT; BEGIN")
                assert await run.all_ended() == {"succeeded": 10}
                assert not worker.is_stopping
        assert await run.value("SELECT sum(n) FROM shared") == 10
