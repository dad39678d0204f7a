"""The Python libraries in the comparison. Runs in the environment of the one it is asked for, which is imported only then.

    python python_peers.py PEER setup | fill COUNT | trickle COUNT INTERVAL_MS | work TASKS

Their handlers' effect goes over a pool of the handlers' own, with as many connections as tasks; none of them commits it together
with the completion. uvloop for all.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import uvloop
from engines import Absurd, Awa, Dbos
from job_queues import DSN, Chancy, Handle, Oban, Pgqueuer, Procrastinate, Saq
from marks import Marks

EFFECT = "INSERT INTO effects (number) VALUES ($1)"
CHUNK = 5_000

PEERS = {
    "pgqueuer": lambda: Pgqueuer(bounded=True),
    "pgqueuer-free": lambda: Pgqueuer(bounded=False),
    "pgqueuer-batch": lambda: Pgqueuer(bounded=False, batch=300),
    "procrastinate": Procrastinate,
    "oban": Oban,
    "saq": Saq,
    "chancy": Chancy,
    "absurd": Absurd,
    "awa": Awa,
    "dbos": Dbos,
}


async def handler(tasks: int) -> Handle:
    """What every peer's handler does."""
    marks = Marks()
    pool = None
    if os.environ["COMPARE_WORKLOAD"] == "effect":
        import asyncpg

        async def leave_alone(_connection) -> None:
            """No RESET ALL between two uses: it would cost a round trip a job."""

        pool = await asyncpg.create_pool(DSN, min_size=tasks, max_size=tasks, reset=leave_alone)

    async def handle(number: int) -> None:
        marks.begin(number)
        if pool is not None:
            await pool.execute(EFFECT, number)
        marks.end()

    return handle


async def main(name: str, command: str, *arguments: str) -> None:
    peer = PEERS[name]()
    match command:
        case "setup":
            await peer.setup()
        case "fill":
            count = int(arguments[0])
            for start in range(0, count, CHUNK):
                await peer.fill(range(start, min(start + CHUNK, count)))
        case "trickle":
            put = await peer.putting()
            for number in range(int(arguments[0])):
                await asyncio.sleep(float(arguments[1]) / 1_000)
                await put(number)
                print(number, time.monotonic_ns())
        case "work":
            await peer.work(int(arguments[0]), await handler(int(arguments[0])))
    # Pools and connections of a short program may end with it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
