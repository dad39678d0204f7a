"""Where the database is and who we are there: values read from a DSN, checked before anything is opened."""

from __future__ import annotations

import getpass
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from worker.errors import ConfigError
from worker.masking import remember
from worker.store.passfile import password_from

_DEFAULT_PORT = 5432
_SOCKET_DIRECTORIES = ("/run/postgresql", "/var/run/postgresql", "/tmp")
_MOST_CONNECT_SECONDS = 60

_CHOICES = {
    "sslmode": ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    "sslnegotiation": ("postgres", "direct"),
    "target_session_attrs": ("any", "read-write", "read-only", "primary", "standby", "prefer-standby"),
    "gsslib": ("gssapi", "sspi"),
    "ssl_min_protocol_version": ("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"),
    "ssl_max_protocol_version": ("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"),
    # libpq's other values here ask for something that this driver cannot give.
    "gssencmode": ("disable", "prefer"),
    "channel_binding": ("disable", "prefer"),
    "load_balance_hosts": ("disable",),
    "client_encoding": ("auto", "utf8", "UTF8", "utf-8", "UTF-8"),
    "sslcompression": ("0", "1"),
    "sslsni": ("1",),
}
_DRIVER_OPTIONS = (
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "sslcrl",
    "sslpassword",
    "sslnegotiation",
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
    "krbsrvname",
    "gsslib",
)
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")

Refusal = Callable[[str], ConfigError]
"""Makes the error for a broken rule, in the name of the variable that is at fault."""


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP host, or the directory of a Unix socket, with a port."""

    host: str
    port: int

    @property
    def is_socket(self) -> bool:
        return self.host.startswith("/")

    def __str__(self) -> str:
        if self.is_socket:
            return f"{self.host}/.s.PGSQL.{self.port}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """TCP options against a peer that vanished. The defaults notice within half a minute, not two hours."""

    enabled: bool = True
    idle_seconds: int = 10
    interval_seconds: int = 5
    count: int = 3
    user_timeout_milliseconds: int = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One or several addresses of one database. Never shows a secret."""

    addresses: tuple[Address, ...]
    user: str
    dbname: str
    password: str | None = field(repr=False)
    passfile: Path | None
    driver_options: Mapping[str, str] = field(repr=False)
    target_session_attrs: str
    application_name: str | None
    connect_timeout_seconds: float | None
    options: str | None
    keepalive: Keepalive

    @property
    def where(self) -> str:
        """For messages: database, hosts and user."""
        return f"database {_quoted(self.dbname)} at {', '.join(map(str, self.addresses))} as user {_quoted(self.user)}"

    def connect_arguments(self, address: Address) -> dict[str, object]:
        """What `asyncpg.connect` wants for one address. Reads the password file, which may have changed."""
        password = self.password
        if password is None and self.passfile is not None:
            password = password_from(self.passfile, address.host, address.port, self.dbname, self.user)
            remember(password)
        arguments: dict[str, object] = {
            "host": address.host,
            "port": address.port,
            "user": self.user,
            "database": self.dbname,
            # "" and not None, with which asyncpg would go looking by itself.
            "password": password or "",
        }
        if self.driver_options.get("sslrootcert") == "system":
            # The system's certificate authorities; asyncpg's word for them, and it means verify-full as in
            # libpq.
            arguments["ssl"] = True
        else:
            # asyncpg takes the names of files from a URL only.
            arguments["dsn"] = "postgresql:///?" + urllib.parse.urlencode(self.driver_options)
        return arguments


def target_of(values: Mapping[str, str], refusal: Refusal) -> Target:
    """The target that libpq's options name; raises `refusal(rule)` where they cannot be kept."""
    for name, choices in _CHOICES.items():
        if values.get(name, choices[0]) not in choices:
            raise refusal(f"{name} {_quoted(values[name][:40])} is not available; use one of: {', '.join(choices)}")
    addresses = _addresses(values.get("host", ""), values.get("port", ""), refusal)
    _check_tls(values, addresses, refusal)
    user = values.get("user") or _own_name(refusal)
    passfile = values.get("passfile")
    usual = Keepalive()

    def whole_number(name: str, default: int) -> int:
        text = values.get(name, "").strip() or "0"
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise refusal(f"{name} {_quoted(text[:40])} must be a whole number")
        return int(text) or default

    return Target(
        addresses=addresses,
        user=user,
        dbname=values.get("dbname") or user,
        password=values.get("password"),
        passfile=Path(passfile) if passfile else _home_file(".pgpass"),
        driver_options={name: values[name] for name in _DRIVER_OPTIONS if name in values},
        target_session_attrs=values.get("target_session_attrs", "any"),
        application_name=values.get("application_name") or values.get("fallback_application_name"),
        # 0 means for ever to libpq; nothing waits for ever here.
        connect_timeout_seconds=min(whole_number("connect_timeout", 0), _MOST_CONNECT_SECONDS) or None,
        options=values.get("options"),
        keepalive=Keepalive(
            enabled=values.get("keepalives", "1").strip() != "0",
            idle_seconds=whole_number("keepalives_idle", usual.idle_seconds),
            interval_seconds=whole_number("keepalives_interval", usual.interval_seconds),
            count=whole_number("keepalives_count", usual.count),
            user_timeout_milliseconds=whole_number("tcp_user_timeout", usual.user_timeout_milliseconds),
        ),
    )


def _addresses(hosts_text: str, ports_text: str, refusal: Refusal) -> tuple[Address, ...]:
    hosts = [host.strip() for host in hosts_text.split(",")] if hosts_text else []
    ports = [port.strip() for port in ports_text.split(",")]
    if not hosts and len(ports) == 1:
        hosts = [*filter(os.path.isdir, _SOCKET_DIRECTORIES), "localhost"]
    hosts = hosts or ["localhost"] * len(ports)
    if len(ports) == 1:
        ports *= len(hosts)
    if len(ports) != len(hosts):
        raise refusal(f"names {len(hosts)} hosts and {len(ports)} ports")
    addresses = []
    for host, port in zip(hosts, ports, strict=True):
        if not re.fullmatch(r"[0-9]{0,5}", port) or not 1 <= int(port or _DEFAULT_PORT) <= 65535:
            raise refusal("the port must be a whole number from 1 to 65535")
        if host.startswith("@"):
            raise refusal("abstract sockets are not supported")
        addresses.append(Address(host or "localhost", int(port or _DEFAULT_PORT)))
    return tuple(addresses)


def _check_tls(values: Mapping[str, str], addresses: tuple[Address, ...], refusal: Refusal) -> None:
    """Fail closed and early: a file missing later would be noticed only once the database has gone away."""
    mode = values.get("sslmode", "prefer")
    root = values.get("sslrootcert")
    verified = mode.startswith("verify-") or root == "system"
    if verified and any(address.is_socket for address in addresses):
        raise refusal(f"sslmode={mode} cannot be kept on a Unix socket; leave it out or name a TCP host")
    if root == "system" and mode != "verify-full" and "sslmode" in values:
        raise refusal(f"sslrootcert=system needs sslmode=verify-full, not {mode}")
    if mode == "disable":
        return
    for name in _FILES:
        path = values.get(name)
        if path and path != "system" and not _readable(Path(path)):
            raise refusal(f"{name} {_quoted(path[-200:])} does not exist or cannot be read")
    if verified and not root:
        default = _home_file(".postgresql/root.crt")
        if default is None or not _readable(default):
            raise refusal(
                f"sslmode={mode} needs the certificate of the authority: name its file in sslrootcert"
                f" ({default or '~/.postgresql/root.crt'} does not exist or cannot be read)"
            )


def _own_name(refusal: Refusal) -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        raise refusal("names no user, and the user of this process has no name; add user=…") from None


def _quoted(text: str) -> str:
    """On one line, whatever is in it."""
    return f'"{repr(text)[1:-1]}"'


def _home_file(name: str) -> Path | None:
    try:
        return Path.home() / name
    except (RuntimeError, KeyError):
        return None


def _readable(path: Path) -> bool:
    try:
        with path.open("rb"):
            return True
    except OSError:
        return False
