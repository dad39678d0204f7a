"""One job, two processes, and everything that may go wrong around them. No clock: a lease may expire at any moment.

What is taken from PostgreSQL: a transaction commits whole or not at all, its row locks last to its end, and a condition is looked
at again under the lock. What is left to chance: every order of steps (so a process may stop for any time between any two of its
own), whether an answer arrives, whether a transaction without a client commits, a crash, and an operator who cancels, retries,
deletes and enqueues again.

A process believes nothing that it was not told, and is never made to stop: handlers here are deaf, they try to write whatever they
have, at any time. Fences alone keep the promises of this model; what trust is worth is the matter of `trust`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Set

from tests.model import statements
from tests.model.checker import Protocol, Step
from tests.model.job_promises import PROMISES, SIGHTS, is_at_rest
from tests.model.statements import MAX_ATTEMPTS, NONE, Row
from tests.model.world import VERBS, Attempt, Bounds, Key, Phase, Process, Recovery, World, Write


def jobs(bounds: Bounds, without: Set[str] = NONE) -> Protocol[World]:
    """The protocol, or a mutant of it."""
    start = World(
        crash_to_come=bounds.crash,
        cancel_to_come=bounds.cancel,
        retry_to_come=bounds.retry,
        deletion_to_come=bounds.deletion,
        left=bounds.fences,
    )

    def steps(world: World) -> Iterator[Step[World]]:
        yield from _time_and_reaper(world, without)
        if world.open is None:
            yield from _operator(world)
        for name in ("a", "b"):
            process = world.process(name)
            faulty = name in bounds.faulty
            yield from _claims(world, name, without, faulty=faulty)
            if bounds.late_recovery and faulty and world.process(name).lost_claim and world.recovery is None:
                yield _lose_recovery(world, name, without)
            for key, phase in process.attempts:
                yield from _attempt(world, name, key, phase, without, faulty=faulty)
        if world.stray is not None:
            yield Step("the lost transaction of " + _what(world.stray) + " ends", world._replace(stray=None))
            if world.open is None:
                yield _execute(world._replace(stray=None), world.stray, without, heard=False)
        if world.recovery is not None:
            yield Step("the lost recovery ends", world._replace(recovery=None))
            recovered = statements.recover(world.row, *world.recovery)
            if recovered is not None and world.open is None:
                yield Step("the lost recovery is executed", world._replace(recovery=None, row=recovered), verb="recover")
        if world.open is not None:
            yield from _end(world, world.open, without, faulty=world.open.owner in bounds.faulty)

    return Protocol(start=start, steps=steps, promises=PROMISES, sights=SIGHTS, is_goal=is_at_rest)


def _time_and_reaper(world: World, without: Set[str]) -> Iterator[Step[World]]:
    row = world.row
    if row.live:
        yield Step("the lease expires", world._replace(row=row._replace(live=False)))
    if world.open is not None or "reaper" in without:
        return
    if world.picked is not None:
        is_same = world.picked == (row.id, row.fence) or "reap re-check" in without
        reaped = statements.reap(row, without) if is_same else None
        yield Step("the reaper writes", world._replace(picked=None, row=reaped or row), verb="reap" if reaped else "")
    elif row.state == "running" and not row.live:
        yield Step("the reaper finds the job expired", world._replace(picked=(row.id, row.fence)))


def _operator(world: World) -> Iterator[Step[World]]:
    row = world.row
    if world.cancel_to_come and (cancelled := statements.cancel(row)):
        yield Step("somebody cancels the job", world._replace(row=cancelled, cancel_to_come=False), "cancel", fault=True)
    if world.retry_to_come and (ready := statements.retry(row)):
        yield Step("somebody retries the job", world._replace(row=ready, retry_to_come=False), "retry_job", fault=True)
    if world.deletion_to_come and row.state == "succeeded":
        again = world._replace(row=Row(row.id + 1), deletion_to_come=False)
        yield Step("the row is deleted and its key enqueued again", again, "enqueue", fault=True)


def _claims(world: World, name: str, without: Set[str], *, faulty: bool) -> Iterator[Step[World]]:
    row, process = world.row, world.process(name)
    is_claimable = row.state == "ready" and row.attempts < MAX_ATTEMPTS and world.left > 0
    if process.stray_claim:
        yield Step(f"{name}'s lost claim ends", world.with_process(name, process._replace(stray_claim=False)))
        if claimed := _claim(world.with_process(name, process._replace(stray_claim=False)), name, without, heard=False):
            yield claimed
    if not process.up:
        return
    if is_claimable and len(process.attempts) <= faulty and (claimed := _claim(world, name, without, heard=True)):
        yield claimed
    if faulty and is_claimable and not process.lost_claim:
        cut = process._replace(stray_claim=True, lost_claim=True)
        yield Step(f"{name} loses the connection of its claim", world.with_process(name, cut), fault=True)
    if process.lost_claim and world.open is None:
        recovered = statements.recover(row, *_recovery(world, name))
        after = world.with_process(name, process._replace(lost_claim=process.stray_claim))
        yield Step(f"{name} gives back what its lost claim took", after._replace(row=recovered or row), verb="recover")
    if name == "a" and world.crash_to_come:
        gone = world.with_process(name, Process(up=False, stray_claim=process.stray_claim))._replace(crash_to_come=False)
        if world.open is not None and world.open.owner == name:
            gone = gone._replace(heard=False)
        yield Step(f"{name} crashes", gone, fault=True)


def _recovery(world: World, name: str) -> Recovery:
    return Recovery(name, tuple(attempt.key for attempt in world.process(name).attempts), world.fence)


def _lose_recovery(world: World, name: str, without: Set[str]) -> Step[World]:
    recovery = _recovery(world, name)
    if "recovery's bound" in without:
        recovery = recovery._replace(bound=sys.maxsize)
    label = f"{name} asks to give back what its lost claim took, and loses the connection"
    return Step(label, world._replace(recovery=recovery), fault=True)


def _claim(world: World, name: str, without: Set[str], *, heard: bool) -> Step[World] | None:
    """The claim locks the row, looks at it again, and writes."""
    process, row = world.process(name), world.row
    fence = row.fence + 1 if "sequence" in without else world.fence + 1
    claimed = statements.claim(row, name, fence, without)
    if claimed is None or world.open is not None or world.left == 0:
        return None
    if heard:
        process = process._replace(attempts=tuple(sorted((*process.attempts, Attempt((row.id, fence), "works")))))
    after = world.with_process(name, process)._replace(row=claimed, fence=max(world.fence, fence), left=world.left - 1)
    return Step(f"{name} claims the job: fence {fence}" + ("" if heard else ", unheard"), after, "claim", (name, fence))


def _attempt(world: World, name: str, key: Key, phase: Phase, without: Set[str], *, faulty: bool) -> Iterator[Step[World]]:
    id, fence = key
    renewed = statements.renew(world.row, id, name, fence, without)
    if renewed is not None and world.open is None:
        yield Step(f"{name} renews fence {fence}", world._replace(row=renewed), "renew", (name, fence))
    if renewed is None and phase == "works":
        # What has once been sent is not given up for a renewal's sake: its end counts until the row has moved on.
        yield Step(f"{name} learns that fence {fence} is lost", world.giving_up(name, key), "give_up")
    if phase in ("works", "finished"):
        for verb in VERBS:
            write = Write(name, key, verb)
            if world.open is None:
                yield _execute(world, write, without, heard=True)
            if faulty and world.stray is None:
                lost = world.with_attempt(name, key, "unsure")._replace(stray=write)
                yield Step(f"{name} sends {_what(write)}, and loses the connection", lost, fault=True)
    if phase == "unsure":
        yield from _look(world, name, key, without)


def _look(world: World, name: str, key: Key, without: Set[str]) -> Iterator[Step[World]]:
    id, fence = key
    locked = world.open is not None and "look's lock" not in without
    ruling = statements.rule(world.row, world.ledger, locked=locked, id=id, owner=name, fence=fence)
    label = f"{name} looks what became of fence {fence}: {ruling}"
    if "look" in without:
        ruling, label = "moved on", f"{name} takes fence {fence} for lost"
    match ruling:
        case "mine":
            yield Step(label, world.with_attempt(name, key, "finished"))
        case "done":
            yield Step(label, world.with_attempt(name, key, None), "done", (name, fence))
        case "moved on":
            yield Step(label, world.giving_up(name, key), "give_up")
        case "gone":  # deleted since: there is nothing left to say about it
            yield Step(label, world.with_attempt(name, key, None))


def _what(write: Write) -> str:
    return f"{write.owner}'s {write.verb} of fence {write.key[1]}"


def _execute(world: World, write: Write, without: Set[str], *, heard: bool) -> Step[World]:
    """The fenced statement: it matches and holds the row's lock, or it matches nothing."""
    name, key, verb = write
    by = (name, key[1])
    if verb == "complete" and "one transaction" in without:
        world = world._replace(effects=(*world.effects, key))
    if statements.end(world.row, key[0], name, key[1], verb, without) is not None:
        opened = world._replace(open=write, heard=heard)
        return Step(
            f"{_what(write)} is executed" + ("" if heard else ", unheard"),
            opened.with_attempt(name, key, "sent") if heard else opened,
            "execute",
            by,
        )
    if heard:
        world = world.giving_up(name, key) if "second look" in without else world.with_attempt(name, key, "unsure")
    return Step(f"{_what(write)} matches nothing", world, "refused", by)


def _end(world: World, write: Write, without: Set[str], *, faulty: bool) -> Iterator[Step[World]]:
    """COMMIT, ROLLBACK, or the loss of the connection while it is open."""
    name, key, verb = write
    closed = world._replace(open=None, heard=True)
    committed = statements.end(world.row, key[0], name, key[1], verb, without)
    assert committed is not None  # its lock has kept everybody away
    after = (closed.with_attempt(name, key, None) if world.heard else closed)._replace(row=committed)
    if verb == "complete":
        after = after._replace(completed=(*world.completed, key))
        if "one transaction" not in without and (world.ledger is None or "ledger" in without):
            after = after._replace(effects=(*world.effects, key), ledger=key)
    yield Step(f"{_what(write)} commits" + ("" if world.heard else ", unheard"), after, verb, (name, key[1]))
    # Without a client it ends by its own time-outs: no fault is needed for that.
    rolled_back = closed.with_attempt(name, key, "finished") if world.heard else closed
    yield Step(f"{_what(write)} is rolled back", rolled_back, fault=world.heard)
    if faulty and world.heard:
        cut = world.with_attempt(name, key, "unsure")._replace(heard=False)
        yield Step(f"{name} loses the connection of {_what(write)}", cut, fault=True)
