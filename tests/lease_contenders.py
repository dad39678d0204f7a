"""Many processes that want one lease: `python -m tests.lease_contenders FOLDER DSN…`, one contender for each DSN.

Started by fork from a process that has imported everything, so that fifty cost little. Each prints nothing; inside the lease it
writes into `history` on a connection of its own, each time in one transaction behind `check_fence`, and notes in files of its own
when it believed to hold the lease, and when it did not run, by the clock that all processes of a host share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import asyncpg

from worker import LeaseHeld, LeaseLost, Leases
from worker.clock import local_seconds
from worker.errors import DatabaseUnavailable

NAME = "contested"
TTL_SECONDS = 1.0
LOOK_SECONDS = 0.04
"""Less than half of the margin of such a lease."""
TROUBLE = (LeaseHeld, LeaseLost, DatabaseUnavailable, OSError, asyncpg.PostgresError, asyncpg.InterfaceError)


def note_sleep(notes: Path) -> None:
    """From when to when this process did not run: it was frozen, or the host had no time for it."""
    before = local_seconds()
    with notes.open("a", buffering=1) as file:
        while True:
            time.sleep(LOOK_SECONDS)
            now = local_seconds()
            if now - before > 2 * LOOK_SECONDS:
                file.write(f"asleep {os.getpid()} {before} {now}\n")
            before = now


async def pause(*seconds: float) -> None:
    """What a contender does for one of these times is of no interest."""
    await asyncio.sleep(random.choice(seconds))


async def write(connection: asyncpg.Connection, fence: int, what: str) -> None:
    """One fenced write: a stale fence is refused, and nothing stays."""
    async with connection.transaction():
        await connection.fetchval("SELECT check_fence($1, $2)", NAME, fence)
        await connection.execute("INSERT INTO history (fence, pid, what) VALUES ($1, $2, $3)", fence, os.getpid(), what)


async def contend(dsn: str, notes: Path) -> None:
    threading.Thread(target=note_sleep, args=(notes.with_name(f"{notes.name}-asleep"),), daemon=True).start()
    with notes.open("a", buffering=1) as file:
        while True:
            with contextlib.suppress(*TROUBLE):
                connection = await asyncpg.connect(dsn, timeout=3)
                try:
                    async with Leases(dsn, holder=f"contender-{os.getpid()}") as leases:
                        while True:
                            await hold_once(leases, connection, file)
                            await pause(0.2, 0.3, 0.4, 0.5, 0.6)  # the others' turn
                finally:
                    connection.terminate()
            await pause(0.05, 0.1, 0.2)


async def hold_once(leases: Leases, connection: asyncpg.Connection, file: TextIO) -> None:
    async with leases.hold(NAME, ttl_seconds=TTL_SECONDS, wait_seconds=60) as held:
        entered_at = local_seconds()
        try:
            await write(connection, held.fence, "enter")
            # Mostly short, and sometimes longer than the lease, so that it lives by its renewals.
            await pause(0.01, 0.05, 0.2, 1.3)
            await write(connection, held.fence, "leave")
        finally:
            file.write(f"held {os.getpid()} {entered_at} {local_seconds()}\n")


def main() -> None:
    folder, *dsns = sys.argv[1:]
    for number, dsn in enumerate(dsns):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            asyncio.run(contend(dsn, Path(folder) / f"contender-{number}"))
    signal.pause()


if __name__ == "__main__":
    main()
