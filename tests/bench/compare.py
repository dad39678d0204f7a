#!/usr/bin/env python3
"""This project beside other libraries, in one run, interleaved turn by turn: rates, latencies, CPU, and the ratios.

    python -m tests.bench.compare [--peers …] [--workloads none,effect,latency,snapshot] [--runs 3] [--jobs 20000] [--tasks 10]

Installs each peer into an environment of its own below --directory (once), starts a PostgreSQL of its own (or takes the
superuser's --database-url of a server on this machine) and prints a table in Markdown. Every run begins with a fresh database,
filled by the peer's own bulk call, analyzed, and one worker process.

none      jobs that do nothing        effect    one row a job, over the handler's own pool; ours commits it with the completion
latency   an idle worker, one job every 20 ms: from the return of the enqueue to the handler's first line
snapshot  `none` with three times the jobs, while a REPEATABLE READ snapshot is held

Time: from the first handler's start, as the worker reports it, until the database holds no unfinished job (asked every 2 ms
once the last handler has returned). CPU: of the worker's process and of the whole server in that time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import asyncpg

from tests.servers import with_database
from worker.bench import machine
from worker.bench.results import quantile
from worker.cluster import temporary_cluster

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OURS = "reliable-worker"
WORKLOADS = ("none", "effect", "latency", "snapshot")
RUN_SECONDS = 300
SERVER = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min", "max_connections": "200"}


@dataclass(frozen=True, kw_only=True)
class Peer:
    unfinished: str
    """True while a job of the run is not completed."""
    packages: tuple[str, ...] = ()
    venv: str = ""
    node: bool = False
    least_python: tuple[int, int] = (3, 11)
    environ: dict[str, str] = field(default_factory=dict)


_OUR_UNFINISHED = "SELECT EXISTS (SELECT FROM jobs WHERE state = 'ready') OR EXISTS (SELECT FROM jobs WHERE state = 'running')"
_GRAPHILE = Peer(
    node=True, packages=("graphile-worker", "pg"), unfinished="SELECT EXISTS (SELECT FROM graphile_worker._private_jobs)"
)
_PGQUEUER = Peer(venv="pgqueuer", packages=("pgqueuer", "asyncpg", "uvloop"), unfinished="SELECT EXISTS (SELECT FROM pgqueuer)")
PEERS = {
    OURS: Peer(unfinished=_OUR_UNFINISHED),
    # As graphile-worker and PgQueuer do: a finished job's row is deleted.
    f"{OURS}-deleting": Peer(unfinished=_OUR_UNFINISHED, environ={"WORKER_RETENTION_SECONDS": "0"}),
    "graphile": _GRAPHILE,
    "graphile-local": _GRAPHILE,
    "pgqueuer": _PGQUEUER,
    "pgqueuer-free": _PGQUEUER,
    "procrastinate": Peer(
        venv="procrastinate",
        packages=("procrastinate", "psycopg[binary,pool]", "asyncpg", "uvloop"),
        unfinished="SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))",
    ),
    "oban": Peer(
        venv="oban",
        packages=("oban", "psycopg[binary,pool]", "asyncpg", "uvloop"),
        least_python=(3, 12),
        unfinished="SELECT EXISTS (SELECT FROM oban_jobs WHERE state IN ('available', 'executing', 'scheduled', 'retryable'))",
    ),
    "saq": Peer(
        venv="saq",
        packages=("saq[postgres]", "psycopg[binary,pool]", "asyncpg", "uvloop"),
        unfinished="SELECT EXISTS (SELECT FROM saq_jobs WHERE status IN ('queued', 'active'))",
    ),
}


def is_ours(name: str) -> bool:
    return name.startswith(OURS)


class Failed(Exception):
    """A run that gave no figure; the others go on."""


# --- environments


def install(name: str, directory: Path) -> str:
    """The environment of a peer, made if it is not there; returns what is in it. Raises Failed."""
    peer = PEERS[name]
    if is_ours(name):
        return "this checkout"
    place = directory / ("node" if peer.node else peer.venv)
    stamp = place / "installed"
    if not stamp.exists():
        print(f"installing {', '.join(peer.packages)} …", file=sys.stderr)
        place.mkdir(parents=True, exist_ok=True)
        if peer.node:
            (place / "package.json").write_text("{}")
            _do(["npm", "install", "--no-audit", "--no-fund", *peer.packages], cwd=place)
            stamp.write_text(_do(["npm", "ls", "--depth=0"], cwd=place))
        else:
            _do([_python(peer.least_python), "-m", "venv", "--clear", str(place)])
            _do([str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *peer.packages])
            stamp.write_text(_do([str(place / "bin" / "python"), "-m", "pip", "freeze"]))
    main = peer.packages[0].partition("[")[0]
    return next((line.strip("├─└ \n") for line in stamp.read_text().splitlines() if main in line), main)


def _python(least: tuple[int, int]) -> str:
    if sys.version_info[:2] >= least:
        return sys.executable
    for minor in range(least[1], least[1] + 10):
        found = shutil.which(f"python3.{minor}")
        # A shim of a version manager may be there without the version.
        if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    raise Failed(f"it needs Python {least[0]}.{least[1]}")


def _do(command: list[str], *, cwd: Path | None = None, environ: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=RUN_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(str(error)) from None
    if done.returncode:
        raise Failed(f"{' '.join(command)[:200]}: {(done.stderr or done.stdout).strip()[-1500:]}")
    return done.stdout


# --- one run


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What stays the same in all runs."""

    server: str
    postmaster: int | None
    directory: Path
    jobs: int
    tasks: int
    moments: int


class Contestant:
    """One library on one fresh database."""

    def __init__(self, name: str, setting: Setting, workload: str) -> None:
        self.name, self.setting, self.workload = name, setting, workload
        self.peer = PEERS[name]
        self.jobs = {"latency": setting.moments, "snapshot": 3 * setting.jobs}.get(workload, setting.jobs)

    def command(self, *arguments: str) -> list[str]:
        if is_ours(self.name):
            return [sys.executable, "-m", "tests.bench.product", *arguments]
        if self.peer.node:
            return ["node", str(HERE / "node_peers.mjs"), self.name, *arguments]
        python = self.setting.directory / self.peer.venv / "bin" / "python"
        return [str(python), str(HERE / "python_peers.py"), self.name, *arguments]

    def environ(self, database: str, pipe: int | None = None) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("WORKER", "PG", "DATABASE_URL"))}
        environ |= {
            "DATABASE_URL": with_database(self.setting.server, database),
            "COMPARE_WORKLOAD": self.workload,
            "COMPARE_JOBS": str(self.jobs),
            "COMPARE_MODULES": str(self.setting.directory / "node"),
        }
        if is_ours(self.name):
            environ |= {
                "PYTHONPATH": str(ROOT),
                "WORKERS": str(self.setting.tasks),
                "WORKER_HANDLERS": "tests.bench.product:handlers",
                "WORKER_RUNTIME_DIR": tempfile.gettempdir(),
            }
        if pipe is not None:
            environ["COMPARE_PIPE"] = str(pipe)
        return environ | self.peer.environ

    def call(self, database: str, *arguments: str) -> str:
        return _do(self.command(*arguments), environ=self.environ(database), cwd=ROOT if is_ours(self.name) else HERE)

    @contextlib.contextmanager
    def working(self, database: str) -> Iterator[Worker]:
        read, write = os.pipe()
        command = [sys.executable, "-m", "worker", "run"] if is_ours(self.name) else self.command("work", str(self.setting.tasks))
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
            while await connection.fetchval(one.peer.unfinished):
                if worker.process.poll() is not None:
                    raise Failed(f"the worker ended: {worker.last_words()}")
                await asyncio.sleep(0.002)
            seconds = time.monotonic() - int(first) / 1e9
            after = _cpu(worker, one)
        effects = await connection.fetchval("SELECT count(*) FROM effects")
        if effects != (one.jobs if one.workload == "effect" else 0):
            raise Failed(f"{effects} effects of {one.jobs} jobs")
    worker_us, server_us = ((end - begin) * 1e6 / one.jobs for begin, end in zip(before, after, strict=True))
    return {"rate": one.jobs / seconds, "worker_us": worker_us, "server_us": server_us}


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
    return {"p50": quantile(delays, 0.5), "p95": quantile(delays, 0.95), "p99": quantile(delays, 0.99)}


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


# --- all of it


async def compare(setting: Setting, names: list[str], workloads: list[str], runs: int) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for workload in workloads:
        for turn in range(runs):
            for name in names:
                measure = delayed if workload == "latency" else drained
                result: dict[str, object] = {"workload": workload, "peer": name, "turn": turn}
                try:
                    result |= await measure(Contestant(name, setting, workload))
                except (Failed, asyncpg.PostgresError, OSError) as error:
                    result["error"] = str(error)
                results.append(result)
                print(json.dumps(result), file=sys.stderr)
    return results


def print_tables(results: list[dict[str, object]], versions: dict[str, str], setting: Setting, server: str) -> None:
    here = machine.this_machine()
    print(f"\n{here.cpu}, {here.cores} cores, {here.system}; {server}; {here.python}, Node {_node()};", end=" ")
    print(f"{setting.jobs:,} jobs, {setting.tasks} tasks, one worker process; medians (least–most)")
    for workload in dict.fromkeys(str(result["workload"]) for result in results):
        figure = "p50" if workload == "latency" else "rate"
        columns = ["p95", "p99"] if workload == "latency" else ["worker_us", "server_us"]
        heads = ["p95 ms", "p99 ms"] if workload == "latency" else ["worker CPU µs a job", "server CPU µs a job"]
        unit = "p50 ms" if workload == "latency" else "jobs/s"
        print(f"\n### {workload}\n\n| library | {unit} | {' | '.join(heads)} | {OURS} / it |\n|---|---|---|---|---|")
        of = [result for result in results if result["workload"] == workload]
        ours = {result["turn"]: result[figure] for result in of if result["peer"] == OURS and figure in result}
        for name in versions:
            mine = [result for result in of if result["peer"] == name]
            good = [result for result in mine if figure in result]
            if not good:
                print(f"| {name} ({versions[name]}) | {str(mine[0]['error'])[:100] if mine else 'not run'} | | | |")
                continue
            values = [float(result[figure]) for result in good]
            digits = 2 if workload == "latency" else 0
            shown = f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"
            rest = [f"{statistics.median(float(result[column]) for result in good):.{digits}f}" for column in columns]
            ratios = [ours[result["turn"]] / float(result[figure]) for result in good if result["turn"] in ours]
            ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
            print(f"| {name} ({versions[name]}) | {shown} | {' | '.join(rest)} | {ratio} |")


def _node() -> str:
    try:
        return _do(["node", "--version"]).strip()
    except Failed:
        return "none"


async def _look_at(server: str) -> tuple[str, int | None]:
    async with connected(server, "postgres") as connection:
        version, user, durability = await connection.fetchrow(
            "SELECT current_setting('server_version'), current_user::text, format('fsync %s, synchronous_commit %s',"
            " current_setting('fsync'), current_setting('synchronous_commit'))"
        )
        postmaster = machine.postmaster_of(connection.get_server_pid(), user=user, database="postgres")
    return f"PostgreSQL {version}, {durability}", postmaster


def _list(text: str, known: list[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=lambda text: _list(text, list(PEERS)), default=list(PEERS))
    parser.add_argument("--workloads", type=lambda text: _list(text, list(WORKLOADS)), default=list(WORKLOADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--moments", type=int, default=750, help="jobs of a latency run")
    parser.add_argument("--directory", type=Path, default=Path.home() / ".cache" / "reliable-worker-compare", help="environments")
    parser.add_argument("--database-url", help="a superuser's, of a server on this machine; without it one is started")
    parser.add_argument("--json", type=Path, help="write every run and the versions there")
    options = parser.parse_args()
    directory = options.directory.absolute()
    versions: dict[str, str] = {}
    for name in options.peers:
        try:
            versions[name] = install(name, directory)
        except Failed as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        server = options.database_url or stack.enter_context(temporary_cluster(settings=SERVER)).dsn
        shown, postmaster = asyncio.run(_look_at(server))
        setting = Setting(
            server=server,
            postmaster=postmaster,
            directory=directory,
            jobs=options.jobs,
            tasks=options.tasks,
            moments=options.moments,
        )
        results = asyncio.run(compare(setting, list(versions), options.workloads, options.runs))
    print_tables(results, versions, setting, shown)
    if options.json:
        options.json.write_text(json.dumps({"server": shown, "versions": versions, "results": results}, indent=1))
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
