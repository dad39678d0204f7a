"""Connections to a server with TLS: encrypted unless told not to, verified as told, and with any password."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from tests.connecting import connected, database
from tests.waiting import wait_for
from worker.store.connection import (
    ConnectFailed,
    sqlstate,
)

ODD_PASSWORD = "a@b#c/d%e?f:g &=+\\ü"


class TlsServer:
    """A server of Debian's, for the embedded one has no TLS: one user by password, TLS only."""

    def __init__(self, directory: Path, programs: Path) -> None:
        self.directory = directory
        self._programs = programs
        self._user = pwd.getpwnam("nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name)
        self.port = 0

    def __enter__(self) -> TlsServer:
        for name, subject in (("authority", "/CN=authority"), ("other", "/CN=other")):
            self._openssl(
                f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj {subject}"
                f" -addext basicConstraints=critical,CA:true -keyout {name}.key -out {name}.crt"
            )
        self._openssl(
            "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost"
            " -addext subjectAltName=DNS:localhost -keyout server.key -out server.csr"
        )
        self._openssl(
            "x509 -req -in server.csr -CA authority.crt -CAkey authority.key -CAcreateserial -days 1"
            " -copy_extensions copyall -out server.crt"
        )
        data = self.directory / "data"
        for path in (self.directory, *self.directory.iterdir()):
            os.chown(path, self._user.pw_uid, self._user.pw_gid)
        (self.directory / "server.key").chmod(0o600)
        self._run("initdb", "-N", "--no-locale", "-E", "UTF8", "-A", "trust", "-U", "postgres", "-D", data)
        (data / "pg_hba.conf").write_text("local all all trust\nhostssl all all all scram-sha-256\n")
        with contextlib.closing(wait_for(lambda: self._started(data), 60)) as admin:
            try:
                admin.execute("CREATE ROLE me LOGIN PASSWORD 'a-tls:secret'")
                admin.execute(f"CREATE ROLE odd LOGIN PASSWORD '{ODD_PASSWORD}'")
            except BaseException:
                self.__exit__()
                raise
        return self

    def _started(self, data: Path) -> psycopg.Connection | None:
        """The server on a port that is free now; None if somebody else was quicker to take it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.directory),
            "ssl": "on",
            "ssl_cert_file": self.file("server.crt"),
            "ssl_key_file": self.file("server.key"),
        }
        options = [f"-c{name}={value}" for name, value in settings.items()]
        self._process = subprocess.Popen(
            [self._programs / "postgres", "-D", data, *options], stderr=subprocess.DEVNULL, **self._as_user()
        )
        try:
            answer = wait_for(self._admin, 60)
            return None if isinstance(answer, int) else answer
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        # SIGINT: without waiting for whoever is still connected.
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=20)

    def dsn(self, host: str = "localhost", password: str = "a-tls%3Asecret", **options: str) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"postgresql://me:{password}@{host}:{self.port}/postgres?{query}"

    def file(self, name: str) -> str:
        return str(self.directory / name)

    def _admin(self) -> psycopg.Connection | int | None:
        """None while it still starts, its exit status if it has ended."""
        with contextlib.suppress(psycopg.OperationalError):
            return psycopg.connect(host=str(self.directory), port=self.port, user="postgres", autocommit=True, connect_timeout=5)
        return self._process.poll()

    def _openssl(self, arguments: str) -> None:
        subprocess.run(["openssl", *arguments.split()], cwd=self.directory, check=True, capture_output=True)

    def _run(self, program: str, *arguments: object) -> None:
        command = [self._programs / program, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, **self._as_user())

    def _as_user(self) -> dict[str, object]:
        if os.geteuid() != 0:
            return {"cwd": "/"}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": [], "cwd": "/"}


@pytest.fixture(scope="module")
def tls() -> Iterator[TlsServer]:
    programs = max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)
    if programs is None or shutil.which("openssl") is None:
        pytest.skip("TLS needs a server built with it: install postgresql and openssl")
    with (
        tempfile.TemporaryDirectory(prefix="rw-tls-") as directory,
        TlsServer(Path(directory), programs) as server,
    ):
        yield server


async def is_encrypted(dsn: str) -> bool:
    async with connected(dsn) as connection:
        return bool(await connection.fetchval("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"))


@pytest.mark.parametrize("mode", ["", "prefer", "require", "verify-ca", "verify-full"])
async def test_a_connection_is_encrypted_unless_told_not_to(tls: TlsServer, mode: str) -> None:
    options = {"sslmode": mode} if mode else {}
    if mode.startswith("verify"):
        options["sslrootcert"] = tls.file("authority.crt")
    assert await is_encrypted(tls.dsn(**options))


@pytest.mark.parametrize(
    ("host", "mode", "authority", "said"),
    [
        ("localhost", "verify-ca", "other.crt", "certificate verify failed"),
        ("localhost", "verify-full", "other.crt", "certificate verify failed"),
        ("localhost", "require", "other.crt", "certificate verify failed"),
        ("127.0.0.1", "verify-full", "authority.crt", "IP address mismatch"),
        ("localhost", "disable", "authority.crt", "no pg_hba.conf entry"),
    ],
)
async def test_what_cannot_be_verified_is_not_connected_to(tls: TlsServer, host: str, mode: str, authority: str, said: str) -> None:
    with pytest.raises(ConnectFailed, match=said) as failed:
        await database(tls.dsn(host, sslmode=mode, sslrootcert=tls.file(authority))).connect("test")
    assert failed.value.refused
    assert "a-tls" not in str(failed.value)


async def test_a_wrong_name_passes_where_only_the_authority_is_verified(tls: TlsServer) -> None:
    assert await is_encrypted(tls.dsn("127.0.0.1", sslmode="verify-ca", sslrootcert=tls.file("authority.crt")))


async def test_a_wrong_password_is_refused_without_being_shown(tls: TlsServer) -> None:
    with pytest.raises(ConnectFailed, match="password authentication failed") as failed:
        await database(tls.dsn(password="wrong-word")).connect("test")
    assert (failed.value.refused, sqlstate(failed.value)) == (True, "28P01")
    assert "wrong-word" not in str(failed.value)


async def test_a_password_may_come_from_a_file_that_changes(tls: TlsServer, tmp_path: Path) -> None:
    path = tmp_path / "pgpass"
    path.touch(mode=0o600)
    dsn = tls.dsn(password="")
    reached = database(dsn, environ={"PGPASSFILE": str(path)})
    with pytest.raises(ConnectFailed):
        await reached.connect("test")
    path.write_text(r"localhost:*:*:me:a-tls\:secret")
    connection = await reached.connect("test")
    assert await connection.fetchval("SELECT current_user") == "me"
    await connection.close()


@pytest.mark.parametrize("way", ["url", "keywords", "variable", "file"])
async def test_a_password_of_odd_characters_logs_in(tls: TlsServer, way: str, tmp_path: Path) -> None:
    """I2: percent-encoded in a URL, with backslashes in the keyword form and in a password file, as it is in PGPASSWORD."""
    path = tmp_path / "pgpass"
    path.touch(mode=0o600)
    backslashed = ODD_PASSWORD.replace("\\", "\\\\")
    path.write_text("*:*:*:odd:" + backslashed.replace(":", r"\:"))
    where = f"host=localhost port={tls.port} user=odd dbname=postgres"
    dsn, environ = {
        "url": (f"postgresql://odd:{quote(ODD_PASSWORD, safe='')}@localhost:{tls.port}/postgres", {}),
        "keywords": (f"{where} password='{backslashed}'", {}),
        "variable": (where, {"PGPASSWORD": ODD_PASSWORD}),
        "file": (where, {"PGPASSFILE": str(path)}),
    }[way]
    connection = await database(dsn, environ=environ).connect("test")
    assert await connection.fetchval("SELECT current_user") == "odd"
    await connection.close()
