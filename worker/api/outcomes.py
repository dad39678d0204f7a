"""Outcomes of remote attempts: completions, failures and releases that arrive meanwhile share one transaction.

The statements are the daemon's. Then one look tells what became of each attempt: whether this transaction has ended it, an earlier
one, or nobody. Nothing is answered that a synchronous standby is not known to have.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker import events, logs
from worker.api.coalescing import Coalescer, Waiting
from worker.api.judging import Verb, judge
from worker.api.problems import Problem, of_database
from worker.clock import local_seconds
from worker.domain import Backoff, Failed, Released, Succeeded, verdict
from worker.measures import REMOTE
from worker.store import effects, settling, standbys, tasks
from worker.store.connection import DATABASE_ERRORS, is_unavailable
from worker.store.leasing import Key
from worker.store.settling import Completion, Settled, Settlement
from worker.store.tasks import Standing, Task

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database, Lane

MOST = 64
FINISH_SETTINGS = {"plan_cache_mode": "force_generic_plan", "lock_timeout": "200ms"}
"""Whoever keeps a row locked holds up the others of its group for no longer than this."""
MOST_RETURNING = 1_000
_RETURN_PAUSES = Backoff(base_seconds=0.2, max_seconds=5.0)


class Ending(NamedTuple):
    """What a remote worker says of its attempt."""

    verb: Verb
    id: int
    fence: int
    owner: str
    outcome: Succeeded | Failed | Released

    @property
    def key(self) -> Key:
        return self.id, self.fence


Member = Waiting[Ending, Task]


class Outcomes:
    """`end` is for routes; `run` is the one loop that writes."""

    def __init__(self, database: Database, lane: Lane, *, backoff: Backoff, statement_seconds: float, limit_seconds: float) -> None:
        self._database = database
        self._lane = lane
        self._backoff = backoff
        self._statement_seconds = statement_seconds
        self._coalescer: Coalescer[Ending, Task] = Coalescer(
            self._write_all,
            most=MOST,
            limit_seconds=limit_seconds,
            bytes_of=lambda ending: len(ending.outcome.result or "") if isinstance(ending.outcome, Succeeded) else 0,
        )
        self.run: Callable[[], Coroutine[object, object, None]] = self._coalescer.run
        self._returning: dict[asyncio.Task[None], Task] = {}
        self._some_is_left = False

    async def end(self, ending: Ending) -> Task:
        """The task after the attempt has ended so. Raises Problem when it has not."""
        return await self._coalescer.ask(ending)

    def give_back(self, task: Task, owner: str) -> None:
        """Nobody was there to take this task: release it, at the next chance or a later one."""
        if len(self._returning) >= MOST_RETURNING:
            self._leave(task)
            return
        ending = Ending("release", task.id, task.fence, owner, Released(reason="claim_lost"))
        returning = asyncio.create_task(self._return(ending, (task.expires_in_ms or 0) / 1000), name="give back")
        self._returning[returning] = task
        returning.add_done_callback(self._returning.pop)

    async def _return(self, ending: Ending, lease_seconds: float) -> None:
        """Until it is told, or the lease is over: then the reaper takes the task back."""
        until = local_seconds() + lease_seconds
        failures = 0
        while True:
            try:
                await self.end(ending)
                return
            except Problem as problem:
                failures += 1
                pause_seconds = _RETURN_PAUSES.delay_seconds(failures, random.uniform(0.5, 1))
                if problem.status_code != 503 or local_seconds() + pause_seconds >= until:
                    return
            await asyncio.sleep(pause_seconds)

    async def finish(self, limit_seconds: float) -> bool:
        """Nothing more is asked for: give back what is on its way back, within the limit. The rest expires, and is named; returns
        whether nothing ever had to."""
        if self._returning:
            await asyncio.wait(set(self._returning), timeout=limit_seconds)
        for task in self._returning.values():
            self._leave(task)
        return not self._some_is_left

    def _leave(self, task: Task) -> None:
        """To the end of its lease, by name."""
        self._some_is_left = True
        logs.emit(
            events.COMPLETION_DEFERRED,
            **task.log_fields(),
            error="not given back; left to lease expiry",
            waiting=len(self._returning),
        )

    async def _write_all(self, members: Sequence[Member]) -> None:
        """Write these; a group that is refused is halved until the one at fault is alone. Raises when the database is away."""
        try:
            await self._write(members)
        except DATABASE_ERRORS as error:
            connection = await self._still_there(error)
            if connection is None:
                raise
            await effects.roll_back(connection)
            if len(members) == 1:
                members[0].refuse(of_database(error))
                return
            half = len(members) // 2
            await self._write_all(members[:half])
            await self._write_all(members[half:])

    async def _still_there(self, error: BaseException) -> Connection | None:
        """The connection, if the error was about what was sent; None (it is dropped then) if it was about the database."""
        if not isinstance(error, OSError) and not is_unavailable(error):
            connection = await self._lane.get()
            if connection.is_in_transaction():
                return connection
        self._lane.drop()
        return None

    async def _write(self, members: Sequence[Member]) -> None:
        endings = [member.wish for member in members]
        connection = await self._lane.get()
        sent_at = local_seconds()
        async with asyncio.timeout(self._statement_seconds):
            await connection.execute("BEGIN")
            completed, settled, delays = await self._apply(connection, endings)
            attempts = [(ending.id, ending.fence, ending.owner) for ending in endings]
            standings = await tasks.look(connection, self._database, attempts)
            ended = {*completed, *settled}
            problems = [
                judge(ending.verb, standing, fence=ending.fence, owner=ending.owner)
                for ending, standing in zip(endings, standings, strict=True)
            ]
            if any(problem is None and ending.key not in ended for ending, problem in zip(endings, problems, strict=True)):
                await standbys.prove(connection)  # an earlier transaction has ended it, whose answer may have been lost
            await connection.execute("COMMIT")
        standbys.believe(connection)
        REMOTE.commit_seconds.observe(local_seconds() - sent_at)
        for member, standing, problem in zip(members, standings, problems, strict=True):
            ending = member.wish
            if problem is None:
                assert standing is not None
                member.answer(standing.task)
                if ending.key in ended:
                    ended.remove(ending.key)  # said once, however often it was asked for at the same time
                    _say(ending, standing, delays.get(ending.key))
            else:
                REMOTE.stale_refused += problem.status_code == 409
                member.refuse(problem)
        await self._wake(connection, settled)

    async def _apply(
        self, connection: Connection, endings: Sequence[Ending]
    ) -> tuple[set[Key], dict[Key, Settled], dict[Key, float | None]]:
        """Each by id, owner and fence; returns what these statements have ended, and the delays (seconds) they were given."""
        completed: set[Key] = set()
        settled: dict[Key, Settled] = {}
        delays: dict[Key, float | None] = {}
        failed = [ending.id for ending in endings if isinstance(ending.outcome, Failed)]
        attempts = await tasks.count_attempts(connection, self._database, failed) if failed else {}
        completions = [
            (Completion(*ending.key, ending.outcome.result, False), ending.owner)
            for ending in endings
            if isinstance(ending.outcome, Succeeded)
        ]
        if completions:
            # The row is kept, whatever the retention: whoever repeats a completion finds it. Pruning removes it.
            completed = await settling.complete_for_several(connection, self._database, completions)
        for owner in sorted({ending.owner for ending in endings if not isinstance(ending.outcome, Succeeded)}):
            # One an attempt, what was said first: the statement would take any.
            settlements: dict[Key, Settlement] = {}
            for ending in endings:
                if ending.owner == owner and ending.key not in settlements and not isinstance(ending.outcome, Succeeded):
                    ruling = verdict(ending.outcome, attempts.get(ending.id, 1), self._backoff, random.uniform(0.5, 1))
                    settlements[ending.key] = Settlement(*ending.key, ruling)
            written = await settling.settle(connection, self._database, list(settlements.values()), owner=owner)
            settled |= written
            delays |= {key: settlements[key].verdict.delay_seconds for key in written}
        return completed, settled, delays

    async def _wake(self, connection: Connection, settled: dict[Key, Settled]) -> None:
        """Tell a hungry process of what is ready again."""
        queues = sorted({one.queue for one in settled.values() if one.state == "ready"})
        if queues:
            try:
                async with asyncio.timeout(self._statement_seconds):
                    await settling.wake(connection, self._database, queues)
            except DATABASE_ERRORS:
                self._lane.drop()  # they are found by the next poll


def _say(ending: Ending, standing: Standing, delay_seconds: float | None) -> None:
    """The event of an attempt that has just ended; `delay_seconds`: until the next one."""
    task = standing.task
    about = {
        "job_id": task.id,
        "kind": task.kind,
        "queue": task.queue,
        # The one that has ended, also where it is refunded.
        "attempt": task.attempt + isinstance(ending.outcome, Released),
        "fence": ending.fence,
        "processor": ending.owner.removeprefix(tasks.OWNER_PREFIX),
        "duration_ms": standing.since_claim_ms,
    }
    match ending.outcome:
        case Succeeded():
            REMOTE.completed += 1
            logs.emit(events.JOB_SUCCEEDED, **about)
        case Failed() as failed:
            REMOTE.failed += 1
            trouble = {"error": failed.error, "error_type": failed.error_type, "exception": failed.detail}
            if task.state == "dead":
                logs.emit(events.JOB_DEAD, **about, **trouble)
            else:
                retry_in_seconds = None if delay_seconds is None else round(delay_seconds, 3)
                logs.emit(events.JOB_FAILED, **about, **trouble, retry_in_seconds=retry_in_seconds)
        case Released() as released:
            logs.emit(events.JOB_RELEASED, **about, reason=released.reason)
