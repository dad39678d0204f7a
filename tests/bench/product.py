"""This project in the comparison: its handlers, run by a real `worker run`, and its own ways to enqueue.

python -m tests.bench.product setup | fill COUNT | trickle COUNT INTERVAL_MS
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import asyncpg
import uvloop

from tests.bench.marks import Marks
from worker import Handlers, Job, enqueue, enqueue_many
from worker.store import schema

KIND = "compared"
EFFECT = "INSERT INTO effects (number) VALUES ($1)"


def _handlers() -> Handlers:
    handlers = Handlers()
    marks = Marks()
    with_effect = os.environ["COMPARE_WORKLOAD"] == "effect"

    @handlers.job(KIND)
    async def compared(job: Job[dict[str, int]]) -> None:
        number = job.payload["n"]
        marks.begin(number)
        if with_effect:
            job.effect(EFFECT, number)
        marks.end()

    return handlers


# What WORKER_HANDLERS names; this module is also a program, which needs none.
handlers = _handlers() if "COMPARE_PIPE" in os.environ else None


async def main(command: str, *arguments: str) -> None:
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    match command:
        case "setup":
            await schema.migrate(connection, "public")
        case "fill":
            # Keys of the caller's own: so each effect gets its row in the ledger, which is what makes it once.
            jobs = [{"kind": KIND, "payload": {"n": number}, "key": f"job-{number}"} for number in range(int(arguments[0]))]
            await enqueue_many(connection, jobs)
        case "trickle":
            for number in range(int(arguments[0])):
                await asyncio.sleep(float(arguments[1]) / 1_000)
                await enqueue(connection, KIND, {"n": number}, key=f"job-{number}")
                print(number, time.monotonic_ns())
    await connection.close()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
