"""Claims take what they may: never more jobs than asked for, no job twice, no more payload than fits."""

from __future__ import annotations

import asyncio

import pytest

from tests.claims import add, claim, session
from tests.inprocess import quick, running, seen
from tests.roles import role, url_as
from tests.servers import Server, execute
from worker import Handlers, Job, Worker
from worker.domain import ClaimedJob
from worker.store import claiming

K7 = (
    "hashjoin",
    "mergejoin",
    "nestloop",
    "material",
    "memoize",
    "hashagg",
    "sort",
    "indexscan",
    "indexonlyscan",
    "bitmapscan",
    "seqscan",
)


@pytest.mark.parametrize("off", [[], K7[:1], K7[:7], K7], ids=["", "no hash join", "neither joins nor sorts", "nothing at all"])
async def test_no_setting_of_the_role_makes_a_claim_take_more_than_it_may(
    server: Server, database_url: str, off: list[str]
) -> None:
    """K7, set before the daemon connects."""
    handlers, all_busy, go = Handlers(), asyncio.Barrier(4), asyncio.Event()

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        if not go.is_set():
            await all_busy.wait()
            await go.wait()

    async with seen(database_url) as run:
        await add(run, "job", 20)
        with role(server, database_url) as name:
            for method in off:
                execute(server.dsn, f"ALTER ROLE {{}} SET enable_{method} = off", name)
            execute(server.dsn, "ALTER ROLE {} SET plan_cache_mode = 'force_custom_plan'", name)
            execute(database_url, "GRANT ALL ON ALL TABLES IN SCHEMA public TO {}", name)
            execute(database_url, "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {}", name)
            async with Worker(handlers, quick(url_as(name, database_url), workers=3)):
                await all_busy.wait()
                assert await run.value("SELECT count(*) FROM jobs WHERE state = 'running'") == 3
                go.set()
                assert await run.all_ended() == {"succeeded": 20}
        assert await run.value("SELECT max(attempts) FROM jobs") == 1


async def test_no_two_claims_get_the_same_job_and_all_get_something(database_url: str) -> None:
    async with seen(database_url) as run:
        await add(run, "job", 300)
        claimed: list[ClaimedJob] = []

        async def take(number: int) -> None:
            async with session(database_url, claiming.CLAIM_SETTINGS) as (connection, database):
                while jobs := await claim(connection, database, 10, owner=f"p{number}-00000000"):
                    claimed.extend(jobs)

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(take(number))
        assert len(claimed) == 300
        assert len({job.id for job in claimed}) == len({job.fence for job in claimed}) == 300


async def test_large_payloads_are_claimed_a_few_at_a_time(database_url: str) -> None:
    """F8: bytes are bounded as well as jobs; one job always fits, in order."""
    async with seen(database_url) as run, session(database_url, claiming.CLAIM_SETTINGS) as (connection, database):
        await run.connection.execute(
            "INSERT INTO jobs (payload, idempotency_key)"
            " SELECT to_jsonb(repeat('x', CASE n WHEN 3 THEN 9 ELSE 400000 END)), 'k' || n FROM generate_series(1, 8) AS n"
        )
        sizes = []
        while jobs := await claim(connection, database, 10, payload_bytes=900_000):
            assert [job.key for job in jobs] == [f"k{sum(sizes) + n + 1}" for n in range(len(jobs))]
            sizes.append(len(jobs))
        assert sizes == [4, 3, 1]
        await add(run, "small", 2)
        assert len(await claim(connection, database, 10, payload_bytes=1)) == 1


async def test_a_process_holds_no_more_payload_than_its_bound(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.demand.PAYLOAD_BYTES_A_CLAIM", 1_000_000)
    monkeypatch.setattr("worker.demand.PAYLOAD_BYTES_AHEAD", 2_000_000)
    handlers, most = Handlers(), [0]

    @handlers.job("weigh")
    async def weigh(job: Job[object]) -> None:
        assert run.worker.parts is not None
        most[0] = max(most[0], run.worker.parts.pool.waiting_bytes())

    async with running(database_url, handlers, workers=2) as run:
        await run.connection.execute(
            "INSERT INTO jobs (kind, payload) SELECT 'weigh', to_jsonb(repeat('x', 300000)) FROM generate_series(1, 60)"
        )
        assert await run.all_ended() == {"succeeded": 60}
    assert most[0] < 3_500_000
