"""A connection pooler in the way: found out before its sessions are taken for our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.store.trouble import PoolerFound

if TYPE_CHECKING:
    from worker.store.connection import Connection

# A pooler that was told to ignore startup parameters takes them and forgets them. Who set the value tells it, not the value: the
# role may carry the same. Asked by the simple protocol, as a prepared statement may already meet somebody else's of that name.
SET_BY_OTHERS = "SELECT FROM pg_settings WHERE name = 'statement_timeout' AND source <> 'client'"


async def require_own_session(connection: Connection, timeout_seconds: float) -> None:
    """Raise PoolerFound unless this session has the settings that it was opened with."""
    if await connection.execute(SET_BY_OTHERS, timeout=timeout_seconds) != "SELECT 0":
        raise PoolerFound("the session does not have the settings that it was opened with")


def way_out(variable: str, *, pooler: bool) -> str:
    """What to do about it: `variable` is what leads to the pooler, `pooler` whether it was known to be one."""
    if pooler:
        return "leave options out of the URL, the role has to carry them: ALTER ROLE … SET"
    return _SAYING_SO.get(variable, f"{variable} has to name a direct route")


_SAYING_SO = {"DATABASE_URL": "set WORKER_POOLER=transaction", "Leases: dsn": "give Leases pooler='transaction'"}
