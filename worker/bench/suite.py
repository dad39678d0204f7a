"""The bench as a whole: its scenarios, one after the other, and the document of everything that a reader needs to judge them."""

from __future__ import annotations

import importlib.metadata
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from worker.bench import (
    aged,
    contended,
    drain,
    enqueueing,
    faults,
    history,
    latency,
    ledger,
    machine,
    payloads,
    processes,
    pruning,
    shapes,
    snapshot,
)
from worker.bench.daemons import daemon_environ
from worker.bench.results import BenchFailed
from worker.bench.running import TIMING, Bench, Plan
from worker.clock import local_seconds
from worker.settings import Settings, load_settings
from worker.store import benchmarks, costs
from worker.store.connection import DATABASE_ERRORS, Database, safe_text
from worker.version import VERSION

SCENARIOS: Final[Mapping[str, Callable[[Bench], Awaitable[None]]]] = {
    "drain": drain.measure,
    "latency": latency.measure,
    "enqueue": enqueueing.measure,
    "history": history.measure,
    "snapshot": snapshot.measure,
    "processes": processes.measure,
    "payloads": payloads.measure,
    "faults": faults.measure,
    "contended": contended.measure,
    "shapes": shapes.measure,
    "pruning": pruning.measure,
    "aged": aged.measure,
    "ledger": ledger.measure,
}

USUAL: Final = ("drain", "latency", "enqueue", "history", "snapshot", "processes")
"""Those that are measured when none is named."""

# All but `public`, so that nothing of a bench looks like anything of an application.
SCHEMA_PREFIX: Final = "worker_bench_"

FAILURES: Final[tuple[type[Exception], ...]] = (BenchFailed, *DATABASE_ERRORS)

_LIBRARIES: Final = ("asyncpg", "uvloop", "orjson", "pydantic", "structlog")
_DURABILITY: Final = ("fsync", "synchronous_commit", "full_page_writes", "wal_level", "synchronous_standby_names")
# What a daemon is told where it is, and secrets.
_NOT_TOLD: Final = {"database_url", "listen_database_url", "runtime_dir", "name", "schema_name", "handlers", "workers", "queues"}


async def run(
    settings: Settings,
    plan: Plan,
    *,
    directory: Path,
    database_of: Callable[[str], Database],
    say: Callable[[str], None],
) -> tuple[Bench, dict[str, object], list[str]]:
    """Measure what the plan says. Returns the bench, its document, and what failed, a line each.

    A scenario that fails is left out and named; the others go on. Raises SchemaError before anything is measured when the role
    may not create a schema.
    """
    started_at = local_seconds()
    here = machine.this_machine()
    prefix = f"{SCHEMA_PREFIX}{secrets.token_hex(4)}"
    connection = await database_of(prefix).connect("bench")
    try:
        session = await benchmarks.describe(connection)
        view = await costs.statements_view(connection)
        # While the session is there: afterwards its process is gone.
        postmaster = machine.postmaster_of(session.backend, user=session.user, database=session.database)
    finally:
        connection.terminate()
    bench = Bench(
        plan=plan,
        settings=settings,
        directory=directory,
        schema_prefix=prefix,
        database_of=database_of,
        say=say,
        postmaster=postmaster,
        statements_view=view,
    )
    async with bench.arena("check"):
        pass  # may this role create a schema at all?
    failures: list[str] = []
    for name in plan.scenarios:
        try:
            await SCENARIOS[name](bench)
        except* FAILURES as group:
            failures.append(f"{name}: {'; '.join(map(_reason, _leaves(group)))}")
    failures += bench.left_behind
    document = {
        "version": VERSION,
        "started_at": session.started_at,
        "duration_seconds": round(local_seconds() - started_at, 1),
        "timing": TIMING,
        "machine": asdict(here),
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "database": {
            "version": session.version,
            "on_this_machine": bench.postmaster is not None,
            "durability": {name: session.settings.get(name) for name in _DURABILITY},
            "settings": {name: value for name, value in session.settings.items() if name not in _DURABILITY},
        },
        "daemon_settings": _daemon_settings(bench),
        "plan": asdict(plan),
        "not_measured": _not_measured(bench),
        "failures": failures,
        **bench.book.document(),
    }
    return bench, document, failures


def _daemon_settings(bench: Bench) -> dict[str, object]:
    environ = daemon_environ(bench.settings, schema=bench.schema_prefix, tasks=bench.plan.tasks[0], directory=bench.directory)
    return load_settings(environ).model_dump(exclude=_NOT_TOLD)


def _not_measured(bench: Bench) -> dict[str, str]:
    """What is missing from the figures, and why."""
    missing: dict[str, str] = {}
    if not machine.has_proc():
        missing["worker_cpu_seconds, cores_busy"] = "this system has no /proc"
    if bench.postmaster is None:
        missing["server_cpu_seconds"] = "the server does not run on this machine, or its processes cannot be seen in /proc"
    if bench.statements_view is None:
        missing["statements"] = (
            "pg_stat_statements is not installed in this database, not preloaded, or not readable; transactions come from "
            "pg_stat_database, where a BEGIN … COMMIT counts once"
        )
    return missing


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    return safe_text(error)
