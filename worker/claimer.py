"""The claimer: one a process, it turns free slots into claimed jobs.

It asks for the free slots and a little more (`Demand`). Each place (queue and priority) has a cursor; what sorts before it (late
commits, released and reaped jobs) and new places are found by a survey of the index from its start: as often as it is cheap (5 % of
the time), and every 5 s at least.

Without work it says that it is hungry (`Hunger`), looks once more, and waits: for a notification, a freed slot, the next due job,
or the poll.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from worker import demand, events
from worker.clock import local_seconds
from worker.demand import Demand
from worker.domain import ClaimedJob, Lease
from worker.holding import Held, Holdings
from worker.hunger import Hunger
from worker.lost_claims import LostClaims
from worker.measures import POOL_CLAIMS
from worker.patience import Patience
from worker.places import Place, Places
from worker.store import claiming
from worker.store.claiming import LIMITS, Cursor
from worker.store.connection import DATABASE_ERRORS, read_moments_as_microseconds
from worker.store.leasing import set_hungry

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database, Lane

SATED_SECONDS = 1.0
"""While every slot is taken it makes a pass this often all the same: who watches it takes a silent loop for a stuck one."""


class Slots(demand.Slots, Protocol):
    """What the pool does for the claimer, beside what it tells."""

    def give_back(self, jobs: int) -> None:
        """Release the last so many of the waiting jobs, unstarted."""

    def suspect_runs(self) -> bool:
        """Whether the handler of a job that lost a process before has not ended."""

    def put(self, jobs: list[Held]) -> None:
        """Jobs to run, in this order."""


class Claimer:
    """Runs in the loop of the handlers; everything but `stop` and `wake` belongs to `run`."""

    def __init__(
        self,
        database: Database,
        lane: Lane,
        *,
        owner: str,
        queues: Sequence[str],
        lease: Lease,
        holdings: Holdings,
        slots: Slots,
        batch: int,
        claim_timeout_seconds: float,
        poll_seconds: float,
        on_trouble: Callable[[], None],
    ) -> None:
        self._database = database
        self._lane = lane
        self._owner = owner
        self._queues = list(queues)
        self._lease = lease
        self._holdings = holdings
        self._slots = slots
        self._claim_timeout_seconds = claim_timeout_seconds
        self._on_trouble = on_trouble
        self._stopping = False
        self._wake = asyncio.Event()
        self._connection: Connection | None = None
        self._patience = Patience(events.CLAIM_FAILED)
        self._places = Places(queues)
        self._survey_was_put_off = True  # the first look is a survey
        self._notified: set[str] = set()
        # A suspect that is due lets the inbox run empty, so that it takes nobody with it.
        self._demand = Demand(
            slots, batch=batch, may_claim_ahead=lambda: not self._has_suspect() and self._places.suspect() is None
        )
        self._hunger = Hunger(poll_seconds=poll_seconds)
        self._lost = LostClaims(database, owner=owner, holdings=holdings, limit_seconds=claim_timeout_seconds)
        self.passed_at = local_seconds()
        """When the loop last got an answer, or found that it needs none: for the health check."""
        self.first_pass = asyncio.Event()
        """Set once the table has been looked at: the process is ready."""

    @property
    def low_water(self) -> int:
        """Wake the claimer when no more than this many claimed jobs wait."""
        return self._demand.low_water

    @property
    def has_lost_claims(self) -> bool:
        """Whether a claim without an answer may still commit."""
        return self._lost.outstanding

    @property
    def is_hungry(self) -> bool:
        """Whether an INSERT should send a notification."""
        return self._hunger.is_said

    def stop(self) -> None:
        """Claim nothing more. A claim in flight is awaited; the pool returns what it brings."""
        self._stopping = True
        self._wake.set()

    def wake(self, *, queue: str | None = None) -> None:
        """Look now: a slot has become free, or jobs have appeared in a queue ("" for any), perhaps behind the cursors."""
        if queue is not None:
            self._notified.add(queue)
        self._wake.set()

    def suspect_ended(self) -> None:
        """There may be another one, and what is claimed ahead may grow again: look at once."""
        self._places.survey_soon()
        self._wake.set()

    async def run(self) -> None:
        """Claim until `stop`. Waits out an absent database; anything else that it raises is a bug."""
        while not self._stopping:
            self._wake.clear()
            if surplus := self._demand.surplus():
                self._slots.give_back(surplus)
            wish = self._demand.jobs()
            if wish == 0 and not self._hunger.may_be_taken_back():
                self._hunger.sated()
                self.passed_at = local_seconds()
                await self._wait(SATED_SECONDS)
                continue
            try:
                wait_seconds = await self._round(wish) if wish > 0 else await self._calm_down()
            except asyncio.CancelledError:
                self._lane.drop()  # what it was in the middle of is over then, and known to be
                raise
            except DATABASE_ERRORS as error:
                self._connection = None
                self._lane.drop()
                self._places.survey_soon()
                self._hunger.forget()
                self._on_trouble()
                await self._pause(self._patience.delay_seconds(error))
                continue
            self._patience.reset()
            self.first_pass.set()
            self.passed_at = local_seconds()
            if wait_seconds > 0:
                await self._wait(wait_seconds)

    async def give_back_lost(self, connection: Connection) -> None:
        """Once `run` has ended: return what claims without an answer have taken, as far as these are over (`has_lost_claims`)."""
        await self._lost.give_back(connection)

    # --- one round

    async def _round(self, wish: int) -> float:
        """Ask for `wish` jobs, one statement a place until enough came; returns how long to wait before the next round."""
        connection = await self._ready_connection()
        async with self._limit():
            await self._lost.give_back(connection)
        now = local_seconds()
        notified, self._notified = self._notified, set()
        survey_is_due = now >= self._places.next_survey_at
        if survey_is_due and (self._survey_was_put_off or not notified):
            self._survey_was_put_off = False
            await self._survey(connection)
        else:
            # What we were told of comes first, but not twice in a row: a stream of notifications would hide all the rest.
            self._survey_was_put_off = survey_is_due
            if notified or not self._places.any_due():
                self._places.look_behind_the_cursors(notified)
        taken = await self._claim_suspect(connection)
        if taken > 0:
            # Beside it, but not behind it: `wish` is from before anybody knew of it, and who waits here would go down with it.
            wish = min(wish, taken + self._demand.jobs_at_once())
        came_full = False
        for place in self._places.in_turn():
            if taken >= wish or self._stopping:
                break
            taken += await self._claim_place(connection, place, wish - taken)
            if came_full := math.isfinite(place.due_at):
                break  # it may have more, since limits are rounded down, and goes before those behind it
        if taken > 0:
            self._hunger.fed()
            if came_full and self._hunger.may_be_taken_back():
                await self._say_hungry(connection, False)
        if self._places.any_due():
            return 0
        if notified and taken == 0:
            # What we were told of stands before a cursor, or in a place that we do not know.
            return max(self._places.next_survey_at - local_seconds(), 0)
        return await self._idle(connection)

    async def _ready_connection(self) -> Connection:
        connection = await self._lane.get()
        if connection is not self._connection:
            if self._connection is not None:
                self._hunger.forget()
            async with self._limit():
                await read_moments_as_microseconds(connection)
            self._connection = connection
        return connection

    async def _survey(self, connection: Connection) -> None:
        """Look from the start of the index: which places have jobs, since when, and whether any stand behind a cursor."""
        asked_at = local_seconds()
        async with self._limit():
            ranges = await claiming.survey(connection, self._database, self._queues)
        self._places.found(ranges, asked_at)

    async def _claim_place(self, connection: Connection, place: Place, wish: int) -> int:
        limit = next(limit for limit in LIMITS if limit <= wish)
        sent_at = local_seconds()
        async with self._limit():
            with self._lost.watching(connection):
                jobs = await claiming.claim(
                    connection,
                    self._database,
                    queue=place.queue,
                    priority=place.priority,
                    limit=limit,
                    owner=self._owner,
                    lease_seconds=self._lease.seconds,
                    cursor=place.cursor,
                    payload_bytes=self._demand.payload_bytes(),
                )
        if jobs:
            place.cursor = Cursor(jobs[-1].available_at, jobs[-1].id)
            self._take(jobs, sent_at)
            self._demand.measure_claim(sent_at)
        if len(jobs) < limit:
            # Empty behind the cursor, or the payloads were large; what stands before it is found by the next survey.
            place.due_at = math.inf
        return len(jobs)

    async def _claim_suspect(self, connection: Connection) -> int:
        """One suspect at a time, and only when nothing waits beside it."""
        place = self._places.suspect()
        if place is None or self._has_suspect() or self._slots.waiting() > 0:
            return 0
        sent_at = local_seconds()
        async with self._limit():
            with self._lost.watching(connection):
                jobs = await claiming.claim_suspect(
                    connection,
                    self._database,
                    queue=place.queue,
                    priority=place.priority,
                    owner=self._owner,
                    lease_seconds=self._lease.seconds,
                )
        self._places.suspects.remove(place)
        self._take(jobs, sent_at)
        return len(jobs)

    def _has_suspect(self) -> bool:
        return self._slots.suspect_runs() or self._holdings.has_suspect

    def _take(self, jobs: list[ClaimedJob], sent_at: float) -> None:
        trusted_until = self._lease.trusted_until(sent_at)
        held = [Held(job, trusted_until) for job in jobs]
        POOL_CLAIMS.claimed += len(jobs)
        for one in held:
            self._holdings.add(one)
        self._slots.put(held)

    def _limit(self) -> asyncio.Timeout:
        return asyncio.timeout(self._claim_timeout_seconds)

    # --- nothing to do

    async def _idle(self, connection: Connection) -> float:
        """Nothing is left that is due: say so after a while, and return how long to wait."""
        now = local_seconds()
        if self._hunger.is_to_be_said():
            await self._say_hungry(connection, True)
            # Once more: what was committed before the flag was set has notified nobody.
            return max(self._places.next_survey_at - now, 0)
        due_at = self._places.next_due_at(with_suspects=not self._has_suspect())
        return min(self._hunger.next_look_seconds(), max(due_at - now, 0.001))

    async def _calm_down(self) -> float:
        await self._say_hungry(await self._ready_connection(), False)
        return 0

    async def _say_hungry(self, connection: Connection, hungry: bool) -> None:
        async with self._limit():
            said = await set_hungry(connection, self._database, process_id=self._owner, hungry=hungry)
        self._hunger.note_said(hungry and said)

    async def _wait(self, seconds: float) -> None:
        """Until somebody wakes the claimer, or the time is over."""
        if self._stopping:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _pause(self, seconds: float) -> None:
        """Wait out trouble: only a stop ends it early."""
        until = local_seconds() + seconds
        while not self._stopping and (remaining := until - local_seconds()) > 0:
            self._wake.clear()
            await self._wait(remaining)
