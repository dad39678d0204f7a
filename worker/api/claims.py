"""Claims over HTTP: all requests that wait for the same queue and kinds share one claim statement.

What is due is looked up from the start of the index before each claim (a survey, the daemon's), so that a task which was there
before the request is found, in the order of priorities. Where that is slow (dead entries under an old snapshot), what was found
last is used for a while, and a survey only comes before the answer "none".

A request with a `request_id` finds what it has claimed before, also while its twin is in flight elsewhere. A task whose client has
gone is given back, attempt refunded; so is one whose answer was lost on the way from the database, or that a synchronous standby
is not known to have. While a few such claims may still commit, nothing more is claimed: each keeps a session of the server, and
its rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker import events, logs
from worker.api.coalescing import Coalescer, Waiting
from worker.api.lost_claims import LostClaims
from worker.api.problems import database_unavailable
from worker.clock import local_seconds
from worker.measures import REMOTE
from worker.store import claiming, standbys, task_claiming
from worker.store.claiming import Cursor, Range
from worker.store.connection import DATABASE_ERRORS, read_moments_as_microseconds, sqlstate
from worker.store.leasing import Key
from worker.store.task_claiming import Wish
from worker.store.tasks import OWNER_PREFIX, Task

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database, Lane

MOST = task_claiming.LIMITS[0]
CHEAP_SURVEY_SECONDS = 0.01
SURVEY_SHARE = 0.05
PAYLOAD_BYTES = 16 * 1024 * 1024
_LOOK_AGAIN_SECONDS = 0.05


class Call(NamedTuple):
    """One request for a task."""

    wish: Wish
    queue: str
    kinds: tuple[str, ...] | None
    may_be_repeated: bool
    """The caller chose the id of the request."""

    @property
    def key(self) -> tuple[str, str]:
        return self.wish.owner, self.wish.request_id


class Grant:
    """A task for one or several callers of the same request. Whoever cannot take it refuses; when all have, it goes back."""

    __slots__ = ("_callers", "_give_back", "task")

    def __init__(self, task: Task, callers: int, give_back: Callable[[], None]) -> None:
        self.task = task
        self._callers = callers
        self._give_back = give_back

    def refuse(self) -> None:
        self._callers -= 1
        if self._callers == 0:
            self._give_back()


Member = Waiting[Call, Grant | None]
Places = list[tuple[Range, Cursor]]


class Claims:
    """`next` is for routes; `run` is the one loop that claims; `finish` ends it."""

    def __init__(
        self,
        database: Database,
        lane: Lane,
        *,
        claim_timeout_seconds: float,
        limit_seconds: float,
        give_back: Callable[[Task, str], None],
    ) -> None:
        self._database = database
        self._lane = lane
        self._claim_timeout_seconds = claim_timeout_seconds
        self._give_back = give_back
        self._coalescer: Coalescer[Call, Grant | None] = Coalescer(
            self._serve,
            most=MOST,
            limit_seconds=limit_seconds,
            group_of=lambda call: (call.queue, call.kinds),
            hand_back=lambda grant: grant.refuse() if grant else None,
        )
        self._turn = asyncio.Lock()
        """Held by the claim in flight, and by `finish` for good."""
        self._loop: asyncio.Task[object] | None = None
        self._connection: Connection | None = None
        self._known: dict[str, tuple[float, Places]] = {}
        """By queue, where surveys are slow: until when what was found is used, and where to go on."""
        self._lost = LostClaims(database, limit_seconds=claim_timeout_seconds)
        self._returning: deque[Key] = deque(maxlen=1_000)
        """What is on its way back: a request that finds it must not take it."""

    async def next(
        self,
        *,
        processor: str,
        queue: str,
        kinds: Sequence[str] | None,
        lease_seconds: float,
        request_id: str | None,
    ) -> Grant | None:
        """A task, or None when none is due. Raises Problem."""
        wish = Wish(f"{OWNER_PREFIX}{processor}", lease_seconds, request_id or f"auto:{secrets.token_hex(16)}")
        ordered = None if kinds is None else tuple(sorted(set(kinds)))
        return await self._coalescer.ask(Call(wish, queue, ordered, request_id is not None))

    async def run(self) -> None:
        """Claim until cancelled."""
        self._loop = asyncio.current_task()
        await self._coalescer.run()

    async def finish(self, limit_seconds: float) -> bool:
        """Nothing more is asked for, and nothing more is claimed: what claims without an answer have taken goes back. The one in
        flight has half of the limit to end. What cannot go back within the limit expires, and is named; returns whether all did."""
        until = local_seconds() + limit_seconds
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_seconds / 2):
                    await self._turn.acquire()
            async with asyncio.timeout(max(until - local_seconds(), 0)):
                if self._loop is not None:
                    self._loop.cancel()  # a claim that has no answer by now counts as lost
                    await asyncio.wait({self._loop})
                while self._lost.may_hold_tasks:
                    try:
                        await self._ready_connection()
                    except DATABASE_ERRORS:  # a failover may be under way
                        self._lane.drop()
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        except DATABASE_ERRORS as error:
            said = "a claim without an answer may still take tasks, which are then left to lease expiry"
            logs.emit(events.CLAIM_FAILED, error=said, error_type=type(error).__name__)
            return False
        return True

    async def _serve(self, members: Sequence[Member]) -> None:
        async with self._turn:
            await self._serve_in_turn(members)

    async def _serve_in_turn(self, members: Sequence[Member]) -> None:
        calls: dict[tuple[str, str], list[Member]] = {}
        for member in members:
            calls.setdefault(member.wish.key, []).append(member)
        asked = {key: same[0].wish for key, same in calls.items()}
        try:
            connection = await self._ready_connection()
            if self._lost.are_too_many:
                for member in members:
                    member.refuse(database_unavailable())
                return
            found, claimed = await self._claim(connection, asked)
        except BaseException:
            self._connection = None
            self._known.clear()
            self._lane.drop()
            raise
        for key, same in calls.items():
            task, is_new = claimed.get(key), True
            if task is None:
                task, is_new = found.get(key), False
            self._hand_out(same, task, is_new=is_new)

    def _hand_out(self, same: Sequence[Member], task: Task | None, *, is_new: bool) -> None:
        if task is None:
            for member in same:
                member.answer(None)
            return
        owner = same[0].wish.wish.owner
        if is_new:
            REMOTE.claimed += 1
            logs.emit(events.JOB_CLAIMED, **task.log_fields())

        def give_back() -> None:
            # What an earlier request has claimed may be in good hands.
            if is_new:
                self._returning.append((task.id, task.fence))
                self._give_back(task, owner)

        grant = Grant(task, len(same), give_back)
        for member in same:
            if not member.answer(grant):
                grant.refuse()

    async def _ready_connection(self) -> Connection:
        connection = await self._lane.get()
        if connection is not self._connection:
            async with asyncio.timeout(self._claim_timeout_seconds):
                await read_moments_as_microseconds(connection)
            self._connection = connection
        if self._lost.outstanding:
            async with asyncio.timeout(self._claim_timeout_seconds):
                await self._lost.give_back(connection)
        return connection

    async def _claim(
        self, connection: Connection, asked: dict[tuple[str, str], Call]
    ) -> tuple[dict[tuple[str, str], Task], dict[tuple[str, str], Task]]:
        """What these requests have claimed before, and what they claim now."""
        repeatable = [call.wish for call in asked.values() if call.may_be_repeated]
        found: dict[tuple[str, str], Task] = {}
        sent_at = local_seconds()
        try:
            async with asyncio.timeout(self._claim_timeout_seconds):
                if repeatable:
                    await connection.execute("BEGIN")
                    found = await task_claiming.find_claimed(connection, self._database, repeatable)
                    found = {key: task for key, task in found.items() if (task.id, task.fence) not in self._returning}
                if found:
                    await standbys.prove(connection)
                wishes = [call.wish for key, call in asked.items() if key not in found]
                claimed = await self._claim_for(connection, next(iter(asked.values())), wishes) if wishes else {}
                if repeatable:
                    await connection.execute("COMMIT")
            standbys.believe(connection)
        except BaseException as error:
            # Something may have been claimed, by an earlier statement perhaps.
            generated = [call.wish.request_id for call in asked.values() if not call.may_be_repeated]
            if generated or sqlstate(error) is None or connection.is_closed():
                self._lost.add(connection, generated)
            raise
        REMOTE.claim_seconds.observe(local_seconds() - sent_at)
        return found, claimed

    async def _claim_for(self, connection: Connection, like: Call, wishes: list[Wish]) -> dict[tuple[str, str], Task]:
        """Claim for as many of `wishes` as there is work, in the order of places."""
        claimed: dict[tuple[str, str], Task] = {}
        until, places = self._known.pop(like.queue, (0.0, []))
        if local_seconds() < until:
            places = await self._take(connection, like, wishes, claimed, places)
            if wishes:
                until = 0.0
        if local_seconds() >= until:
            asked_at = local_seconds()
            ranges = await claiming.survey(connection, self._database, [like.queue])
            took = local_seconds() - asked_at
            until = asked_at + took / SURVEY_SHARE if took > CHEAP_SURVEY_SECONDS else 0.0
            places = await self._take(connection, like, wishes, claimed, _in_order(ranges))
        if until:
            self._known[like.queue] = until, places
        return claimed

    async def _take(
        self, connection: Connection, like: Call, wishes: list[Wish], claimed: dict[tuple[str, str], Task], places: Places
    ) -> Places:
        """Serve `wishes` (which shrinks) from these places; returns where to go on."""
        left: Places = []
        for place, start in places:
            cursor = start
            while wishes:
                asked = 1 if place.suspect else next(limit for limit in task_claiming.LIMITS if limit <= len(wishes))
                rows = await task_claiming.claim(
                    connection,
                    self._database,
                    wishes[:asked],
                    queue=place.queue,
                    priority=place.priority,
                    suspect=place.suspect,
                    kinds=like.kinds,
                    cursor=cursor,
                    payload_bytes=PAYLOAD_BYTES,
                )
                for row in rows:
                    wish = wishes[row.place]
                    claimed[wish.owner, wish.request_id] = row.task
                del wishes[: len(rows)]
                if rows and not place.suspect:
                    cursor = rows[-1].cursor
                if not rows or place.suspect:
                    break  # fewer than asked for may also mean large payloads
            else:
                left.append((place, cursor))
        return left


def _in_order(ranges: Sequence[Range]) -> Places:
    """What is due, the highest priority first, suspects before ordinary work; from before the first row of each."""
    due = [one for one in ranges if one.due_in_seconds <= 0]
    due.sort(key=lambda one: (-one.priority, not one.suspect))
    return [(one, Cursor(one.first.available_at, one.first.id - 1)) for one in due]
