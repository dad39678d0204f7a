"""A program that lives by named leases: `python -m worker.torture.holder` takes them, works a while, and gives them back.

What it does under a lease is guarded as the documentation says: the resource refuses a fence that is lower than one it has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from typing import Final

import uvloop

from worker.errors import DatabaseUnavailable, LeaseHeld, LeaseLost
from worker.leases import Leases
from worker.settings import Settings, load_settings
from worker.store import sabotage
from worker.store.connection import DATABASE_ERRORS, Database
from worker.torture.notes import NOTES, Notebook

HOLD: Final = "lease"
"""The kind of its notes."""
RESOURCES: Final = ("red", "green", "blue")

_TROUBLE: Final[tuple[type[Exception], ...]] = (LeaseHeld, LeaseLost, DatabaseUnavailable, *DATABASE_ERRORS)
_PAUSE_SECONDS: Final = (0.02, 0.2)
_WORK_SECONDS: Final = 0.1
_GUARDED_SECONDS: Final = 1.0


async def _hold(leases: Leases, database: Database, notebook: Notebook, *, name: str, ttl_seconds: float) -> None:
    """One lease: for a moment, or for longer than it would live without renewals."""
    resource = random.choice(RESOURCES)
    turns = random.randint(1, round(1.5 * ttl_seconds / _WORK_SECONDS))
    async with leases.hold(resource, ttl_seconds=ttl_seconds, holder=name) as held:
        notebook.write("start", subject=resource, fence=held.fence, kind=HOLD)
        try:
            for turn in range(turns):
                if turn % 5 == 0:
                    await _write(database, resource, held.fence)
                await asyncio.sleep(_WORK_SECONDS)
        finally:
            notebook.write("end", subject=resource, fence=held.fence, kind=HOLD)


async def _write(database: Database, resource: str, fence: int) -> None:
    """What the lease is for: a write that the resource refuses to anybody who comes too late."""
    with contextlib.suppress(*DATABASE_ERRORS):
        async with asyncio.timeout(_GUARDED_SECONDS):
            connection = await database.connect("holder")
            try:
                await sabotage.write_guarded(connection, database, resource=resource, fence=fence)
            finally:
                connection.terminate()


async def _live(settings: Settings) -> None:
    assert settings.database_url is not None
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    dsn = settings.database_url.get_secret_value()
    database = Database(dsn, schema=settings.schema_name, connect_timeout_seconds=settings.connect_timeout_seconds)
    notebook = Notebook(os.environ[NOTES], settings.name)
    async with Leases(dsn, schema=settings.schema_name) as leases:
        while True:
            try:
                await _hold(leases, database, notebook, name=settings.name, ttl_seconds=settings.lease_seconds)
            except _TROUBLE:
                pass
            await asyncio.sleep(random.uniform(*_PAUSE_SECONDS))


def main() -> None:
    """Until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # while there is nothing to stop
    with contextlib.suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_live(load_settings()))


if __name__ == "__main__":
    main()
