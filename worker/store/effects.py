"""Effects: the handlers' own statements, run behind the fence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from worker.domain import Effect

if TYPE_CHECKING:
    from worker.store.connection import Connection

_HEAD_CHARACTERS = 60


async def apply(connection: Connection, sql: str, arguments: Sequence[object]) -> None:
    """One effect of one job."""
    await connection.execute(sql, *arguments)


async def apply_many(connection: Connection, sql: str, rows: Sequence[Sequence[object]]) -> None:
    """The same effect of several jobs, in the order of its arguments: whoever else runs it locks shared rows in that order too."""
    try:
        ordered = sorted(rows)  # type: ignore[type-var]  # what cannot be compared is sorted by its text
    except TypeError:
        ordered = sorted(rows, key=repr)
    await connection.executemany(sql, ordered)


async def reset_session_after_commit(connection: Connection) -> None:
    """Undo what `set_config` may have left. RESET inside the transaction takes effect with its COMMIT."""
    await connection.execute("RESET ALL")


def where(effect: Effect) -> str:
    """`effect 2 (INSERT INTO sent …) at app/jobs.py:17`, for an error message."""
    head = " ".join(effect.sql.split())
    if len(head) > _HEAD_CHARACTERS:
        head = head[: _HEAD_CHARACTERS - 1] + "…"
    return f"effect {effect.number} ({head}) at {effect.called_from}"
