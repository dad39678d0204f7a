"""Instances of the generator as processes, a way to cut one of them off, and what the database says that came of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg.rows import namedtuple_row

from tests.commands import worker
from tests.processes import Daemon, environment
from tests.waiting import wait_for
from tests.workplace import frozen

LEASE_SECONDS = 1.0
SLOW_MACHINE_SECONDS = 10.0
"""What a busy machine may add to a bound: a new process may take seconds to start there."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
VARIABLES = {
    "WORKER_LEASE_SECONDS": f"{LEASE_SECONDS:g}",
    "WORKER_QUERY_TIMEOUT_SECONDS": "1",
    "WORKER_LOG_LEVEL": "debug",
}
CALM = {"WORKER_LEASE_SECONDS": "60", "WORKER_QUERY_TIMEOUT_SECONDS": "10"}
"""For what is not about an expiry: no stall of the machine costs the lease, or keeps it from being released."""


class Fleet:
    """Instances of the generator on one database, and what they have produced."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.db: psycopg.Connection[Any] = psycopg.connect(url, autocommit=True, row_factory=namedtuple_row)
        self.instances: list[Daemon] = []
        self._numbers = itertools.count(1)

    def run(self, *arguments: str, **variables: str) -> Daemon:
        """One more instance."""
        return self.run_below((), *arguments, **variables)

    def run_below(self, command: tuple[str, ...], *arguments: str, **variables: str) -> Daemon:
        """One more instance, started by this command."""
        command = (*command, sys.executable, "-m", "worker", "generator", "run", *arguments)
        name = f"generator-{next(self._numbers)}"
        environ = environment(self.directory, **({"DATABASE_URL": self.url} | VARIABLES | variables))
        self.instances.append(Daemon(command, environ, self.directory, name))
        return self.instances[-1]

    def lead(self, *arguments: str, **variables: str) -> Daemon:
        """One more instance, once it has the lease."""
        instance = self.run(*arguments, **variables)
        instance.wait_for_event("generator_leader", 30)
        return instance

    def stand_by(self, **variables: str) -> Daemon:
        """One more instance, once it has found another one producing."""
        instance = self.run(**variables)
        instance.wait_for_event("generator_standby", 30)
        return instance

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return worker("generator", *arguments, directory=self.directory, DATABASE_URL=self.url)

    def status(self) -> dict[str, Any]:
        done = self.command("status", "--json")
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def value(self, statement: str, *arguments: object) -> Any:
        row = self.db.execute(statement, arguments).fetchone()
        assert row is not None
        return row[0]

    @property
    def holder(self) -> str | None:
        live = "SELECT holder FROM leases WHERE resource = 'generator' AND released_at IS NULL AND expires_at > now()"
        row = self.db.execute(live).fetchone()
        return None if row is None else row[0]

    def leader(self) -> Daemon:
        """The instance that has the lease, once there is one."""

        def found() -> list[Daemon]:
            holder = self.holder
            return [one for one in self.instances if one.find("generator_leader", worker=holder)]

        return wait_for(found, 30)[0]

    def slots(self) -> list[tuple[datetime, timedelta]]:
        """The moment of each slot that has a job and how late it came, in the order of production."""
        rows = self.db.execute("SELECT idempotency_key AS key, created_at FROM jobs ORDER BY id").fetchall()
        moments = [datetime.fromisoformat(row.key.removeprefix("generator:")) for row in rows]
        return [(moment, row.created_at - moment) for moment, row in zip(moments, rows, strict=True)]

    def produced(self) -> int:
        count: int = self.value("SELECT count(*) FROM jobs")
        return count

    def wait_for_more(self, jobs: int = 1, timeout_seconds: float = 30) -> None:
        """So many jobs more than now."""
        before = self.produced()
        wait_for(lambda: self.produced() >= before + jobs, timeout_seconds)

    def each_slot_once(self, spacing_seconds: float, *, late_seconds: float | None = None) -> None:
        """No slot is missing between the first and the last, none is there twice, none was early, none later than that."""
        with self.db.transaction():  # one view of both: production goes on
            self.db.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            slots = self.slots()
            produced, undone = self.value("SELECT produced FROM generators"), self.value("SELECT skipped + failed FROM generators")
        moments = [moment for moment, _ in slots]
        spacing = timedelta(seconds=spacing_seconds)
        assert {later - earlier for earlier, later in itertools.pairwise(moments)} <= {spacing}
        assert all((moment - EPOCH) % spacing == timedelta(0) for moment in moments)
        latest = max(late for _, late in slots)
        assert min(late for _, late in slots) >= timedelta(0)
        assert late_seconds is None or latest <= timedelta(seconds=late_seconds + SLOW_MACHINE_SECONDS)
        assert (produced, undone) == (len(slots), 0)

    def close(self) -> None:
        for instance in self.instances:
            instance.kill()
        self.db.close()


class Route:
    """A way to the server for one process, which can be cut: what is open goes mute, nothing new gets through."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port) if parts.hostname else None
        self._parts = parts
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._open = threading.Event()
        self._open.set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        user = self._parts.netloc.rpartition("@")[0]
        address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        return urlunsplit(self._parts._replace(netloc=f"{user}@{address}" if user else address, query="sslmode=disable"))

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = self._connect()
                self._sockets += (near, far)
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _connect(self) -> socket.socket:
        if self._target is not None:
            return socket.create_connection(self._target)
        far = socket.socket(socket.AF_UNIX)
        query = dict(pair.split("=") for pair in self._parts.query.split("&"))
        far.connect(f"{query['host']}/.s.PGSQL.{query.get('port', '5432')}")
        return far

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65_536):
                self._open.wait()
                target.sendall(piece)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.mend()
        for one in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def slow_insert(seconds: float) -> str:
    """Makes each production take so long, and notes when it had ended."""
    return f"""
        CREATE TABLE ended (at timestamptz);
        CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_sleep({seconds});
            INSERT INTO ended VALUES (clock_timestamp());
            RETURN NULL;
        END $$;
        CREATE TRIGGER slow AFTER INSERT ON jobs FOR EACH STATEMENT EXECUTE FUNCTION be_slow();
    """


@contextlib.contextmanager
def frozen_between_slots(fleet: Fleet, leader: Daemon) -> Iterator[None]:
    """The leader stands still for the block, and has told of all that it has produced. Nobody else has produced lately."""

    def all_is_told() -> bool:
        told = sum(event["jobs"] for one in fleet.instances for event in one.find("generator_produced"))
        return not in_production(fleet) and told == fleet.produced()

    for _ in range(1000):
        with frozen([leader.pid]):
            if all_is_told():
                yield
                return
    raise AssertionError("it was in the middle of a production each time")


def in_production(fleet: Fleet) -> bool:
    found: int = fleet.value(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'"
        " AND application_name = 'reliable-worker generator' AND query LIKE '%%produce_slots%%'"
    )
    return found == 1
