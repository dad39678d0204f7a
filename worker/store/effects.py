"""Effects: the handlers' own statements, run behind the fence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import asyncpg

from worker.cancellation import is_cancelled
from worker.domain import Effect
from worker.store.trouble import DATABASE_ERRORS

if TYPE_CHECKING:
    from worker.store.connection import Connection

_HEAD_CHARACTERS = 60


async def apply(connection: Connection, sql: str, arguments: Sequence[object]) -> None:
    """One effect of one job."""
    with _arguments_of_the_user():
        if arguments:
            await connection.execute(sql, *arguments)
        else:  # `execute` would use the simple protocol, in which the server runs whatever stands behind a semicolon
            await connection.executemany(sql, [()])


async def apply_many(connection: Connection, sql: str, rows: Sequence[Sequence[object]]) -> None:
    """The same effect of several jobs, in the order of its arguments: whoever else runs it locks shared rows in that order too.

    An argument whose encoding raises what is no Exception (SystemExit) leaves asyncpg waiting: that ends by the caller's limit.
    """
    with _arguments_of_the_user():
        try:
            ordered = sorted(rows)  # type: ignore[type-var]  # what cannot be compared is sorted by its text
        except BaseException:  # nothing here waits: whatever it is, a method of theirs has raised it
            ordered = sorted(rows, key=repr)
        await connection.executemany(sql, ordered)


@contextlib.contextmanager
def _arguments_of_the_user() -> Iterator[None]:
    """Arguments are compared, printed and encoded by their own methods, which may raise anything: that is a bad argument."""
    try:
        yield
    except DATABASE_ERRORS:
        raise
    except BaseException as error:
        if isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and is_cancelled()):
            raise
        raise asyncpg.DataError(f"an argument cannot be sent: {type(error).__name__}") from error


async def reset_session_after_commit(connection: Connection) -> None:
    """Undo what the effects may have left: settings (RESET inside the transaction takes effect with its COMMIT), temporary
    tables, advisory locks of the session."""
    await connection.execute("RESET ALL; DISCARD TEMP; SELECT pg_advisory_unlock_all()")


async def roll_back(connection: Connection) -> None:
    """Undo the transaction, and what a rollback leaves: advisory locks of the session."""
    await connection.execute("ROLLBACK; SELECT pg_advisory_unlock_all()")


def where(effect: Effect) -> str:
    """`effect 2 (INSERT INTO sent …) at app/jobs.py:17`, for an error message."""
    head = " ".join(effect.sql.split())
    if len(head) > _HEAD_CHARACTERS:
        head = head[: _HEAD_CHARACTERS - 1] + "…"
    return f"effect {effect.number} ({head}) at {effect.called_from}"
