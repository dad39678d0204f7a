"""The Python engines for durable execution in the comparison: one task or workflow of a single step a job.

Runs in the environment of the one that is asked for, which is imported only then.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass

from job_queues import DSN, QUEUE, Handle, Put


class Absurd:
    """Its asyncio worker, which runs all statements over one connection. It has no bulk call: its own SQL function, many times."""

    async def setup(self) -> None:
        from absurd_sdk import AsyncAbsurd

        control = os.path.join(os.path.dirname(sys.executable), "absurdctl")
        await asyncio.to_thread(subprocess.run, [control, "init", "--database", DSN], check=True, stdout=subprocess.DEVNULL)
        app = AsyncAbsurd(DSN, queue_name=QUEUE)
        await app.create_queue(QUEUE)
        await app.close()

    async def fill(self, numbers: range) -> None:
        import psycopg

        async with await psycopg.AsyncConnection.connect(DSN) as connection:
            await connection.execute(
                "SELECT count(t.task_id) FROM generate_series(%s::int, %s::int) AS n,"
                " LATERAL absurd.spawn_task(%s, 'compared', jsonb_build_object('n', n), '{\"max_attempts\": 5}') AS t",
                (numbers.start, numbers.stop - 1, QUEUE),
            )

    async def putting(self) -> Put:
        import psycopg
        from absurd_sdk import AsyncAbsurd

        connection = await psycopg.AsyncConnection.connect(DSN, autocommit=True)
        app = AsyncAbsurd(connection, queue_name=QUEUE)
        return lambda number: app.spawn("compared", {"n": number}, queue=QUEUE)

    async def work(self, tasks: int, handle: Handle) -> None:
        from absurd_sdk import AsyncAbsurd

        app = AsyncAbsurd(DSN, queue_name=QUEUE)

        @app.register_task("compared")
        async def compared(params, _context) -> None:
            await handle(params["n"])

        await app.start_worker(concurrency=tasks)


@dataclass
class Compared:
    """What awa takes for a job's arguments."""

    n: int


class Awa:
    """A runtime in Rust with handlers on asyncio."""

    # It takes the socket's directory from the query, but refuses a URL without a host before it.
    dsn = DSN.replace("@/", "@localhost/", 1)

    async def setup(self) -> None:
        import awa

        async with awa.AsyncClient(self.dsn) as client:
            await client.migrate()
            await client.install_queue_storage()

    async def fill(self, numbers: range) -> None:
        import awa

        async with awa.AsyncClient(self.dsn) as client:
            await client.enqueue_many_copy([Compared(number) for number in numbers], queue=QUEUE)

    async def putting(self) -> Put:
        import asyncpg
        from awa.bridge import insert_job

        connection = await asyncpg.connect(DSN)
        return lambda number: insert_job(connection, Compared(number), queue=QUEUE)

    async def work(self, tasks: int, handle: Handle) -> None:
        import awa

        client = awa.AsyncClient(self.dsn, max_connections=10)

        @client.task(Compared, queue=QUEUE)
        async def compared(job) -> None:
            await handle(job.args.n)

        await client.start([(QUEUE, tasks)])
        await asyncio.Event().wait()


class Dbos:
    """Polling every 10 ms: at the default of a second a worker takes at most its number of tasks a second. It has no bulk call."""

    options = {"workflow_name": "compared", "queue_name": QUEUE, "app_version": "1"}  # noqa: RUF012  (read only)

    def configure(self) -> None:
        from dbos import DBOS

        DBOS(
            config={
                "name": "compared",
                "system_database_url": DSN,
                "run_admin_server": False,
                "log_level": "ERROR",
                "application_version": "1",
            }
        )

    async def setup(self) -> None:
        from dbos import DBOS

        self.configure()
        DBOS.launch()
        await asyncio.sleep(1)
        DBOS.destroy()

    async def fill(self, numbers: range) -> None:
        from dbos import DBOSClient

        def one_by_one() -> None:
            client = DBOSClient(system_database_url=DSN)
            for number in numbers:
                client.enqueue(self.options, number)
            client.destroy()

        await asyncio.to_thread(one_by_one)

    async def putting(self) -> Put:
        from dbos import DBOSClient

        client = DBOSClient(system_database_url=DSN)
        return lambda number: client.enqueue_async(self.options, number)

    async def work(self, tasks: int, handle: Handle) -> None:
        from dbos import DBOS

        self.configure()

        @DBOS.workflow(name="compared")
        async def compared(n: int) -> None:
            await handle(n)

        DBOS.launch()
        await DBOS.register_queue_async(QUEUE, worker_concurrency=tasks, polling_interval_sec=0.01)
        await asyncio.Event().wait()
