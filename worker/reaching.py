"""Reach the database at the start of a process: one that is away is waited for, one that refuses us is not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from worker import events
from worker.clock import local_seconds
from worker.errors import ConfigError, DatabaseUnavailable
from worker.patience import Patience
from worker.store import schema
from worker.store.connection import DATABASE_ERRORS, ConnectFailed, Database, safe_text, sqlstate

SCHEMA_SECONDS = 600.0
"""An upgrade may take a while; a server that says nothing must not be waited for without end."""

_NEVER = "42"
"""The class of errors about rights, and about what a statement names or says."""
_NOT_NOW: tuple[type[Exception], ...] = (*DATABASE_ERRORS, DatabaseUnavailable)


async def reach_database(
    prepare: Callable[[], Awaitable[None]], *, wait_seconds: float | None, on_waiting: Callable[[str], None]
) -> None:
    """Connect and `prepare`, again and again until that succeeds: for `wait_seconds`, None is for ever.

    `on_waiting` hears of each failure. Raises DatabaseUnavailable when the time is over, ConfigError at once where waiting
    would not help.
    """
    until = math.inf if wait_seconds is None else local_seconds() + wait_seconds
    patience = Patience(events.DATABASE_LOST)
    while True:
        try:
            await prepare()
            return
        except _NOT_NOW as error:
            code = sqlstate(error) or ""
            if isinstance(error, ConnectFailed):
                if error.refused:
                    raise ConfigError(str(error)) from None
            elif code.startswith(_NEVER):
                raise ConfigError(f"{safe_text(error)} (SQLSTATE {code})") from None
            on_waiting("waiting for the database")
            delay_seconds = patience.delay_seconds(error)
            if local_seconds() + delay_seconds >= until:
                raise DatabaseUnavailable(f"no database within {wait_seconds:g} s: {safe_text(error)}") from None
        await asyncio.sleep(delay_seconds)


async def apply_schema(database: Database) -> None:
    """Apply or upgrade the schema, on a connection of its own. Raises TimeoutError after SCHEMA_SECONDS, and whatever `migrate`
    raises; calling it again is safe."""
    connection = await database.connect("migrate")
    try:
        async with asyncio.timeout(SCHEMA_SECONDS):
            await schema.migrate(connection, database.schema)
    finally:
        connection.terminate()
