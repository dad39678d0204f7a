"""Reads how to reach the database: a URL, libpq's keyword form, the PG* variables, each as libpq does.

asyncpg reads URLs too, but it knows no keyword form, takes an unknown option for a server setting, and
shows pieces of a badly encoded password in its errors. So the text is read here, what is wrong is refused
by name, and no message ever quotes a part that may belong to a password.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping

from worker.domain import is_storable
from worker.errors import ConfigError
from worker.masking import remember
from worker.store.target import Refusal, Target, target_of

# option → the variable that libpq takes it from when the text does not have it
_OPTIONS: dict[str, str | None] = {
    "host": "PGHOST",
    "port": "PGPORT",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "passfile": "PGPASSFILE",
    "dbname": "PGDATABASE",
    "application_name": "PGAPPNAME",
    "fallback_application_name": None,
    "connect_timeout": "PGCONNECT_TIMEOUT",
    "options": "PGOPTIONS",
    "target_session_attrs": "PGTARGETSESSIONATTRS",
    "keepalives": None,
    "keepalives_idle": None,
    "keepalives_interval": None,
    "keepalives_count": None,
    "tcp_user_timeout": None,
    "client_encoding": None,
    "gssencmode": "PGGSSENCMODE",
    "channel_binding": "PGCHANNELBINDING",
    "load_balance_hosts": "PGLOADBALANCEHOSTS",
    "sslcompression": None,
    "sslsni": None,
    "sslmode": "PGSSLMODE",
    "sslrootcert": "PGSSLROOTCERT",
    "sslcert": "PGSSLCERT",
    "sslkey": "PGSSLKEY",
    "sslcrl": "PGSSLCRL",
    "sslpassword": None,
    "sslnegotiation": "PGSSLNEGOTIATION",
    "ssl_min_protocol_version": "PGSSLMINPROTOCOLVERSION",
    "ssl_max_protocol_version": "PGSSLMAXPROTOCOLVERSION",
    "krbsrvname": "PGKRBSRVNAME",
    "gsslib": "PGGSSLIB",
}
# What other libraries' URLs carry, and how to say it here.
_INSTEAD = {
    "schema": "name the schema in WORKER_SCHEMA",
    "search_path": "write options=-csearch_path%3Dname",
    "pgbouncer": "set WORKER_POOLER=transaction",
    "ssl": "write sslmode=require, or better sslmode=verify-full",
    "service": "write out the values of the service",
    "hostaddr": "write the address as host",
    "database": "write dbname",
    "requirepeer": "it cannot be checked here",
    "require_auth": "it cannot be checked here",
}
# File names, and hosts that may be the directory of a socket, are bytes; everything else is sent to the server as text.
_PATHS = frozenset({"host", "passfile", "sslrootcert", "sslcert", "sslkey", "sslcrl"})
_SECRET = frozenset({"password", "sslpassword"})
_ENCODE = "percent-encode @ : / ? # % in user and password (%40 %3A %2F %3F %23 %25)"
_PAIR = re.compile(
    r"""\s* ([^\s='\\]+) \s* = \s*
        ( ' (?: [^'\\] | \\. )* ' (?=\s|$)  |  (?: [^\s'\\] | \\. )* (?=\s|$) )""",
    re.DOTALL | re.VERBOSE,
)
_HOST_AND_PORT = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]*)(?::([0-9]*))?")


def parse(text: str | None, *, variable: str, environ: Mapping[str, str]) -> Target:
    """The target that `text` names, completed from the PG* variables as psql would.

    None or an empty text stands for the variables alone. Raises `ConfigError` in the name of `variable`.
    """

    def refusal(rule: str) -> ConfigError:
        return ConfigError(f"{variable}: {rule}")

    reader = _Reader(refusal)
    text = (text or "").strip()
    is_url = re.match(r"[^\s='\"]+://", text) is not None
    given = reader.url(text) if is_url else reader.keywords(text)
    values = {name: value for name, value in given.items() if value}
    for name, pg_variable in _OPTIONS.items():
        if pg_variable and environ.get(pg_variable):
            values.setdefault(name, environ[pg_variable])
    for name, value in values.items():
        if name not in _PATHS and not is_storable(value):
            raise refusal(f"the {name} holds bytes that are not UTF-8")
    password = values.get("password")
    # A password that is also the name of something would blank out half of every message, and protect
    # nothing.
    if password not in (values.get("user"), values.get("dbname"), values.get("host")):
        remember(password, urllib.parse.quote(password or "", safe=""), text if password else None)
    remember(values.get("sslpassword"))
    return target_of(values, refusal)


class _Reader:
    """Reads one text into libpq's options."""

    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal

    def url(self, text: str) -> dict[str, str]:
        scheme, _, rest = text.partition("://")
        if scheme not in ("postgresql", "postgres"):
            shown = scheme if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]{0,40}", scheme) else "this"
            fix = "write postgresql:// without a driver" if "+" in scheme else "write postgresql://"
            raise self._refusal(f"{shown}:// is not a scheme of PostgreSQL; {fix}")
        if "#" in rest:
            raise self._refusal(f"has a # in it; {_ENCODE}")
        rest, _, query = rest.partition("?")
        authority, _, path = rest.partition("/")
        if authority.count("@") > 1 or "@" in path or ("@" in query and "@" not in authority):
            raise self._refusal(f"has an @ too many or in the wrong place; {_ENCODE}")
        credentials, _, hosts = authority.rpartition("@")
        user, _, password = credentials.partition(":")
        given = self._hosts_and_ports(hosts)
        given |= {
            "user": self._decoded(user),
            "password": self._decoded(password),
            "dbname": self._decoded(path),
        }
        named: set[str] = set()
        for pair in query.split("&") if query else ():
            name, equals, value = pair.partition("=")
            # With an @ behind it, a name we do not know may be the rest of a password with a raw ? in it; after a password, of
            # one with a raw &.
            may_show = "@" not in query and _SECRET.isdisjoint(named)
            self._check_name(name if equals else "", may_show=may_show)
            named.add(name)
            given[name] = self._decoded(value)
        return given

    def _hosts_and_ports(self, text: str) -> dict[str, str]:
        hosts, ports = [], []
        for part in text.split(","):
            matched = _HOST_AND_PORT.fullmatch(part)
            if matched is None:
                raise self._refusal(f"has no readable host and port; an IPv6 address stands in [ ]; {_ENCODE}")
            hosts.append(self._decoded(matched[1]).strip("[]"))
            ports.append(matched[2] or "")
        return {"host": ",".join(hosts), "port": ",".join(ports) if any(ports) else ""}

    def keywords(self, text: str) -> dict[str, str]:
        """`name=value` pairs; quotes around a value with spaces, a backslash before ' and \\."""
        given: dict[str, str] = {}
        position = 0
        while position < len(text):
            matched = _PAIR.match(text, position)
            if matched is None:
                raise self._refusal(
                    "is neither a URL (postgresql://user:password@host/dbname) nor keyword=value pairs (a"
                    " value with spaces or quotes stands in '…', with a backslash before ' and \\)"
                )
            name, value = matched.groups()
            # After a password, a name we do not know may be the rest of it.
            self._check_name(name, may_show=_SECRET.isdisjoint(given))
            if value.startswith("'"):
                value = value[1:-1]
            given[name] = self._clean(re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL))
            position = matched.end()
        return given

    def _check_name(self, name: str, *, may_show: bool) -> None:
        if name in _OPTIONS:
            return
        if not may_show or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.]{0,40}", name):
            raise self._refusal(f"has an option that is not known; if it is part of a password: {_ENCODE}")
        instead = _INSTEAD.get(name.lower())
        raise self._refusal(f'option "{name}" is not known' + (f"; {instead}" if instead else ""))

    def _decoded(self, text: str) -> str:
        if re.search(r"%(?![0-9A-Fa-f]{2})", text):
            raise self._refusal(f"has a % that two hexadecimal digits do not follow; {_ENCODE}")
        try:
            return self._clean(urllib.parse.unquote(text, errors="strict"))
        except UnicodeDecodeError:
            raise self._refusal("has percent-encoded bytes that are not UTF-8") from None

    def _clean(self, value: str) -> str:
        if "\x00" in value:
            raise self._refusal("has a NUL in it")
        return value
