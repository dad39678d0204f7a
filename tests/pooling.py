"""A real PgBouncer in front of a server, in transaction mode unless a test says otherwise."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from tests.waiting import wait_for
from worker.server_programs import server_account
from worker.store.dsn import parse

PORT = 6432  # only a part of the socket's name
FEW_CONNECTIONS = 4
"""Fewer than one daemon has: so each transaction soon meets a session that somebody else has used."""


def program() -> str | None:
    """PgBouncer's program, or None where it is not installed; Debian keeps it out of an ordinary user's PATH."""
    return shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")


needs_pgbouncer = pytest.mark.skipif(program() is None, reason="PgBouncer is not installed (Debian: apt-get install pgbouncer)")


class PgBouncer:
    """Listens on a Unix socket only. `dsn` is that of the server, asked through it."""

    def __init__(self, server_dsn: str, directory: Path, roles: Sequence[tuple[str, str]], settings: dict[str, str]) -> None:
        self._target = parse(server_dsn, variable="dsn", environ={})
        self._account = server_account(Path("/nonexistent"))
        self._directory = directory
        self._log = directory / "pgbouncer.log"
        address = self._target.addresses[0]
        roles = [(self._target.user, self._target.password or ""), *roles]
        names = directory / "users.txt"
        names.write_text("".join(f'"{name}" "{password}"\n' for name, password in roles))
        pgbouncer = {
            "listen_addr": "",
            "listen_port": str(PORT),
            "unix_socket_dir": str(directory),
            "auth_type": "trust",
            "auth_file": str(names),
            "pool_mode": "transaction",
            "default_pool_size": str(FEW_CONNECTIONS),
            "admin_users": self._target.user,
            "server_login_retry": "0.2",
            **settings,
        }
        self._file = directory / "pgbouncer.ini"
        self._file.write_text(
            f"[databases]\n* = host={address.host} port={address.port}\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in pgbouncer.items())
        )
        for path in (directory, names, self._file):
            self._account.own(path)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def dsn(self, *, user: str | None = None, dbname: str | None = None) -> str:
        target = self._target
        return f"postgresql://{user or target.user}@/{dbname or target.dbname}?host={quote(str(self._directory))}&port={PORT}"

    def start(self) -> None:
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        name = program()
        assert name is not None
        with self._log.open("ab") as log:
            self._process = self._account.popen([*prefix, name, self._file], log.fileno())
        wait_for(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"PgBouncer did not start: {self._log.read_text()}")
        with contextlib.suppress(psycopg.OperationalError):
            self.ask("SHOW VERSION")
            return True
        return False

    def stop(self) -> None:
        """At once, with the connections of all its clients."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=5)
            self._process = None

    def ask(self, command: str) -> list[tuple[object, ...]]:
        """A command of its console."""
        with psycopg.connect(self.dsn(dbname="pgbouncer"), autocommit=True) as console:
            # Without parameters psycopg uses the simple protocol, which is all that the console knows.
            cursor = console.execute(command)
            return cursor.fetchall() if cursor.description else []


@contextlib.contextmanager
def pgbouncer(server_dsn: str, *, roles: Sequence[tuple[str, str]] = (), **settings: str) -> Iterator[PgBouncer]:
    """A PgBouncer for the block. `roles`: names and passwords of who may log in, beside the user of the DSN."""
    directory = server_account(Path("/nonexistent")).temporary_directory("rw-bouncer-")
    try:
        bouncer = PgBouncer(server_dsn, directory, roles, settings)
        try:
            yield bouncer
        finally:
            bouncer.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
