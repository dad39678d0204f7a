"""The way to one database: sessions that are the same whatever the defaults of the role.

Three ways to hold a connection, each for one purpose:

- `Lane`: one connection for one loop (claim, commit, renew, listen), so that nobody can starve it;
- `Pool`: a few connections shared by handlers and upkeep, opened as needed;
- `Database.connect`: one, for a command.

A COMMIT in flight is never cancelled by us, and nothing on a lane is: a cancel request ends the wait for a
synchronous standby, and the commit then stays local only. What takes too long is dropped with its connection;
the server's own time-outs end it there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg
from asyncpg.transaction import Transaction as Transaction

from worker.masking import safe_text as safe_text
from worker.store import dsn as dsn_text
from worker.store.lane import Lane as Lane
from worker.store.poolers import require_own_session, way_out
from worker.store.sessions import Backend, own_backend
from worker.store.shared_pool import Pool as Pool
from worker.store.target import Address, Keepalive
from worker.store.trouble import DATABASE_ERRORS as DATABASE_ERRORS
from worker.store.trouble import ConnectFailed as ConnectFailed
from worker.store.trouble import is_outdated as is_outdated
from worker.store.trouble import is_poolers, is_refusal
from worker.store.trouble import is_unavailable as is_unavailable
from worker.store.trouble import sqlstate as sqlstate


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """The server's own time limits for our sessions: they act when this process cannot."""

    statement_timeout_seconds: float
    lock_timeout_seconds: float
    idle_in_transaction_seconds: float

    @classmethod
    def of(cls, *, lease_seconds: float, query_timeout_seconds: float) -> SessionLimits:
        return cls(
            statement_timeout_seconds=min(query_timeout_seconds, lease_seconds / 2),
            lock_timeout_seconds=min(1.0, lease_seconds / 6),
            idle_in_transaction_seconds=min(5.0, lease_seconds / 3),
        )


DEFAULT_LIMITS = SessionLimits.of(lease_seconds=30, query_timeout_seconds=3)


class Connection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg carries no types
    """An asyncpg connection that drops itself where a cancel request could harm a commit."""

    cancels_statements = True
    opened_at = 0.0
    proven_at = 0.0
    """Local moment at which its server was last known to take writes, for whoever keeps connections in store."""
    backend: Backend | None = None
    """None: it cannot be told, as behind a transaction pooler."""
    _commits = False
    _stays_in_transaction = False
    _wait_was_cut_short = False

    def prove(self, moment: float) -> None:
        """Its server took writes at this local moment. (A method, since what asyncpg's pool hands out passes no assignment on.)"""
        self.proven_at = moment

    def stay_in_transaction(self, stays: bool) -> None:
        """While set, a statement outside a transaction is refused instead of committing itself."""
        self._stays_in_transaction = stays

    def take_cut_short_wait(self) -> bool:
        """Whether, since this was last asked, a commit was answered that a synchronous standby is not known to have: somebody has
        cancelled the wait for it, and the server says so in a warning only."""
        taken, self._wait_was_cut_short = self._wait_was_cut_short, False
        return taken

    def _process_log_message(self, fields: Mapping[str, str], last_query: object) -> None:
        # asyncpg calls this for each notice. The words are in the server's language; where it speaks from is not.
        if fields.get("R") == "SyncRepWaitForLSN":
            self._wait_was_cut_short = True
        super()._process_log_message(fields, last_query)

    def _check_open(self) -> None:
        # asyncpg calls this before each statement.
        super()._check_open()
        if self._stays_in_transaction and not self.is_in_transaction():
            raise RuntimeError("the transaction was ended by hand inside job.transaction()")

    async def execute(
        self,
        query: str,
        *args: Any,
        timeout: float | None = None,  # noqa: ASYNC109  (asyncpg's signature)
    ) -> str:
        self._commits = query[:6].upper() == "COMMIT"
        try:
            status: str = await super().execute(query, *args, timeout=timeout)
            return status
        finally:
            self._commits = False

    def _cancel_current_command(self, waiter: Any, cancel_waiter: Any = None) -> None:
        # asyncpg calls this when the caller was cancelled or ran out of time.
        if self.cancels_statements and not self._commits:
            super()._cancel_current_command(waiter, cancel_waiter)
        else:
            # Not at once: the protocol is in the middle of a step that may still write to the transport.
            self._loop.call_soon(self.terminate)


class Database:
    """How to reach one database, and how our SQL is spelled there. Opens nothing by itself.

    Raises `ConfigError` for a DSN that cannot be right. `pooler`: the route is a transaction pooler, which
    refuses session settings and keeps no prepared statements; its role must carry the limits then.
    """

    connection_class = Connection

    def __init__(
        self,
        dsn: str | None,
        *,
        schema: str = "public",
        application_name: str = "reliable-worker",
        connect_timeout_seconds: float = 3.0,
        limits: SessionLimits = DEFAULT_LIMITS,
        pooler: bool = False,
        variable: str = "DATABASE_URL",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        self.target = dsn_text.parse(dsn, variable=variable, environ=environ)
        self.schema = schema
        self.limits = limits
        self.pooler = pooler
        # Who writes connect_timeout into the DSN knows this database best.
        self.connect_timeout_seconds = self.target.connect_timeout_seconds or connect_timeout_seconds
        self._application_name = self.target.application_name or application_name
        self._quoted_schema = '"' + schema.replace('"', '""') + '"'
        self._variable = variable
        self._sql: dict[str, str] = {}
        self._is_direct = False

    def __repr__(self) -> str:
        return f"<Database {self.target.where}>"

    def sql(self, template: str) -> str:
        """`template` with `{schema}` replaced by the quoted schema; the same object every time."""
        text = self._sql.get(template)
        if text is None:
            text = self._sql[template] = template.replace("{schema}", self._quoted_schema)
        return text

    def pool(self, size: int) -> Pool:
        return Pool(self, size)

    async def connect(
        self,
        role: str,
        *,
        statement_timeout_seconds: float | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> Connection:
        """A new connection within the connect time-out, which all hosts share; raises `ConnectFailed`.

        `statement_timeout_seconds` replaces the server's usual limit, and belongs below the caller's own.
        """
        wanted = self.target.target_session_attrs
        passes = ("standby", "any") if wanted == "prefer-standby" else (wanted,)
        attempts = [(address, attribute) for attribute in passes for address in self.target.addresses]
        server_settings = self._server_settings(role, statement_timeout_seconds, settings or {})
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.connect_timeout_seconds
        failures: list[tuple[Address, Exception]] = []
        for tried, (address, attribute) in enumerate(attempts):
            # A fair share each, else one silent host would use up the time of all.
            share_seconds = max((deadline - loop.time()) / (len(attempts) - tried), 0.001)
            try:
                return await self._connect_one(address, attribute, share_seconds, server_settings)
            except _CONNECT_ERRORS as error:
                failures.append((address, error))
                if not is_unavailable(error) and sqlstate(error) != _NOT_ACCEPTING:
                    break
        raise self._failed(failures) from failures[-1][1]

    def _failed(self, failures: list[tuple[Address, Exception]]) -> ConnectFailed:
        reasons = [f"{address}: {self._reason(error)}" for address, error in failures]
        last = failures[-1][1]
        return ConnectFailed(
            f"cannot connect to {self.target.where}: {'; '.join(dict.fromkeys(reasons))}"[:1000],
            sqlstate=sqlstate(last),
            refused=is_refusal(last),
        )

    async def _connect_one(
        self, address: Address, attribute: str, timeout_seconds: float, server_settings: dict[str, str]
    ) -> Connection:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        connection: Connection = await asyncpg.connect(
            **self.target.connect_arguments(address),
            target_session_attrs=attribute,
            timeout=timeout_seconds,
            server_settings=server_settings,
            statement_cache_size=0 if self.pooler else 1000,
            # Our statements are few; preparing each anew every five minutes would help nobody.
            max_cached_statement_lifetime=0,
            connection_class=self.connection_class,
        )
        try:
            for name in ("json", "jsonb"):
                await connection.set_type_codec(name, schema="pg_catalog", encoder=_json_text, decoder=str)
            if not self.pooler and not self._is_direct:
                await require_own_session(connection, max(deadline - loop.time(), 0.001))
                self._is_direct = True
            if not self.pooler:
                connection.backend = await own_backend(connection, timeout_seconds=max(deadline - loop.time(), 0.001))
            if not address.is_socket:
                _keep_alive(connection, self.target.keepalive)
        except BaseException:
            connection.terminate()
            raise
        return connection

    def _reason(self, error: Exception) -> str:
        if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
            return "is not what target_session_attrs asks for"
        if isinstance(error, TimeoutError):
            return "timed out"
        text = safe_text(error)
        if is_poolers(error):
            text = f"a connection pooler is in between ({text}): {way_out(self._variable, pooler=self.pooler)}"
        return text

    def _server_settings(self, role: str, statement_timeout_seconds: float | None, settings: Mapping[str, str]) -> dict[str, str]:
        chosen = {"application_name": f"{self._application_name} {role}"}
        if self.target.options is not None:
            chosen["options"] = self.target.options
        if self.pooler:
            return chosen
        limits = self.limits
        # These win over `options`, and both win over ALTER ROLE … SET. default_transaction_read_only and
        # search_path are left alone: the first is news about the database, the second serves the user's SQL.
        chosen |= {
            "TimeZone": "UTC",
            "default_transaction_isolation": "read committed",
            "default_transaction_deferrable": "off",
            "standard_conforming_strings": "on",
            "client_min_messages": "notice",  # one warning matters: see take_cut_short_wait
            "statement_timeout": _milliseconds(statement_timeout_seconds or limits.statement_timeout_seconds),
            "lock_timeout": _milliseconds(limits.lock_timeout_seconds),
            "idle_in_transaction_session_timeout": _milliseconds(limits.idle_in_transaction_seconds),
            "idle_session_timeout": "0",
            "jit": "off",
        }
        return chosen | dict(settings)


# object_not_in_prerequisite_state: "database is not currently accepting connections"
_NOT_ACCEPTING = "55000"
# A host name that cannot be encoded is a UnicodeError.
_CONNECT_ERRORS: tuple[type[Exception], ...] = (*DATABASE_ERRORS, UnicodeError)


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _json_text(value: object) -> str:
    """JSON text for a json or jsonb parameter: a str is JSON text already, anything else is encoded."""
    return value if isinstance(value, str) else _encode(value)


def _milliseconds(seconds: float) -> str:
    # 0 would mean no limit at all.
    return str(max(1, int(seconds * 1000)))


def _keep_alive(connection: Connection, keepalive: Keepalive) -> None:
    """Notice a peer that vanished without a word, as far as this system can be told to."""
    stream = connection._transport.get_extra_info("socket")
    if not keepalive.enabled or stream is None:
        return
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", keepalive.idle_seconds),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", keepalive.interval_seconds),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", keepalive.count),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", keepalive.user_timeout_milliseconds),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                stream.setsockopt(level, option, value)


async def read_moments_as_microseconds(connection: Connection) -> None:
    """Let this connection give and take timestamptz as microseconds since 2000-01-01 UTC, as the server does.

    Exact, and no date is out of range: one row with a date that Python cannot read would else make a whole
    answer unreadable.
    """
    await connection.set_type_codec(
        "timestamptz",
        schema="pg_catalog",
        format="tuple",
        encoder=lambda moment: (moment,),
        decoder=lambda parts: parts[0],
    )


def underlying(connection: Connection) -> Connection:
    """The session itself behind a pool's loan: the loan is void as soon as the session has ended."""
    return getattr(connection, "_con", None) or connection
