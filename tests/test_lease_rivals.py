"""Named leases in SQL, when several want one at the same time: one gets it, and nobody's transaction is aborted for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg.rows import namedtuple_row

from tests.lease_rows import Db, acquire, expire, release, row
from tests.servers import WAIT_FOR_US
from tests.waiting import wait_for


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
    db.execute("SET deadlock_timeout = '60s'")  # it is the other one that notices
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
