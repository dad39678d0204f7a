"""The product, broken on purpose, one condition at a time: the checker of `worker torture` finds each break.

The product's own code writes, to a real database that records, on connections that are named as in a torture; what was recorded is
judged as there. Each history is one in which the missing condition matters, and runs as well with nothing missing: no breach then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest

from tests.waiting import await_for
from worker.committer import COMMIT_SETTINGS
from worker.committing import Caution, Finished
from worker.domain import Backoff, ClaimedJob, CodePlace, Effect, Failed, Outcome, Released, Succeeded, verdict
from worker.holding import Held, Holdings
from worker.last_word import LastWord
from worker.store import audit, claiming, leasing, reaping, recording, settling
from worker.store.connection import Connection, Database, Lane, SessionLimits, read_moments_as_microseconds
from worker.store.enqueueing import enqueue
from worker.store.settling import Completion, Settlement
from worker.torture.breaches import Findings
from worker.torture.end_rules import check_end
from worker.torture.job_rules import JobRules, Kinds
from worker.torture.other_rules import check_fences
from worker.writer import Writer

KIND = "torture.effect"
EFFECT = "INSERT INTO torture_effects (key, job_id, fence) VALUES ($1, $2, $3)"
PATIENT = SessionLimits(statement_timeout_seconds=60, lock_timeout_seconds=60, idle_in_transaction_seconds=60)
BACKOFF = Backoff(0.0, 0.0)
A_MOMENT = 0.01
LONG = 600.0

# COMMIT waits here for as long as the operator has the lock: it is on its way.
SLOW_COMMITS = """
CREATE FUNCTION wait_here() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON torture_effects DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION wait_here();
SELECT pg_advisory_lock(1)
"""


class Process:
    """What one process has: an owner, a connection a role, and a writer of outcomes."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self.owner = f"{name}-aaaaaaaa"
        self.database = Database(url, application_name=name, environ={}, limits=PATIENT)
        self.connections: dict[str, Connection] = {}
        self.lane = Lane(self.database, "commit", settings=COMMIT_SETTINGS)
        self.writer = Writer(
            self.database,
            self.lane,
            LastWord(Holdings(), None),
            owner=self.owner,
            backoff=BACKOFF,
            caution=Caution(300),
            one_at_a_time=asyncio.Lock(),
            batch=300,
            deletes=False,
            group_seconds=60,
            statement_seconds=60,
            on_trouble=lambda: None,
            postpone=lambda one, due_at: None,
            waiting=lambda: 0,
        )

    async def connection(self, role: str) -> Connection:
        if role not in self.connections:
            connection = self.connections[role] = await self.database.connect(role)
            await read_moments_as_microseconds(connection)
        return self.connections[role]

    async def claim(self, *, by: Connection | None = None, lease_seconds: float = A_MOMENT) -> ClaimedJob:
        """The one job there is, whether a process was lost with it or not."""
        connection = by or await self.connection("claim")
        about: dict[str, Any] = {"queue": "default", "priority": 0, "owner": self.owner, "lease_seconds": lease_seconds}
        jobs = await claiming.claim(connection, self.database, limit=1, payload_bytes=1000, **about)
        [job] = jobs or await claiming.claim_suspect(connection, self.database, **about)
        return job

    async def reap(self) -> list[reaping.Reaped]:
        return await reaping.reap(await self.connection("reaper"), self.database, horizon=reaping.FROM_THE_START)

    async def renew(self, job: ClaimedJob) -> None:
        connection = await self.connection("leases")
        await leasing.renew(connection, self.database, held=[job[:2]], owner=self.owner, lease_seconds=LONG)

    async def succeed(self, *jobs: ClaimedJob) -> None:
        await self.writer.write([finished(job) for job in jobs])

    def close(self) -> None:
        self.lane.drop()
        for connection in self.connections.values():
            connection.terminate()


def finished(job: ClaimedJob, outcome: Outcome | None = None) -> Finished:
    """What a handler of the torture leaves: everything carries its fence."""
    if outcome is None:
        effect = Effect(EFFECT, (job.key, job.id, job.fence), False, 1, CodePlace("", 0))
        outcome = Succeeded(f'{{"fence": {job.fence}}}', (effect,))
    return Finished(Held(job, trusted_until=0.0), outcome, 0.0)


class Recorded:
    """A database that records, with one job, and processes at work on it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._processes: dict[str, Process] = {}

    def __getitem__(self, name: str) -> Process:
        if name not in self._processes:
            self._processes[name] = Process(self._url, name)
        return self._processes[name]

    async def __aenter__(self) -> Self:
        self.database = Database(self._url, environ={}, limits=PATIENT)
        self.operator = await self.database.connect("torture")
        await recording.install(self.operator, self.database)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.operator.terminate()
        for process in self._processes.values():
            process.close()

    async def add(self, key: str | None = "k") -> None:
        self.id = (await enqueue(self.operator, KIND, {}, key=key)).id

    async def expired(self) -> bool:
        return bool(await self.operator.fetchval("SELECT lease_until < now() FROM jobs WHERE id = $1", self.id))

    async def waits(self, session: str, *, for_commit: bool = False) -> bool:
        """Whether this session waits for a lock; `for_commit`: at the end of its transaction."""
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND datname = current_database()"
            " AND wait_event_type = 'Lock' AND (wait_event = 'advisory') = $2"
        )
        return bool(await self.operator.fetchval(waiting, session, for_commit))

    async def breaches(self) -> set[str]:
        await self.operator.execute("SELECT cancel_job(id) FROM jobs WHERE state IN ('ready', 'running')")
        findings = Findings()
        kinds = Kinds(with_effect={KIND}, with_next=(), refusing=(), snoozing=())
        rules = JobRules(findings, kinds)
        async for change in audit.changes(self.operator, self.database):
            rules.feed(change)
        check_fences(rules.facts.draws, findings)
        check_end(
            rules.facts,
            findings,
            kinds,
            final=await audit.final_rows(self.operator, self.database),
            effects=await audit.effects(self.operator, self.database),
            ledger=await audit.ledger(self.operator, self.database),
            failures=await audit.failures(self.operator, self.database),
            acknowledged=[self.id],
        )
        return {breach.rule for breach in findings.breaches}


# --- histories in which one condition matters


async def two_attempts(recorded: Recorded, first: Process, second: Process) -> tuple[ClaimedJob, ClaimedJob]:
    """The lease of the first one was taken by the reaper, and the job claimed again."""
    await recorded.add()
    old = await first.claim()
    await await_for(recorded["t2-1"].reap)
    return old, await second.claim(lease_seconds=LONG)


async def a_late_completion(recorded: Recorded) -> None:
    old, new = await two_attempts(recorded, recorded["t0-1"], recorded["t0-1"])
    await recorded["t0-1"].succeed(old)
    await recorded["t0-1"].succeed(new)


async def a_late_completion_of_another_process(recorded: Recorded) -> None:
    old, new = await two_attempts(recorded, recorded["t0-1"], recorded["t1-1"])
    await recorded["t0-1"].succeed(old)
    await recorded["t1-1"].succeed(new)


async def a_lost_process(recorded: Recorded) -> None:
    _, new = await two_attempts(recorded, recorded["t0-1"], recorded["t1-1"])
    await recorded["t1-1"].succeed(new)


async def a_failure(recorded: Recorded) -> None:
    await recorded.add()
    job = await recorded["t0-1"].claim()
    failed = Failed(error=f"asked to fail under fence {job.fence}", error_type="RuntimeError", detail="")
    await recorded["t0-1"].writer.write([finished(job, failed)])


async def a_release(recorded: Recorded) -> None:
    await recorded.add()
    job = await recorded["t0-1"].claim()
    await recorded["t0-1"].writer.write([finished(job, Released(reason="shutdown"))])


async def a_late_failure(recorded: Recorded) -> None:
    old, new = await two_attempts(recorded, recorded["t0-1"], recorded["t0-1"])
    failed = Failed(error=f"asked to fail under fence {old.fence}", error_type="RuntimeError", detail="")
    await recorded["t0-1"].writer.write([finished(old, failed)])
    await recorded["t0-1"].succeed(new)


async def two_attempts_in_one_group(recorded: Recorded) -> None:
    old, new = await two_attempts(recorded, recorded["t0-1"], recorded["t0-1"])
    await recorded["t0-1"].succeed(old, new)


async def a_late_renewal(recorded: Recorded) -> None:
    old, new = await two_attempts(recorded, recorded["t0-1"], recorded["t1-1"])
    await recorded["t0-1"].renew(old)
    await recorded["t1-1"].succeed(new)


async def a_claim_while_the_reaper_is_on_its_way(recorded: Recorded) -> None:
    """It has seen an expired lease; before it gets at the row, the job is given back and claimed by another process."""
    await recorded.add()
    first, second, reaper = recorded["t0-1"], recorded["t1-1"], recorded["t2-1"]
    old = await first.claim()
    await await_for(recorded.expired)
    hand = await first.connection("commit")
    async with hand.transaction():
        give_back = verdict(Released(reason="shutdown"), old.attempt, BACKOFF, 1.0)
        await settling.settle(hand, first.database, [Settlement(old.id, old.fence, give_back)], owner=first.owner)
        reaping_it = asyncio.create_task(reaper.reap())
        await await_for(lambda: reaping_it.done() or recorded.waits("t2-1 reaper"))
        # In the same transaction, so that nobody comes in between; in the other one's name.
        await hand.execute("SET LOCAL application_name = 't1-1 claim'")
        new = await second.claim(by=hand, lease_seconds=LONG)
    await reaping_it
    await second.succeed(new)


async def an_ordinary_completion(recorded: Recorded) -> None:
    await recorded.add()
    await recorded["t0-1"].succeed(await recorded["t0-1"].claim())


async def a_commit_without_answer(recorded: Recorded) -> None:
    """It is still on its way when its outcome is looked up; what the look takes for undone is written again."""
    process = recorded["t0-1"]
    await recorded.add(None)  # a key that leaves no row in the ledger, which would be one more net
    await recorded.operator.execute(SLOW_COMMITS)
    one = finished(await process.claim(lease_seconds=LONG))
    writing = asyncio.create_task(process.writer.write([one]))
    await await_for(lambda: recorded.waits("t0-1 commit", for_commit=True))
    process.lane.drop()
    await writing
    undone = await process.writer.still_ours([one])
    again = asyncio.create_task(process.writer.write(undone)) if undone else None
    if again is not None:
        await await_for(lambda: recorded.waits("t0-1 commit"))
    await recorded.operator.execute("SELECT pg_advisory_unlock(1)")
    if again is not None:
        await again

    async def succeeded() -> bool:
        return await recorded.operator.fetchval("SELECT state FROM jobs") == "succeeded"

    await await_for(succeeded)


# --- ways to break the product

Patch = pytest.MonkeyPatch
BY_FENCE = "AND j.fence = held.fence AND"


def _replaced(statement: str, text: str, instead: str) -> str:
    assert text in statement, f"there is no {text!r} any more: break it otherwise"
    return statement.replace(text, instead)


def completes_without_fence(patch: Patch) -> None:
    for which, statement in settling.COMPLETE.items():
        patch.setitem(settling.COMPLETE, which, _replaced(statement, BY_FENCE, "AND"))


def completes_by_id_alone(patch: Patch) -> None:
    for which, statement in settling.COMPLETE.items():
        by_id = _replaced(statement, f"{BY_FENCE} j.lease_owner = $5", "AND $5::text IS NOT NULL")
        patch.setitem(settling.COMPLETE, which, by_id)


def settles_without_fence(patch: Patch) -> None:
    patch.setattr(settling, "SETTLE", _replaced(settling.SETTLE, BY_FENCE, "AND"))


def matches_answers_by_id_alone(patch: Patch) -> None:
    complete = settling.complete

    async def by_id(connection: Connection, database: Database, completions: Sequence[Completion], **about: Any) -> Any:
        answer = {id: applied for (id, _), applied in (await complete(connection, database, completions, **about)).items()}
        return {(one.id, one.fence): answer[one.id] for one in completions if one.id in answer}

    patch.setattr(settling, "complete", by_id)


def renews_without_owner(patch: Patch) -> None:
    first = _replaced(leasing.RENEW, "WHERE j.fence = held.fence AND j.lease_owner = $3 AND", "WHERE $3::text IS NOT NULL AND")
    both = _replaced(first, "j.id = mine.id AND j.fence = mine.fence AND j.lease_owner = $3", "j.id = mine.id")
    patch.setattr(leasing, "RENEW", both)


def reaps_without_another_look(patch: Patch) -> None:
    unlocked = _replaced(reaping.REAP, "    FOR NO KEY UPDATE SKIP LOCKED\n), reaped", "), reaped")
    patch.setattr(reaping, "REAP", _replaced(unlocked, "AND j.fence = e.fence AND j.lease_owner = e.lease_owner", ""))


def commits_the_effect_apart(patch: Patch) -> None:
    complete = settling.complete

    async def committed(connection: Connection, *others: Any, **about: Any) -> Any:
        answer = await complete(connection, *others, **about)
        await connection.execute("COMMIT")
        await connection.execute("BEGIN")
        return answer

    patch.setattr(settling, "complete", committed)


def never_counts_a_crash(patch: Patch) -> None:
    counted = "crashes = CASE WHEN e.crashed THEN LEAST(j.crashes + 1, 32767) ELSE j.crashes END,"
    patch.setattr(reaping, "REAP", _replaced(reaping.REAP, counted, ""))


def buries_at_the_first_failure(patch: Patch) -> None:
    only_at_the_last = "held.verb = 'retry' AND j.attempts >= j.max_attempts"
    patch.setattr(settling, "SETTLE", _replaced(settling.SETTLE, only_at_the_last, "held.verb = 'retry'"))


def charges_for_a_release(patch: Patch) -> None:
    refund = "attempts = CASE held.verb WHEN 'give_back' THEN GREATEST(j.attempts - 1, 0) ELSE j.attempts END,"
    patch.setattr(settling, "SETTLE", _replaced(settling.SETTLE, refund, ""))


def releases_to_the_end_of_the_queue(patch: Patch) -> None:
    kept = "COALESCE(now() + held.delay_seconds * interval '1 second', j.available_at)"
    patch.setattr(settling, "SETTLE", _replaced(settling.SETTLE, kept, "now()"))


def looks_without_lock(patch: Patch) -> None:
    """The fence would be one more net: see the test of the lock alone."""
    completes_by_id_alone(patch)
    patch.setattr(settling, "RULE", _replaced(settling.RULE, "FOR NO KEY UPDATE SKIP LOCKED", ""))


@dataclass(frozen=True, slots=True)
class Break:
    """How the product is broken, in which history that matters, and exactly which rules are then found broken."""

    how: Callable[[Patch], None]
    history: Callable[[Recorded], Awaitable[None]]
    rules: set[str]


BREAKS = {
    "a completion without fence": Break(completes_without_fence, a_late_completion, {"own_outcome", "effect_iff_succeeded"}),
    "a completion by the id alone": Break(
        completes_by_id_alone,
        a_late_completion_of_another_process,
        {"owner_writes", "own_outcome", "effect_iff_succeeded", "terminal"},
    ),
    "a failure without fence": Break(settles_without_fence, a_late_failure, {"own_outcome"}),
    "answers matched by the id alone": Break(
        matches_answers_by_id_alone, two_attempts_in_one_group, {"effect_once", "effect_with_completion", "ledger"}
    ),
    "renewed without owner": Break(renews_without_owner, a_late_renewal, {"owner_writes"}),
    "reaped without another look": Break(reaps_without_another_look, a_claim_while_the_reaper_is_on_its_way, {"one_live_lease"}),
    "the effect committed apart": Break(commits_the_effect_apart, an_ordinary_completion, {"effect_with_completion"}),
    "no crash counted": Break(never_counts_a_crash, a_lost_process, {"crashes"}),
    "buried at the first failure": Break(buries_at_the_first_failure, a_failure, {"used_up"}),
    "a release that costs an attempt": Break(charges_for_a_release, a_release, {"attempts"}),
    "a release to the end of the queue": Break(releases_to_the_end_of_the_queue, a_release, {"deploy"}),
    "looked without lock after a lost COMMIT": Break(
        looks_without_lock, a_commit_without_answer, {"terminal", "effect_once", "effect_with_completion"}
    ),
}


@pytest.mark.parametrize("name", BREAKS)
async def test_a_product_that_is_broken_on_purpose_is_found_out(
    database_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = BREAKS[name]
    broken.how(monkeypatch)
    async with Recorded(database_url) as recorded:
        await broken.history(recorded)
        assert await recorded.breaches() == broken.rules


@pytest.mark.parametrize("history", {broken.history for broken in BREAKS.values()})
async def test_the_product_as_it_is_keeps_every_promise_in_the_same_history(
    database_url: str, history: Callable[[Recorded], Awaitable[None]]
) -> None:
    async with Recorded(database_url) as recorded:
        await history(recorded)
        assert await recorded.breaches() == set()


async def test_the_lock_alone_keeps_a_commit_without_answer_from_being_made_again(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fence gone from the completion, the lock of the look is all that is left."""
    completes_by_id_alone(monkeypatch)
    async with Recorded(database_url) as recorded:
        await a_commit_without_answer(recorded)
        assert await recorded.breaches() == set()
