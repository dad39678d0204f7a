"""Questions asked around a run: is any work left, does the session carry the limits it needs, is there room for the connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from worker.errors import ConfigError

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

# Indexes jobs_ready, jobs_suspect and jobs_running. A job that was started before and waits for its next attempt counts, one that
# is first due in the future does not.
WORK_IS_LEFT = """
SELECT EXISTS (
    SELECT FROM {schema}.jobs
    WHERE state = 'ready' AND queue = ANY ($1) AND kind = ANY ($2)
        AND (available_at <= now() OR started_at IS NOT NULL)
) OR EXISTS (
    SELECT FROM {schema}.jobs
    WHERE state = 'running' AND queue = ANY ($1) AND kind = ANY ($2)
)
"""


async def work_is_left(connection: Connection, database: Database, *, queues: Sequence[str], kinds: Sequence[str]) -> bool:
    """Whether a job of these queues and kinds is running or ready, its retries of the future included."""
    return bool(await connection.fetchval(database.sql(WORK_IS_LEFT), list(queues), list(kinds)))


LIMITS = "SELECT name, setting::bigint FROM pg_settings WHERE name = ANY ($1)"
ISOLATION = "SHOW default_transaction_isolation"


async def verify_session(connection: Connection, database: Database) -> None:
    """Behind a transaction pooler sessions cannot be set, so the role must carry the time limits. Raises ConfigError."""
    if not database.pooler:
        return
    limits = database.limits
    most = {
        "statement_timeout": limits.statement_timeout_seconds,
        "lock_timeout": limits.lock_timeout_seconds,
        "idle_in_transaction_session_timeout": limits.idle_in_transaction_seconds,
    }
    rows = await connection.fetch(LIMITS, list(most))
    lines = [
        f"WORKER_POOLER=transaction: the role's {name} is {value or 'unlimited'}; set it with"
        f" ALTER ROLE … SET {name} = '{int(most[name] * 1000)}ms' (or less)"
        for name, value in rows
        if not 0 < value <= most[name] * 1000
    ]
    isolation = await connection.fetchval(ISOLATION)
    if isolation != "read committed":
        lines.append(
            f"WORKER_POOLER=transaction: the role's default_transaction_isolation is {isolation}; set it with"
            " ALTER ROLE … SET default_transaction_isolation = 'read committed'"
        )
    if lines:
        raise ConfigError(*lines)


# A superuser is bound by the limit of the database alone. Everybody may read both.
ROOM = """
SELECT LEAST(
    NULLIF(d.datconnlimit, -1),
    CASE WHEN NOT r.rolsuper THEN NULLIF(r.rolconnlimit, -1) END)
FROM pg_database AS d, pg_roles AS r
WHERE d.datname = current_database() AND r.rolname = current_user
"""


LANES = 5
"""Connections that a process has beside its pool: for claims, commits, leases, the reaper and LISTEN."""
HTTP_LANES = 4
"""The same of the HTTP interface, which has a pool of its own, of the same size."""


async def verify_room(connection: Connection, database: Database, *, pool_size: int, lanes: int = LANES, beside: int = 0) -> bool:
    """A process that gets some of its connections and never the others would claim what it cannot complete. Raises ConfigError.

    Returns whether there is room for one more, which would be useful and is not needed.

    `beside`: those of an HTTP interface in the same process. The limit is shared with other processes, so that enough for one may
    still be too few.
    """
    if database.pooler:
        return True  # the limit counts the pooler's connections, not ours
    most = await connection.fetchval(ROOM)
    needed = lanes + pool_size + beside
    if most is not None and most < needed:
        http = f", {beside} of the HTTP interface" if beside else ""
        raise ConfigError(
            f"WORKER_POOL_SIZE={pool_size}: one process opens up to {needed} connections ({lanes} of its loops{http},"
            f" and the pool), the role or the database has CONNECTION LIMIT {most}"
        )
    return most is None or most > needed
