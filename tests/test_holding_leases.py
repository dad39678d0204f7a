"""`Leases`: a block that runs while its lease is held, is stopped when it is lost, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import asyncpg
import psycopg
import pytest

from tests.inprocess import listening, quick
from tests.lease_rows import Db, is_live, row
from tests.ports import Proxy
from tests.psql import grant
from tests.roles import role, url_as
from tests.servers import Server
from tests.waiting import await_for
from worker import Handlers, Job, LeaseHeld, LeaseLost, Leases, Worker, enqueue, events, lease_desk, wait
from worker.clock import local_seconds
from worker.errors import ConfigError, DatabaseUnavailable, SchemaError
from worker.holding import HeldName
from worker.keeper import Keeper
from worker.lease_desk import Asking, LeaseDesk
from worker.lease_transport import DatabaseTransport, Renewed
from worker.name_renewals import NameRenewals, terms_of
from worker.patience import Patience
from worker.store.connection import Database


class Watched(DatabaseTransport):
    """Notes which names were asked for, and how many questions were on their way at a time."""

    def __init__(self, dsn: str) -> None:
        super().__init__(Database(dsn, environ={}))
        self.answered: list[str] = []
        self.most_at_once = 0
        self._at_once = 0

    async def acquire(self, **terms: Any) -> Any:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            answer = await super().acquire(**terms)
            self.answered.append(terms["resource"])
            return answer
        finally:
            self._at_once -= 1


@pytest.fixture
async def leases(database_url: str) -> AsyncIterator[Leases]:
    async with Leases(database_url, holder="me") as leases:
        yield leases


def is_free(db: Db, name: str) -> bool:
    return not is_live(db, name)


def take(db: Db, name: str, holder: str = "other", ttl: float = 30) -> Any:
    got = db.execute("SELECT * FROM acquire_lease(%s, %s, %s)", [name, holder, ttl]).fetchone()
    assert got.outcome == "acquired"
    return got


def loses(match: str | None = None) -> Any:
    """`with loses():` a block that is told of its loss."""
    return pytest.raises(LeaseLost, match=match)


def steal(db: Db, name: str) -> None:
    """What happens to a holder that was away for too long: the lease expires, and another takes it."""
    db.execute("UPDATE leases SET expires_at = clock_timestamp() WHERE resource = %s", [name])
    take(db, name)


# --- holding


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
    async with leases.hold("nightly", ttl_seconds=1) as held:
        moments = [row(db, "nightly").created_at]
        for _ in range(9):
            await await_for(lambda: row(db, "nightly").renewed_at not in (None, moments[-1]))
            moments.append(row(db, "nightly").renewed_at)
            held.ensure_lease()
            assert is_live(db, "nightly")
        gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(moments)]
        assert 0.2 < statistics.median(gaps) < 0.6
    assert is_free(db, "nightly")


async def test_a_block_that_keeps_its_loop_busy_loses_nothing(leases: Leases, db: Db) -> None:
    async with leases.hold("nightly", ttl_seconds=1) as held:
        time.sleep(2.5)  # noqa: ASYNC251  (what is tested)
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
    await hold_once(leases, "short", wait_seconds=5)
    take(db, "long", "other", 60)
    started = time.monotonic()
    with pytest.raises(LeaseHeld):
        await hold_once(leases, "long", wait_seconds=0.5)
    assert 0.4 < time.monotonic() - started < 30


async def hold_once(leases: Leases, name: str, **options: Any) -> int:
    async with leases.hold(name, **options) as held:
        return held.fence


async def test_many_tasks_of_a_process_share_one_name_in_turn(leases: Leases) -> None:
    inside = 0
    fences: list[int] = []

    async def one() -> None:
        nonlocal inside
        async with leases.hold("nightly", ttl_seconds=5, wait_seconds=20) as held:
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.01)
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
        async with leases.hold("nightly", ttl_seconds=1) as held:
            await await_for(lambda: row(db, "nightly").renewed_at is not None)
            job.effect("SELECT check_fence('report', $1::bigint)", held.fence)
            return held.fence

    async with Worker(handlers, quick(database_url)):
        connection = await asyncpg.connect(database_url)
        job = await enqueue(connection, "uses_lease", None)
        done = await wait(connection, job.id, timeout_seconds=10)
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
        async with Leases(url) as leases, leases.hold("nightly", ttl_seconds=1) as held:
            await await_for(lambda: row(db, "nightly").renewed_at is not None)
            with psycopg.connect(url) as application:
                application.execute("SELECT check_fence('report', %s)", [held.fence])
        assert row(db, "nightly").released_at is not None


# --- losing


async def test_a_lost_lease_cancels_the_block_and_surfaces_as_lease_lost(leases: Leases, db: Db) -> None:
    with loses("'nightly': lease_lost") as loss:
        async with leases.hold("nightly", ttl_seconds=3) as held:
            steal(db, "nightly")
            try:
                await asyncio.sleep(30)
            finally:
                with pytest.raises(LeaseLost):
                    held.ensure_lease()
                assert held.remaining_seconds() == 0
    assert loss.value.reason == "lease_lost"
    assert isinstance(loss.value.__cause__, asyncio.CancelledError)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert row(db, "nightly").holder == "other"
    assert is_live(db, "nightly"), "the new holder's lease is not released"


async def test_the_block_is_cancelled_before_the_lease_can_pass_on_when_nothing_is_heard(database_url: str, db: Db) -> None:
    """K10, H2: the route goes mute; nobody tells, and the local clock decides."""
    async with Proxy(database_url) as proxy, Leases(proxy.dsn, holder="me") as leases:
        with loses() as loss:
            async with leases.hold("nightly", ttl_seconds=10) as held:
                proxy.go_mute()
                try:
                    await asyncio.sleep(60)
                finally:
                    assert held.remaining_seconds() == 0
                    assert is_live(db, "nightly"), "cancelled too late: the lease could have passed on"
        assert loss.value.reason == "lease_untrusted"
        proxy.flow()


async def test_an_outage_shorter_than_the_trust_costs_nothing(database_url: str, db: Db) -> None:
    with listening() as log:
        async with Proxy(database_url) as proxy, Leases(proxy.dsn) as leases, leases.hold("nightly", ttl_seconds=6) as held:
            proxy.go_mute()
            proxy.cut()
            await await_for(lambda: log.find(events.DATABASE_LOST))
            held.ensure_lease()
            lost = row(db, "nightly")
            proxy.cut()
            proxy.flow()
            await await_for(lambda: log.find(events.DATABASE_RESTORED))
            await await_for(lambda: row(db, "nightly").renewed_at not in (None, lost.renewed_at))
            held.ensure_lease(1)
            assert row(db, "nightly").fence == held.fence == lost.fence
        assert is_free(db, "nightly")


class Fickle:
    """A transport that answers, or does not."""

    answer_seconds = 60.0
    is_away = False

    async def renew_many(self, held: Sequence[HeldName], *, limit_seconds: float) -> Renewed:
        if self.is_away:
            raise ConnectionError("away")
        return Renewed({one.key: 60_000 for one in held}, frozenset())

    def drop(self) -> None: ...


async def test_a_database_that_nobody_asks_is_not_called_restored() -> None:
    """The last lease has gone while it was away: the beats go on, with nothing to ask."""
    transport: Any = Fickle()
    names = NameRenewals(transport)
    keeper = Keeper(names, patience=Patience(events.RENEW_FAILED, first_seconds=0.01, longest_seconds=0.01))
    due = {"holder": "me", "id": 1, "terms": terms_of(60), "asked_at": 0.0, "remaining_seconds": 60.0}

    async def beaten() -> None:
        keeper.poke()
        await await_for(lambda: not keeper._poked.is_set())

    with listening() as log:
        running = asyncio.create_task(keeper.run())
        transport.is_away = True
        names.add(last := HeldName(resource="last", fence=1, **due))  # type: ignore[arg-type]
        await beaten()
        await await_for(lambda: log.find(events.DATABASE_LOST))
        names.remove(last)
        await beaten()
        await beaten()
        assert (keeper.database_up, log.find(events.DATABASE_RESTORED)) == (False, [])
        transport.is_away = False
        names.add(HeldName(resource="next", fence=2, **due))  # type: ignore[arg-type]
        await beaten()
        await await_for(lambda: log.find(events.DATABASE_RESTORED))
        running.cancel()
        await asyncio.wait({running})


async def test_a_lease_that_was_heard_of_late_is_renewed_at_once() -> None:
    """The first answer to the acquisition was lost, and most of the lease was over when the second one came."""
    transport: Any = Fickle()
    names = NameRenewals(transport)
    now = local_seconds()
    names.add(
        held := HeldName(resource="r", holder="me", id=1, fence=1, terms=terms_of(60), asked_at=now, remaining_seconds=10),
    )
    assert held.trusted_until == now + 10 - 6
    await names.beat(poked=True)
    assert held.trusted_until >= now + 60 - 6


async def test_a_block_that_ends_by_its_own_exception_surfaces_it(leases: Leases, db: Db) -> None:
    with pytest.raises(ValueError, match="mine"):
        async with leases.hold("nightly", ttl_seconds=1):
            raise ValueError("mine")
    assert is_free(db, "nightly")
    with pytest.raises(ValueError, match="mine"):
        await fail_when_cancelled(leases, db)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def fail_when_cancelled(leases: Leases, db: Db) -> None:
    async with leases.hold("nightly", ttl_seconds=1):
        steal(db, "nightly")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise ValueError("mine") from None


async def test_a_block_that_ends_as_if_nothing_had_happened_is_told_of_the_loss(leases: Leases, db: Db) -> None:
    with loses():
        async with leases.hold("nightly", ttl_seconds=1):
            steal(db, "nightly")
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(30)
    db.execute("DELETE FROM leases")
    with loses():
        async with leases.hold("nightly", ttl_seconds=1):
            steal(db, "nightly")
            time.sleep(1)  # noqa: ASYNC251  (nothing can be cancelled)
    await hold_once(leases, "another")  # nor is anybody cancelled afterwards


async def test_a_cancellation_from_outside_stays_one(leases: Leases, db: Db) -> None:
    entered = asyncio.Event()

    async def holding() -> None:
        async with leases.hold("nightly", ttl_seconds=1):
            entered.set()
            await asyncio.sleep(30)

    for also_lost in (False, True):
        db.execute("DELETE FROM leases")
        entered.clear()
        task = asyncio.create_task(holding())
        await entered.wait()
        if also_lost:
            steal(db, "nightly")
            time.sleep(0.6)  # noqa: ASYNC251  (the keeper learns of it, the loop has not turned yet)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert row(db, "nightly").released_at is not None or also_lost

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await holding_alone(leases)
    assert is_free(db, "alone")


async def holding_alone(leases: Leases) -> None:
    async with leases.hold("alone", ttl_seconds=1):
        await asyncio.sleep(30)


async def test_blocks_inside_each_other_are_lost_one_by_one(leases: Leases, db: Db) -> None:
    async with leases.hold("outer", ttl_seconds=1) as outer:
        with loses("inner"):
            async with leases.hold("inner", ttl_seconds=1):
                steal(db, "inner")
                await asyncio.sleep(30)
        outer.ensure_lease()
        await hold_once(leases, "another")  # nobody is cancelled for it
    with loses("outer"):
        async with leases.hold("outer", ttl_seconds=1), leases.hold("innermost", ttl_seconds=30):
            steal(db, "outer")
            await asyncio.sleep(30)
    assert is_free(db, "innermost")


async def test_the_release_waits_until_the_block_has_really_ended(leases: Leases, db: Db) -> None:
    """H9: what cleans up after a cancellation is protected as well."""
    task_holds = asyncio.Event()

    async def holding() -> None:
        async with leases.hold("nightly", ttl_seconds=1):
            task_holds.set()
            try:
                await asyncio.sleep(30)
            finally:
                for _ in range(5):  # longer than its term
                    before = row(db, "nightly").renewed_at
                    await await_for(lambda: row(db, "nightly").renewed_at != before)  # noqa: B023
                    assert is_live(db, "nightly")

    task = asyncio.create_task(holding())
    await task_holds.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert row(db, "nightly").released_at is not None


# --- answers that do not come


async def test_an_acquisition_whose_answer_was_lost_is_not_locked_out_by_itself(database_url: str, db: Db) -> None:
    """H11: the same request again gives the same fence, at once."""
    async with Proxy(database_url) as proxy, Leases(proxy.dsn) as leases:
        await hold_once(leases, "warm")
        proxy.lose_answers()
        waiting = asyncio.create_task(hold_once(leases, "nightly", ttl_seconds=30))
        await await_for(lambda: is_live(db, "nightly"))
        fence = row(db, "nightly").fence
        proxy.flow()
        started = time.monotonic()
        assert await waiting == fence
        assert time.monotonic() - started < 20
    assert is_free(db, "nightly")


async def test_who_is_cancelled_while_acquiring_leaves_no_lease_behind(database_url: str, db: Db) -> None:
    async with Proxy(database_url) as proxy, Leases(proxy.dsn) as leases:
        await hold_once(leases, "warm")
        # The answer is lost, and nobody waits for it any more.
        proxy.lose_answers()
        waiting = asyncio.create_task(hold_once(leases, "lost", ttl_seconds=60))
        await await_for(lambda: is_live(db, "lost"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        proxy.flow()
        await await_for(lambda: is_free(db, "lost"))
        # At any other moment.
        for turn in range(40):
            waiting = asyncio.create_task(hold_once(leases, f"turn-{turn}", ttl_seconds=60))
            await asyncio.sleep(turn * 0.0002)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
        await await_for(lambda: db.execute("SELECT count(*) FROM leases WHERE released_at IS NULL").fetchone()[0] == 0)


async def test_who_is_cancelled_while_another_has_the_lease_asks_no_more(database_url: str, db: Db) -> None:
    theirs, beside = take(db, "theirs"), take(db, "beside")
    watched = Watched(database_url)
    async with Leases(transport=lambda: watched) as leases:
        waiting, staying = (asyncio.create_task(hold_once(leases, name, wait_seconds=30)) for name in ("theirs", "beside"))
        await await_for(lambda: {"theirs", "beside"} <= set(watched.answered))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        asked = watched.answered.count("theirs")
        for name, lease in (("theirs", theirs), ("beside", beside)):
            db.execute("SELECT release_lease(%s, 'other', %s)", [name, lease.fence])
        # Whoever waits beside it has asked by then. At most one question was on its way, and its answer was given back.
        assert await staying > beside.fence
        assert watched.answered.count("theirs") <= asked + 1
        await await_for(lambda: is_free(db, "theirs"))


async def test_a_database_that_does_not_answer_is_said_after_a_while(database_url: str, db: Db) -> None:
    async with Proxy(database_url) as proxy, Leases(proxy.dsn) as leases:
        await hold_once(leases, "warm")
        proxy.go_mute()
        started = time.monotonic()
        with pytest.raises(DatabaseUnavailable, match="nightly"):
            await hold_once(leases, "nightly", ttl_seconds=60)
        assert time.monotonic() - started < 40
        proxy.flow()


async def test_without_a_connection_it_gives_up_after_the_time_for_opening_one_and_leaves_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that only its own pauses move: nothing was sent, so there is nothing to find out about, either."""
    now = 1_000.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(lease_desk, "local_seconds", lambda: now)
    monkeypatch.setattr(lease_desk, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    for limit, wait_seconds in ((3, 0.0), (7, 0.0), (3, 20.0)):
        asking = Asking(resource="nightly", holder="me", ttl_seconds=30, wait_seconds=wait_seconds, metadata=None)
        desk = LeaseDesk(DatabaseTransport(Database(f"postgresql://127.0.0.1:1/x?connect_timeout={limit}", environ={})))
        began = now
        with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1:1: "):
            await asyncio.create_task(desk.ask(asking))
        expected = max(limit, wait_seconds)
        assert expected - 0.001 <= now - began <= expected + 0.5
        before = now
        await desk.close(60)
        assert (now, asking.asked_at) == (before, None)


async def test_more_who_ask_at_once_than_there_are_connections_wait_for_their_turn(database_url: str, db: Db) -> None:
    watched = Watched(database_url)
    async with Leases(transport=lambda: watched) as leases, asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(hold_once(leases, f"name-{number}", ttl_seconds=30))
    assert len(watched.answered) >= 60
    assert watched.most_at_once <= 4
    assert db.execute("SELECT count(*) FROM leases WHERE released_at IS NOT NULL").fetchone()[0] == 60


async def test_a_release_that_is_not_answered_is_tried_again_behind_the_block(database_url: str, db: Db) -> None:
    async with Proxy(database_url) as proxy, Leases(proxy.dsn) as leases:
        async with leases.hold("nightly", ttl_seconds=60):
            proxy.cut()
        assert is_free(db, "nightly")
        async with asyncio.timeout(30):
            async with leases.hold("nightly", ttl_seconds=60):
                proxy.go_mute()
        assert is_live(db, "nightly")
        proxy.cut()
        proxy.flow()
        await await_for(lambda: is_free(db, "nightly"), 20)


async def test_leaving_leases_first_tells_the_blocks_that_are_left(database_url: str, db: Db) -> None:
    leases = Leases(database_url)
    entered = asyncio.Event()

    async def holding() -> None:
        async with leases.hold("nightly", ttl_seconds=5):
            entered.set()
            await asyncio.sleep(30)

    async with leases:
        task = asyncio.create_task(holding())
        await entered.wait()
    with pytest.raises(LeaseLost) as loss:
        await task
    assert loss.value.reason == "lease_untrusted"


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": ""}, "name: "),
        ({"name": "x" * 513}, "name: "),
        ({"ttl_seconds": 0.5}, "ttl_seconds: "),
        ({"ttl_seconds": 86_401}, "ttl_seconds: "),
        ({"wait_seconds": -1}, "wait_seconds: "),
        ({"wait_seconds": float("inf")}, "wait_seconds: "),
        ({"holder": "x" * 129}, "holder: "),
        ({"metadata": {"x": {1}}}, "metadata: "),
    ],
)
async def test_terms_are_checked_at_the_call(leases: Leases, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        leases.hold(**({"name": "nightly"} | arguments))


async def test_metadata_that_only_the_database_can_measure_is_refused_at_the_entry(leases: Leases, db: Db) -> None:
    with pytest.raises(ValueError, match="metadata: "):
        await hold_once(leases, "nightly", metadata={"x": "y" * 10_000})
    assert row(db, "nightly") is None


async def test_either_a_dsn_or_a_url_is_needed_and_only_while_it_is_entered(database_url: str) -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"dsn": database_url, "url": "http://localhost"},
        {"dsn": database_url, "pooler": "session"},
        {"url": "http://localhost", "pooler": "transaction"},
    ]
    for arguments in wrong:
        with pytest.raises(TypeError):
            Leases(**arguments)
    leases = Leases(database_url)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="async with Leases"):
            await hold_once(leases, "nightly")
        if leases.where == "":
            async with leases:
                hold = leases.hold("nightly")
                async with hold:
                    pass
                with pytest.raises(RuntimeError, match="call hold again"):
                    async with hold:
                        pass
    with pytest.raises(RuntimeError, match="entered once"):
        await leases.__aenter__()


def test_over_http_it_needs_the_extra_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("worker.lease_http", "worker.http_calls"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match=r"extra http: pip install 'reliable-worker\[http\]'"):
        Leases(url="http://127.0.0.1:8080", bearer="token")


async def test_a_database_without_the_schema_or_the_password_is_a_config_error_that_says_what_to_do(
    empty_database_url: str,
) -> None:
    async with Leases(empty_database_url) as leases:
        with pytest.raises(SchemaError, match="worker migrate"):
            await hold_once(leases, "nightly")
    async with Leases(url_as("nobody_here", empty_database_url)) as leases:
        with pytest.raises((ConfigError, DatabaseUnavailable)):
            await hold_once(leases, "nightly")
