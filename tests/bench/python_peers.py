"""The Python libraries in the comparison. Runs in the environment of the one it is asked for, which is imported only then.

    python python_peers.py PEER setup | fill COUNT | trickle COUNT INTERVAL_MS | work TASKS

Each works as its documentation shows: its own bulk call, its own worker, uvloop. Their handlers' effect goes over a pool of the
handlers' own, with as many connections as tasks; none of them commits it together with the completion.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable

import uvloop
from marks import Marks

DSN = os.environ["DATABASE_URL"]
QUEUE = "compared"
EFFECT = "INSERT INTO effects (number) VALUES ($1)"
CHUNK = 5_000

Handle = Callable[[int], Awaitable[None]]
Put = Callable[[int], Awaitable[object]]


class Pgqueuer:
    """`bounded` keeps to the number of tasks, which PgQueuer allows with a batch of half of it only; `free` has no such limit."""

    def __init__(self, mode: str) -> None:
        self.bounded = mode == "bounded"

    async def queries(self):
        import asyncpg
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        return Queries(AsyncpgDriver(await asyncpg.connect(DSN)))

    async def setup(self) -> None:
        await (await self.queries()).install()

    async def fill(self, numbers: range) -> None:
        payloads = [json.dumps({"n": number}).encode() for number in numbers]
        await (await self.queries()).enqueue([QUEUE] * len(payloads), payloads, [0] * len(payloads))

    async def putting(self) -> Put:
        queries = await self.queries()
        return lambda number: queries.enqueue(QUEUE, json.dumps({"n": number}).encode())

    async def work(self, tasks: int, handle: Handle) -> None:
        import asyncpg
        from pgqueuer import PgQueuer

        queuer = PgQueuer.from_asyncpg_pool(await asyncpg.create_pool(DSN, min_size=4, max_size=10))

        @queuer.entrypoint(QUEUE)
        async def compared(job) -> None:
            await handle(json.loads(job.payload)["n"])

        if self.bounded:
            await queuer.run(batch_size=tasks // 2, max_concurrent_tasks=tasks)
        else:
            await queuer.run(batch_size=tasks)


class Procrastinate:
    def app(self, connections: int, handle: Handle | None = None):
        import procrastinate

        connector = procrastinate.PsycopgConnector(conninfo=DSN, min_size=connections, max_size=connections)
        app = procrastinate.App(connector=connector)

        @app.task(name=QUEUE, queue=QUEUE)
        async def compared(n: int) -> None:
            assert handle is not None
            await handle(n)

        return app, compared

    async def setup(self) -> None:
        app, _ = self.app(1)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    async def fill(self, numbers: range) -> None:
        app, task = self.app(1)
        async with app.open_async():
            await task.batch_defer_async(*({"n": number} for number in numbers))

    async def putting(self) -> Put:
        app, task = self.app(1)
        await app.open_async()
        return lambda number: task.defer_async(n=number)

    async def work(self, tasks: int, handle: Handle) -> None:
        app, _ = self.app(tasks + 2, handle)
        async with app.open_async():
            await app.run_worker_async(queues=[QUEUE], concurrency=tasks)


class Oban:
    def kind(self, handle: Handle | None = None):
        from oban import worker

        @worker(queue=QUEUE)
        class Compared:
            async def process(self, job) -> None:
                assert handle is not None
                await handle(job.args["n"])

        return Compared

    async def setup(self) -> None:
        from oban import Oban
        from oban.schema import install

        await install(await Oban.create_pool(DSN, min_size=1, max_size=2))

    async def fill(self, numbers: range) -> None:
        from oban import Oban

        kind = self.kind()
        await Oban(pool=await Oban.create_pool(DSN, min_size=1, max_size=2)).enqueue_many(
            kind.new({"n": number}) for number in numbers
        )

    async def putting(self) -> Put:
        from oban import Oban

        oban, kind = Oban(pool=await Oban.create_pool(DSN, min_size=1, max_size=2)), self.kind()
        return lambda number: oban.enqueue(kind.new({"n": number}))

    async def work(self, tasks: int, handle: Handle) -> None:
        from oban import Oban

        self.kind(handle)
        async with Oban(pool=await Oban.create_pool(DSN, min_size=4, max_size=10), queues={QUEUE: tasks}):
            await asyncio.Event().wait()


class Saq:
    """It has no bulk call for PostgreSQL."""

    async def queue(self, **pool: int):
        from saq import Queue

        queue = Queue.from_url(DSN, name=QUEUE, **pool)
        await queue.connect()
        return queue

    async def setup(self) -> None:
        await (await self.queue()).disconnect()

    async def fill(self, numbers: range) -> None:
        queue = await self.queue(min_size=1, max_size=1)
        for number in numbers:
            await queue.enqueue(QUEUE, n=number)

    async def putting(self) -> Put:
        queue = await self.queue(min_size=1, max_size=1)
        return lambda number: queue.enqueue(QUEUE, n=number)

    async def work(self, tasks: int, handle: Handle) -> None:
        from saq import Worker

        async def compared(_context, *, n: int) -> None:
            await handle(n)

        await Worker(await self.queue(), functions=[(QUEUE, compared)], concurrency=tasks).start()


PEERS = {
    "pgqueuer": lambda: Pgqueuer("bounded"),
    "pgqueuer-free": lambda: Pgqueuer("free"),
    "procrastinate": Procrastinate,
    "oban": Oban,
    "saq": Saq,
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
