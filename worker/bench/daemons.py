"""Real daemons: `worker run` processes on a schema of the bench, so that what is measured is what users run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from worker.bench.results import BenchFailed
from worker.clock import local_seconds
from worker.settings import Settings

HANDLERS = "worker.bench.handlers:handlers"
LOOK_AGAIN_SECONDS = 0.01
STOP_SECONDS = 20.0
NO_SETTINGS: Mapping[str, str] = {}

# What the bench decides by itself. Everything else that is set stays: it is what the user runs.
_OURS = ("DATABASE_URL_FILE", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "RUNTIME_DIRECTORY")
_OUR_SETTINGS = (
    "QUEUES",
    "NAME",
    "RETENTION_SECONDS",
    "DEAD_RETENTION_SECONDS",
    "LEDGER_RETENTION_SECONDS",
    "CONNECT_WAIT_SECONDS",
)


def daemon_environ(
    settings: Settings, *, schema: str, tasks: int, directory: Path, extra: Mapping[str, str] = NO_SETTINGS
) -> dict[str, str]:
    """The environment of a daemon: the caller's, with the bench's schema, handlers and number of worker tasks, and `extra`."""
    ours = {*_OURS, *(f"WORKER_{name}" for name in _OUR_SETTINGS)}
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    if settings.database_url is not None:
        environ["DATABASE_URL"] = settings.database_url.get_secret_value()
    return environ | {
        "WORKERS": str(tasks),
        "WORKER_SCHEMA": schema,
        "WORKER_HANDLERS": HANDLERS,
        "WORKER_NAME": "bench",
        "WORKER_RUNTIME_DIR": str(directory),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **extra,
    }


class Daemon:
    """One process. Its log goes to a file, as it would to a journal."""

    def __init__(self, environ: Mapping[str, str], log: Path) -> None:
        self._log = log
        command = [sys.executable, "-m", "worker", "run"]
        # If the bench itself is killed, its daemons must not go on working.
        if sys.platform == "linux" and (setpriv := shutil.which("setpriv")):
            command = [setpriv, "--pdeathsig", "KILL", "--", *command]
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                # A Ctrl-C is for the bench, which then ends its daemons.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def must_live(self) -> None:
        """Raises BenchFailed with its last words when it has ended."""
        status = self.process.poll()
        if status is not None:
            lines = self._log.read_text("utf-8", "replace").splitlines()
            raise BenchFailed(f"a daemon ended with status {status}: {lines[-1][:1000] if lines else 'it said nothing'}")

    async def stop(self) -> None:
        """SIGTERM, and wait for it: what its sessions have done is in the server's statistics then."""
        self.process.terminate()
        deadline = local_seconds() + STOP_SECONDS
        while self.process.poll() is None:
            if local_seconds() > deadline:
                return
            await asyncio.sleep(LOOK_AGAIN_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def daemons(environ: Mapping[str, str], directory: Path, count: int) -> AsyncIterator[list[Daemon]]:
    """So many daemons for the block; killed at its end, whatever they do."""
    started: list[Daemon] = []
    try:
        for number in range(count):
            started.append(Daemon(environ, directory / f"daemon-{number + 1}.log"))
        yield started
    finally:
        for daemon in started:
            daemon.kill()
