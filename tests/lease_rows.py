"""Named leases in SQL, as a program uses them, and as their table shows them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

Db = psycopg.Connection[Any]


def acquire(db: Db, resource: str, holder: str, ttl: object = 30, request_id: str | None = None, metadata: object = None) -> Any:
    """The one row that acquire_lease gives."""
    rows = db.execute(
        "SELECT * FROM acquire_lease(%s, %s, %s::float8, %s, %s::jsonb)",
        [resource, holder, ttl, request_id, "{}" if metadata is None else json.dumps(metadata)],
    ).fetchall()
    assert len(rows) == 1
    return rows[0]


def take(db: Db, resource: str, holder: str = "other", ttl: float = 30) -> Any:
    """Acquire it, which must be possible."""
    got = acquire(db, resource, holder, ttl)
    assert got.outcome == "acquired"
    return got


def renew(db: Db, resource: str, holder: str, fence: int, ttl: float | None = None) -> int:
    return int(db.execute("SELECT renew_lease(%s, %s, %s, %s)", [resource, holder, fence, ttl]).fetchone()[0])


def release(db: Db, resource: str, holder: str, fence: int) -> bool:
    return bool(db.execute("SELECT release_lease(%s, %s, %s)", [resource, holder, fence]).fetchone()[0])


@contextlib.contextmanager
def not_held() -> Iterator[None]:
    """The database refuses the block: whoever renews, releases or shows the fence holds nothing (any more)."""
    with pytest.raises(psycopg.Error) as refusal:
        yield
    assert refusal.value.sqlstate == "RW001"


def expire(db: Db, resource: str, seconds: float = 1) -> None:
    """Age the row, not the clock."""
    db.execute(
        "UPDATE leases SET expires_at = clock_timestamp() - %s * interval '1 second' WHERE resource = %s", [seconds, resource]
    )


def steal(db: Db, resource: str) -> None:
    """What happens to a holder that was away for too long: the lease expires, and another takes it."""
    expire(db, resource, 0)
    take(db, resource)


def row(db: Db, name: str) -> Any:
    """The lease of this name, and whether it is `live` and `unexpired`; None if nobody has ever had it."""
    return db.execute(
        "SELECT *, expires_at > clock_timestamp() AS unexpired, released_at IS NULL AND expires_at > clock_timestamp() AS live"
        " FROM leases WHERE resource = %s",
        [name],
    ).fetchone()


def is_live(db: Db, name: str) -> bool:
    lease = row(db, name)
    return lease is not None and lease.live


def is_free(db: Db, name: str) -> bool:
    return not is_live(db, name)
