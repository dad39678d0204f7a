"""A primary and a standby on one machine, from the programs that the tests have. Unix sockets only."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.servers import SETTINGS, apply_schema
from tests.waiting import wait_for
from worker.cluster import Cluster, start_or_adopt
from worker.server_process import PORT
from worker.server_programs import ClusterError, programs_for, server_account

COPY_SECONDS = 60
STANDBY_NAME = "standby"
REPLICATION = {**SETTINGS, "max_connections": "100", "wal_keep_size": "256MB", "wal_receiver_status_interval": "1s"}


@functools.cache
def lacking() -> str | None:
    """What is missing for a standby, or None."""
    try:
        program = programs_for(server_account(Path("/nonexistent"))) / "pg_basebackup"
    except ClusterError as error:
        return str(error)
    return None if os.access(program, os.X_OK) else f"there is no {program}"


class Node:
    """One of the two servers; which of them is the primary changes."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self._account = server_account(data_dir / "postgresql")
        self._cluster: Cluster | None = None
        self._dsn = ""

    @property
    def dsn(self) -> str:
        """As superuser; also while it is down."""
        return self._dsn

    @property
    def socket_dir(self) -> str:
        assert self._cluster is not None
        return str(self._cluster.socket_dir)

    def start(self, **settings: str) -> None:
        self._cluster = start_or_adopt(self.data_dir, settings=REPLICATION | settings, die_with_parent=True)
        assert self._dsn in ("", self._cluster.dsn)
        self._dsn = self._cluster.dsn

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()

    def crash(self) -> None:
        """As by a loss of power: it writes nothing any more, not even to its standby."""
        assert self._cluster is not None
        os.kill(self._cluster.pid, signal.SIGQUIT)
        wait_for(lambda: not self.answers())
        self._cluster.stop()

    def answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError), self.connect():
            return True
        return False

    def copy_of(self, other: Node) -> None:
        """Throw away what this node has, and make it a standby of the other one, not yet started."""
        pgdata = self.data_dir / "postgresql"
        shutil.rmtree(pgdata, ignore_errors=True)
        self._account.own(self.data_dir)
        source = make_conninfo(host=other.socket_dir, port=PORT, user="postgres", application_name=STANDBY_NAME)
        # Not -R: it writes down all options that its own libpq knows, and the server may find an older one.
        program = programs_for(self._account) / "pg_basebackup"
        arguments = ("-D", pgdata, "-d", source, "-c", "fast", "-X", "stream")
        status, output = self._account.run(program, *arguments, timeout_seconds=COPY_SECONDS)
        assert status == 0, output
        signal_file = pgdata / "standby.signal"
        signal_file.touch()
        self._account.own(signal_file)
        with (pgdata / "postgresql.auto.conf").open("a") as conf:
            conf.write(f"primary_conninfo = '{source}'\n")

    def connect(self) -> psycopg.Connection[Any]:
        # local: a look of ours waits for no standby.
        return psycopg.connect(self.dsn, autocommit=True, connect_timeout=5, options="-c synchronous_commit=local")

    def value(self, statement: str, *arguments: object) -> Any:
        with self.connect() as connection:
            row = connection.execute(statement, arguments).fetchone()
            assert row is not None
            return row[0]

    def set(self, name: str, value: str) -> None:
        """In its own configuration, at once."""
        with self.connect() as connection:
            connection.execute(sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), value))
            connection.execute("SELECT pg_reload_conf()")
            wait_for(lambda: self.value("SELECT current_setting(%s)", name) == value)

    def promote(self) -> None:
        assert self.value("SELECT pg_promote(true, 30)")


class Pair:
    """`primary` and `standby`, and what a failover makes of them. `url` leads to whichever of them can be written to."""

    def __init__(self, first: Node, second: Node) -> None:
        self.primary = first
        self.standby = second
        sockets = ",".join(quote(node.socket_dir, safe="") for node in (first, second))
        self.url = f"postgresql://postgres@/postgres?host={sockets}&port={PORT},{PORT}&target_session_attrs=read-write"

    def synchronous(self) -> None:
        """From now on the primary acknowledges what its standby has, and nothing else."""
        self.primary.set("synchronous_standby_names", STANDBY_NAME)
        wait_for(lambda: self.primary.value("SELECT bool_or(sync_state = 'sync') FROM pg_stat_replication"))

    def fail_over(self) -> float:
        """Promote the standby. It waits for no other. Returns the local moment from which it takes writes."""
        self.standby.set("synchronous_standby_names", "")
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary
        return time.monotonic()


@contextlib.contextmanager
def pairs() -> Iterator[Pair]:
    """A primary with the schema and its asynchronous standby; both are gone after the block."""
    account = server_account(Path("/nonexistent"))
    with contextlib.ExitStack() as stack:

        def node() -> Node:
            directory = account.temporary_directory("rw-node-")
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            if account.user is not None:
                directory.chmod(0o711)
            one = Node(directory)
            stack.callback(one.stop)
            return one

        first, second = node(), node()
        first.start()
        apply_schema(first.dsn)
        second.copy_of(first)
        second.start()
        yield Pair(first, second)
