"""Named leases as their table shows them."""

from __future__ import annotations

from typing import Any

import psycopg

Db = psycopg.Connection[Any]


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
