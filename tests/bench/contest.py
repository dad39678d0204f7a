"""One run of one library: a fresh database, a worker process, its marks, and what they add up to.

Time: from the first handler's start, as the worker reports it, until the database holds no unfinished job (asked every 2 ms once
the last handler has returned). So start-up is left out for everybody, and acknowledgements that come in batches are in.
CPU: of the worker's process (none of them works in others) and of the whole server, in that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import asyncpg

from tests.bench import peers
from tests.bench.peers import PEERS, Failed, home_of, is_ours
from tests.servers import with_database
from worker.bench import machine
from worker.bench.results import quantile

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORKLOADS = ("none", "effect", "latency", "snapshot")
RUN_SECONDS = 300
LEAST_JOBS = 50


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What stays the same in all runs."""

    server: str
    postmaster: int | None
    directory: Path
    jobs: int
    moments: int


class Contestant:
    """One library on one fresh database."""

    def __init__(self, name: str, setting: Setting, workload: str, tasks: int) -> None:
        self.name, self.setting, self.workload, self.tasks = name, setting, workload, tasks
        self.peer = PEERS[name]
        jobs = max(setting.jobs // self.peer.fewer, LEAST_JOBS)
        self.jobs = {"latency": setting.moments, "snapshot": 3 * jobs}.get(workload, jobs)

    def command(self, *arguments: str) -> list[str]:
        if is_ours(self.name):
            return [sys.executable, "-m", "tests.bench.product", *arguments]
        if self.peer.node:
            return ["node", str(HERE / "node_peers.mjs"), self.name, *arguments]
        python = home_of(self.name, self.setting.directory) / "bin" / "python"
        return [str(python), str(HERE / "python_peers.py"), self.name, *arguments]

    def environ(self, database: str, pipe: int | None = None) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("WORKER", "PG", "DATABASE_URL"))}
        environ.pop("PYTHONPATH", None)
        environ |= {
            "DATABASE_URL": with_database(self.setting.server, database),
            "COMPARE_WORKLOAD": self.workload,
            "COMPARE_JOBS": str(self.jobs),
        }
        if self.peer.node:
            environ["COMPARE_MODULES"] = str(home_of(self.name, self.setting.directory))
        if is_ours(self.name):
            environ |= {
                "PYTHONPATH": str(ROOT),
                "WORKERS": str(self.tasks),
                "WORKER_HANDLERS": "tests.bench.product:handlers",
                "WORKER_RUNTIME_DIR": tempfile.gettempdir(),
            }
        if pipe is not None:
            environ["COMPARE_PIPE"] = str(pipe)
        return environ | self.peer.environ

    def call(self, database: str, *arguments: str) -> str:
        return peers.run(self.command(*arguments), environ=self.environ(database), cwd=ROOT if is_ours(self.name) else HERE)

    @contextlib.contextmanager
    def working(self, database: str) -> Iterator[Worker]:
        read, write = os.pipe()
        command = [sys.executable, "-m", "worker", "run"] if is_ours(self.name) else self.command("work", str(self.tasks))
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                command,
                env=self.environ(database, write),
                cwd=ROOT if is_ours(self.name) else HERE,
                pass_fds=(write,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            os.close(write)
            try:
                yield Worker(process, read, log)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                os.close(read)


class Worker:
    """A running worker, and the lines that it sends."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: int, log: IO[bytes]) -> None:
        self.process, self.pipe, self._log = process, pipe, log
        self._rest = b""

    async def line(self) -> list[str]:
        """The next one, in words. Raises Failed when the worker ends or takes too long."""
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + RUN_SECONDS
        while b"\n" not in self._rest:
            ready = asyncio.Event()
            loop.add_reader(self.pipe, ready.set)
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    await ready.wait()
            except TimeoutError:
                raise Failed(f"not done within {RUN_SECONDS} s: {self.last_words()}") from None
            finally:
                loop.remove_reader(self.pipe)
            piece = os.read(self.pipe, 65_536)
            if not piece:
                raise Failed(f"the worker ended: {self.last_words()}")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode().split()

    def last_words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-1500:]


@contextlib.asynccontextmanager
async def connected(server: str, database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(with_database(server, database))
    try:
        yield connection
    finally:
        connection.terminate()


@contextlib.asynccontextmanager
async def fresh_database(one: Contestant) -> AsyncIterator[str]:
    """A database of the run's own, with the peer's schema and a table for effects."""
    name = "compare_run"
    async with connected(one.setting.server, "postgres") as admin:
        await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        await admin.execute(f"CREATE DATABASE {name}")
        try:
            await asyncio.to_thread(one.call, name, "setup")
            async with connected(one.setting.server, name) as connection:
                await connection.execute("CREATE TABLE effects (number bigint PRIMARY KEY)")
            yield name
        finally:
            await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


async def drained(one: Contestant) -> dict[str, float]:
    """Jobs a second, and the CPU that they took."""
    unfinished = one.peer.unfinished.replace("{jobs}", str(one.jobs))
    async with fresh_database(one) as name, connected(one.setting.server, name) as connection:
        await asyncio.to_thread(one.call, name, "fill", str(one.jobs))
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("CHECKPOINT")
        async with contextlib.AsyncExitStack() as stack:
            if one.workload == "snapshot":
                holder = await stack.enter_async_context(connected(one.setting.server, name))
                await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                await holder.fetchval("SELECT count(*) FROM pg_class")
            worker = stack.enter_context(one.working(name))
            _, first = await worker.line()
            before = _cpu(worker, one)
            await worker.line()
            deadline = time.monotonic() + RUN_SECONDS
            while await connection.fetchval(unfinished):
                if worker.process.poll() is not None:
                    raise Failed(f"the worker ended: {worker.last_words()}")
                if time.monotonic() > deadline:
                    raise Failed(f"{RUN_SECONDS} s after the last handler jobs are still unfinished")
                await asyncio.sleep(0.002)
            seconds = time.monotonic() - int(first) / 1e9
            after = _cpu(worker, one)
        effects = await connection.fetchval("SELECT count(*) FROM effects")
        if effects != (one.jobs if one.workload == "effect" else 0):
            raise Failed(f"{effects} effects of {one.jobs} jobs")
    worker_us, server_us = ((end - begin) * 1e6 / one.jobs for begin, end in zip(before, after, strict=True))
    return {"jobs": one.jobs, "rate": one.jobs / seconds, "worker_us": worker_us, "server_us": server_us}


async def delayed(one: Contestant) -> dict[str, float]:
    """Milliseconds from the return of an enqueue to the start of the handler, of an idle worker."""
    async with fresh_database(one) as name:
        with one.working(name) as worker:
            await asyncio.sleep(3)  # to start up and fall idle; nobody but ourselves tells when that is
            said = asyncio.create_task(_starts(worker, one.jobs), name="starts")
            try:
                lines = (await asyncio.to_thread(one.call, name, "trickle", str(one.jobs), "20")).split("\n")
                started = await said
            finally:
                said.cancel()
    sent = dict(map(int, line.split()) for line in lines if line)
    delays = sorted((started[number] - at) / 1e6 for number, at in sent.items())
    return {"jobs": one.jobs, "p50": quantile(delays, 0.5), "p95": quantile(delays, 0.95), "p99": quantile(delays, 0.99)}


async def _starts(worker: Worker, count: int) -> dict[int, int]:
    started: dict[int, int] = {}
    while len(started) < count:
        match await worker.line():
            case ["start", number, at]:
                started.setdefault(int(number), int(at))
    return started


def _cpu(worker: Worker, one: Contestant) -> tuple[float, float]:
    server = machine.server_cpu_seconds(one.setting.postmaster) if one.setting.postmaster else None
    return machine.process_cpu_seconds(worker.process.pid) or 0.0, server or 0.0
