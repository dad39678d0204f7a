"""Named leases in SQL: one atomic acquisition, fences that rise, renewals and releases that need holder and fence."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import namedtuple_row

from tests.inprocess import seen
from tests.lease_rows import Db, row
from tests.psql import ODD, apply_by_psql
from tests.servers import WAIT_FOR_US, Server, execute
from tests.waiting import wait_for
from worker.store import lease_renewals, leases, pruning
from worker.store.connection import Database


@pytest.fixture
def other(database_url: str) -> Iterator[Db]:
    with psycopg.connect(database_url, autocommit=True, row_factory=namedtuple_row) as connection:
        yield connection


def acquire(db: Db, resource: str, holder: str, ttl: object = 30, request_id: str | None = None, metadata: object = None) -> Any:
    """The one row that acquire_lease gives."""
    rows = db.execute(
        "SELECT * FROM acquire_lease(%s, %s, %s::float8, %s, %s::jsonb)",
        [resource, holder, ttl, request_id, "{}" if metadata is None else json.dumps(metadata)],
    ).fetchall()
    assert len(rows) == 1
    return rows[0]


def renew(db: Db, resource: str, holder: str, fence: int, ttl: float | None = None) -> int:
    return int(db.execute("SELECT renew_lease(%s, %s, %s, %s)", [resource, holder, fence, ttl]).fetchone()[0])


def release(db: Db, resource: str, holder: str, fence: int) -> bool:
    return bool(db.execute("SELECT release_lease(%s, %s, %s)", [resource, holder, fence]).fetchone()[0])


def expire(db: Db, resource: str, seconds: float = 1) -> None:
    """Age the row, not the clock."""
    db.execute(
        "UPDATE leases SET expires_at = clock_timestamp() - %s * interval '1 second' WHERE resource = %s", [seconds, resource]
    )


def database_of(dsn: str) -> Database:
    return Database(dsn, environ={})


class NotHeld:
    """`with not_held:` the database says RW001."""

    def __enter__(self) -> None:
        self._raises = pytest.raises(psycopg.Error)
        self._caught = self._raises.__enter__()

    def __exit__(self, *trouble: Any) -> bool:
        swallowed = self._raises.__exit__(*trouble)
        assert self._caught.value.sqlstate == "RW001"
        return bool(swallowed)


# --- acquire


def test_a_free_resource_is_acquired_with_a_new_fence_and_its_whole_time(db: Db) -> None:
    got = acquire(db, "nightly", "a", 30, "q", {"why": "report"})
    assert (got.outcome, got.holder) == ("acquired", "a")
    assert got._fields == ("outcome", "id", "fence", "holder", "expires_in_ms")
    assert 29_000 < got.expires_in_ms <= 30_000
    lease = row(db, "nightly")
    assert (lease.id, lease.fence, lease.ttl_seconds, lease.request_id) == (got.id, got.fence, 30, "q")
    assert (lease.metadata, lease.renewed_at, lease.released_at) == ({"why": "report"}, None, None)
    assert lease.fence == db.execute("SELECT last_value FROM fence_seq").fetchone()[0]


def test_a_held_resource_is_refused_with_holder_and_remaining_time_and_costs_no_fence(db: Db) -> None:
    acquire(db, "nightly", "a")
    before = db.execute("SELECT last_value FROM fence_seq").fetchone()
    got = acquire(db, "nightly", "b", 5)
    assert (got.outcome, got.holder, got.fence) == ("held", "a", None)
    assert 29_000 < got.expires_in_ms <= 30_000
    assert acquire(db, "nightly", "a").outcome == "held", "a lease is not re-entrant"
    assert db.execute("SELECT last_value FROM fence_seq").fetchone() == before
    assert row(db, "nightly").ttl_seconds == 30


def test_an_expired_lease_is_acquired_by_the_next_with_a_higher_fence_and_clean_times(db: Db) -> None:
    first = acquire(db, "nightly", "a", request_id="one", metadata={"a": 1})
    renew(db, "nightly", "a", first.fence)
    expire(db, "nightly")
    second = acquire(db, "nightly", "b")
    assert (second.outcome, second.id) == ("acquired", first.id)
    assert second.fence > first.fence
    lease = row(db, "nightly")
    assert (lease.holder, lease.renewed_at, lease.released_at, lease.request_id, lease.metadata) == ("b", None, None, None, {})


def test_a_released_lease_is_acquired_again_at_once(db: Db) -> None:
    fences = []
    for holder in "abcabc":
        got = acquire(db, "nightly", holder)
        assert got.outcome == "acquired"
        assert release(db, "nightly", holder, got.fence)
        fences.append(got.fence)
    assert fences == sorted(set(fences))


def test_expiry_is_judged_by_the_clock_and_not_by_the_start_of_the_callers_transaction(db: Db, other: Db) -> None:
    acquire(db, "nightly", "a", 1)
    with other.transaction():
        other.execute("SELECT now()")
        wait_for(lambda: not row(db, "nightly").unexpired)
        got = acquire(other, "nightly", "b", 5)
        assert got.outcome == "acquired"
        # Its time runs from the call, not from the beginning of the transaction, a second before.
        assert got.expires_in_ms > 4_500


def test_a_lease_that_was_acquired_in_a_transaction_is_held_from_its_commit(db: Db, other: Db) -> None:
    with db.transaction():
        mine = acquire(db, "nightly", "a")
        assert other.execute("SELECT count(*) FROM leases").fetchone()[0] == 0
    assert acquire(other, "nightly", "b").holder == "a"
    assert release(db, "nightly", "a", mine.fence)
    with db.transaction(force_rollback=True):
        acquire(db, "nightly", "a")
    assert acquire(other, "nightly", "b").outcome == "acquired"


def test_fences_rise_over_jobs_and_leases_and_across_release_deletion_and_prune(db: Db) -> None:
    fences = [acquire(db, "nightly", "a").fence]
    db.execute("DELETE FROM leases")
    fences.append(acquire(db, "nightly", "a").fence)
    db.execute("TRUNCATE leases RESTART IDENTITY")
    fences.append(db.execute("SELECT nextval('fence_seq')").fetchone()[0])  # what a claim of a job draws
    fences.append(acquire(db, "nightly", "b").fence)
    expire(db, "nightly")
    fences.append(acquire(db, "nightly", "b").fence)
    assert fences == sorted(set(fences))
    assert 0 not in fences


@pytest.mark.parametrize("ttl", ["0", "-1", "0.999", "86400.001", "1e9", "NaN", "Infinity", "-Infinity", None])
def test_a_length_beyond_1_s_to_24_h_is_refused_with_a_reason(db: Db, ttl: str | None) -> None:
    """H12."""
    for call in (
        "SELECT acquire_lease('nightly', 'a', %s::float8)",
        *(("SELECT renew_lease('nightly', 'a', 1, %s::float8)",) if ttl is not None else ()),
    ):
        with pytest.raises(psycopg.Error, match=r"ttl_seconds: .* is not from 1 to 86400") as refusal:
            db.execute(call, [ttl])
        assert refusal.value.sqlstate == "22023"
    with pytest.raises(psycopg.Error):
        db.execute("SELECT acquire_lease('nightly', 'a', '5s')")
    assert db.execute("SELECT count(*) FROM leases").fetchone()[0] == 0


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("resource", ["", "a", 30, None, "{}"]),
        ("resource", [None, "a", 30, None, "{}"]),
        ("resource", ["x" * 513, "a", 30, None, "{}"]),
        ("resource", ["é" * 257, "a", 30, None, "{}"]),
        ("holder", ["nightly", "", 30, None, "{}"]),
        ("holder", ["nightly", None, 30, None, "{}"]),
        ("holder", ["nightly", "x" * 129, 30, None, "{}"]),
        ("request_id", ["nightly", "a", 30, "", "{}"]),
        ("request_id", ["nightly", "a", 30, "x" * 129, "{}"]),
        ("metadata", ["nightly", "a", 30, None, "[]"]),
        ("metadata", ["nightly", "a", 30, None, "null"]),
        ("metadata", ["nightly", "a", 30, None, json.dumps({"x": "y" * 8192})]),
    ],
)
def test_terms_out_of_bounds_are_refused_by_name(db: Db, what: str, arguments: list[object]) -> None:
    """H12."""
    with pytest.raises(psycopg.Error, match=f"{what}: ") as refusal:
        db.execute("SELECT acquire_lease(%s, %s, %s, %s, %s::jsonb)", arguments)
    assert refusal.value.sqlstate == "22023"


def test_names_are_compared_by_code_points(db: Db) -> None:
    """H12: `a/b`, and é in two forms, are names like any other; 512 bytes are allowed."""
    for name in ("a/b", "\u00e9", "e\u0301", "E\u0301", " a/b", "x" * 512, "é" * 256):
        assert acquire(db, name, "a").outcome == "acquired", name
    assert acquire(db, "\u00e9", "b").outcome == "held"


# --- asking again


def test_a_repeated_request_gives_the_same_fence_and_the_remaining_time(db: Db) -> None:
    """H11."""
    first = acquire(db, "nightly", "a", 30, "q")
    db.execute("UPDATE leases SET expires_at = expires_at - interval '10 seconds'")
    again = acquire(db, "nightly", "a", 60, "q")
    assert (again.outcome, again.fence, again.holder) == ("acquired", first.fence, "a")
    assert 18_000 < again.expires_in_ms <= 20_000
    assert row(db, "nightly").ttl_seconds == 30
    assert acquire(db, "nightly", "b", 30, "q").outcome == "held", "the id is the holder's own"


def test_a_repeated_request_says_ended_until_somebody_else_has_acquired(db: Db) -> None:
    for end in (lambda lease: release(db, "nightly", "a", lease.fence), lambda lease: expire(db, "nightly")):
        first = acquire(db, "nightly", "a", 30, "q")
        end(first)
        for _ in range(2):
            assert acquire(db, "nightly", "a", 30, "q")[:3] == ("ended", first.id, first.fence)
        second = acquire(db, "nightly", "b", 30, "r")
        assert second.outcome == "acquired"
        assert acquire(db, "nightly", "a", 30, "q").outcome == "held"
        release(db, "nightly", "b", second.fence)
        third = acquire(db, "nightly", "a", 30, "q")
        assert (third.outcome, third.fence > second.fence) == ("acquired", True)
        release(db, "nightly", "a", third.fence)
        acquire(db, "nightly", "c", 1)
        expire(db, "nightly")


# --- renew and release


def test_a_renewal_needs_holder_and_fence_and_a_lease_that_lives(db: Db) -> None:
    got = acquire(db, "nightly", "a", 5)
    assert 4_000 < renew(db, "nightly", "a", got.fence) <= 5_000
    assert row(db, "nightly").renewed_at is not None
    assert 59_000 < renew(db, "nightly", "a", got.fence, 60) <= 60_000
    assert 59_000 < renew(db, "nightly", "a", got.fence) <= 60_000, "the new length stays"
    for resource, holder, fence in (("other", "a", got.fence), ("nightly", "b", got.fence), ("nightly", "a", got.fence + 1)):
        with NotHeld():
            renew(db, resource, holder, fence)
    expire(db, "nightly", 0)
    with NotHeld():
        renew(db, "nightly", "a", got.fence)
    again = acquire(db, "nightly", "a", 5)
    release(db, "nightly", "a", again.fence)
    with NotHeld():
        renew(db, "nightly", "a", again.fence)


def test_a_release_ends_the_lease_at_once_and_may_be_repeated(db: Db) -> None:
    got = acquire(db, "nightly", "a")
    for _ in range(3):
        assert release(db, "nightly", "a", got.fence) is True
    released_at = row(db, "nightly").released_at
    assert released_at is not None
    for holder, fence in (("b", got.fence), ("a", got.fence - 1)):
        with NotHeld():
            release(db, "nightly", holder, fence)
    assert row(db, "nightly").released_at == released_at


def test_who_lost_the_lease_can_neither_renew_nor_release_that_of_the_next(db: Db) -> None:
    """H10, also for a namesake: the holder's name alone lets nobody in."""
    old = acquire(db, "nightly", "a", 1)
    expire(db, "nightly")
    with NotHeld():
        release(db, "nightly", "a", old.fence)
    new = acquire(db, "nightly", "a")
    for stale in (renew, release):
        with NotHeld():
            stale(db, "nightly", "a", old.fence)
    assert row(db, "nightly").released_at is None
    assert renew(db, "nightly", "a", new.fence) > 0


# --- rivals


def test_of_many_rivals_one_acquires_and_each_gets_one_row(database_url: str) -> None:
    start = threading.Barrier(12)

    def one(holder: str) -> list[tuple[str, str, int]]:
        with psycopg.connect(database_url, autocommit=True, row_factory=namedtuple_row) as mine:
            seen = []
            for turn in range(15):
                start.wait()
                got = acquire(mine, f"turn-{turn}", holder)
                seen.append((got.outcome, got.holder, got.fence))
            return seen

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(one, [f"h{number}" for number in range(12)]))
    for turn in zip(*answers, strict=True):
        [(_, winner, _)] = [answer for answer in turn if answer[0] == "acquired"]
        assert {answer[:2] for answer in turn if answer[0] != "acquired"} == {("held", winner)}


def test_the_rival_of_an_acquisition_in_flight_waits_for_its_end(db: Db, other: Db, database_url: str) -> None:
    """Committed: held. Rolled back: the rival acquires, and with a fence drawn after the wait."""
    for resource, commits in (("one", True), ("two", False)):
        with ThreadPoolExecutor(1) as pool:
            with db.transaction(force_rollback=not commits):
                mine = acquire(db, resource, "a")
                rival = pool.submit(acquire, other, resource, "b")
                wait_for(lambda: db.execute(WAIT_FOR_US).fetchone()[0])
                drawn = db.execute("SELECT nextval('fence_seq')").fetchone()[0]
            got = rival.result(10)
        if commits:
            assert (got.outcome, got.holder) == ("held", "a")
        else:
            assert (got.outcome, got.fence > drawn > mine.fence) == ("acquired", True)


def test_a_fence_is_drawn_under_the_lock_of_its_resource(db: Db, other: Db) -> None:
    """Else who waited for the lock would come back with a fence lower than what was given meanwhile."""
    first = acquire(db, "nightly", "a")
    release(db, "nightly", "a", first.fence)
    with ThreadPoolExecutor(1) as pool:
        with db.transaction():
            between = acquire(db, "nightly", "b")
            rival = pool.submit(acquire, other, "nightly", "c")
            wait_for(lambda: db.execute(WAIT_FOR_US).fetchone()[0])
            release(db, "nightly", "b", between.fence)
            last = db.execute("SELECT nextval('fence_seq')").fetchone()[0]
        got = rival.result(10)
    assert got.outcome == "acquired"
    assert got.fence > last


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_race_lost_to_somebody_this_snapshot_cannot_see_is_held_and_aborts_nothing(db: Db, other: Db, level: str) -> None:
    acquire(db, "old", "x", 1)
    expire(db, "old")
    with other.transaction():
        other.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        other.execute("SELECT count(*) FROM leases")
        acquire(db, "old", "a")
        acquire(db, "new", "a")
        for resource in ("old", "new"):
            assert acquire(other, resource, "b") == ("held", None, None, None, None)
        assert acquire(other, "free", "b").outcome == "acquired"
    assert row(db, "free").holder == "b"


def test_a_deadlock_or_a_wait_beyond_lock_timeout_is_held_and_aborts_nothing(db: Db, other: Db) -> None:
    for resource in ("one", "two"):
        acquire(db, resource, "x", 1)
        expire(db, resource)
    other.execute("SET lock_timeout = '100ms'")
    with db.transaction():
        acquire(db, "one", "a")
        with other.transaction():
            assert acquire(other, "two", "b").outcome == "acquired"
            assert acquire(other, "one", "b")[:2] == ("held", None)
    other.execute("SET lock_timeout = 0; SET deadlock_timeout = '100ms'")
    for resource in ("one", "two"):
        expire(db, resource)
    with ThreadPoolExecutor(1) as pool, db.transaction():
        acquire(db, "one", "a")
        with other.transaction():
            acquire(other, "two", "b")
            mine = pool.submit(acquire, db, "two", "a")
            wait_for(lambda: other.execute(WAIT_FOR_US).fetchone()[0])
            assert acquire(other, "one", "b")[:2] == ("held", None)
        assert mine.result(10).outcome == "held"


def test_it_works_in_another_schema_whatever_the_callers_path(empty_database_url: str) -> None:
    execute(empty_database_url, "CREATE SCHEMA {}", ODD)
    assert apply_by_psql(empty_database_url, ODD).returncode == 0
    with psycopg.connect(empty_database_url, autocommit=True, row_factory=namedtuple_row) as db:
        db.execute("CREATE TABLE leases (id int); SET search_path = public")
        names = {name: sql.Identifier(ODD, name) for name in ("acquire_lease", "renew_lease", "release_lease")}
        got = db.execute(sql.SQL("SELECT * FROM {acquire_lease}('nightly', 'a')").format(**names)).fetchone()
        assert got.outcome == "acquired"
        assert db.execute(sql.SQL("SELECT {renew_lease}('nightly', 'a', %s)").format(**names), [got.fence]).fetchone()[0] > 0
        assert db.execute(sql.SQL("SELECT {release_lease}('nightly', 'a', %s)").format(**names), [got.fence]).fetchone()[0]
        assert db.execute("SELECT count(*) FROM leases").fetchone()[0] == 0


def test_a_fence_from_a_lease_guards_a_resource_against_its_former_holder(db: Db) -> None:
    old = acquire(db, "nightly", "a", 1)
    expire(db, "nightly")
    new = acquire(db, "nightly", "b")
    db.execute("SELECT check_fence('report', %s)", [new.fence])
    with NotHeld():
        db.execute("SELECT check_fence('report', %s)", [old.fence])


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("resource", ["", 1]),
        ("resource", [None, 1]),
        ("resource", ["x" * 513, 1]),
        ("resource", ["é" * 257, 1]),
        ("fence", ["report", None]),
        ("fence", ["report", 0]),
        ("fence", ["report", -1]),
    ],
)
def test_a_fence_that_is_none_and_a_resource_without_a_name_are_refused_by_name(db: Db, what: str, arguments: list[object]) -> None:
    with pytest.raises(psycopg.Error, match=f"^{what}: ") as refusal:
        db.execute("SELECT check_fence(%s, %s)", arguments)
    assert refusal.value.sqlstate == "22023"
    assert db.execute("SELECT count(*) FROM fences").fetchone()[0] == 0


@pytest.mark.parametrize(
    "arguments", [[None, "a", 1], ["nightly", None, 1], ["nightly", "a", None], ["", "", 0], ["x" * 513, "a", -1]]
)
def test_what_names_no_lease_is_not_held(db: Db, arguments: list[object]) -> None:
    for call in ("SELECT renew_lease(%s, %s, %s)", "SELECT release_lease(%s, %s, %s)"):
        with NotHeld():
            db.execute(call, arguments)


# --- the store


async def test_the_store_gives_the_lease_as_a_value_and_none_for_what_is_not_held(database_url: str) -> None:
    async with seen(database_url) as run:
        database, connection = database_of(database_url), run.connection
        terms: dict[str, Any] = {"resource": "nightly", "holder": "a", "ttl_seconds": 30}
        lease = await leases.acquire(connection, database, **terms, request_id="q", metadata={"x": [1, None, "é"]})
        assert isinstance(lease, leases.Lease)
        assert (lease.state, lease.metadata, lease.renewed_at) == ("active", {"x": [1, None, "é"]}, None)
        assert await leases.get(connection, database, id=lease.id + 1) is None
        held = await leases.acquire(connection, database, **terms)
        assert isinstance(held, leases.Held)
        assert (held.holder, 29_000 < held.retry_after_ms <= 30_000) == ("a", True)
        mine: dict[str, Any] = {"resource": "nightly", "holder": "a", "fence": lease.fence}
        renewed = await leases.renew(connection, database, **mine, ttl_seconds=60)
        assert renewed is not None
        assert (renewed.ttl_seconds, renewed.renewed_at is not None, renewed.fence) == (60, True, lease.fence)
        for stale in ({"holder": "b"}, {"fence": lease.fence + 1}, {"resource": "x"}):
            assert await leases.renew(connection, database, **(mine | stale)) is None
            assert await leases.release(connection, database, **(mine | stale)) is None
        assert await leases.release_by_id(connection, database, id=lease.id, holder="b", fence=lease.fence) is None
        assert await leases.release_by_id(connection, database, id=lease.id + 1, holder="a", fence=lease.fence) is None
        for _ in range(2):
            for released in (
                await leases.release_by_id(connection, database, id=lease.id, holder="a", fence=lease.fence),
                await leases.release(connection, database, **mine),
            ):
                assert released is not None
                assert (released.state, released.expires_in_ms) == ("released", 0)
        assert await leases.acquire(connection, database, **terms, request_id="q") == leases.Ended(id=lease.id, fence=lease.fence)


@pytest.mark.parametrize(
    "wrong",
    [
        {"resource": ""},
        {"resource": "x" * 513},
        {"resource": "a\0b"},
        {"resource": "\ud800"},
        {"resource": 7},
        {"holder": "é" * 65},
        {"request_id": ""},
        {"ttl_seconds": 0},
        {"ttl_seconds": float("nan")},
        {"ttl_seconds": True},
        {"ttl_seconds": "5s"},
        {"metadata": [1]},
        {"metadata": {"x": float("inf")}},
        {"metadata": {"x": "y" * 9_000}},
        {"metadata": {"x": "y" * 90_000}},
        {"metadata": {"x": {1, 2}}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_terms_that_are_refused_are_a_value_error(database_url: str, wrong: dict[str, Any]) -> None:
    async with seen(database_url) as run:
        terms: dict[str, Any] = {"resource": "nightly", "holder": "a", "ttl_seconds": 30} | wrong
        [name] = wrong
        with pytest.raises(ValueError, match=f"^{name}: "):
            await leases.acquire(run.connection, database_of(database_url), **terms)


async def test_lists_show_each_state_in_pages(database_url: str, db: Db) -> None:
    for name in ("active", "expired", "renewed", "released"):
        got = acquire(db, name, "a")
        if name == "renewed":
            renew(db, name, "a", got.fence)
        if name == "released":
            release(db, name, "a", got.fence)
    expire(db, "expired")
    async with seen(database_url) as run:
        database = database_of(database_url)

        async def names(which: leases.Which) -> list[str]:
            return [lease.resource for lease in await leases.list_leases(run.connection, database, which=which, limit=10)]

        assert await names("all") == ["active", "expired", "renewed", "released"]
        assert await names("active") == ["active", "renewed"]
        assert (await names("expired"), await names("renewed"), await names("released")) == (["expired"], ["renewed"], ["released"])
        first = await leases.list_leases(run.connection, database, which="all", limit=3)
        rest = await leases.list_leases(run.connection, database, which="all", after_id=first[-1].id, limit=3)
        assert [lease.state for lease in (*first, *rest)] == ["active", "expired", "active", "released"]


async def test_one_statement_renews_what_is_live_and_says_what_is_locked_or_lost(database_url: str, db: Db, other: Db) -> None:
    live, locked, gone, stolen = (acquire(db, name, "a", 5) for name in ("live", "locked", "gone", "stolen"))
    release(db, "gone", "a", gone.fence)
    expire(db, "stolen")
    acquire(db, "stolen", "a", 5)
    asked = [(one.id, one.fence, "a") for one in (live, locked, gone, stolen)]
    async with seen(database_url) as run:
        database = database_of(database_url)
        with other.transaction():
            other.execute("SELECT FROM leases WHERE resource = 'locked' FOR UPDATE")
            renewed = await lease_renewals.renew_many(run.connection, database, asked)
            assert set(renewed) == {(live.id, live.fence)}
            assert 4_000 < renewed[live.id, live.fence] <= 5_000
        assert await lease_renewals.look_many(run.connection, database, asked) == {(live.id, live.fence), (locked.id, locked.fence)}
        assert await lease_renewals.renew_many(run.connection, database, [(live.id, live.fence, "b")]) == {}


async def test_renewals_find_room_in_the_page_and_touch_no_index(database_url: str, db: Db) -> None:
    """HOT: there is no index on expires_at, and half of each page is free for it."""
    db.execute("ALTER TABLE leases SET (autovacuum_enabled = off)")
    asked = [(got.id, got.fence, "a") for got in (acquire(db, f"lease-{number}", "a") for number in range(200))]
    counted = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'leases'"
    async with seen(database_url) as run:
        for _ in range(5):
            assert len(await lease_renewals.renew_many(run.connection, database_of(database_url), asked)) == 200
        if db.info.server_version >= 150_000:
            await run.value("SELECT pg_stat_force_next_flush()")
    wait_for(lambda: db.execute(counted).fetchone()[0] >= 1_000, 30)
    updates, hot = db.execute(counted).fetchone()
    # The first renewal of each in any case: somebody's snapshot may keep a page from being tidied for the others.
    assert hot >= 200, (updates, hot)
    indexes = db.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'leases'").fetchall()
    assert sorted(text.partition("(")[2] for (text,) in indexes) == ["id)", "resource)"]


# --- pruning


async def test_leases_that_ended_longer_ago_than_the_retention_are_pruned_and_no_others(database_url: str, db: Db) -> None:
    for name in ("old-released", "old-expired", "young-released", "young-expired", "long", "locked"):
        got = acquire(db, name, "a", 86_400 if name == "long" else 30)
        if "released" in name:
            release(db, name, "a", got.fence)
    db.execute("UPDATE leases SET released_at = released_at - interval '1 hour' WHERE resource = 'old-released'")
    expire(db, "old-expired", 3_600)
    expire(db, "young-expired", 60)
    expire(db, "locked", 3_600)
    db.execute("UPDATE leases SET created_at = created_at - interval '1 year'")
    async with seen(database_url) as run:
        database = database_of(database_url)
        assert await pruning.prune_leases(run.connection, database, retention_seconds=None) == pruning.PruneStep(0, None)
        with psycopg.connect(database_url) as holding:
            holding.execute("SELECT FROM leases WHERE resource = 'locked' FOR UPDATE")
            step = await pruning.prune_leases(run.connection, database, retention_seconds=1_800)
        assert step.deleted == 2
        assert step.next_cursor is not None
        assert await pruning.prune_leases(run.connection, database, cursor=step.next_cursor, retention_seconds=0) == (0, None)
        left = db.execute("SELECT resource FROM leases ORDER BY id").fetchall()
        assert [name for (name,) in left] == ["young-released", "young-expired", "long", "locked"]


async def test_a_walk_prunes_thousands_in_pages(database_url: str, db: Db) -> None:
    db.execute(
        "INSERT INTO leases (resource, holder, fence, ttl_seconds, created_at, expires_at, metadata)"
        " SELECT 'lease-' || n, 'a', nextval('fence_seq'), 30, now() - interval '1 day', now() - interval '1 day', '{}'"
        " FROM generate_series(1, 2500) AS n"
    )
    async with seen(database_url) as run:
        pruned = await pruning.prune_all(
            run.connection,
            database_of(database_url),
            retention_seconds=60,
            dead_retention_seconds=None,
            ledger_retention_seconds=None,
        )
    assert pruned.leases == 2_500
    assert db.execute("SELECT count(*) FROM leases").fetchone()[0] == 0


def test_a_daemon_prunes_leases_with_its_retention(server: Server, database_url: str, db: Db, daemon: Callable[..., Any]) -> None:
    got = acquire(db, "done", "a")
    release(db, "done", "a", got.fence)
    acquire(db, "held", "a")
    daemon(DATABASE_URL=database_url, WORKER_RETENTION_SECONDS="0.5", WORKER_REAP_SECONDS="0.1")
    wait_for(lambda: db.execute("SELECT resource FROM leases").fetchall() == [("held",)], 20)
