"""Sorts what can go wrong with a database by what the caller should do about it."""

from __future__ import annotations

import ssl

import asyncpg

DATABASE_ERRORS: tuple[type[Exception], ...] = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,  # TimeoutError is one
)
"""Everything that talking to a database may raise; anything else is a bug."""

# 08 connection · 53 resources · 58 system error · XX the server's own fault
_UNAVAILABLE_CLASSES = frozenset({"08", "53", "58", "XX"})
# 25006 read-only for now (a demoted primary) · 25P0x and 57P05 the session ran into a time limit and is gone
# · 57P0x shutting down, starting up, terminated by an administrator. Not 57014: a cancelled statement says
# nothing about the database.
_UNAVAILABLE_STATES = frozenset({"25006", "25P03", "25P04", "57P01", "57P02", "57P03", "57P04", "57P05"})
_PROTOCOL_VIOLATION = "08P01"
# What asyncpg says on a connection that is gone. Its other InterfaceErrors are misuse (two statements at
# once on one connection), which must not look like an outage.
_GONE = ("closed", "closing", "released back to the pool")


class ConnectFailed(ConnectionError):
    """No connection could be had. The message names where to, and holds no secret.

    `refused`: the server, or our check of its certificate, said no; waiting alone will hardly help.
    """

    def __init__(self, message: str, *, sqlstate: str | None, refused: bool) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.refused = refused


class PoolerFound(ConnectionError):
    """The session is not our own: what we asked for at its start has not reached it."""


def is_poolers(error: BaseException) -> bool:
    """Whether a connection failed because it leads to a connection pooler that was taken for the database."""
    return isinstance(error, PoolerFound) or (
        sqlstate(error) == _PROTOCOL_VIOLATION and "unsupported startup parameter" in str(error)
    )


def sqlstate(error: BaseException | None) -> str | None:
    """The SQLSTATE the server gave, or None when it did not speak."""
    code = getattr(error, "sqlstate", None)
    return code if isinstance(code, str) else None


def is_unavailable(error: BaseException) -> bool:
    """Whether the database is away or refuses work for now: wait, and try again on a new connection."""
    if isinstance(error, OSError | asyncpg.TargetServerAttributeNotMatched):
        return True
    code = sqlstate(error)
    if code is not None:
        return code[:2] in _UNAVAILABLE_CLASSES or code in _UNAVAILABLE_STATES
    return isinstance(error, asyncpg.InterfaceError) and any(word in str(error) for word in _GONE)


def is_outdated(error: BaseException) -> bool:
    """Whether somebody has altered what a statement that is prepared here returns. It did nothing; asyncpg has forgotten by now
    what it knew of it, and it can be sent again."""
    return isinstance(error, asyncpg.InvalidCachedStatementError | asyncpg.OutdatedSchemaCacheError)


def is_refusal(error: BaseException) -> bool:
    """Whether a connection failed for what we are or ask for: password, database, certificate, a pooler."""
    code = sqlstate(error) or ""
    return (
        code[:2] == "28"
        or code in ("3D000", "42501")
        or is_poolers(error)
        or isinstance(error, ssl.SSLCertVerificationError | asyncpg.ClientConfigurationError | UnicodeError)
    )
