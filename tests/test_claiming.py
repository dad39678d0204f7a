"""Claiming: in which order, never more than asked for, nothing passed over for good, and by plans that stay right."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.inprocess import SHAPES, Run, both_shapes, connect, quick, running, seen
from tests.roles import role, url_as
from tests.servers import Server, execute
from tests.waiting import await_for
from worker import Handlers, Job, Worker, committer, events, keeper, reaper
from worker.domain import ClaimedJob
from worker.store import claiming, leasing, reaping, settling
from worker.store.claiming import START, Cursor
from worker.store.connection import Connection, Database, read_moments_as_microseconds
from worker.store.settling import Completion

OWNER = "test-00000000"
ADD = """
INSERT INTO jobs (idempotency_key, kind, queue, priority, available_at, payload)
SELECT $1 || n, 'note', $2, $3, now() - interval '1 hour' + n * interval '1 second' + $4 * interval '1 second', '{}'
FROM generate_series(1, $5::int) AS n
"""


async def add(run: Run, name: str, count: int = 1, *, queue: str = "default", priority: int = 0, later_seconds: float = 0) -> None:
    """Jobs `<name>1`, `<name>2` … of kind `note`, a second apart, due an hour ago."""
    await run.connection.execute(ADD, name, queue, priority, later_seconds, count)


def noting() -> tuple[Handlers, list[str]]:
    """A handler that notes the keys of its jobs in the order in which they start."""
    handlers, started = Handlers(), []

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        started.append(job.key)

    return handlers, started


@asynccontextmanager
async def session(dsn: str, settings: dict[str, str]) -> AsyncIterator[tuple[Connection, Database]]:
    """A connection as one of the loops has it."""
    database = Database(dsn, environ={})
    connection = await database.connect("claim", settings=settings, statement_timeout_seconds=20)
    try:
        await read_moments_as_microseconds(connection)
        yield connection, database
    finally:
        connection.terminate()


async def claim(connection: Connection, database: Database, limit: int = 10, **options: Any) -> list[ClaimedJob]:
    chosen = {"queue": "default", "priority": 0, "owner": OWNER, "lease_seconds": 3600, "payload_bytes": 10_000_000} | options
    return await claiming.claim(connection, database, limit=limit, **chosen)


# --- the order


@both_shapes
async def test_higher_priority_first_then_the_older_then_the_lower_id(database_url: str, shape: dict[str, Any]) -> None:
    handlers, started = noting()
    async with seen(database_url) as run:
        await add(run, "new", later_seconds=60)
        await add(run, "low", priority=-5)
        await add(run, "old", 3)
        await add(run, "twin-a")  # the same moment as old1, but written later
        await add(run, "high", 2, priority=32_767, later_seconds=120)
        await run.connection.execute(
            "UPDATE jobs SET available_at = (SELECT min(available_at) FROM jobs) WHERE idempotency_key = 'twin-a1'"
        )
        await run.connection.execute(
            "UPDATE jobs SET available_at = (SELECT min(available_at) FROM jobs) WHERE idempotency_key = 'old1'"
        )
        async with Worker(handlers, quick(database_url, workers=1, **shape)):
            await await_for(lambda: len(started) == 8)
    assert started == ["high1", "high2", "old1", "twin-a1", "old2", "old3", "new1", "low1"]


async def test_a_new_priority_overtakes_a_backlog(database_url: str) -> None:
    handlers, started = Handlers(), []
    gate = asyncio.Event()

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        started.append(job.key)
        if len(started) == 5:
            await add(run, "urgent", 3, priority=9)
            gate.set()
        await asyncio.sleep(0.02)

    async with seen(database_url) as run:
        await add(run, "backlog", 400)
        async with Worker(handlers, quick(database_url, workers=1)):
            await gate.wait()
            await await_for(lambda: len([key for key in started if key.startswith("urgent")]) == 3)
            assert len(started) < 100, "strictly: as soon as it is seen, and it is seen soon"


async def test_no_place_behind_is_asked_while_one_before_has_more(database_url: str) -> None:
    """Twenty slots are no step of the ladder of limits: one statement takes ten, and so does the next."""
    handlers, all_in, go = Handlers(), asyncio.Barrier(21), asyncio.Event()

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        if not go.is_set():
            await all_in.wait()
            await go.wait()

    async with seen(database_url) as run:
        await add(run, "low", 100)
        await add(run, "high", 100, priority=1)
        async with Worker(handlers, quick(database_url, workers=20)):
            await all_in.wait()
            assert await run.column("SELECT DISTINCT priority FROM jobs WHERE state = 'running'") == [1]
            go.set()


async def test_a_stream_of_notifications_does_not_hide_a_new_priority(database_url: str) -> None:
    """Every round is told of a job that it finds behind its cursor; the table is surveyed all the same."""
    handlers, started = noting()
    async with running(database_url, handlers) as run, seen(database_url) as other:

        async def hungry() -> bool:
            return bool(await run.value("SELECT hungry FROM processes"))

        await await_for(hungry)

        async def stream() -> None:
            for number in range(100_000):
                await add(other, f"stream{number}-", later_seconds=number / 1_000)

        streaming = asyncio.create_task(stream())
        try:
            await await_for(lambda: len(started) > 200)
            await add(run, "urgent", priority=9)
            await await_for(lambda: "urgent1" in started)
            assert not streaming.done()
        finally:
            streaming.cancel()
            await asyncio.wait({streaming})


async def test_low_priorities_wait_for_as_long_as_higher_ones_come_in(database_url: str) -> None:
    """G7. The documented rule is strict: priority before age, however long the wait."""
    handlers, started = Handlers(), []

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        started.append(job.key)
        if len(started) < 60:
            await add(run, f"high{len(started)}-", priority=5)
        await asyncio.sleep(0.001)

    async with seen(database_url) as run:
        await add(run, "low")
        await add(run, "high", 2, priority=5)
        async with Worker(handlers, quick(database_url, workers=1, **SHAPES["single"])):
            await await_for(lambda: "low1" in started)
    assert started[-1] == "low1"
    assert len(started) >= 60


async def test_several_queues_are_served_in_turn(database_url: str) -> None:
    """G8: a thousand jobs of one queue do not hide those of another."""
    handlers, started = noting()
    async with seen(database_url) as run:
        await add(run, "flood", 1_000, queue="a")
        await add(run, "few", 10, queue="b", later_seconds=3_000)
        await add(run, "other", queue="not ours")
        async with Worker(handlers, quick(database_url, workers=1, queues="a,b", **SHAPES["single"])):
            await await_for(lambda: len([key for key in started if key.startswith("few")]) == 10)
            assert len(started) < 60
        assert await run.value("SELECT state FROM jobs WHERE queue = 'not ours'") == "ready"


@both_shapes
async def test_jobs_that_cannot_be_run_now_hide_none_behind_them(database_url: str, shape: dict[str, Any]) -> None:
    """G8: suspects, of which one runs at a time; kinds that nobody here knows; rows that somebody else has locked."""
    handlers, started = Handlers(), []
    go = asyncio.Event()

    @handlers.job("suspect")
    async def suspect(job: Job[object]) -> None:
        started.append(job.key)
        await go.wait()

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        started.append(job.key)

    other = await connect(database_url)
    try:
        async with seen(database_url) as run, other.transaction():
            await run.connection.execute(
                "INSERT INTO jobs (kind, payload, crashes, idempotency_key, available_at)"
                " SELECT kind, '1', crashes, kind || n, now() - interval '2 hours' FROM generate_series(1, 300) AS n,"
                " (VALUES ('suspect', 1), ('unknown', 0), ('locked', 0)) AS v (kind, crashes)"
            )
            await other.execute("SELECT FROM jobs WHERE kind = 'locked' FOR UPDATE")
            await add(run, "behind", 20)
            async with Worker(handlers, quick(database_url, workers=2, **shape)):
                await await_for(lambda: sum(key.startswith("behind") for key in started) == 20, 30)
                assert sum(key.startswith("suspect") for key in started) == 1
                go.set()
                await await_for(lambda: sum(key.startswith("suspect") for key in started) == 300, 60)
            assert await run.value("SELECT max(attempts) FROM jobs WHERE kind = 'unknown'") == 0
            assert set(await run.column("SELECT state FROM jobs WHERE kind IN ('unknown', 'locked')")) == {"ready"}
    finally:
        await other.close()


async def test_a_job_of_the_future_is_run_when_it_is_due_and_not_before(database_url: str) -> None:
    handlers, _ = noting()
    async with running(database_url, handlers, poll_seconds=30) as run:
        id = await run.enqueue("note", delay_seconds=0.4)
        row = await run.ended(id)
        assert 0 <= (row["started_at"] - row["available_at"]).total_seconds() < 10  # and not at the next poll


# --- never more than asked for


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

                async def over() -> bool:
                    return bool(await run.value("SELECT count(*) FROM jobs WHERE state = 'succeeded'") == 20)

                await await_for(over)
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

        async def over() -> bool:
            return bool(await run.value("SELECT count(*) FROM jobs WHERE state = 'succeeded'") == 60)

        await await_for(over, 30)
    assert most[0] < 3_500_000


# --- cursors and stragglers


async def test_a_claim_starts_behind_its_cursor(database_url: str) -> None:
    async with seen(database_url) as run, session(database_url, claiming.CLAIM_SETTINGS) as (connection, database):
        await add(run, "job", 5)
        first = await claim(connection, database, 3)
        await run.connection.execute("UPDATE jobs SET state = 'ready', lease_owner = NULL, lease_until = NULL")
        cursor = Cursor(first[-1].available_at, first[-1].id)
        assert [job.key for job in await claim(connection, database, 10, cursor=cursor)] == ["job4", "job5"]
        ranges = await claiming.survey(connection, database, ["default"])
        assert [(range.priority, range.first.id) for range in ranges] == [(0, first[0].id)], "the survey finds who is before it"
        assert [job.key for job in await claim(connection, database, 10, cursor=START)] == ["job1", "job2", "job3"]


@both_shapes
async def test_whoever_comes_to_stand_before_the_cursor_is_found(database_url: str, shape: dict[str, Any]) -> None:
    """A transaction that commits late, a row that was locked in passing, a job that was released."""
    handlers, started = noting()
    async with seen(database_url) as late, seen(database_url) as locker, running(database_url, handlers, **shape) as run:
        async with late.connection.transaction():
            await add(late, "late")
            async with locker.connection.transaction():
                await add(run, "locked")
                await locker.connection.execute("SELECT FROM jobs WHERE idempotency_key = 'locked1' FOR UPDATE")
                await add(run, "job", 50, later_seconds=60)
                await await_for(lambda: len([key for key in started if key.startswith("job")]) == 50)
        await await_for(lambda: {"late1", "locked1"} <= set(started))
        await run.ended(await run.value("SELECT id FROM jobs WHERE idempotency_key = 'job25'"))
        await run.connection.execute(
            "UPDATE jobs SET state = 'ready', completed_at = NULL, attempts = 0 WHERE idempotency_key = 'job25'"
        )
        await await_for(lambda: started.count("job25") == 2)


async def test_the_claimer_moves_its_cursor_on(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, started = noting()
    cursors: list[Cursor] = []
    original = claiming.claim

    async def noted(*arguments: Any, **options: Any) -> list[ClaimedJob]:
        cursors.append(options["cursor"])
        return await original(*arguments, **options)

    monkeypatch.setattr("worker.store.claiming.claim", noted)
    async with seen(database_url) as run:
        await add(run, "job", 100)
        async with Worker(handlers, quick(database_url, workers=1, **SHAPES["single"])):
            await await_for(lambda: len(started) == 100)
    assert sum(cursor != START for cursor in cursors) > 90
    assert cursors == sorted(cursors)


async def test_a_released_job_keeps_its_place(database_url: str) -> None:
    handlers, started = Handlers(), []

    @handlers.job("note")
    async def note(job: Job[object]) -> None:
        started.append(job.key)
        if len(started) == 1:
            await asyncio.sleep(60)

    async with seen(database_url) as run:
        await add(run, "job", 3)
        async with Worker(handlers, quick(database_url, workers=1, shutdown_grace_seconds=0)):
            await await_for(lambda: started)
        assert run.log.find(events.JOB_RELEASED, reason="shutdown")
        async with Worker(handlers, quick(database_url, workers=1)):
            await await_for(lambda: len(started) == 4)
    assert started == ["job1", "job1", "job2", "job3"]


async def test_a_recovery_that_arrives_late_leaves_what_was_claimed_meanwhile(database_url: str) -> None:
    """Its connection was given up half open, and the process has gone on: what it claimed since is held, and no orphan."""
    asked, delivered = asyncio.Event(), asyncio.Event()

    class Late:
        """Holds back the statement itself."""

        def __init__(self, connection: Connection) -> None:
            self.fetchval = connection.fetchval
            self._fetch = connection.fetch

        async def fetch(self, *arguments: object) -> object:
            asked.set()
            await delivered.wait()
            return await self._fetch(*arguments)

    about = {"queue": "default", "priority": 0, "limit": 1, "owner": OWNER, "lease_seconds": 30, "payload_bytes": 1000}
    async with (
        session(database_url, claiming.CLAIM_SETTINGS) as (connection, database),
        session(database_url, claiming.CLAIM_SETTINGS) as (other, _),
    ):
        await connection.execute(ADD, "late", "default", 0, 0.0, 2)
        [orphan] = await claiming.claim(connection, database, **about)
        recovering = asyncio.create_task(claiming.recover(Late(other), database, owner=OWNER, held=[]))
        await asked.wait()
        [younger] = await claiming.claim(connection, database, **about)
        delivered.set()
        assert [job.id for job in await recovering] == [orphan.id]
        states = dict(await connection.fetch("SELECT id, state FROM jobs"))
        assert states == {orphan.id: "ready", younger.id: "running"}


async def test_priorities_that_were_used_once_are_not_asked_for_for_ever(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers, started = noting()
    asked: list[int] = []
    original = claiming.claim

    async def counted(*arguments: Any, **options: Any) -> list[ClaimedJob]:
        asked.append(options["priority"])
        return await original(*arguments, **options)

    monkeypatch.setattr("worker.store.claiming.claim", counted)
    async with running(database_url, handlers) as run:
        await run.connection.execute(
            "INSERT INTO jobs (kind, payload, priority) SELECT 'note', '{}', n FROM generate_series(1, 500) AS n"
        )
        await await_for(lambda: len(started) == 500)
        await await_for(lambda: set(asked[-20:]) == {0})


# --- plans


class Plans:
    """What the statements read, as the loops' own sessions plan them."""

    def __init__(self, connection: Connection, database: Database) -> None:
        self.connection = connection
        self.database = database

    async def read(self, template: str, *literals: str) -> tuple[int, set[str]]:
        """The pages read, and the indexes (or sequential scans) of jobs used; whatever it did is rolled back."""
        await self.connection.execute("DEALLOCATE ALL; BEGIN")
        try:
            await self.connection.execute(f"PREPARE p AS {self.database.sql(template)}")
            arguments = f"({', '.join(literals)})" if literals else ""
            text = await self.connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE p{arguments}")
        finally:
            await self.connection.execute("ROLLBACK")
        plan = json.loads(text)[0]["Plan"]
        found: set[str] = set()
        self._collect(plan, found)
        return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], found

    def _collect(self, node: dict[str, Any], found: set[str]) -> None:
        if node.get("Relation Name") == "jobs" and node["Node Type"] == "Seq Scan":
            found.add("sequential scan")
        if "Index Name" in node:
            found.add(node["Index Name"])
        for child in node.get("Plans", []):
            self._collect(child, found)


def claim_text(limit: int) -> str:
    return re.sub(r"\{limit\}", str(limit), claiming.CLAIM)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("analyzed", ["never", "while nothing ran", "as it is"])
async def test_plans_stay_right_with_much_history_under_an_old_snapshot(database_url: str, analyzed: str) -> None:
    """Each statement finds its rows by the index that was made for it, whatever the planner believes."""
    async with (
        seen(database_url) as run,
        seen(database_url) as old,
        session(database_url, claiming.CLAIM_SETTINGS) as (connection, database),
    ):
        await run.connection.execute("SET statement_timeout = '120s'; ALTER TABLE jobs SET (autovacuum_enabled = off)")
        await run.connection.execute(
            "INSERT INTO jobs (payload, state, completed_at, fence, available_at, created_at)"
            " SELECT '{}', CASE WHEN n % 50 = 0 THEN 'dead' ELSE 'succeeded' END, now(), nextval('fence_seq'),"
            " now() - interval '2 days', now() - interval '2 days' FROM generate_series(1, 1000000) AS n"
        )
        await old.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await old.connection.fetchval("SELECT count(*) FROM schema_version")
        # What the old snapshot keeps: the dead entries of jobs that were claimed and completed since.
        await add(run, "gone", 3_000, later_seconds=-36_000)
        cursor = START
        while jobs := await claim(connection, database, 300, cursor=cursor):
            cursor = Cursor(jobs[-1].available_at, jobs[-1].id)
            completions = [Completion(job.id, job.fence, None, False) for job in jobs]
            assert len(await settling.complete(connection, database, completions, owner=OWNER, deletes=False)) == len(jobs)
        if analyzed == "while nothing ran":
            await run.connection.execute("ANALYZE jobs")
        await add(run, "held", 300)
        held = await claim(connection, database, 300, cursor=cursor)
        assert len(held) == 300
        await add(run, "waiting", 300, later_seconds=1_000)
        ids = "'{" + ",".join(str(job.id) for job in held[:100]) + "}'"
        fences = "'{" + ",".join(str(job.fence) for job in held[:100]) + "}'"
        nulls, yes = "array_fill(NULL::text, ARRAY[100])", "array_fill(true, ARRAY[100])"
        behind = await run.value("SELECT available_at::text FROM jobs WHERE id = $1", held[-1].id)

        async def look() -> None:
            async def plans(settings: dict[str, str], template: str, *literals: str) -> tuple[int, set[str]]:
                async with session(database_url, settings) as (other, _):
                    return await Plans(other, database).read(template, *literals)

            arguments = ("'default'", "0", f"'{OWNER}'", "30", f"'{behind}'", str(held[-1].id), "10000000")
            pages, used = await plans(claiming.CLAIM_SETTINGS, claim_text(100), *arguments)
            assert used == {"jobs_ready", "jobs_pkey"}
            assert pages < 4_000
            from_the_start = ("'default'", "0", f"'{OWNER}'", "30", "'-infinity'", "0", "10000000")
            one, _ = await plans(claiming.CLAIM_SETTINGS, claim_text(1), *arguments)
            one_from_the_start, _ = await plans(claiming.CLAIM_SETTINGS, claim_text(1), *from_the_start)
            assert one < 100
            assert one_from_the_start > one, "else there is nothing that a cursor could save"

            for template in settling.COMPLETE.values():
                pages, used = await plans(committer.COMMIT_SETTINGS, template, ids, fences, nulls, yes, f"'{OWNER}'")
                assert "sequential scan" not in used
                assert "jobs_pkey" in used
                assert "jobs_running" not in used
                assert pages < 6_000
            pages, used = await plans(
                committer.COMMIT_SETTINGS, settling.SETTLE, ids, fences, "array_fill('retry'::text, ARRAY[100])",
                "array_fill(1.0::float8, ARRAY[100])", "array_fill('error'::text, ARRAY[100])", nulls,
                "array_fill('x'::text, ARRAY[100])", f"'{OWNER}'",
            )  # fmt: skip
            assert used & {"jobs_pkey", "jobs_running", "sequential scan"} == {"jobs_pkey"}
            pages, used = await plans(committer.COMMIT_SETTINGS, settling.RULE, ids, fences, f"'{OWNER}'", nulls)
            assert used & {"jobs_pkey", "jobs_running", "sequential scan"} == {"jobs_pkey"}

            pages, used = await plans(keeper.LEASE_SETTINGS, leasing.RENEW, ids, fences, f"'{OWNER}'", "30")
            assert used == {"jobs_pkey"}
            assert pages < 4_000
            pages, used = await plans(keeper.LEASE_SETTINGS, leasing.LOOK, ids, fences, f"'{OWNER}'")
            assert used == {"jobs_pkey"}

            pages, used = await plans(reaper.REAP_SETTINGS, reaping.REAP, "now()")
            assert "jobs_running" in used
            assert "sequential scan" not in used
            assert pages < 60
            pages, used = await plans(reaper.REAP_SETTINGS, reaping.BURY)
            assert "jobs_exhausted" in used
            assert "sequential scan" not in used

        if analyzed == "as it is":
            await run.connection.execute("ANALYZE jobs")
        await look()
        await old.connection.execute("ROLLBACK")
