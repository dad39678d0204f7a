"""Where the tests get a PostgreSQL: TEST_DATABASE_URL, else a container, else the embedded server.

One server serves a whole session, all its xdist workers included; each test has a database of its own in it.
What needs a server of its own, to crash it or to alter it, takes a `PrivateCluster`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import conninfo, sql

from tests.processes import ROOT
from tests.waiting import wait_for
from worker.cluster import Cluster, start_or_adopt, temporary_cluster

SCHEMA_SQL = ROOT / "schema.sql"

# Each test brings a database of its own, and with it statements that are new: where they are too many, the youngest are forgotten.
SETTINGS = {"max_connections": "300", "shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.max": "100000"}
DEFAULT_IMAGE = "postgres:17"

# The server is shared, and pg_locks shows the locks of all databases, those of other tests too.
WAIT_FOR_US = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"
"""How many sessions wait for a lock of the one that asks."""
ADVISORY_LOCKS = """
SELECT count(*) FROM pg_locks
WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
DOCKER_SECONDS = 3
PULL_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that tests share: `dsn` is a superuser's, `template` a database that holds the schema."""

    dsn: str
    template: str
    origin: str
    version: str

    @contextlib.contextmanager
    def database(self, *, template: str = "template0") -> Iterator[str]:
        """The URL of a fresh database, dropped at the end whoever is still connected to it."""
        name = f"test_{uuid.uuid4().hex[:16]}"
        execute(self.dsn, "CREATE DATABASE {} TEMPLATE {}", name, template)
        try:
            yield with_database(self.dsn, name)
        finally:
            execute(self.dsn, "DROP DATABASE IF EXISTS {} WITH (FORCE)", name)


@contextlib.contextmanager
def session_server(environ: Mapping[str, str]) -> Iterator[Server]:
    """The server of a test session, with its template."""
    with contextlib.ExitStack() as stack:
        if dsn := environ.get("TEST_DATABASE_URL"):
            origin = "TEST_DATABASE_URL"
        elif container := _container(environ.get("TEST_POSTGRES_IMAGE", DEFAULT_IMAGE)):
            dsn, origin = stack.enter_context(container), "testcontainers"
        else:
            dsn, origin = stack.enter_context(temporary_cluster(settings=SETTINGS)).dsn, "embedded"
        template = f"test_template_{uuid.uuid4().hex[:8]}"
        execute(dsn, "CREATE DATABASE {} TEMPLATE template0", template)
        stack.callback(execute, dsn, "DROP DATABASE IF EXISTS {} WITH (FORCE)", template)
        apply_schema(with_database(dsn, template))
        with psycopg.connect(dsn) as connection:
            version = connection.execute("SHOW server_version").fetchone()[0]
        yield Server(dsn=dsn, template=template, origin=origin, version=version)


def apply_schema(dsn: str) -> None:
    """What `psql -f schema.sql` does."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(SCHEMA_SQL.read_text())


def execute(dsn: str, statement: str, *names: str) -> None:
    """One statement outside a transaction, with names quoted."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


def schemas_like(url: str, prefix: str) -> list[str]:
    """The schemas whose names begin so."""
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT nspname FROM pg_namespace WHERE nspname ^@ %s", [prefix])]


def with_database(dsn: str, name: str) -> str:
    """The same server and role, another database."""
    if "://" in dsn:
        return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))
    return conninfo.make_conninfo(dsn, dbname=name)


class PrivateCluster:
    """A throw-away embedded server for one test, with the schema in its database `postgres`.

    It may be stopped, crashed and started again: the data and `dsn` stay.
    """

    def __init__(self, cluster: Cluster, settings: Mapping[str, str]) -> None:
        self.cluster = cluster
        self.dsn = cluster.dsn
        self._settings = settings
        apply_schema(self.dsn)

    def stop(self) -> None:
        self.cluster.stop()

    def start(self) -> None:
        self.cluster = start_or_adopt(self.cluster.data_dir, settings=self._settings, die_with_parent=True)
        assert self.cluster.dsn == self.dsn


@contextlib.contextmanager
def private_clusters() -> Iterator[Callable[..., PrivateCluster]]:
    """A factory, called with server settings; what it made is stopped and removed at the end."""
    with contextlib.ExitStack() as stack:

        def make(**settings: str) -> PrivateCluster:
            settings = SETTINGS | settings
            server = PrivateCluster(stack.enter_context(temporary_cluster(settings=settings)), settings)
            stack.callback(lambda: server.stop())
            return server

        yield make


@contextlib.contextmanager
def commits_wait_for_a_standby(url: str) -> Iterator[None]:
    """On a server of one's own: every COMMIT is applied, and answered to nobody."""

    def name_standby(name: str) -> None:
        with psycopg.connect(url, autocommit=True, options="-c synchronous_commit=local") as other:
            other.execute(sql.SQL("ALTER SYSTEM SET synchronous_standby_names = {}").format(sql.Literal(name)))
            other.execute("SELECT pg_reload_conf()")

    name_standby("ghost")
    try:
        _wait_until_commits_wait(url)
        yield
    finally:
        name_standby("")


def _wait_until_commits_wait(url: str) -> None:
    """A reload is heard of a little later."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event = 'SyncRep'"
    with (
        psycopg.connect(url, autocommit=True, options="-c synchronous_commit=on") as one,
        psycopg.connect(url, autocommit=True, options="-c synchronous_commit=local") as other,
        ThreadPoolExecutor(1) as thread,
    ):
        pid = one.info.backend_pid

        def waits() -> bool:
            [(count,)] = other.execute(waiting, (pid,)).fetchall()
            return count == 1

        def is_in_force() -> bool:
            asked = thread.submit(one.execute, "SELECT pg_logical_emit_message(true, 'probe', '')")
            wait_for(lambda: asked.done() or waits())
            if asked.done():
                return False
            other.execute("SELECT pg_cancel_backend(%s)", (pid,))
            asked.result(60)
            return True

        wait_for(is_in_force)


def _container(image: str) -> contextlib.AbstractContextManager[str] | None:
    """The URL of a PostgreSQL in a container, or None where Docker or the image is not to be had in time."""
    if not _docker_listens():
        return None
    import docker

    try:
        with contextlib.closing(docker.from_env(timeout=DOCKER_SECONDS)) as client:
            images = client.images.list(name=image)
    except (docker.errors.DockerException, OSError):
        return None
    if not images and not _pulled(image):
        return None
    return _run_container(image)


def _docker_listens() -> bool:
    """Asked by hand, since Docker's own client leaves sockets open when nobody answers."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not host.startswith("unix://"):
        return True
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DOCKER_SECONDS)
        return connection.connect_ex(host.removeprefix("unix://")) == 0


def _pulled(image: str) -> bool:
    """Whether the image came in time; a pull that hangs is left behind."""
    import docker

    arrived = threading.Event()

    def pull() -> None:
        with contextlib.suppress(docker.errors.DockerException):
            docker.from_env().images.pull(image)
            arrived.set()

    thread = threading.Thread(target=pull, daemon=True)
    thread.start()
    thread.join(PULL_SECONDS)
    return arrived.is_set()


@contextlib.contextmanager
def _run_container(image: str) -> Iterator[str]:
    from testcontainers.community.postgres import PostgresContainer

    arguments = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
    with PostgresContainer(image, driver=None).with_command(arguments) as container:
        yield container.get_connection_url()
