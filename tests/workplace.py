"""One database with its daemons: what tests of whole processes do to them, and how they look at what came of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

from tests.processes import Daemon
from tests.servers import PrivateCluster, with_database
from tests.waiting import wait_for

LEASE_SECONDS = 2.0
VARIABLES = {
    "WORKER_HANDLERS": "tests.handlers_for_tests:handlers",
    "WORKER_LEASE_SECONDS": f"{LEASE_SECONDS:g}",
    "WORKER_REAP_SECONDS": "0.2",
    "WORKER_QUERY_TIMEOUT_SECONDS": "1",
    "WORKER_BACKOFF_BASE_SECONDS": "0.05",
    "WORKERS": "4",
}
TEXTBOOK = {"WORKER_CLAIM_BATCH": "1", "WORKER_COMMIT_BATCH": "1"}
"""One claim statement and one transaction a job."""
both_shapes = pytest.mark.parametrize("shape", [{}, TEXTBOOK], ids=["batches", "textbook"])

POLL_NEVER = {"WORKER_POLL_SECONDS": "60"}
"""So long that whatever happens sooner was a notification's doing."""

TABLES = """
CREATE TABLE ledger (job_id bigint NOT NULL, fence bigint NOT NULL);
CREATE TABLE deferred_ledger (job_id bigint NOT NULL, fence bigint NOT NULL);
CREATE FUNCTION wait_for_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(4711);
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER deferred_ledger_waits AFTER INSERT ON deferred_ledger
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_for_gate();
"""


class Note(NamedTuple):
    """One line that a handler wrote outside the database."""

    word: str
    key: str
    attempt: int
    fence: int
    pid: int
    at_seconds: float


class Workplace:
    """A database, its daemons and their common working directory."""

    def __init__(self, url: str, directory: Path, start: Callable[..., Daemon]) -> None:
        self.url = url
        self.directory = directory
        self._start = start
        self._cluster: PrivateCluster | None = None
        self.db = self._connect()
        self.db.execute(TABLES)

    @classmethod
    def on(cls, cluster: PrivateCluster, directory: Path, start: Callable[..., Daemon]) -> Self:
        """On a server of its own."""
        place = cls(cluster.dsn, directory, start)
        place._cluster = cluster
        return place

    @property
    def cluster(self) -> PrivateCluster:
        assert self._cluster is not None
        return self._cluster

    def _connect(self) -> psycopg.Connection[Any]:
        # local: a look of ours waits for no standby.
        options = "-c synchronous_commit=local"
        return psycopg.connect(self.url, autocommit=True, row_factory=namedtuple_row, options=options)

    def reconnect(self) -> None:
        """Wait until the server has gone, and come back to it."""

        def gone() -> bool:
            try:
                self.db.execute("SELECT 1")
            except psycopg.OperationalError:
                return True
            return False

        wait_for(gone)

        def connected() -> bool:
            with contextlib.suppress(psycopg.OperationalError):
                self.db.close()
                self.db = self._connect()
                return True
            return False

        wait_for(connected)

    def close(self) -> None:
        self.db.close()

    # --- processes

    def daemon(self, *arguments: str, ready: bool = True, **variables: str) -> Daemon:
        """A daemon on this database, once it claims."""
        process = self._start(*arguments, **({"DATABASE_URL": self.url} | VARIABLES | variables))
        if ready:
            process.wait_for_event("daemon_ready", 20)
        return process

    def wait_until_hungry(self, daemons: int = 1) -> None:
        """So many want to be told of the next job."""
        wait_for(lambda: self.value("SELECT count(*) FROM processes WHERE hungry") == daemons, 20)

    def wait_until_only_notifications_wake(self, daemons: int = 1) -> None:
        """They are hungry, and the quick polls of the beginning, a quarter of a second apart, are over. All have POLL_NEVER."""
        self.wait_until_hungry(daemons)
        silent = """
            SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
            AND application_name = 'reliable-worker claim' AND clock_timestamp() - query_start > interval '0.5 second'
        """
        wait_for(lambda: self.value(silent) == daemons)

    # --- jobs

    def ask(self, statement: str, *arguments: object) -> list[Any]:
        return self.db.execute(statement, arguments).fetchall()

    def value(self, statement: str, *arguments: object) -> Any:
        row = self.db.execute(statement, arguments).fetchone()
        assert row is not None
        return row[0]

    def add(self, kind: str, payload: Mapping[str, object] | None = None, *, key: str | None = None, max_attempts: int = 5) -> int:
        """One job; its id."""
        enqueue = "SELECT id FROM enqueue_job(%s, %s, %s, max_attempts => %s)"
        id: int = self.value(enqueue, kind, Jsonb(payload or {}), key, max_attempts)
        return id

    def add_many(self, count: int, kind: str, payload: Mapping[str, object] | None = None) -> list[int]:
        """`count` equal jobs in one statement; their ids."""
        rows = self.ask(
            "INSERT INTO jobs (idempotency_key, kind, payload) SELECT %s || '-' || gen_random_uuid(), %s, %s"
            " FROM generate_series(1, %s) RETURNING id",
            kind,
            kind,
            Jsonb(payload or {}),
            count,
        )
        return [row.id for row in rows]

    def job(self, id: int) -> Any:
        return self.ask("SELECT * FROM jobs WHERE id = %s", id)[0]

    def wait_for_state(self, id: int, *states: str, timeout_seconds: float = 15) -> Any:
        """The job once it is in one of these states."""

        def reached() -> Any:
            row = self.job(id)
            assert row.state in states, row
            return row

        return wait_for(reached, timeout_seconds)

    def wait_until_leases_are_over(self) -> None:
        """Those of all running jobs, by the clock of the database."""
        over = "SELECT bool_and(lease_until <= clock_timestamp()) FROM jobs WHERE state = 'running'"
        wait_for(lambda: self.value(over), 30)

    def states(self) -> Counter[str]:
        return Counter({row.state: row.jobs for row in self.ask("SELECT state, count(*)::int AS jobs FROM jobs GROUP BY state")})

    def wait_until_all(self, state: str, timeout_seconds: float = 15) -> None:
        """Every job is in this state."""

        def all_there() -> bool:
            assert set(self.states()) == {state}, self.states()
            return True

        wait_for(all_there, timeout_seconds)

    def ledger(self, table: str = "ledger") -> Counter[int]:
        """Effects by job."""
        rows = self.db.execute(sql.SQL("SELECT job_id FROM {}").format(sql.Identifier(table))).fetchall()
        return Counter(row.job_id for row in rows)

    def failures(self, id: int) -> list[Any]:
        return self.ask("SELECT * FROM job_failures WHERE job_id = %s ORDER BY fence", id)

    # --- what handlers saw

    def notes(self, word: str | None = None, key: str | None = None) -> list[Note]:
        path = self.directory / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            said, of, attempt, fence, pid, at = line.split(" ")
            if word in (None, said) and key in (None, of):
                found.append(Note(said, of, int(attempt), int(fence), int(pid), float(at)))
        return found

    def wait_for_notes(self, word: str, key: str | None = None, *, count: int = 1, timeout_seconds: float = 30) -> list[Note]:
        def noted() -> list[Note]:
            found = self.notes(word, key)
            assert len(found) >= count, self.notes()
            return found

        return wait_for(noted, timeout_seconds)

    def open_gate(self, name: str = "gate") -> None:
        (self.directory / name).touch()

    # --- server processes

    def backends(self, role: str = "%", state: str = "%") -> list[int]:
        """Server processes of the daemons' connections of this role, in this state."""
        rows = self.ask(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s AND state LIKE %s"
            " ORDER BY pid",
            f"reliable-worker {role}",
            state,
        )
        return [row.pid for row in rows]

    def terminate(self, role: str = "%") -> int:
        """End these connections; how many there were."""
        pids = self.backends(role)
        self.ask("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", pids)
        return len(pids)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """For the daemons the database is away: no connection lives, none can be made. Ours stays."""
        name = self.db.info.dbname
        with psycopg.connect(with_database(self.url, "template1"), autocommit=True) as other:
            allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
            other.execute(allow.format(sql.Identifier(name), sql.SQL("false")))
            try:
                wait_for(lambda: self.terminate() == 0)
                yield
            finally:
                other.execute(allow.format(sql.Identifier(name), sql.SQL("true")))

    @contextlib.contextmanager
    def lock(self, id: int) -> Iterator[None]:
        """Keep somebody else's lock on the row of a job."""
        with psycopg.connect(self.url) as other:
            other.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", (id,))
            yield
            other.rollback()

    def healthy(self) -> None:
        """What must hold after every case: effects once, attempts within bounds, no lease left behind, fresh work done."""
        assert self.ask("SELECT id FROM jobs WHERE attempts > max_attempts") == []
        assert set((self.ledger() + self.ledger("deferred_ledger")).values()) <= {1}
        fresh = self.add("nap")
        wait_for(lambda: self.ledger()[fresh] == 1)


class Supervisor:
    """What a service manager does: starts the daemon again each time it ends."""

    def __init__(self, workplace: Workplace, **variables: str) -> None:
        self._start = lambda: workplace.daemon(ready=False, WORKER_LEASE_SECONDS="1", **variables)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="supervisor")
        self.daemons: list[Daemon] = []

    def _keep_alive(self) -> None:
        while not self._ended.is_set():
            self.daemons.append(self._start())
            while self.daemons[-1].process.poll() is None and not self._ended.wait(0.02):
                pass

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def crashes(self) -> int:
        return len(self.daemons) - 1


@contextlib.contextmanager
def frozen(pids: Sequence[int]) -> Iterator[None]:
    """These processes stand still for the block (SIGSTOP, SIGCONT)."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
