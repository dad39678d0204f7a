"""The writer: it brings a group of outcomes into the database in one transaction, whatever it takes.

The fence (completions and ledger rows, whoever is missing has lost its lease and drops out), the effects of those who are left,
COMMIT. A group that fails is halved until the guilty one is alone. A COMMIT without an answer is resolved by looking under the row
lock. What cannot be written yet is postponed, and tried until the fence refuses it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from worker import events, logs
from worker.clock import local_seconds
from worker.committing import Caution, Finished, blame, completes
from worker.domain import AlreadyApplied, Backoff, Failed, Released, Snoozed, Succeeded, failure, verdict
from worker.events import Event
from worker.holding import Holdings
from worker.job import Job
from worker.patience import Patience
from worker.store import effects, settling
from worker.store.connection import DATABASE_ERRORS, is_unavailable, safe_text, sqlstate
from worker.store.settling import Completion, Settlement

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database, Lane

_CONFLICT_TRIES = 10
_LONGEST_CONFLICT_SECONDS = 2.0

FailureListener = Callable[["Job[object]", BaseException, bool], None]


class Writer:
    """Runs in the rights thread's loop, one group at a time."""

    def __init__(
        self,
        database: Database,
        lane: Lane,
        *,
        owner: str,
        holdings: Holdings,
        backoff: Backoff,
        batch: int,
        deletes: bool,
        group_seconds: float,
        statement_seconds: float,
        on_failed: FailureListener | None,
        on_trouble: Callable[[], None],
        postpone: Callable[[Finished, float], None],
        waiting: Callable[[], int],
    ) -> None:
        self._database = database
        self._lane = lane
        self._owner = owner
        self._holdings = holdings
        self._backoff = backoff
        self._batch = batch
        self._deletes = deletes
        self._group_seconds = group_seconds
        self._statement_seconds = statement_seconds
        self._on_failed = on_failed
        self._on_trouble = on_trouble
        self._postpone = postpone
        self._waiting = waiting
        self._patience = Patience(events.COMPLETION_DEFERRED, first_seconds=0.05, longest_seconds=2.0)
        self._wait_cut_short = False
        self._listening_to: Connection | None = None
        self._uncommitted_pid: int | None = None
        """The server process of a transaction whose COMMIT has not been sent."""
        self.caution = Caution(batch)
        self.largest = batch
        """How many outcomes may share a transaction for now."""
        self.unwritten = 0
        """Outcomes given up for good, for the exit status."""

    async def write(self, members: Sequence[Finished]) -> None:
        """Write these outcomes, whatever it takes: halve a group that fails, look after a lost answer, keep what must wait."""
        connection = await self._connection(members)
        if connection is None:
            return
        alone = len(members) == 1
        culprit: list[Finished] = []  # whose statement was running
        self._uncommitted_pid = None
        try:
            async with asyncio.timeout(self._statement_seconds if alone else self._group_seconds) as limit:
                if completes(members[0].outcome):
                    # Alone, each of its statements has the time of a statement: a slow job may take the sum of them, a
                    # connection that has gone mute keeps nobody waiting for that long.
                    await self._complete(connection, members, culprit, limit if alone else None)
                else:
                    await self._settle(connection, members)
        except DATABASE_ERRORS as error:
            if connection.is_closed() or isinstance(error, OSError | TimeoutError):
                self._lane.drop()
                if isinstance(error, TimeoutError):
                    self.largest = max(len(members) // 2, 1)  # what was too much for the time is not tried again as it was
                await self._unanswered(members, error)
                return
            await self._roll_back(connection)
            await self._failed(members, error, culprit)
            return
        self._patience.reset()
        if len(members) >= self.largest < self._batch:
            self.largest = min(self.largest * 2, self._batch)
        if self.caution.is_active:
            self.caution.behaved({effect.sql for one in members for effect in one.effects}, len(members))

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
    ) -> None:
        completions = [
            Completion(one.held.job.id, one.held.job.fence, one.outcome.result, bool(one.outcome.effects))
            if isinstance(one.outcome, Succeeded)
            else Completion(one.held.job.id, one.held.job.fence, None, False)
            for one in members
        ]
        has_effects = any(one.effects for one in members)
        if has_effects:
            self._uncommitted_pid = None if self._database.pooler else connection.get_server_pid()
            await connection.execute("BEGIN")
            self._extend(limit)
        answer = await settling.complete(connection, self._database, completions, owner=self._owner, deletes=self._deletes)
        self._extend(limit)
        present = [one for one in members if one.held.key in answer]
        if has_effects:
            to_apply = [one for one in present if one.effects and not answer[one.held.key]]
            if present:
                await self._apply(connection, to_apply, culprit, limit)
            if not connection.is_in_transaction():
                raise ConnectionError("an effect has ended the transaction that took the fence")
            culprit[:] = to_apply if len(members) == 1 else []  # a deferred constraint speaks at COMMIT
            self._uncommitted_pid = None
            await connection.execute("COMMIT" if present else "ROLLBACK")
            self._extend(limit)
            culprit.clear()
        if self._wait_cut_short:
            self._wait_cut_short = False
            raise ConnectionError("the wait for a synchronous standby was cut short")
        for one in present:
            if answer[one.held.key] or isinstance(one.outcome, AlreadyApplied):
                self._log(one, events.EFFECT_ALREADY_APPLIED, key=one.held.job.key)
            self.end(one, events.JOB_SUCCEEDED)
        await self._explain(connection, [one for one in members if one.held.key not in answer])

    async def _apply(
        self,
        connection: Connection,
        members: Sequence[Finished],
        culprit: list[Finished],
        limit: asyncio.Timeout | None,
    ) -> None:
        """Run the effects. Single ones of the same text in one go, arguments sorted, so that two committers lock shared rows in
        the same order; several of a job one after the other."""
        by_text: dict[str, list[tuple[object, ...]]] = {}
        several: list[Finished] = []
        alone = len(members) == 1
        for one in members:
            if len(one.effects) == 1 and not alone:
                by_text.setdefault(one.effects[0].sql, []).append(one.effects[0].arguments)
            else:
                several.append(one)
        for text, rows in by_text.items():
            await effects.apply_many(connection, text, rows)
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

    async def _settle(self, connection: Connection, members: Sequence[Finished]) -> None:
        settlements = [
            Settlement(
                one.held.job.id,
                one.held.job.fence,
                verdict(one.outcome, one.held.job.attempt, self._backoff, random.uniform(0.5, 1)),  # type: ignore[arg-type]
            )
            for one in members
        ]
        answer = await settling.settle(connection, self._database, settlements, owner=self._owner)
        queues: set[str] = set()
        for one, settlement in zip(members, settlements, strict=True):
            settled = answer.get(one.held.key)
            if settled is None:
                continue
            delay_seconds = settlement.verdict.delay_seconds or 0.0
            if settled.state == "ready" and delay_seconds < 0.01:
                queues.add(settled.queue)
            self._say_settled(one, settled.state, delay_seconds)
        await self._explain(connection, [one for one in members if one.held.key not in answer])
        if queues:
            await settling.wake(connection, self._database, sorted(queues))

    def _say_settled(self, one: Finished, state: str, delay_seconds: float) -> None:
        match one.outcome:
            case Failed() as failed:
                dead = state == "dead"
                fields: dict[str, object] = {} if dead else {"retry_in_seconds": round(delay_seconds, 3)}
                self.end(
                    one,
                    events.JOB_DEAD if dead else events.JOB_FAILED,
                    error=failed.error,
                    error_type=failed.error_type,
                    exception=failed.detail,
                    **fields,
                )
                job = one.held.job_object
                if self._on_failed is not None and job is not None and failed.exception is not None:
                    self._on_failed(job, failed.exception, not dead)
            case Snoozed():
                self.end(one, events.JOB_SNOOZED, retry_in_seconds=delay_seconds)
            case Released() as released:
                self.end(one, events.JOB_RELEASED, reason=released.reason)

    # --- what goes wrong

    async def _connection(self, members: Sequence[Finished]) -> Connection | None:
        """A connection; None when there is none, and `members` have been put back to wait."""
        try:
            connection = await self._lane.get()
        except DATABASE_ERRORS as error:
            self._on_trouble()
            self._keep(members, error)
            return None
        if connection is not self._listening_to:
            self._listening_to = connection
            connection.add_log_listener(self._notice)
        return connection

    def _notice(self, _connection: object, message: object) -> None:
        """A COMMIT that answers with "canceling wait for synchronous replication" is not known to be on the standby."""
        if getattr(message, "sqlstate", "") == "01000" and "canceling" in str(getattr(message, "message", "")):
            self._wait_cut_short = True

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
        if is_unavailable(error):
            self._lane.drop()
            self._on_trouble()
            self._keep(members, error)
            return
        one = members[0]
        has_result = isinstance(one.outcome, Succeeded) and one.outcome.result is not None
        result_at_fault = (
            has_result
            and not culprit
            and ((state or "")[:2] in ("22", "54") or getattr(error, "constraint_name", None) == "jobs_result_size")
        )
        whose = blame(state, statement_of_job=bool(culprit), alone=len(members) == 1, result_at_fault=result_at_fault)
        if len(members) > 1:
            texts = {effect.sql for member in members for effect in member.effects}
            self.caution.failed(texts, len(members), alone=(state or "")[:2] in ("40", "55", "57"))
            middle = len(members) // 2
            await self.write(members[:middle])
            await self.write(members[middle:])
            return
        if whose == "database":
            self._keep(members, error)
            return
        one.tries += 1
        if whose != "job" and (one.tries < _CONFLICT_TRIES or (whose == "company" and not culprit)):
            # A conflict over our own row goes on for as long as the fence allows; one that an effect runs into is bounded.
            delay_seconds = min(0.02 * 2.0 ** min(one.tries, 16), _LONGEST_CONFLICT_SECONDS)
            self._postpone(one, local_seconds() + random.uniform(0.5, 1) * delay_seconds)
        elif completes(one.outcome):
            one.outcome = self._as_failure(error, result_at_fault)
            one.tries = 0
            await self.write([one])
        else:
            self._log(one, events.FAILURE_UPDATE_FAILED, error=error, error_type=type(error).__name__)
            self._give_up(one)

    def _as_failure(self, error: BaseException, result_at_fault: bool) -> Failed:
        """The attempt's failure; without our traceback, which tells the user nothing, and without the row in its detail."""
        where = "result" if result_at_fault else ", ".join(getattr(error, "__notes__", [])) or "COMMIT"
        return failure(error, message=f"{where}: {safe_text(error)}", with_traceback=False)

    async def _unanswered(self, members: Sequence[Finished], error: BaseException) -> None:
        """Nobody knows whether this was committed: it is looked up under the row lock before anything else is tried."""
        pid, self._uncommitted_pid = self._uncommitted_pid, None
        self._on_trouble()
        for one in members:
            one.uncertain = True
        connection = await self._connection(members)
        if connection is None:
            return
        try:
            async with asyncio.timeout(self._statement_seconds * 2):
                if pid is not None:
                    await settling.end_session(connection, pid=pid)
                await self._rule(connection, members, error)
        except DATABASE_ERRORS as trouble:
            self._lane.drop()
            self._keep(members, trouble)

    async def _explain(self, connection: Connection, missing: Sequence[Finished]) -> None:
        """The fence has refused these: say why. What was sent before without an answer may simply be done."""
        if missing:
            await self._rule(connection, missing, None)

    async def _rule(self, connection: Connection, members: Sequence[Finished], error: BaseException | None) -> None:
        rulings = await settling.rule(connection, self._database, [one.held.job for one in members], owner=self._owner)
        for one in members:
            ruling = rulings[one.held.key]
            gone_as_planned = ruling.state is None and self._deletes and one.uncertain
            if ruling.done or (gone_as_planned and completes(one.outcome)):
                self.end(one, events.JOB_SUCCEEDED)
            elif ruling.mine:
                self._keep([one], error or ConnectionError("refused by the fence, which is still ours"))
            elif one.uncertain and not completes(one.outcome) and ruling.state in ("ready", "running", "dead"):
                self._say_settled(one, ruling.state, 0.0)
            else:
                reason = "cancelled" if ruling.state == "cancelled" else "lease_lost"
                self.end(one, events.JOB_ABANDONED, reason=reason)

    def _give_up(self, one: Finished) -> None:
        """Its outcome cannot be written: no longer renewed, it is the reaper's."""
        self.unwritten += 1
        self._holdings.remove(one.held)

    # --- the last word

    def end(self, one: Finished, event: Event, **fields: object) -> None:
        """Settled: the lease is over, and everybody may know."""
        self._holdings.remove(one.held)
        self._log(one, event, **fields)

    def _log(self, one: Finished, event: Event, **fields: object) -> None:
        job = one.held.job
        logs.emit(
            event,
            **job.log_fields(),
            duration_ms=one.duration_ms,
            **fields,
        )
