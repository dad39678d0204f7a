"""Claims whose answer was lost: their jobs go back, attempt refunded, once the claim can no longer commit.

The server process of a dropped connection may still be at work. It is gone when pg_stat_activity says so (where that cannot be
told, as behind a transaction pooler, the server's own time limit must have passed); its jobs are those of this owner that nobody
here holds. No claim may be in flight while that is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from worker import events, logs
from worker.clock import local_seconds
from worker.holding import Holdings
from worker.store import claiming, sessions
from worker.store.connection import sqlstate

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database
    from worker.store.sessions import Backend


MOST_OUTSTANDING = 3
"""While a synchronous standby is away each claim stays in the server without an answer, with its connection and its rows."""


class LostClaims:
    """Remembers claims without an answer, and gives back what they took."""

    def __init__(self, database: Database, *, owner: str, holdings: Holdings, limit_seconds: float) -> None:
        self._database = database
        self._owner = owner
        self._holdings = holdings
        self._limit_seconds = limit_seconds
        self._lost: list[tuple[Backend | None, float]] = []

    @property
    def outstanding(self) -> bool:
        """Whether some claim is not known to be over."""
        return bool(self._lost)

    @contextmanager
    def watching(self, connection: Connection) -> Iterator[None]:
        """Around a claim: if its answer does not come, its server process is remembered. No claim while too many are."""
        if len(self._lost) >= MOST_OUTSTANDING:
            raise ConnectionError(f"the last {len(self._lost)} claims had no answer and may still commit")
        try:
            yield
        except BaseException as error:
            if sqlstate(error) is None or connection.is_closed():
                self._lost.append((connection.backend, local_seconds()))
            raise

    async def give_back(self, connection: Connection) -> None:
        """Return what claims without an answer have taken, and forget those that are surely over."""
        if not self._lost:
            return
        over = [one for one in self._lost if await is_over(connection, self._database, *one, limit_seconds=self._limit_seconds)]
        released = await claiming.recover(connection, self._database, owner=self._owner, held=self._holdings.keys())
        for job in released:
            logs.emit(events.JOB_RELEASED, **job.log_fields(), duration_ms=0.0, reason="claim_lost")
        if over and not await claiming.orphans_are_left(connection, self._database, owner=self._owner, held=self._holdings.keys()):
            self._lost = [one for one in self._lost if one not in over]


async def is_over(
    connection: Connection, database: Database, backend: Backend | None, since: float, *, limit_seconds: float
) -> bool:
    """Whether the claim that was dropped at the local moment `since` can no longer commit. `limit_seconds`: how long its answer was
    waited for; behind a transaction pooler the server may work at it for as long as the role lets any statement run."""
    if backend is None:
        return local_seconds() - since >= max(2 * limit_seconds, database.limits.statement_timeout_seconds)
    return not await sessions.lives(connection, backend)
