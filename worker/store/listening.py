"""LISTEN: the two notification channels of a schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.store.connection import Connection


async def listen(
    connection: Connection,
    channel: str,
    *,
    on_jobs: Callable[[str], None],
    on_cancel: Callable[[str], None],
    on_end: Callable[[], object],
) -> None:
    """Call `on_jobs(queue)` and `on_cancel(owner)` as notifications arrive, `on_end()` when the connection ends."""
    connection.add_termination_listener(lambda _connection: on_end())
    await connection.add_listener(channel, lambda _connection, _pid, _channel, payload: on_jobs(payload))
    await connection.add_listener(f"{channel}_cancel", lambda _connection, _pid, _channel, payload: on_cancel(payload))


PROBE = "SELECT NOT current_setting('transaction_read_only')::boolean"


async def probe(connection: Connection) -> bool:
    """A question that a living connection answers at once: whether the server can be written to. It also reads what was sent
    meanwhile."""
    return bool(await connection.fetchval(PROBE))


CHECK = "SELECT pg_notify($1 || '_cancel', $2)"


async def check(connection: Connection, channel: str, payload: str) -> None:
    """Send ourselves a notification: behind a transaction pooler LISTEN raises no error and delivers nothing."""
    await connection.execute(CHECK, channel, payload)
