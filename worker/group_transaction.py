"""One transaction that completes a group of jobs: the fence and the ledger, the effects of those who are left, COMMIT.

It only tries. What an error means for the members, and what is tried next, the writer decides; it is told whose statement was
running, and whether COMMIT had been sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from worker.committing import Finished
from worker.domain import Succeeded
from worker.store import effects, settling
from worker.store.connection import DATABASE_ERRORS
from worker.store.leasing import Key
from worker.store.settling import Completion

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database
    from worker.store.sessions import Backend


class GroupTransaction:
    """One try to complete `members` on a connection that nobody else uses meanwhile."""

    def __init__(
        self,
        connection: Connection,
        database: Database,
        members: Sequence[Finished],
        *,
        owner: str,
        deletes: bool,
        lock_seconds: float | None,
        statement_seconds: float,
        one_at_a_time: asyncio.Lock,
    ) -> None:
        self._connection = connection
        self._database = database
        self._members = members
        self._owner = owner
        self._deletes = deletes
        self._lock_seconds = lock_seconds
        self._statement_seconds = statement_seconds
        self._one_at_a_time = one_at_a_time
        self._is_alone = len(members) == 1
        self.culprit: list[Finished] = []
        """Whose statement was running when it failed."""
        self.uncommitted: Backend | None = None
        """The server process of a transaction whose COMMIT has not been sent."""

    async def run(self, limit: asyncio.Timeout, *, on_sent: Callable[[], None]) -> dict[Key, bool]:
        """Fence, ledger, effects, COMMIT, within `limit`. Returns, for those that had their lease, whether their effect was applied
        before. `on_sent` is called while the server works.

        A job alone has the time of a statement for each of its own: a slow one may take the sum of them, a connection that has gone
        mute keeps nobody waiting for that long.
        """
        connection, members = self._connection, self._members
        completions = [
            Completion(*one.held.job[:2], one.outcome.result, bool(one.outcome.effects))
            if isinstance(one.outcome, Succeeded)
            else Completion(*one.held.job[:2], None, False)
            for one in members
        ]
        has_effects = any(completion.has_effects for completion in completions)
        if has_effects:
            self.uncommitted = connection.backend
            await connection.execute("BEGIN")
            if self._lock_seconds is not None:
                await settling.wait_briefly_for_locks(connection, seconds=self._lock_seconds)
            self._extend(limit)
        asyncio.get_running_loop().call_soon(on_sent)
        answer = await settling.complete(connection, self._database, completions, owner=self._owner, deletes=self._deletes)
        self._extend(limit)
        if has_effects:
            to_apply = [one for one in members if one.effects and answer.get(one.held.job[:2]) is False]
            # Several effects of a job lock rows in an order of their own: two groups of this process would run into each other.
            in_turn = any(len(one.effects) > 1 for one in to_apply)
            async with self._one_at_a_time if in_turn else contextlib.nullcontext():
                await self._apply(to_apply, limit)
                if not connection.is_in_transaction():
                    raise ConnectionError("an effect has ended the transaction that took the fence")
                self.culprit = to_apply if self._is_alone else []  # a deferred constraint speaks at COMMIT
                self.uncommitted = None
                await connection.execute("COMMIT")
            self.culprit = []
        return answer

    def _extend(self, limit: asyncio.Timeout) -> None:
        """The server has answered: the next statement has its own time."""
        if self._is_alone:
            limit.reschedule(asyncio.get_running_loop().time() + self._statement_seconds)

    async def _apply(self, members: Sequence[Finished], limit: asyncio.Timeout) -> None:
        """Run the effects. Single ones of the same text in one go, texts and arguments sorted, so that two committers lock shared
        rows in the same order; several of a job one after the other."""
        connection = self._connection
        by_text: dict[str, list[tuple[object, ...]]] = {}
        in_sequence: list[Finished] = []
        for one in members:
            if len(one.effects) == 1 and len(members) > 1:
                by_text.setdefault(one.effects[0].sql, []).append(one.effects[0].arguments)
            else:
                in_sequence.append(one)
        for text in sorted(by_text):
            await effects.apply_many(connection, text, by_text[text])
        for one in in_sequence:
            self.culprit = [one]
            for effect in one.effects:
                try:
                    await effects.apply(connection, effect.sql, effect.arguments)
                except DATABASE_ERRORS as error:
                    error.add_note(effects.where(effect))
                    raise
                self._extend(limit)
        if any(effect.alone for one in members for effect in one.effects):
            await effects.reset_session_after_commit(connection)
        self.culprit = []
