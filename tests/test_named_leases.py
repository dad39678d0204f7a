"""Named leases in SQL: one atomic acquisition, fences that rise, renewals and releases that need holder and fence."""

from __future__ import annotations

import json

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import namedtuple_row

from tests.lease_rows import Db, acquire, expire, not_held, release, renew, row
from tests.psql import ODD, apply_by_psql
from tests.servers import execute
from tests.waiting import wait_for

# --- acquire


def test_a_free_resource_is_acquired_with_a_new_fence_and_its_whole_time(db: Db) -> None:
    got = acquire(db, "nightly", "a", 30, "q", {"why": "report"})
    assert (got.outcome, got.holder) == ("acquired", "a")
    assert got._fields == ("outcome", "id", "fence", "holder", "expires_in_ms")
    assert 20_000 < got.expires_in_ms <= 30_000
    lease = row(db, "nightly")
    assert (lease.id, lease.fence, lease.ttl_seconds, lease.request_id) == (got.id, got.fence, 30, "q")
    assert (lease.metadata, lease.renewed_at, lease.released_at) == ({"why": "report"}, None, None)
    assert lease.fence == db.execute("SELECT last_value FROM fence_seq").fetchone()[0]


def test_a_held_resource_is_refused_with_holder_and_remaining_time_and_costs_no_fence(db: Db) -> None:
    acquire(db, "nightly", "a")
    before = db.execute("SELECT last_value FROM fence_seq").fetchone()
    got = acquire(db, "nightly", "b", 5)
    assert (got.outcome, got.holder, got.fence) == ("held", "a", None)
    assert 20_000 < got.expires_in_ms <= 30_000
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
    acquire(db, "nightly", "a", 3)
    with other.transaction():
        other.execute("SELECT now()")
        wait_for(lambda: not row(db, "nightly").unexpired)
        got = acquire(other, "nightly", "b", 10)
        assert got.outcome == "acquired"
        # Its time runs from the call, not from the beginning of the transaction, three seconds before.
        assert got.expires_in_ms > 8_000


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
    assert 10_000 < again.expires_in_ms <= 20_000
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
    got = acquire(db, "nightly", "a", 30)
    assert 20_000 < renew(db, "nightly", "a", got.fence) <= 30_000
    assert row(db, "nightly").renewed_at is not None
    assert 50_000 < renew(db, "nightly", "a", got.fence, 60) <= 60_000
    assert 50_000 < renew(db, "nightly", "a", got.fence) <= 60_000, "the new length stays"
    for resource, holder, fence in (("other", "a", got.fence), ("nightly", "b", got.fence), ("nightly", "a", got.fence + 1)):
        with not_held():
            renew(db, resource, holder, fence)
    expire(db, "nightly", 0)
    with not_held():
        renew(db, "nightly", "a", got.fence)
    again = acquire(db, "nightly", "a", 30)
    release(db, "nightly", "a", again.fence)
    with not_held():
        renew(db, "nightly", "a", again.fence)


def test_a_release_ends_the_lease_at_once_and_may_be_repeated(db: Db) -> None:
    got = acquire(db, "nightly", "a")
    for _ in range(3):
        assert release(db, "nightly", "a", got.fence) is True
    released_at = row(db, "nightly").released_at
    assert released_at is not None
    for holder, fence in (("b", got.fence), ("a", got.fence - 1)):
        with not_held():
            release(db, "nightly", holder, fence)
    assert row(db, "nightly").released_at == released_at


def test_who_lost_the_lease_can_neither_renew_nor_release_that_of_the_next(db: Db) -> None:
    """H10, also for a namesake: the holder's name alone lets nobody in."""
    old = acquire(db, "nightly", "a", 1)
    expire(db, "nightly")
    with not_held():
        release(db, "nightly", "a", old.fence)
    new = acquire(db, "nightly", "a")
    for stale in (renew, release):
        with not_held():
            stale(db, "nightly", "a", old.fence)
    assert row(db, "nightly").released_at is None
    assert renew(db, "nightly", "a", new.fence) > 0


# --- elsewhere, and beside jobs


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
    with not_held():
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
        with not_held():
            db.execute(call, arguments)
