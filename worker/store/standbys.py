"""Synchronous standbys: what one of them may lack although it is committed here, and how to be sure that it lacks nothing.

Somebody can cut short a commit's wait for them (`pg_cancel_backend`, or the end of the session). What was committed then stands
here for everybody to read, and is gone after a failover. The server says so in a warning, to whoever has committed; nobody else
hears of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.store.connection import Connection


def believe(connection: Connection) -> None:
    """To be asked right behind a commit. Raises ConnectionError, as for a lost answer, when a standby is not known to have it."""
    if connection.take_cut_short_wait():
        raise ConnectionError("the wait for a synchronous standby was cut short")


# Nothing but a record in the log, which needs no table and no lock; and not even that where no commit waits for a standby.
PROVE = """
SELECT pg_logical_emit_message(true, 'reliable-worker', '')
WHERE current_setting('synchronous_standby_names') <> ''
"""


async def prove(connection: Connection) -> None:
    """Write something, so that the commit of this transaction (or statement) waits until the standbys have whatever it has read."""
    await connection.execute(PROVE)
