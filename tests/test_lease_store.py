"""Named leases as the package's own statements see them: values, pages, renewals of many, and pruning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests import connecting
from tests.inprocess import seen
from tests.lease_rows import Db, acquire, expire, release, renew
from tests.waiting import wait_for
from worker.store import lease_renewals, leases, pruning


async def test_the_store_gives_the_lease_as_a_value_and_none_for_what_is_not_held(database_url: str) -> None:
    async with seen(database_url) as run:
        database, connection = connecting.database(database_url), run.connection
        terms: dict[str, Any] = {"resource": "nightly", "holder": "a", "ttl_seconds": 30}
        lease = await leases.acquire(connection, database, **terms, request_id="q", metadata={"x": [1, None, "é"]})
        assert isinstance(lease, leases.Lease)
        assert (lease.state, lease.metadata, lease.renewed_at) == ("active", {"x": [1, None, "é"]}, None)
        assert await leases.get(connection, database, id=lease.id + 1) is None
        held = await leases.acquire(connection, database, **terms)
        assert isinstance(held, leases.Held)
        assert (held.holder, 0 < held.retry_after_ms <= 30_000) == ("a", True)
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
            await leases.acquire(run.connection, connecting.database(database_url), **terms)


async def test_lists_show_each_state_in_pages(database_url: str, db: Db) -> None:
    for name in ("active", "expired", "renewed", "released"):
        got = acquire(db, name, "a")
        if name == "renewed":
            renew(db, name, "a", got.fence)
        if name == "released":
            release(db, name, "a", got.fence)
    expire(db, "expired")
    async with seen(database_url) as run:
        database = connecting.database(database_url)

        async def names(which: leases.Which) -> list[str]:
            return [lease.resource for lease in await leases.list_leases(run.connection, database, which=which, limit=10)]

        assert await names("all") == ["active", "expired", "renewed", "released"]
        assert await names("active") == ["active", "renewed"]
        assert (await names("expired"), await names("renewed"), await names("released")) == (["expired"], ["renewed"], ["released"])
        first = await leases.list_leases(run.connection, database, which="all", limit=3)
        rest = await leases.list_leases(run.connection, database, which="all", after_id=first[-1].id, limit=3)
        assert [lease.state for lease in (*first, *rest)] == ["active", "expired", "active", "released"]


async def test_one_statement_renews_what_is_live_and_says_what_is_locked_or_lost(database_url: str, db: Db, other: Db) -> None:
    live, locked, gone, stolen = (acquire(db, name, "a", 60) for name in ("live", "locked", "gone", "stolen"))
    release(db, "gone", "a", gone.fence)
    expire(db, "stolen")
    acquire(db, "stolen", "a", 60)
    asked = [(one.id, one.fence, "a") for one in (live, locked, gone, stolen)]
    async with seen(database_url) as run:
        database = connecting.database(database_url)
        with other.transaction():
            other.execute("SELECT FROM leases WHERE resource = 'locked' FOR UPDATE")
            renewed = await lease_renewals.renew_many(run.connection, database, asked)
            assert set(renewed) == {(live.id, live.fence)}
            assert 30_000 < renewed[live.id, live.fence] <= 60_000
        assert await lease_renewals.look_many(run.connection, database, asked) == {(live.id, live.fence), (locked.id, locked.fence)}
        assert await lease_renewals.renew_many(run.connection, database, [(live.id, live.fence, "b")]) == {}


async def test_renewals_find_room_in_the_page_and_touch_no_index(database_url: str, db: Db) -> None:
    """HOT: there is no index on expires_at, and half of each page is free for it."""
    db.execute("ALTER TABLE leases SET (autovacuum_enabled = off)")
    asked = [(got.id, got.fence, "a") for got in (acquire(db, f"lease-{number}", "a") for number in range(200))]
    counted = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'leases'"
    async with seen(database_url) as run:
        for _ in range(5):
            assert len(await lease_renewals.renew_many(run.connection, connecting.database(database_url), asked)) == 200
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
        database = connecting.database(database_url)
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
            connecting.database(database_url),
            retention_seconds=60,
            dead_retention_seconds=None,
            ledger_retention_seconds=None,
        )
    assert pruned.leases == 2_500
    assert db.execute("SELECT count(*) FROM leases").fetchone()[0] == 0


def test_a_daemon_prunes_leases_with_its_retention(database_url: str, db: Db, daemon: Callable[..., Any]) -> None:
    got = acquire(db, "done", "a")
    release(db, "done", "a", got.fence)
    acquire(db, "held", "a")
    daemon(DATABASE_URL=database_url, WORKER_RETENTION_SECONDS="0.5", WORKER_REAP_SECONDS="0.1")
    wait_for(lambda: db.execute("SELECT resource FROM leases").fetchall() == [("held",)], 20)
