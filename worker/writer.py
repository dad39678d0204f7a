"""The writer: it brings a group of outcomes into the database, whatever it takes.

Completions in one transaction (`GroupTransaction`), failures and releases in one statement; whoever is missing from the answer has
lost its lease. A group that fails is halved until the guilty one is alone. A COMMIT without an answer is resolved by looking under
the row lock. What cannot be written yet is postponed, and tried until the fence refuses it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from worker import events
from worker.clock import local_seconds
from worker.committing import Caution, Finished, blame, completes, effect_texts, is_result_at_fault
from worker.domain import AlreadyApplied, Backoff, Failed, failure, verdict
from worker.group_transaction import GroupTransaction
from worker.last_word import LastWord
from worker.measures import POOL_RIGHTS
from worker.patience import Patience
from worker.store import effects, sessions, settling, standbys
from worker.store.connection import DATABASE_ERRORS, is_outdated, is_unavailable, safe_text, sqlstate
from worker.store.leasing import Key
from worker.store.settling import Ruling, Settled, Settlement

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
        self._one_at_a_time = one_at_a_time
        self.caution = caution
        self.largest = batch
        """How many outcomes may share a transaction for now."""

    async def write(self, members: Sequence[Finished], *, lock_seconds: float | None = None) -> None:
        """Write these outcomes, whatever it takes: halve a group that fails, look after a lost answer, postpone what must wait."""
        connection = await self._connection(members)
        if connection is None:
            return
        transaction = GroupTransaction(
            connection,
            self._database,
            members,
            owner=self._owner,
            deletes=self._deletes,
            lock_seconds=lock_seconds,
            statement_seconds=self._statement_seconds,
            one_at_a_time=self._one_at_a_time,
        )
        settlements: list[Settlement] = []
        sent_at = local_seconds()
        try:
            async with asyncio.timeout(self._statement_seconds if len(members) == 1 else self._group_seconds) as limit:
                if completes(members[0].outcome):
                    # Told while the server works at these: what the group before came to.
                    completed = await transaction.run(limit, on_sent=self._last_word.tell)
                else:
                    settlements = self._settlements(members)
                    settled = await settling.settle(connection, self._database, settlements, owner=self._owner)
                standbys.believe(connection)
        except DATABASE_ERRORS as error:
            if connection.is_closed() or isinstance(error, OSError | TimeoutError):
                self._lane.drop()
                if isinstance(error, TimeoutError):
                    self.largest = max(len(members) // 2, 1)  # what was too much for the time is not tried again as it was
                # One of the statements may be what ends the connection: next time they go by themselves.
                self.caution.failed(effect_texts(members), len(members), alone=True)
                for one in transaction.culprit:
                    one.tries += 1
                await self._unanswered(members, error, transaction.uncommitted)
                return
            await self._roll_back(connection)
            await self._failed(members, error, transaction.culprit)
            return
        self._patience.reset()
        self._measure(members, sent_at)
        if len(members) >= self.largest < self._batch:
            self.largest = min(self.largest * 2, self._batch)
        if self.caution.is_active:
            self.caution.behaved(effect_texts(members), len(members))
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
        return self.caution.is_active and self.caution.knows(effect_texts(members))

    async def write_with_care(self, members: Sequence[Finished]) -> None:
        """Write a group whose effects failed lately: not while they are known to be blocked, and without a long wait for locks."""
        texts = effect_texts(members)
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
        texts = effect_texts(members)
        if is_unavailable(error):
            self._on_trouble()
            for guilty in culprit:
                guilty.tries += 1  # the database may be in trouble, or this statement may always say so
            if len(members) > 1:
                self.caution.failed(texts, len(members), alone=True)  # next time it says so with nobody beside it
            if not culprit or culprit[0].tries < _CONFLICT_TRIES:
                self._lane.drop()
                self._keep(members, error)
                return
        if is_outdated(error) and culprit and culprit[0].tries + 1 < _CONFLICT_TRIES:
            for guilty in culprit:
                guilty.tries += 1
            await self.write(members)
            return
        one = members[0]
        result_at_fault = not culprit and is_result_at_fault(one, state, getattr(error, "constraint_name", None))
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

    async def _unanswered(self, members: Sequence[Finished], error: BaseException, uncommitted: Backend | None) -> None:
        """Nobody knows whether this was committed: it is looked up under the row lock before anything else is tried."""
        self._on_trouble()
        for one in members:
            one.uncertain = True
        if uncommitted is not None:
            connection = await self._connection(members)
            if connection is None:
                return
            try:
                async with asyncio.timeout(self._statement_seconds):
                    await sessions.end(connection, uncommitted)
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
