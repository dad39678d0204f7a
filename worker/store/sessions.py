"""Sessions of ours in the server, as another session sees them: whether one that was dropped here is over there.

A process number alone names nobody for long: it comes back on the same server, and after a failover or behind a load balancer it
may be somebody else's on another one. The moment at which the server started it comes with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from worker.store.connection import Connection


class Backend(NamedTuple):
    """The server process of one session."""

    pid: int
    started_us: int
    """Since 1970, by that server's clock."""


_STARTED = "(extract(epoch FROM backend_start) * 1000000)::bigint"

OWN = f"SELECT pid, {_STARTED} FROM pg_stat_activity WHERE pid = pg_backend_pid()"


async def own_backend(connection: Connection, *, timeout_seconds: float) -> Backend | None:
    """Who serves this session; None: the server does not say. Behind a transaction pooler it is somebody new each time."""
    row = await connection.fetchrow(OWN, timeout=timeout_seconds)
    return None if row is None or row[1] is None else Backend(*row)


# pg_stat_activity shows every role its own sessions.
LIVES = f"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND {_STARTED} = $2)"


async def lives(connection: Connection, backend: Backend) -> bool:
    """True while the server process of a dropped session may still be at work (and commit)."""
    return bool(await connection.fetchval(LIVES, *backend))


# A role may end its own sessions.
END = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = $1 AND {_STARTED} = $2 AND usename = current_user"


async def end(connection: Connection, backend: Backend) -> None:
    """End a dropped session that has not been sent its COMMIT: it would hold its row locks, which keep the keeper from renewing,
    until it has run all that it was sent."""
    await connection.execute(END, *backend)
