"""The libraries under comparison: what each needs, and its environment, made by its own package manager.

A library that cannot be installed here stays in the tables, with the reason in place of its figures.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

OURS = "reliable-worker"
DELETING = f"{OURS}-deleting"
INSTALL_SECONDS = 300


class Failed(Exception):
    """No figure, and why; the others go on."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    unfinished: str
    """A query that is true while a job of the run is not completed; `{jobs}` is their number."""
    packages: tuple[str, ...] = ()
    venv: str = ""
    node: bool = False
    least_python: tuple[int, int] = (3, 11)
    environ: dict[str, str] = field(default_factory=dict)
    atomic: bool = False
    """Whether the effect and the completion are one transaction as the workload is written here."""
    deletes: bool = False
    """Whether a finished job leaves no row in its table of jobs."""
    fewer: int = 1
    """It gets that share of the jobs, where enqueueing or running all of them would take minutes."""


_PYTHON = ("asyncpg", "uvloop")
_PSYCOPG = ("psycopg[binary,pool]", *_PYTHON)
_OUR_UNFINISHED = "SELECT EXISTS (SELECT FROM jobs WHERE state = 'ready') OR EXISTS (SELECT FROM jobs WHERE state = 'running')"
_GRAPHILE = Peer(
    node=True,
    packages=("graphile-worker", "pg"),
    unfinished="SELECT EXISTS (SELECT FROM graphile_worker._private_jobs)",
    deletes=True,
)
_PGQUEUER = Peer(venv="pgqueuer", packages=("pgqueuer", *_PYTHON), unfinished="SELECT EXISTS (SELECT FROM pgqueuer)", deletes=True)
_PGBOSS = Peer(
    node=True,
    packages=("pg-boss", "pg"),
    unfinished="SELECT EXISTS (SELECT FROM pgboss.job WHERE name = 'compared' AND state IN ('created', 'active', 'retry'))",
)
PEERS = {
    OURS: Peer(unfinished=_OUR_UNFINISHED, atomic=True),
    # As graphile-worker and PgQueuer do: a finished job's row is deleted.
    DELETING: Peer(unfinished=_OUR_UNFINISHED, environ={"WORKER_RETENTION_SECONDS": "0"}, atomic=True, deletes=True),
    "graphile": _GRAPHILE,
    "graphile-local": _GRAPHILE,
    "pgqueuer": _PGQUEUER,
    "pgqueuer-free": _PGQUEUER,
    "pgqueuer-batch": _PGQUEUER,
    "procrastinate": Peer(
        venv="procrastinate",
        packages=("procrastinate", *_PSYCOPG),
        unfinished="SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))",
        fewer=4,
    ),
    "oban": Peer(
        venv="oban",
        packages=("oban", *_PSYCOPG),
        least_python=(3, 12),
        unfinished="SELECT EXISTS (SELECT FROM oban_jobs WHERE state IN ('available', 'executing', 'scheduled', 'retryable'))",
    ),
    "saq": Peer(
        venv="saq",
        packages=("saq[postgres]", *_PSYCOPG),
        unfinished="SELECT EXISTS (SELECT FROM saq_jobs WHERE status IN ('queued', 'active'))",
        fewer=4,
    ),
    "chancy": Peer(
        venv="chancy",
        packages=("chancy", *_PSYCOPG),
        unfinished="SELECT EXISTS (SELECT FROM chancy_jobs WHERE state IN ('pending', 'running', 'retrying'))",
        fewer=4,
    ),
    "absurd": Peer(
        venv="absurd",
        packages=("absurd-sdk", "absurdctl", *_PSYCOPG),
        unfinished="SELECT EXISTS (SELECT FROM absurd.t_compared WHERE state IN ('pending', 'running', 'sleeping'))",
        fewer=8,
    ),
    "awa": Peer(
        venv="awa",
        packages=("awa-pg", *_PYTHON),
        unfinished=(
            "SELECT (SELECT COALESCE(sum(cardinality(job_ids)), 0) FROM awa.receipt_completion_batches)"
            " + (SELECT count(*) FROM awa.done_entries) < {jobs}"
        ),
        fewer=4,
    ),
    "dbos": Peer(
        venv="dbos",
        packages=("dbos", *_PYTHON),
        unfinished="SELECT EXISTS (SELECT FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING'))",
        fewer=8,
    ),
    "pg-boss": _PGBOSS,
    "pg-boss-batch": _PGBOSS,
}


def is_ours(name: str) -> bool:
    return name.startswith(OURS)


def home_of(name: str, directory: Path) -> Path:
    """Where the environment of a library is."""
    peer = PEERS[name]
    return directory / (f"node-{peer.packages[0]}" if peer.node else peer.venv)


def install(name: str, directory: Path) -> str:
    """The environment of a peer, made if it is not there; returns the version of what is in it. Raises Failed."""
    peer = PEERS[name]
    if is_ours(name):
        return "this checkout"
    place = home_of(name, directory)
    stamp = place / "installed"
    if not stamp.exists():
        print(f"installing {', '.join(peer.packages)} …", file=sys.stderr)
        place.mkdir(parents=True, exist_ok=True)
        if peer.node:
            (place / "package.json").write_text("{}")
            run(["npm", "install", "--no-audit", "--no-fund", *peer.packages], cwd=place)
            stamp.write_text(run(["npm", "ls", "--depth=0"], cwd=place))
        else:
            run([_python(peer.least_python), "-m", "venv", "--clear", str(place)])
            run([str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *peer.packages])
            stamp.write_text(run([str(place / "bin" / "python"), "-m", "pip", "freeze"]))
    main = peer.packages[0].partition("[")[0]
    return next((line.strip("├─└ \n") for line in stamp.read_text().splitlines() if line.strip("├─└ ").startswith(main)), main)


def _python(least: tuple[int, int]) -> str:
    if sys.version_info[:2] >= least:
        return sys.executable
    for minor in range(least[1], least[1] + 10):
        managed = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3.{minor}"))
        for found in (shutil.which(f"python3.{minor}"), *managed):
            # A shim of a version manager may be there without the version.
            if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
                return str(found)
    raise Failed(f"it needs Python {least[0]}.{least[1]}")


def run(command: list[str], *, cwd: Path | None = None, environ: dict[str, str] | None = None) -> str:
    """What it prints on standard output. Raises Failed with its last words when it does not end well, and in time."""
    try:
        done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(str(error)) from None
    if done.returncode:
        raise Failed(f"{' '.join(command)[:200]}: {(done.stderr or done.stdout).strip()[-1500:]}")
    return done.stdout
