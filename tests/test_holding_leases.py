"""`Leases`: a block runs while its lease is held and renewed, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from typing import Any

import asyncpg
import psycopg
import pytest

from tests.inprocess import quick
from tests.lease_blocks import Watched, hold_once
from tests.lease_rows import Db, is_free, is_live, row, take
from tests.psql import grant
from tests.roles import role, url_as
from tests.servers import Server
from tests.waiting import await_for, await_while, block_loop
from worker import Handlers, Job, LeaseHeld, LeaseLost, Leases, Worker, enqueue, wait


async def test_it_is_held_while_the_block_runs_and_free_behind_it(leases: Leases, db: Db) -> None:
    fences = []
    for _ in range(3):
        async with leases.hold("nightly", ttl_seconds=60, metadata={"why": "report"}) as held:
            lease = row(db, "nightly")
            assert (lease.live, lease.holder, lease.fence, lease.metadata) == (True, "me", held.fence, {"why": "report"})
            assert (held.name, held.holder) == ("nightly", "me")
            assert 40 < held.remaining_seconds() <= 54
            held.ensure_lease(for_seconds=40)
            with pytest.raises(LeaseLost, match="nightly"):
                held.ensure_lease(for_seconds=55)
        assert row(db, "nightly").released_at is not None
        fences.append(held.fence)
    assert fences == sorted(set(fences))


async def test_it_is_renewed_at_a_third_of_its_length_also_one_of_a_second(leases: Leases, db: Db) -> None:
    moments: list[Any] = []

    async def hold() -> None:
        async with leases.hold("nightly", ttl_seconds=1) as held:
            moments[:] = [row(db, "nightly").created_at]
            for _ in range(9):
                await await_for(lambda: row(db, "nightly").renewed_at not in (None, moments[-1]))
                moments.append(row(db, "nightly").renewed_at)
                held.ensure_lease()

    for _ in range(4):
        with contextlib.suppress(LeaseLost):  # a machine that stands still for a second costs it
            await hold()
            break
    gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(moments)]
    assert len(gaps) == 9
    assert 0.2 < statistics.median(gaps) < 0.6
    assert is_free(db, "nightly")


async def test_a_block_that_keeps_its_loop_busy_loses_nothing(leases: Leases, db: Db) -> None:
    async with leases.hold("nightly", ttl_seconds=3) as held:
        block_loop(4.5)
        held.ensure_lease()
        assert row(db, "nightly").fence == held.fence
        assert is_live(db, "nightly")


async def test_held_by_another_is_said_with_the_holder_and_the_time(leases: Leases, db: Db) -> None:
    take(db, "nightly", "other", 60)
    with pytest.raises(LeaseHeld, match="held by other") as refusal:
        async with leases.hold("nightly"):
            pytest.fail("not held")
    assert refusal.value.holder == "other"
    assert 40 < refusal.value.retry_after_seconds <= 60


async def test_it_waits_for_a_release_and_learns_of_it_soon(database_url: str, db: Db) -> None:
    theirs = take(db, "nightly", "other", 600)
    watched = Watched(database_url)
    async with Leases(transport=lambda: watched) as leases:
        waiting = asyncio.create_task(hold_once(leases, "nightly", wait_seconds=300))
        await await_for(lambda: watched.answered)
        assert not waiting.done()
        db.execute("SELECT release_lease('nightly', 'other', %s)", [theirs.fence])
        started = time.monotonic()
        assert await waiting > theirs.fence
        assert time.monotonic() - started < 30


async def test_it_waits_for_an_expiry_and_not_longer_than_it_may(leases: Leases, db: Db) -> None:
    take(db, "short", "other", 1)
    await hold_once(leases, "short", wait_seconds=30)
    take(db, "long", "other", 60)
    started = time.monotonic()
    with pytest.raises(LeaseHeld):
        await hold_once(leases, "long", wait_seconds=0.5)
    assert 0.4 < time.monotonic() - started < 30


async def test_many_tasks_of_a_process_share_one_name_in_turn(leases: Leases) -> None:
    inside = 0
    fences: list[int] = []

    async def one() -> None:
        nonlocal inside
        async with leases.hold("nightly", ttl_seconds=5, wait_seconds=20) as held:
            inside += 1
            assert inside == 1
            await await_while(lambda: inside == 1, 0.01)
            fences.append(held.fence)
            inside -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(one())
    assert fences == sorted(set(fences))
    assert len(fences) == 8


async def test_nesting_the_same_name_is_refused_since_it_would_wait_for_itself(leases: Leases, database_url: str) -> None:
    async with Leases(database_url) as others, leases.hold("nightly") as held, leases.hold("other"):
        for again in (leases, others):
            with pytest.raises(RuntimeError, match="nightly"):
                await hold_once(again, "nightly", wait_seconds=30)
        with pytest.raises(RuntimeError, match="nightly"):  # a task of the block is inside it
            await asyncio.create_task(hold_once(leases, "nightly"))
        held.ensure_lease()
    await hold_once(leases, "nightly")


async def test_a_task_that_outlives_the_block_is_not_inside_it(leases: Leases) -> None:
    go = asyncio.Event()

    async def later() -> int:
        await go.wait()
        return await hold_once(leases, "nightly")

    async with leases.hold("nightly") as held:
        task = asyncio.create_task(later())
    go.set()
    assert await task > held.fence


async def test_a_thousand_leases_of_all_lengths_are_renewed_in_one_statement(leases: Leases, db: Db) -> None:
    db.execute("CREATE EXTENSION pg_stat_statements")
    counted = (
        "SELECT COALESCE(sum(calls), 0)::int AS calls, COALESCE(sum(rows), 0)::int AS leases FROM pg_stat_statements"
        " WHERE query LIKE '%FROM unnest($1::bigint[]%UPDATE %leases%'"
        " AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    async with contextlib.AsyncExitStack() as stack:
        for number in range(1_000):
            await stack.enter_async_context(leases.hold(f"lease-{number}", ttl_seconds=6 + number % 4))
        # The first rounds bring together what was acquired one after the other.
        seen = [db.execute(counted).fetchone()]

        def all_of_them_twice() -> bool:
            if (now := db.execute(counted).fetchone()) != seen[-1]:
                seen.append(now)
            return [(b.calls - a.calls, b.leases - a.leases) for a, b in itertools.pairwise(seen[-3:])] == [(1, 1_000)] * 2

        await await_for(all_of_them_twice, 60)
        assert db.execute("SELECT count(*) FROM leases WHERE expires_at > clock_timestamp()").fetchone()[0] == 1_000
    assert db.execute("SELECT count(*) FROM leases WHERE released_at IS NULL").fetchone()[0] == 0


async def test_it_serves_a_handler_of_a_worker_in_the_same_process(leases: Leases, database_url: str, db: Db) -> None:
    handlers = Handlers()

    @handlers.job("uses_lease")
    async def uses_lease(job: Job[Any]) -> int:
        async with leases.hold("nightly", ttl_seconds=4) as held:
            await await_for(lambda: row(db, "nightly").renewed_at is not None)
            job.effect("SELECT check_fence('report', $1::bigint)", held.fence)
            return held.fence

    async with Worker(handlers, quick(database_url)):
        connection = await asyncpg.connect(database_url)
        job = await enqueue(connection, "uses_lease", None)
        done = await wait(connection, job.id, timeout_seconds=30)
        await connection.close()
    assert (done.state, done.error) == ("succeeded", None)
    assert db.execute("SELECT fence FROM fences WHERE resource = 'report'").fetchone()[0] == done.result


@pytest.mark.parametrize("of", ["application", "daemon"])
async def test_the_grants_of_a_role_are_enough_to_hold_a_lease_and_to_show_its_fence(
    server: Server, database_url: str, db: Db, of: str
) -> None:
    with role(server, database_url) as name:
        db.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC")
        grant(database_url, of, name)
        url = url_as(name, database_url)
        async with Leases(url) as leases, leases.hold("nightly", ttl_seconds=4) as held:
            await await_for(lambda: row(db, "nightly").renewed_at is not None)
            with psycopg.connect(url) as application:
                application.execute("SELECT check_fence('report', %s)", [held.fence])
        assert row(db, "nightly").released_at is not None
