"""The claimer: one a process, it turns free slots into claimed jobs.

It asks for the free slots plus what all slots could finish while the answer travels (Little: slots / seconds a job x round trip
x 2, and at least AHEAD_SECONDS' worth: large claims cost less a job), so that long jobs are never claimed early and short ones
never waited for. Each place (queue and priority) has a cursor; what sorts before it (late commits, released and reaped jobs) and
new places are found by a survey of the index from its start: as often as it is cheap (5 % of the time), and every 5 s at least.

Without work it says that it is hungry, looks once more, and waits: for a notification, a freed slot, the next due job, or the poll.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from worker import events
from worker.clock import local_seconds
from worker.domain import ClaimedJob, Lease
from worker.holding import Held, Holdings
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
AHEAD_SECONDS = 0.03
SURPLUS_SECONDS = 1.0
HUNGRY_AFTER_SECONDS = 0.1
HUNGRY_FLIP_SECONDS = 1.0
PAYLOAD_BYTES_A_CLAIM = 16 * 1024 * 1024
PAYLOAD_BYTES_AHEAD = 32 * 1024 * 1024
_FIRST_POLLS_SECONDS = (0.02, 0.05, 0.1, 0.25)


class Slots(Protocol):
    """What the pool tells the claimer."""

    workers: int

    def free(self) -> int:
        """Worker tasks that wait for a job."""

    def waiting(self) -> int:
        """Claimed jobs that no task has taken yet."""

    def waiting_bytes(self) -> int:
        """Their payloads."""

    def finished(self) -> tuple[int, float]:
        """Attempts that have ended since the start, and the seconds of slots that they took."""

    def is_full(self) -> bool:
        """Whether finished work cannot be written, so that no more should be taken."""

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
        self._batch = batch
        self._claim_timeout_seconds = claim_timeout_seconds
        self._poll_seconds = poll_seconds
        self._on_trouble = on_trouble
        self._stopping = False
        self._wake = asyncio.Event()
        self._connection: Connection | None = None
        self._patience = Patience(events.CLAIM_FAILED)
        self._places = Places(queues)
        self._survey_was_put_off = True  # the first look is a survey
        self._notified: set[str] = set()
        self._slot_seconds = math.inf
        self._round_trip_seconds = 0.002
        self._measured = (0, 0.0)
        self._measured_at = 0.0
        self._surplus_since: float | None = None
        self._hungry = False
        self._hungry_since = 0.0
        self._wanting_since: float | None = None
        self._polls = 0
        self._lost = LostClaims(database, owner=owner, holdings=holdings, limit_seconds=claim_timeout_seconds)
        self.passed_at = local_seconds()
        """When the loop last got an answer, or found that it needs none: for the health check."""
        self.first_pass = asyncio.Event()
        """Set once the table has been looked at: the process is ready."""
        self.low_water = 0
        """Wake the claimer when no more than this many claimed jobs wait."""

    @property
    def has_lost_claims(self) -> bool:
        """Whether a claim without an answer may still commit."""
        return self._lost.outstanding

    @property
    def is_hungry(self) -> bool:
        """Whether an INSERT should send a notification."""
        return self._hungry

    def stop(self) -> None:
        """Claim nothing more. A claim in flight is awaited; the pool returns what it brings."""
        self._stopping = True
        self._wake.set()

    def wake(self, *, queue: str | None = None) -> None:
        """Look now: a slot has become free, or jobs have appeared in a queue ("" for any), perhaps behind the cursors."""
        if queue is not None:
            self._notified.add(queue)
        self._wake.set()

    async def run(self) -> None:
        """Claim until `stop`. Waits out an absent database; anything else that it raises is a bug."""
        while not self._stopping:
            self._wake.clear()
            self._give_back_surplus()
            wish = self._wish()
            if wish == 0 and not self._may_calm_down():
                self._wanting_since = None
                self.passed_at = local_seconds()
                await self._wait(SATED_SECONDS)
                continue
            try:
                wait_seconds = await self._round(wish) if wish > 0 else await self._calm_down()
            except DATABASE_ERRORS as error:
                self._connection = None
                self._lane.drop()
                self._places.survey_soon()
                self._on_trouble()
                await self._pause(self._patience.delay_seconds(error))
                continue
            self._patience.reset()
            self.first_pass.set()
            self.passed_at = local_seconds()
            if wait_seconds > 0:
                await self._wait(wait_seconds)

    # --- how much

    def _wish(self) -> int:
        """How many jobs to ask for now; 0 when enough is at hand."""
        free, waiting = 0 if self._slots.is_full() else self._slots.free(), self._slots.waiting()
        ahead = self._ahead()
        wish = min(free + ahead - waiting, self._batch)
        if waiting < free:
            self.low_water = ahead
            return wish
        # Enough for the moment: ask again when half of what is kept ahead has gone, or a full batch fits.
        enough = min(self._batch, max(ahead // 2, 1))
        self.low_water = max(free + ahead - enough, 0)
        return wish if wish >= enough else 0

    def _ahead(self) -> int:
        if self._batch == 1 or self._slots.is_full() or self._has_suspect() or self._slots.waiting_bytes() >= PAYLOAD_BYTES_AHEAD:
            return 0
        if self._places.suspect() is not None:
            return 0  # let the inbox run empty, so that a suspect takes nobody with it
        jobs_a_second = self._slots.workers / max(self._slot_seconds, 1e-6)
        return min(int(jobs_a_second * max(self._round_trip_seconds * 2, AHEAD_SECONDS)), 2 * self._batch)

    def _give_back_surplus(self) -> None:
        """Jobs that were claimed ahead of quick ones and have waited behind slow ones for a while: others may be free for them."""
        now = local_seconds()
        if now - self._measured_at >= SURPLUS_SECONDS / 4:
            self._measure_slots()
        surplus = self._slots.waiting() - self._ahead()
        if surplus <= 0:
            self._surplus_since = None
        elif self._surplus_since is None:
            self._surplus_since = now
        elif now - self._surplus_since >= SURPLUS_SECONDS:
            self._surplus_since = None
            self._slots.give_back(surplus)

    def _measure_slots(self) -> None:
        """How long a job takes a slot, lately."""
        finished, busy_seconds = self._slots.finished()
        jobs, seconds = finished - self._measured[0], busy_seconds - self._measured[1]
        self._measured_at = local_seconds()
        if jobs > 0:
            old_seconds = seconds / jobs if math.isinf(self._slot_seconds) else self._slot_seconds
            self._slot_seconds = old_seconds + 0.3 * (seconds / jobs - old_seconds)
            self._measured = (finished, busy_seconds)
        elif self._slots.free() < self._slots.workers:
            # Nothing has ended since: a job takes at least as long as the slots have been busy with it.
            self._slot_seconds = max(self._slot_seconds, seconds / self._slots.workers)

    def _measure_claim(self, sent_at: float) -> None:
        """How long a claim takes to answer, lately."""
        self._measure_slots()
        seconds = local_seconds() - sent_at
        self._round_trip_seconds += 0.3 * (seconds - self._round_trip_seconds)
        POOL_CLAIMS.claim_seconds.observe(seconds)

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
        came_full = False
        for place in self._places.in_turn():
            if taken >= wish or self._stopping:
                break
            taken += await self._claim_place(connection, place, wish - taken)
            if came_full := math.isfinite(place.due_at):
                break  # it may have more, since limits are rounded down, and goes before those behind it
        if taken > 0:
            self._wanting_since = None
            self._polls = 0
            if came_full and self._may_calm_down():
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
        claim = claiming.claim(
            connection,
            self._database,
            queue=place.queue,
            priority=place.priority,
            limit=limit,
            owner=self._owner,
            lease_seconds=self._lease.seconds,
            cursor=place.cursor,
            payload_bytes=max(min(PAYLOAD_BYTES_A_CLAIM, PAYLOAD_BYTES_AHEAD - self._slots.waiting_bytes()), 1),
        )
        async with self._limit():
            with self._lost.watching(connection):
                jobs = await claim
        if jobs:
            place.cursor = Cursor(jobs[-1].available_at, jobs[-1].id)
            self._take(jobs, sent_at)
            self._measure_claim(sent_at)
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
        claim = claiming.claim_suspect(
            connection,
            self._database,
            queue=place.queue,
            priority=place.priority,
            owner=self._owner,
            lease_seconds=self._lease.seconds,
        )
        async with self._limit():
            with self._lost.watching(connection):
                jobs = await claim
        self._places.suspects.remove(place)
        self._take(jobs, sent_at)
        return len(jobs)

    def _has_suspect(self) -> bool:
        return self._slots.suspect_runs() or self._holdings.has_suspect

    def suspect_ended(self) -> None:
        """There may be another one, and what is claimed ahead may grow again: look at once."""
        self._places.survey_soon()
        self._wake.set()

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
        if self._wanting_since is None:
            self._wanting_since = now
        if not self._hungry and now - self._wanting_since >= HUNGRY_AFTER_SECONDS:
            await self._say_hungry(connection, True)
            # Once more: what was committed before the flag was set has notified nobody.
            return max(self._places.next_survey_at - now, 0)
        seconds = self._poll_seconds * random.uniform(0.8, 1.2)
        if self._polls < len(_FIRST_POLLS_SECONDS):
            seconds = min(_FIRST_POLLS_SECONDS[self._polls], self._poll_seconds)
        self._polls += 1
        due_at = self._places.next_due_at(with_suspects=not self._has_suspect())
        return min(seconds, max(due_at - now, 0.001))

    def _may_calm_down(self) -> bool:
        """Whether the flag may be taken back: each INSERT pays for it."""
        return self._hungry and local_seconds() - self._hungry_since >= HUNGRY_FLIP_SECONDS

    async def _calm_down(self) -> float:
        await self._say_hungry(await self._ready_connection(), False)
        return 0

    async def _say_hungry(self, connection: Connection, hungry: bool) -> None:
        async with self._limit():
            said = await set_hungry(connection, self._database, process_id=self._owner, hungry=hungry)
        self._hungry, self._hungry_since = hungry and said, local_seconds()

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

    async def give_back_lost(self, connection: Connection) -> None:
        """Once `run` has ended: return what claims without an answer have taken, as far as these are over (`has_lost_claims`)."""
        await self._lost.give_back(connection)
