"""What every step of the model of jobs must keep, what must be seen in it, and where it may end."""

from __future__ import annotations

from tests.model.checker import Promise, Step
from tests.model.statements import MAX_ATTEMPTS
from tests.model.world import TERMINAL, VERBS, World


def _one_live_lease(before: World, step: Step[World]) -> bool:
    row, after = before.row, step.after.row
    if not row.live or (row.owner, row.fence) == (after.owner, after.fence):
        return True
    if step.verb == "recover" and row.owner is not None:
        return (row.id, row.fence) not in [attempt.key for attempt in before.process(row.owner).attempts]
    return step.verb == "cancel" or step.by == (row.owner, row.fence)


def _fences_rise(before: World, step: Step[World]) -> bool:
    return step.verb != "claim" or step.after.row.fence > before.fence


def _one_effect(_before: World, step: Step[World]) -> bool:
    return len(step.after.effects) <= 1


def _together(_before: World, step: Step[World]) -> bool:
    after = step.after
    return set(after.effects) <= set(after.completed) and bool(after.effects) == bool(after.completed)


def _no_stale_write(before: World, step: Step[World]) -> bool:
    if step.verb not in ("renew", *VERBS) or before.row == step.after.row:
        return True
    return step.by == (before.row.owner, before.row.fence)


def _no_late_renewal(before: World, step: Step[World]) -> bool:
    return step.verb != "renew" or before.row.live


def _attempts_add_up(before: World, step: Step[World]) -> bool:
    row, after = before.row, step.after.row
    if after.attempts > MAX_ATTEMPTS or (after.state == "ready" and after.attempts >= MAX_ATTEMPTS):
        return False
    match step.verb:
        case "claim":
            return after.attempts == row.attempts + 1
        case "give_back":
            return after.attempts == row.attempts - 1
        case "recover":
            return row == after or after.attempts == row.attempts - 1
        case "retry_job" | "enqueue":
            return after.attempts == 0
        case _:
            return after.attempts == row.attempts


def _last_word_is_true(_before: World, step: Step[World]) -> bool:
    id_fence = step.after.row.id, (step.by or ("", 0))[1]
    if step.verb == "done" and id_fence[0] == 1 and id_fence not in step.after.completed:
        return False
    return step.after.given_up not in step.after.completed


def _success_stays(before: World, step: Step[World]) -> bool:
    return before.row.state != "succeeded" or before.row == step.after.row or step.verb == "enqueue"


PROMISES: dict[str, Promise[World]] = {
    "one live lease": _one_live_lease,
    "fences rise": _fences_rise,
    "one effect a key": _one_effect,
    "effect and completion together": _together,
    "no stale write": _no_stale_write,
    "no late renewal": _no_late_renewal,
    "attempts add up": _attempts_add_up,
    "the last word is true": _last_word_is_true,
    "success stays": _success_stays,
}

SIGHTS: dict[str, Promise[World]] = {
    "a completion behind the expiry counts": lambda before, step: step.verb == "complete" and not before.row.live,
    "a failure behind the expiry counts": lambda before, step: step.verb == "retry" and not before.row.live,
    "a write is refused": lambda before, step: step.verb == "refused",
    "a process holds two attempts of the job": lambda before, step: len(step.after.a.attempts) == 2,
    "a commit that nobody heard of is found": lambda before, step: step.verb == "done",
    "a lost claim is given back": lambda before, step: step.verb == "recover" and before.row != step.after.row,
    "an effect is skipped": lambda before, step: step.verb == "complete" and step.after.effects == before.effects,
    "the last attempt is buried": lambda before, step: step.verb == "reap" and step.after.row.state == "dead",
}


def is_at_rest(world: World) -> bool:
    """The job is terminal, and nobody has anything left to say. Or it could be claimed, had the model more fences."""
    is_quiet = not (world.open or world.stray or world.recovery) and not any(
        one.attempts or one.stray_claim or one.lost_claim for one in (world.a, world.b)
    )
    row = world.row
    may_be_claimed = row.state == "ready" and row.attempts < MAX_ATTEMPTS and world.left == 0
    return is_quiet and (row.state in TERMINAL or may_be_claimed)
