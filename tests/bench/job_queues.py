"""The Python job queues in the comparison, each as its documentation shows: its own bulk call, its own worker.

Runs in the environment of the one that is asked for, which is imported only then.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable

DSN = os.environ["DATABASE_URL"]
QUEUE = "compared"

Handle = Callable[[int], Awaitable[None]]
Put = Callable[[int], Awaitable[object]]


class Pgqueuer:
    """Bounded, it keeps to the number of tasks, which it allows with a batch of half of it only; else there is no limit, with
    batches of that number or of 300."""

    def __init__(self, *, bounded: bool, batch: int | None = None) -> None:
        self.bounded, self.batch = bounded, batch

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
            await queuer.run(batch_size=self.batch or tasks)


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


# chancy finds a job's function by the name of its module and its own, and hands it its arguments only.
_chancy_handle: Handle | None = None


async def compared(*, n: int) -> None:
    assert _chancy_handle is not None
    await _chancy_handle(n)


class Chancy:
    """With `eager_polling`: without it a queue takes its number of tasks once an interval of a second or more."""

    def client(self):
        import logging

        from chancy import Chancy

        log = logging.getLogger("chancy")
        log.setLevel(logging.WARNING)
        return Chancy(DSN, log=log)

    def job(self, number: int):
        from chancy import Job

        return Job(func=f"{__name__}.compared", queue=QUEUE, kwargs={"n": number})

    async def setup(self) -> None:
        async with self.client() as app:
            await app.migrate()

    async def fill(self, numbers: range) -> None:
        async with self.client() as app:
            async for _ in app.push_many([self.job(number) for number in numbers]):
                pass

    async def putting(self) -> Put:
        app = self.client()
        await app.__aenter__()
        return lambda number: app.push(self.job(number))

    async def work(self, tasks: int, handle: Handle) -> None:
        global _chancy_handle
        _chancy_handle = handle
        from chancy import Chancy, Queue, Worker

        async with self.client() as app:
            queue = Queue(QUEUE, concurrency=tasks, executor=Chancy.Executor.Async, eager_polling=True, polling_interval=1)
            await app.declare(queue, upsert=True)
            async with Worker(app) as worker:
                await worker.wait_for_shutdown()
