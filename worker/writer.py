"""The writer: it brings a group of outcomes into the database in one transaction, whatever it takes.

The fence (completions and ledger rows, whoever is missing has lost its lease and drops out), the effects of those who are left,
COMMIT. A group that fails is halved until the guilty one is alone. A COMMIT without an answer is resolved by looking under the row
lock. What cannot be written yet is postponed, and tried until the fence refuses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from worker import events
from worker.clock import local_seconds
from worker.committing import Caution, Finished, blame, completes
from worker.domain import AlreadyApplied, Backoff, Failed, Succeeded, failure, verdict
from worker.last_word import LastWord
from worker.measures import POOL_RIGHTS
from worker.patience import Patience
from worker.store import effects, sessions, settling
from worker.store.connection import DATABASE_ERRORS, is_unavailable, safe_text, sqlstate
from worker.store.leasing import Key
from worker.store.settling import Completion, Ruling, Settled, Settlement

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database, Lane
    from worker.store.sessions import Backend

_CONFLICT_TRIES = 10
_LONGEST_CONFLICT_SECONDS = 2.0
_LOCK_SECONDS_WITH_CARE = 0.2


class Writer:
    """Runs in the rights thread's loop, one group at a time."""

    def __init__(
        self,
        database: Database,
        lane: Lane,
        last_word: LastWord,
        *,
        owner: str,
        backoff: Backoff,
        caution: Caution,
        one_at_a_time: asyncio.Lock,
        batch: int,
        deletes: bool,
        group_seconds: float,
        statement_seconds: float,
        on_trouble: Callable[[], None],
        postpone: Callable[[Finished, float], None],
        waiting: Callable[[], int],
    ) -> None:
        self._database = database
        self._lane = lane
        self._last_word = last_word
        self._owner = owner
        self._backoff = backoff
        self._batch = batch
        self._deletes = deletes
        self._group_seconds = group_seconds
        self._statement_seconds = statement_seconds
        self._on_trouble = on_trouble
        self._postpone = postpone
        self._waiting = waiting
        self._patience = Patience(events.COMPLETION_DEFERRED, first_seconds=0.05, longest_seconds=2.0)
        self._uncommitted: Backend | None = None
        """The server process of a transaction whose COMMIT has not been sent."""
        self._one_at_a_time = one_at_a_time
        self.caution = caution
        self.largest = batch
        """How many outcomes may share a transaction for now."""

    async def write(self, members: Sequence[Finished], *, lock_seconds: float | None = None) -> None:
        """Write these outcomes, whatever it takes: halve a group that fails, look after a lost answer, postpone what must wait."""
        connection = await self._connection(members)
        if connection is None:
            return
        alone = len(members) == 1
        culprit: list[Finished] = []  # whose statement was running
        self._uncommitted = None
        settlements: list[Settlement] = []
        sent_at = local_seconds()
        try:
            async with asyncio.timeout(self._statement_seconds if alone else self._group_seconds) as limit:
                if completes(members[0].outcome):
                    # Alone, each of its statements has the time of a statement: a slow job may take the sum of them, a
                    # connection that has gone mute keeps nobody waiting for that long.
                    completed = await self._complete(connection, members, culprit, limit if alone else None, lock_seconds)
                else:
                    settlements = self._settlements(members)
                    settled = await settling.settle(connection, self._database, settlements, owner=self._owner)
                if connection.take_cut_short_wait():
                    raise ConnectionError("the wait for a synchronous standby was cut short")
        except DATABASE_ERRORS as error:
            if connection.is_closed() or isinstance(error, OSError | TimeoutError):
                self._lane.drop()
                if isinstance(error, TimeoutError):
                    self.largest = max(len(members) // 2, 1)  # what was too much for the time is not tried again as it was
                # One of the statements may be what ends the connection: next time they go by themselves.
                self.caution.failed(_texts(members), len(members), alone=True)
                for one in culprit:
                    one.tries += 1
                await self._unanswered(members, error)
                return
            await self._roll_back(connection)
            await self._failed(members, error, culprit)
            return
        self._patience.reset()
        self._measure(members, sent_at)
        if len(members) >= self.largest < self._batch:
            self.largest = min(self.largest * 2, self._batch)
        if self.caution.is_active:
            self.caution.behaved(_texts(members), len(members))
        # From here on it is history: whatever happens, these are not written again.
        if settlements:
            POOL_RIGHTS.failed += sum(isinstance(one.outcome, Failed) for one in members)
            missing = await self._tell_settled(connection, members, settlements, settled)
        else:
            POOL_RIGHTS.completed += len(completed)
            missing = self._tell_completed(members, completed)
        POOL_RIGHTS.stale_refused += len(missing)
        if missing:
            await self._explain(missing, None)

    def _measure(self, members: Sequence[Finished], sent_at: float) -> None:
        now = local_seconds()
        POOL_RIGHTS.commit_seconds.observe(now - sent_at)
        POOL_RIGHTS.trust_left_seconds.observe(min(one.held.trusted_until for one in members) - now)

    def is_cautious_about(self, members: Sequence[Finished]) -> bool:
        """Whether some of their effects failed lately."""
        return self.caution.is_active and self.caution.knows(_texts(members))

    async def write_with_care(self, members: Sequence[Finished]) -> None:
        """Write a group whose effects failed lately: not while they are known to be blocked, and without a long wait for locks."""
        texts = _texts(members)
        until = self.caution.blocked_until(texts)
        if until > local_seconds():
            for one in members:
                one.waits += 1
                self._postpone(one, until)
            return
        await self.write(members, lock_seconds=_LOCK_SECONDS_WITH_CARE if self.caution.limit(texts) == 1 else None)

    async def still_ours(self, members: Sequence[Finished]) -> list[Finished]:
        """Look these up before they are tried again. Returns those that are still to be written; ends or postpones the others."""
        connection = await self._connection(members)
        if connection is None:
            return []
        try:
            async with asyncio.timeout(self._statement_seconds):
                rulings = await settling.rule(connection, self._database, [one.held.job for one in members], owner=self._owner)
        except DATABASE_ERRORS as error:
            self._lane.drop()
            self._keep(members, error)
            return []
        return [one for one in members if self._judge(one, rulings[one.held.key])]

    def _extend(self, limit: asyncio.Timeout | None) -> None:
        """The server has answered: the next statement has its own time."""
        if limit is not None:
            limit.reschedule(asyncio.get_running_loop().time() + self._statement_seconds)

    async def _complete(
        self,
        connection: Connection,
        members: Sequence[Finished],
        culprit: list[Finished],
        limit: asyncio.Timeout | None,
        lock_seconds: float | None,
    ) -> dict[Key, bool]:
        """Fence, ledger, effects, COMMIT. Returns, for those that had their lease, whether their effect was applied before."""
        completions = [
            Completion(*one.held.job[:2], one.outcome.result, bool(one.outcome.effects))
            if isinstance(one.outcome, Succeeded)
            else Completion(*one.held.job[:2], None, False)
            for one in members
        ]
        has_effects = any(completion.has_effects for completion in completions)
        if has_effects:
            self._uncommitted = connection.backend
            await connection.execute("BEGIN")
            if lock_seconds is not None:
                await settling.wait_briefly_for_locks(connection, seconds=lock_seconds)
            self._extend(limit)
        # Told while the server works at these: what the group before came to.
        asyncio.get_running_loop().call_soon(self._last_word.tell)
        answer = await settling.complete(connection, self._database, completions, owner=self._owner, deletes=self._deletes)
        self._extend(limit)
        if has_effects:
            to_apply = [one for one in members if one.effects and answer.get(one.held.job[:2]) is False]
            # Several effects of a job lock rows in an order of their own: two groups of this process would run into each other.
            in_turn = any(len(one.effects) > 1 for one in to_apply)
            async with self._one_at_a_time if in_turn else contextlib.nullcontext():
                await self._apply(connection, to_apply, culprit, limit)
                if not connection.is_in_transaction():
                    raise ConnectionError("an effect has ended the transaction that took the fence")
                culprit[:] = to_apply if len(members) == 1 else []  # a deferred constraint speaks at COMMIT
                self._uncommitted = None
                await connection.execute("COMMIT")
            culprit.clear()
        return answer

    def _tell_completed(self, members: Sequence[Finished], completed: dict[Key, bool]) -> list[Finished]:
        """Say of each that it is done; returns those that the fence has refused."""
        missing: list[Finished] = []
        for one in members:
            already_applied = completed.get(one.held.job[:2])
            if already_applied is None:
                missing.append(one)
                continue
            if already_applied or isinstance(one.outcome, AlreadyApplied):
                self._last_word.log(one, events.EFFECT_ALREADY_APPLIED, key=one.held.job.key)
            self._last_word.succeeded(one)
        return missing

    async def _apply(
        self,
        connection: Connection,
        members: Sequence[Finished],
        culprit: list[Finished],
        limit: asyncio.Timeout | None,
    ) -> None:
        """Run the effects. Single ones of the same text in one go, texts and arguments sorted, so that two committers lock shared
        rows in the same order; several of a job one after the other."""
        by_text: dict[str, list[tuple[object, ...]]] = {}
        several: list[Finished] = []
        alone = len(members) == 1
        for one in members:
            if len(one.effects) == 1 and not alone:
                by_text.setdefault(one.effects[0].sql, []).append(one.effects[0].arguments)
            else:
                several.append(one)
        for text in sorted(by_text):
            await effects.apply_many(connection, text, by_text[text])
        for one in several:
            for effect in one.effects:
                culprit[:] = [one]
                try:
                    await effects.apply(connection, effect.sql, effect.arguments)
                except DATABASE_ERRORS as error:
                    error.add_note(effects.where(effect))
                    raise
                self._extend(limit)
        if any(effect.alone for one in members for effect in one.effects):
            await effects.reset_session_after_commit(connection)
        culprit.clear()

    def _settlements(self, members: Sequence[Finished]) -> list[Settlement]:
        return [
            Settlement(
                one.held.job.id,
                one.held.job.fence,
                verdict(one.outcome, one.held.job.attempt, self._backoff, random.uniform(0.5, 1)),  # type: ignore[arg-type]
            )
            for one in members
        ]

    async def _tell_settled(
        self,
        connection: Connection,
        members: Sequence[Finished],
        settlements: Sequence[Settlement],
        answer: dict[Key, Settled],
    ) -> list[Finished]:
        """Say of each what became of it, and wake who could run what is ready; returns those that the fence has refused."""
        queues: set[str] = set()
        for one, settlement in zip(members, settlements, strict=True):
            settled = answer.get(one.held.key)
            if settled is None:
                continue
            delay_seconds = settlement.verdict.delay_seconds or 0.0
            if settled.state == "ready" and delay_seconds < 0.01:
                queues.add(settled.queue)
            self._last_word.settled(one, settled.state, delay_seconds)
        if queues:
            try:
                async with asyncio.timeout(self._statement_seconds):
                    await settling.wake(connection, self._database, sorted(queues))
            except DATABASE_ERRORS:
                self._lane.drop()  # they are found by the next poll
        return [one for one in members if one.held.key not in answer]

    # --- what goes wrong

    async def _connection(self, members: Sequence[Finished]) -> Connection | None:
        """A connection; None when there is none, and `members` have been put back to wait."""
        try:
            connection = await self._lane.get()
        except DATABASE_ERRORS as error:
            self._on_trouble()
            self._keep(members, error)
            return None
        return connection

    def _keep(self, members: Sequence[Finished], error: BaseException) -> None:
        """The database refuses work for now: these wait, with their leases kept."""
        due_at = local_seconds() + self._patience.delay_seconds(error, waiting=self._waiting())
        for one in members:
            self._postpone(one, due_at)

    async def _roll_back(self, connection: Connection) -> None:
        if not connection.is_in_transaction():
            return
        try:
            async with asyncio.timeout(self._statement_seconds):
                await effects.roll_back(connection)
        except DATABASE_ERRORS:
            self._lane.drop()

    async def _failed(self, members: Sequence[Finished], error: BaseException, culprit: list[Finished]) -> None:
        """A transaction that surely was rolled back."""
        state = sqlstate(error)
        one = members[0]
        texts = _texts(members)
        if is_unavailable(error):
            self._on_trouble()
            if culprit:
                one.tries += 1  # the database may be in trouble, or this statement may always say so
            elif texts and len(members) > 1:
                self.caution.failed(texts, len(members), alone=True)
            if not culprit or one.tries < _CONFLICT_TRIES:
                self._lane.drop()
                self._keep(members, error)
                return
        has_result = isinstance(one.outcome, Succeeded) and one.outcome.result is not None
        result_at_fault = (
            has_result
            and not culprit
            and ((state or "")[:2] in ("22", "54") or getattr(error, "constraint_name", None) == "jobs_result_size")
        )
        whose = blame(state, statement_of_job=bool(culprit), alone=len(members) == 1, result_at_fault=result_at_fault)
        conflict = (state or "")[:2] in ("40", "55", "57")
        if len(members) > 1:
            self.caution.failed(texts, len(members), alone=conflict)
            if conflict:
                # Halving would wait for the same lock again and again. Next time each is looked at by itself.
                self._put_off(members)
                return
            middle = len(members) // 2
            await self.write(members[:middle])
            await self.write(members[middle:])
        elif whose == "job" or (culprit and one.tries + 1 >= _CONFLICT_TRIES):
            one.outcome = self._as_failure(error, result_at_fault)
            one.tries = one.waits = 0
            if conflict:
                self.caution.block(texts, local_seconds())
            await self.write([one])
        elif whose == "database":
            self._keep(members, error)
        elif culprit:
            one.tries += 1
            self.caution.block(texts, local_seconds())
            self._put_off(members)
        elif conflict:
            self._put_off(members)  # somebody holds our own row: for as long as the fence allows
        else:
            # Our own statement was refused, which is nobody's fault and may be mended: a grant, a trigger, a disk.
            if not completes(one.outcome):
                self._last_word.log(one, events.FAILURE_UPDATE_FAILED, error=error, error_type=type(error).__name__)
            self._keep(members, error)
            one.waits += 1

    def _put_off(self, members: Sequence[Finished]) -> None:
        """Try these again after a growing, jittered delay; each is looked up first then."""
        for one in members:
            delay_seconds = min(0.02 * 2.0 ** min(one.waits, 16), _LONGEST_CONFLICT_SECONDS)
            one.waits += 1
            self._postpone(one, local_seconds() + random.uniform(0.5, 1) * delay_seconds)

    def _as_failure(self, error: BaseException, result_at_fault: bool) -> Failed:
        """The attempt's failure; without our traceback, which tells the user nothing, and without the row in its detail."""
        where = "result" if result_at_fault else ", ".join(getattr(error, "__notes__", [])) or "COMMIT"
        return failure(error, message=f"{where}: {safe_text(error)}", with_traceback=False)

    async def _unanswered(self, members: Sequence[Finished], error: BaseException) -> None:
        """Nobody knows whether this was committed: it is looked up under the row lock before anything else is tried."""
        backend, self._uncommitted = self._uncommitted, None
        self._on_trouble()
        for one in members:
            one.uncertain = True
        if backend is not None:
            connection = await self._connection(members)
            if connection is None:
                return
            try:
                async with asyncio.timeout(self._statement_seconds):
                    await sessions.end(connection, backend)
            except DATABASE_ERRORS:
                self._lane.drop()  # it ends by its own time-outs
        await self._explain(members, error)

    async def _explain(self, members: Sequence[Finished], error: BaseException | None) -> None:
        """Look what became of these: refused by the fence, done in spite of everything, or still to be written."""
        ours = await self.still_ours(members)
        for one in ours:
            if error is not None and one.tries >= _CONFLICT_TRIES and completes(one.outcome):
                one.outcome = failure(error, message=f"the connection was lost each time: {safe_text(error)}", with_traceback=False)
                one.tries = 0
        if ours:
            self._keep(ours, error or ConnectionError("refused by the fence, which is still ours"))

    def _judge(self, one: Finished, ruling: Ruling) -> bool:
        """End or postpone an attempt as its row says; True if it is still to be written."""
        gone_as_planned = ruling.state is None and self._deletes and one.uncertain
        if ruling.done or (gone_as_planned and completes(one.outcome)):
            self._last_word.succeeded(one)
        elif ruling.undecided:
            self._put_off([one])
        elif ruling.mine:
            return True
        elif one.uncertain and not completes(one.outcome) and ruling.state in ("ready", "running", "dead"):
            self._last_word.settled(one, ruling.state, 0.0)
        else:
            reason = "cancelled" if ruling.state == "cancelled" else "lease_lost"
            self._last_word.end(one, events.JOB_ABANDONED, reason=reason)
        return False


def _texts(members: Sequence[Finished]) -> set[str]:
    return {effect.sql for one in members for effect in one.effects}
