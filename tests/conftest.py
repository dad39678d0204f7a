"""Fixtures that several test files share: a database of one's own, a server of one's own, real daemons."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType

import asyncpg
import psycopg
import pytest
from psycopg.rows import namedtuple_row

import tests.fuzzing  # noqa: F401  (the profile of every test with generated input)
from tests.generators import Fleet
from tests.lease_rows import Db
from tests.pooled_workplace import PooledWorkplace, pooled_by
from tests.processes import ROOT, Daemon, daemons
from tests.servers import PrivateCluster, Server, private_clusters, session_server
from tests.serving import Served, serving
from tests.slots import Instance
from tests.waiting import wait_for
from tests.workplace import Workplace
from worker import Leases
from worker.cluster import start_or_adopt
from worker.server_programs import server_account
from worker.store.connection import Database

# The controller starts the server before xdist starts its workers, which find it here.
HANDED_DOWN = "RELIABLE_WORKER_TEST_SERVER"

# Under nohup, or in the background of a script, these are ignored, and so they would be in all processes that the tests start.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

SERVER = pytest.StashKey[Server]()
CLOSING = pytest.StashKey[contextlib.ExitStack]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if handed_down := os.environ.get(HANDED_DOWN):
        config.stash[SERVER] = Server(**json.loads(handed_down))
    elif not config.option.collectonly:
        config.stash[CLOSING] = contextlib.ExitStack()
        server = config.stash[CLOSING].enter_context(session_server(os.environ))
        config.stash[SERVER] = server
        os.environ[HANDED_DOWN] = json.dumps(dataclasses.asdict(server))
        config.stash[CLOSING].callback(os.environ.pop, HANDED_DOWN)


def pytest_unconfigure(config: pytest.Config) -> None:
    if CLOSING in config.stash:
        config.stash[CLOSING].close()


def pytest_report_header(config: pytest.Config) -> str | None:
    server = config.stash.get(SERVER, None)
    return f"PostgreSQL: {server.version} ({server.origin})" if server else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first: what is long and begins last is waited for by everybody."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Server:
    """The server that all tests share; tests change nothing in it beyond their own database and roles."""
    return pytestconfig.stash[SERVER]


@pytest.fixture
def database_url(server: Server) -> Iterator[str]:
    """A fresh database with the schema, as superuser."""
    with server.database(template=server.template) as url:
        yield url


@pytest.fixture
def db(database_url: str) -> Iterator[Db]:
    """A connection to the fresh database, in autocommit; rows have names."""
    with psycopg.connect(database_url, autocommit=True, row_factory=namedtuple_row) as connection:
        yield connection


@pytest.fixture
def other(database_url: str) -> Iterator[Db]:
    """Another connection like `db`: somebody else's."""
    with psycopg.connect(database_url, autocommit=True, row_factory=namedtuple_row) as connection:
        yield connection


@pytest.fixture
async def leases(database_url: str) -> AsyncIterator[Leases]:
    """The named leases of the fresh database, entered."""
    async with Leases(database_url, holder="me") as entered:
        yield entered


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A plain connection of an application to the fresh database."""
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


@pytest.fixture
def empty_database_url(server: Server) -> Iterator[str]:
    """A fresh database with nothing in it, as superuser."""
    with server.database() as url:
        yield url


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses; bound and not listening, so that nobody else gets it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def private_cluster() -> Iterator[Callable[..., PrivateCluster]]:
    """`private_cluster(**settings)`: a server to crash, alter or stop."""
    with private_clusters() as make:
        yield make


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """For `--embedded --data-dir`: not made yet, open to the server's user; what runs there is ended."""
    parent = server_account(Path("/nonexistent")).temporary_directory("rw-test-")
    if os.geteuid() == 0:
        parent.chmod(0o711)
    directory = parent / "data"
    yield directory
    if (directory / "postgresql" / "PG_VERSION").exists():
        start_or_adopt(directory).stop()
    shutil.rmtree(parent)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """`daemon(*arguments, DATABASE_URL=…, WORKERS=…)`: a real `worker run` process, killed after the test."""
    with daemons(tmp_path) as start:
        yield start


@pytest.fixture
def workplace(database_url: str, daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Workplace]:
    """A fresh database, and daemons on it whose handlers are those of `handlers_for_tests`."""
    with contextlib.closing(Workplace(database_url, tmp_path, daemon)) as place:
        yield place


@pytest.fixture
def private_workplace(
    private_cluster: Callable[..., PrivateCluster], daemon: Callable[..., Daemon], tmp_path: Path
) -> Iterator[Workplace]:
    """The same on a server of its own, whose processes may be frozen and killed."""
    with contextlib.closing(Workplace.on(private_cluster(), tmp_path, daemon)) as place:
        yield place


@pytest.fixture
def pooled(server: Server, database_url: str, daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[PooledWorkplace]:
    """A fresh database, and daemons that go to it through a PgBouncer of their own."""
    place = PooledWorkplace(database_url, tmp_path, daemon)
    with contextlib.closing(place), pooled_by(place, server.dsn):
        yield place


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """`serve(database_url, …)`: a real `worker serve` process, killed after the test."""
    with serving(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def served(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a token on a database of its own, which the tests of a file share: each has a queue of its own in it."""
    with server.database(template=server.template) as url, serving(tmp_path_factory.mktemp("served")) as start:
        yield start(url)


@pytest.fixture
def no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_for(lambda: set(threading.enumerate()) <= before)


@pytest.fixture
def patient(private_cluster: Callable[..., PrivateCluster], serve: Callable[..., Served]) -> Served:
    """A server that waits long for its statements, on a database server of its own, whose processes may be frozen."""
    long = {"WORKER_LEASE_SECONDS": "60", "WORKER_CLAIM_TIMEOUT_SECONDS": "20", "WORKER_QUERY_TIMEOUT_SECONDS": "20"}
    return serve(private_cluster().dsn, **long)


@pytest.fixture
def queue() -> str:
    """The name of a queue that no other test uses."""
    return f"queue-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def name() -> str:
    """The name of a lease that no other test uses."""
    return f"name-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of examples/ as if one stood in that directory."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield importlib.import_module
    for name in list(sys.modules):
        if name in ("app", "monolith") or name.startswith("app."):
            del sys.modules[name]


@pytest.fixture
async def instance(database_url: str) -> AsyncIterator[Instance]:
    """The generator's slots on a fresh database: it has the lease, and is started with a slot a second."""
    database = Database(database_url)
    connection = await database.connect("test")
    one = Instance(database, connection)
    await one.acquire()
    await one.start()
    yield one
    await connection.close()


@pytest.fixture
def fleet(database_url: str, tmp_path: Path) -> Iterator[Fleet]:
    """Instances of the generator on a fresh database, killed after the test."""
    with contextlib.closing(Fleet(database_url, tmp_path)) as one:
        yield one
