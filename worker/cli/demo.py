"""`worker demo`: the whole promise in under a minute, on a PostgreSQL of its own that is gone afterwards.

1,000 sample jobs, two daemon processes, one of them killed with SIGKILL half-way; in the end the database is asked
whether every effect was applied once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib import resources
from pathlib import Path
from types import FrameType

import typer

from worker.cli.printing import flush, is_terminal, print_error, print_line, print_rows
from worker.clock import local_seconds
from worker.store import demonstration, schema
from worker.store.bulk import enqueue_many
from worker.store.connection import Connection, Database
from worker.store.demonstration import Outcome, Progress

# Short, so that the jobs of the killed process come back soon.
LEASE_SECONDS = 3
WORKERS = 4
LIMIT_SECONDS = 55.0
STOP_SECONDS = 20.0
LOOK_AGAIN_SECONDS = 0.1
NEXT = """
Try next{where}:
  worker run --embedded                                        a daemon with a PostgreSQL of your own, until Ctrl-C
  worker enqueue --embedded message '{{"message": "hello"}}'     in another terminal: a job for it
  worker jobs list --embedded                                  what became of it
"""

Show = Callable[[Progress], None]


def demo() -> None:
    """Run 1,000 sample jobs in two processes, kill one of them half-way, and show that nothing is lost or done twice."""
    from worker.cluster import temporary_cluster

    with _terminating_as_interrupt(), tempfile.TemporaryDirectory(prefix="reliable-worker-demo-") as directory:
        _say("Starting a PostgreSQL for this demo …")
        with temporary_cluster() as cluster:
            fault = asyncio.run(_demonstrate(Database(cluster.dsn, environ={}), cluster.dsn, Path(directory)))
    if fault is not None:
        print_error(fault)
        raise typer.Exit(1)
    print_line(NEXT.format(where=_where_worker_is()).rstrip())


def _where_worker_is() -> str:
    """What to do first where the shell does not find `worker`: this one was started by its whole path."""
    bin_directory = Path(sys.executable).parent
    if shutil.which("worker") or not (bin_directory / "activate").exists():
        return ""
    return f", after `. {os.path.relpath(bin_directory / 'activate')}`"


async def _demonstrate(database: Database, dsn: str, directory: Path) -> str | None:
    """The whole show; returns what went wrong, or None."""
    started_at = local_seconds()
    connection = await database.connect("demo", statement_timeout_seconds=10)
    try:
        await schema.migrate(connection, database.schema)
        await demonstration.note_effects(connection, database)
        jobs = [json.loads(line) for line in (resources.files("worker") / "samples.jsonl").read_text("utf-8").splitlines()]
        await enqueue_many(connection, [_with_moment(job) for job in jobs])
        _say(f"Enqueued {len(jobs):,} jobs. Starting two processes with {WORKERS} worker tasks each …")
        with _daemon("demo-1", dsn, directory) as victim, _daemon("demo-2", dsn, directory) as survivor, _progress() as show:
            async with asyncio.timeout(LIMIT_SECONDS):
                await _until(connection, database, show, (victim, survivor), len(jobs) // 2)
                victim.process.kill()
                victim.process.wait()
                killed_at_seconds = await demonstration.read_clock(connection)
                held = await demonstration.read_held(connection, database, victim.name)
                _say(f"Killed process {victim.process.pid} with SIGKILL; it held {len(held)} jobs.")
                await _until(connection, database, show, (survivor,), len(jobs))
            survivor.process.terminate()
            status = survivor.process.wait(STOP_SECONDS)
        outcome = await demonstration.read_outcome(connection, database, held=held, killed_at_seconds=killed_at_seconds)
        _show_outcome(outcome, victim.process.pid, len(held), local_seconds() - started_at)
        if status != 0:
            return f"the surviving process ended with status {status}: {survivor.last_words()}"
        if not outcome.jobs == outcome.succeeded == outcome.once == len(jobs) or outcome.recovered != len(held):
            return "that is not what was promised: please report it"
        return None
    except TimeoutError:
        return f"not done within {LIMIT_SECONDS:.0f} s"
    except _Ended as error:
        return str(error)
    finally:
        connection.terminate()


class _Ended(Exception):
    """A daemon ended that should not have."""


class _Daemon:
    """One `worker run` process of the demo."""

    def __init__(self, name: str, dsn: str, directory: Path) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        # Nothing of the user's own configuration has a say here.
        environ = {
            variable: value
            for variable, value in os.environ.items()
            if not variable.startswith(("WORKER", "PG", "DATABASE_URL", "NOTIFY_SOCKET"))
        }
        environ |= {
            "DATABASE_URL": dsn,
            "WORKERS": str(WORKERS),
            "WORKER_LEASE_SECONDS": str(LEASE_SECONDS),
            "WORKER_NAME": name,
            "WORKER_RUNTIME_DIR": str(directory),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        command = [sys.executable, "-m", "worker", "run"]
        # If the demo itself is killed, its daemons must not go on looking for a database that is gone.
        if sys.platform == "linux" and (setpriv := shutil.which("setpriv")):
            command = [setpriv, "--pdeathsig", "KILL", *command]
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                # A Ctrl-C is for the demo, which then ends its processes.
                start_new_session=True,
            )

    def last_words(self) -> str:
        lines = self._log.read_text("utf-8", "replace").splitlines()
        return lines[-1] if lines else "it said nothing"


@contextlib.contextmanager
def _daemon(name: str, dsn: str, directory: Path) -> Iterator[_Daemon]:
    daemon = _Daemon(name, dsn, directory)
    try:
        yield daemon
    finally:
        daemon.process.kill()
        daemon.process.wait()


async def _until(connection: Connection, database: Database, show: Show, daemons: tuple[_Daemon, ...], ended: int) -> None:
    """Show progress until so many jobs have ended. Raises _Ended when a daemon gives up before."""
    while True:
        progress = await demonstration.read_progress(connection, database)
        show(progress)
        if progress.ended >= ended:
            return
        for daemon in daemons:
            if daemon.process.poll() is not None:
                raise _Ended(f"process {daemon.name} ended with status {daemon.process.returncode}: {daemon.last_words()}")
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


@contextlib.contextmanager
def _progress() -> Iterator[Show]:
    """A bar for a person, a line for every tenth of the way in a pipe."""
    if not is_terminal():
        shown = -1

        def show_line(progress: Progress) -> None:
            nonlocal shown
            tenth = progress.ended * 10 // max(progress.total, 1)
            if tenth > shown:
                shown = tenth
                _say(f"{progress.ended} of {progress.total} jobs done, {progress.running} claimed")

        yield show_line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    with Bar(TextColumn("jobs done"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("")

        def show_bar(progress: Progress) -> None:
            bar.update(task, total=progress.total, completed=progress.ended)

        yield show_bar


def _show_outcome(outcome: Outcome, pid: int, held: int, seconds: float) -> None:
    recovery = "-" if outcome.recovery_seconds is None else f"{outcome.recovery_seconds:.1f} s after the kill"
    print_line("")
    print_rows(
        ("what", "result"),
        [
            ("jobs", outcome.jobs),
            ("jobs succeeded", outcome.succeeded),
            ("effects applied once", outcome.once),
            ("effects missing", outcome.missing),
            ("effects applied twice or more", outcome.repeated),
            (f"jobs held by process {pid} when it was killed", held),
            ("of these recovered by the other process", outcome.recovered),
            ("last of these done", recovery),
            ("all of this took", f"{seconds:.1f} s"),
        ],
        nothing="",
    )


def _with_moment(job: dict[str, object]) -> dict[str, object]:
    if isinstance(job.get("run_at"), str):
        return job | {"run_at": datetime.fromisoformat(str(job["run_at"]))}
    return job


def _say(text: str) -> None:
    print_line(text)
    flush()


@contextlib.contextmanager
def _terminating_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP clean up as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
