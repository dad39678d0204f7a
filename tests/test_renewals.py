"""What the keeper of a process writes: its presence, and the leases of its jobs, also of those with a transaction of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.inprocess import Run, connect, quick, seen
from tests.ports import Proxy
from tests.waiting import await_for
from worker import Handlers, Job, Worker, events
from worker.clock import local_seconds
from worker.domain import Lease
from worker.holding import Held, Holdings, Phase
from worker.job_renewals import JobRenewals
from worker.keeper import LEASE_SETTINGS, ROLE
from worker.store import claiming, leasing
from worker.store.connection import Database, Lane, SessionLimits, read_moments_as_microseconds

OWNER = "test-00000000"
LEASE = Lease(60.0, 6.0)
RENEW_SECONDS = 20.0
PATIENT = SessionLimits(statement_timeout_seconds=60, lock_timeout_seconds=60, idle_in_transaction_seconds=60)

# --- the presence


@asynccontextmanager
async def renewing(dsn: str) -> AsyncIterator[tuple[JobRenewals, Holdings]]:
    """The renewals of a process with leases of a minute, which says in between that it is there."""
    database, holdings = Database(dsn, environ={}, limits=PATIENT), Holdings()
    lane = Lane(database, ROLE, settings=LEASE_SETTINGS)
    renewals = JobRenewals(
        database,
        lane,
        presence=leasing.Presence(OWNER, "test", "host", 1, "0", ["default"], 1),
        lease=LEASE,
        holdings=holdings,
        renew_seconds=RENEW_SECONDS,
        statement_seconds=60.0,
        busy=lambda: 0,
        hungry=lambda: False,
        health=lambda: "{}",
    )
    try:
        yield renewals, holdings
    finally:
        lane.drop()


async def claim_one(run: Run) -> Held:
    database = Database(run.dsn, environ={})
    connection = await database.connect("claim")
    try:
        await read_moments_as_microseconds(connection)
        [job] = await claiming.claim(
            connection,
            database,
            queue="default",
            priority=0,
            limit=1,
            owner=OWNER,
            lease_seconds=LEASE.seconds,
            payload_bytes=1,
        )
    finally:
        connection.terminate()
    return Held(job, float("inf"))


async def test_the_presence_of_a_process_never_outlives_its_leases(database_url: str) -> None:
    """Guarantee 8: who was killed with its job is away when the lease expires, else the job would not count as a crash's victim."""
    async with seen(database_url) as run, renewing(database_url) as (renewals, holdings):
        await run.enqueue("any")
        holdings.add(await claim_one(run))
        await renewals.beat(poked=False)
        for _ in range(3):
            await renewals.beat(poked=False)  # nothing is due: it only says that it is there
            assert await run.value("SELECT p.expires_at <= j.lease_until FROM processes AS p, jobs AS j")
        assert await run.value("SELECT p.expires_at > now() + interval '30 seconds' FROM processes AS p")


async def test_a_process_that_holds_nothing_stays_present(database_url: str) -> None:
    async with seen(database_url) as run, renewing(database_url) as (renewals, _):
        for _ in range(3):
            await renewals.beat(poked=False)
            assert await run.value("SELECT p.expires_at > now() + interval '30 seconds' FROM processes AS p")


async def test_a_process_that_leaves_leases_behind_outlives_them_with_its_next_beats_too(database_url: str) -> None:
    async with seen(database_url) as run, renewing(database_url) as (renewals, holdings):
        await run.enqueue("any")
        holdings.add(await claim_one(run))
        renewals.outlive_leases()
        for poked in (True, False, False):
            await renewals.beat(poked=poked)
            assert await run.value("SELECT p.expires_at > j.lease_until + interval '1 minute' FROM processes AS p, jobs AS j")


# --- a handler's own transaction


async def test_an_own_transaction_may_outlive_its_lease_for_as_long_as_its_row_is_found_locked(database_url: str) -> None:
    async with seen(database_url) as run, renewing(database_url) as (renewals, holdings):
        id = await run.enqueue("any")
        held = await claim_one(run)
        held.trusted_until = local_seconds()  # nobody can renew it
        held.phase = Phase.OWN_TRANSACTION
        holdings.add(held)
        await run.connection.execute("UPDATE jobs SET lease_until = now() - interval '1 second'")
        handler = await connect(database_url)
        try:
            async with handler.transaction():
                await handler.execute("SELECT FROM jobs WHERE id = $1 FOR NO KEY UPDATE", id)
                before = local_seconds()
                await renewals.beat(poked=True)
                assert held.lost is None
                assert held.safe_until - before >= 2 * RENEW_SECONDS
        finally:
            await handler.close()
        await renewals.beat(poked=True)
        assert held.lost == "lease_lost", "that transaction is over, and an expired lease is not renewed"


@asynccontextmanager
async def own_transaction_gone_mute(dsn: str) -> AsyncIterator[tuple[Run, int, Callable[[], str | None]]]:
    """A Worker with one job, its id, and the reason for which its handler was told to stop: it waits inside job.transaction() for
    an answer on a connection that has gone mute, and the server ends that transaction soon."""
    handlers, is_inside = Handlers(), asyncio.Event()
    jobs: list[Job[object]] = []

    @handlers.job("own", timeout_seconds=600)
    async def own(job: Job[object]) -> None:
        jobs.append(job)
        async with job.transaction() as tx:
            proxy.go_mute()  # at once, before the server can end it
            is_inside.set()
            await tx.execute("SELECT 1")

    limits = SessionLimits(statement_timeout_seconds=3, lock_timeout_seconds=1, idle_in_transaction_seconds=1)
    async with seen(dsn) as run, Proxy(dsn) as proxy:
        pool = Database(proxy.dsn, environ={}, limits=limits).pool(1)
        try:
            async with Worker(handlers, quick(dsn, lease_seconds=9)) as worker:
                assert worker.parts is not None
                worker.parts.pool.surroundings.pool = pool
                id = await run.enqueue("own", max_attempts=1)
                await asyncio.wait_for(is_inside.wait(), 20)
                yield run, id, lambda: jobs[0].cancel_reason
                proxy.flow()
        finally:
            await pool.close(0.1)


async def test_a_lease_is_renewed_again_when_the_server_has_ended_the_handlers_own_transaction_unheard(database_url: str) -> None:
    """Guarantee 5: nobody else gets the job while this handler, which knows of nothing, may still be at work."""
    async with own_transaction_gone_mute(database_url) as (run, id, told):
        lease_until = (await run.row(id))["lease_until"]

        async def renewed() -> bool:
            return bool((await run.row(id))["lease_until"] > lease_until)

        await await_for(renewed, 20)
        assert told() is None


async def test_a_handler_whose_own_transaction_has_gone_mute_is_told_that_its_lease_has_passed_on(database_url: str) -> None:
    async with own_transaction_gone_mute(database_url) as (run, id, told):
        operator = await connect(database_url)
        try:  # it waits for the row until the server has ended the transaction
            await operator.execute("UPDATE jobs SET lease_until = now() - interval '1 second' WHERE id = $1", id)
        finally:
            await operator.close()
        row = await run.ended(id)
        assert row["last_error"].startswith("lease lost: ")
        await await_for(lambda: told() == "lease_lost", 20)
        await run.said(events.JOB_ABANDONED, job_id=id, reason="lease_lost")


async def test_a_handler_in_its_own_transaction_is_told_to_stop_in_time_when_nothing_is_heard_of_the_database(
    database_url: str,
) -> None:
    """Guarantee 5: the server may have ended that transaction, whose row then waits for nothing but the end of the lease."""
    handlers, is_inside = Handlers(), asyncio.Event()
    told: list[str | None] = []

    @handlers.job("own", timeout_seconds=600)
    async def own(job: Job[object]) -> None:
        async with job.transaction():
            is_inside.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told.append(job.cancel_reason)
                raise

    # The margin is as large as may be: it is what a machine that stands still at that moment has.
    lease: dict[str, float] = {"lease_seconds": 12, "renew_seconds": 3, "lease_margin_seconds": 4.5}
    async with seen(database_url) as run, Proxy(database_url) as proxy, Worker(handlers, quick(proxy.dsn, **lease)):
        id = await run.enqueue("own", max_attempts=1)
        await asyncio.wait_for(is_inside.wait(), 20)
        proxy.go_mute()
        await await_for(lambda: bool(told), 20)
        assert await run.value("SELECT lease_until > now() FROM jobs WHERE id = $1", id)
        assert told == ["lease_untrusted"]
        proxy.flow()


@pytest.mark.parametrize("retention_seconds", [604_800.0, 0.0], ids=["kept", "deleted"])
async def test_a_transaction_longer_than_its_lease_is_left_alone_and_commits(database_url: str, retention_seconds: float) -> None:
    """Its row is locked all the time, and then says that it has succeeded, or is gone: neither is a lost lease."""
    handlers = Handlers()
    to_the_end: list[str | None] = []

    async def next_beat() -> None:
        present_until = "SELECT max(expires_at) FROM processes"
        before = await run.value(present_until)

        async def has_come() -> bool:
            return bool(await run.value(present_until) != before)

        await await_for(has_come, 20)

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        async with job.transaction() as tx:
            for _ in range(28):
                await tx.execute("SELECT pg_sleep(0.2)")
        for _ in range(2):  # the second one began after the commit
            await next_beat()
        to_the_end.append(job.cancel_reason)

    async with seen(database_url) as run:
        settings = quick(database_url, lease_seconds=5, retention_seconds=retention_seconds)
        async with Worker(handlers, settings):
            id = await run.enqueue("own", max_attempts=1)
            await run.said(events.JOB_SUCCEEDED, job_id=id, timeout_seconds=30)
        assert await run.value("SELECT count(*) FROM job_effects WHERE job_id = $1", id) == 1
        assert not run.log.find(events.JOB_ABANDONED)
    assert to_the_end == [None]
