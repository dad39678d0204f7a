"""The product, broken on purpose, one condition at a time: the checker of `worker torture` finds each break.

The product's own code writes, to a real database that records, on connections that are named as in a torture; what was recorded is
judged as there. Each history is one in which the missing condition matters, and runs as well with nothing missing: no breach then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.torture_recorded import BACKOFF, LONG, Process, Recorded, finished
from tests.waiting import await_for
from worker.domain import ClaimedJob, Failed, Released, verdict
from worker.store import leasing, reaping, settling
from worker.store.connection import Connection, Database
from worker.store.settling import Completion, Settlement

# COMMIT waits here for as long as the operator has the lock: it is on its way.
SLOW_COMMITS = """
CREATE FUNCTION wait_here() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON torture_effects DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION wait_here();
SELECT pg_advisory_lock(1)
"""


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


@pytest.mark.parametrize("history", dict.fromkeys(broken.history for broken in BREAKS.values()))
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
