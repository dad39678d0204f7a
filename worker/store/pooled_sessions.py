"""Behind a transaction pooler no session can be set up: the role has to carry the limits, and this is where it is held to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.errors import ConfigError

if TYPE_CHECKING:
    from worker.store.connection import Connection, SessionLimits

READ_LIMITS = """
SELECT name, setting::bigint AS milliseconds
FROM pg_settings
WHERE name IN ('statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout')
"""

READ_ISOLATION = """
SELECT current_setting('default_transaction_isolation') AS isolation, current_user::text AS role
"""


async def verify_pooled_session(connection: Connection, limits: SessionLimits) -> None:
    """Return when the role's own settings are safe. Raises ConfigError with the ALTER ROLE for each that is not."""
    most_seconds = {
        "statement_timeout": limits.statement_timeout_seconds,
        "lock_timeout": limits.lock_timeout_seconds,
        "idle_in_transaction_session_timeout": limits.idle_in_transaction_seconds,
    }
    found = {row["name"]: row["milliseconds"] / 1000 for row in await connection.fetch(READ_LIMITS)}
    session = await connection.fetchrow(READ_ISOLATION)
    role = '"' + session["role"].replace('"', '""') + '"'
    faults = [
        # 0 means no limit.
        f"WORKER_POOLER=transaction: {name} of the role is {found[name]:g} s, {most:g} s at most is needed: "
        f"ALTER ROLE {role} SET {name} = '{most * 1000:.0f}ms'"
        for name, most in most_seconds.items()
        if not 0 < found[name] <= most + 0.001
    ]
    if session["isolation"] != "read committed":
        faults.append(
            f"WORKER_POOLER=transaction: default_transaction_isolation of the role is {session['isolation']}: "
            f"ALTER ROLE {role} SET default_transaction_isolation = 'read committed'"
        )
    if faults:
        raise ConfigError(*faults)
