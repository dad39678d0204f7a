"""What a remote worker is told about an attempt that it can, or can no longer, say something about. Rules only."""

from __future__ import annotations

from typing import Literal

from worker.api.problems import Problem, busy
from worker.domain import FAILURE_BYTES, LAST_ERROR_CHARACTERS, Failed, clean_text, cut_bytes
from worker.masking import masked
from worker.store.tasks import OWNER_PREFIX, Standing

Verb = Literal["heartbeat", "complete", "fail", "release"]
VERBS: tuple[Verb, ...] = ("heartbeat", "complete", "fail", "release")


def judge(verb: Verb, standing: Standing | None, *, fence: int, owner: str) -> Problem | None:
    """None: it is done as asked, now or by this attempt before. Else why not.

    Whoever repeats what has ended the attempt hears that it is done; whoever says something else about it that it was processed.
    """
    if standing is None:
        return Problem(404, "not_found", "there is no such task")
    task, state = standing.task, standing.task.state
    by_me = task.fence == fence and f"{OWNER_PREFIX}{standing.claimed_by}" == owner
    if verb == "fail" and standing.failure in ("error", "timeout"):
        return None
    if verb in ("complete", "heartbeat") and state == "succeeded" and by_me:
        return None
    if verb == "release" and state == "ready" and by_me and standing.failure is None:
        return None
    if state == "running" and task.fence == fence and standing.owner == owner:
        if verb == "heartbeat" and not standing.live:
            return Problem(409, "lease_expired", "the lease has expired; stop working on this task")
        return busy()  # it is this worker's, and could not be written: somebody has the row locked
    if state in ("succeeded", "dead", "cancelled"):
        return Problem(409, "already_processed", f"the task is {state}; this attempt has no say about it")
    if standing.failure in ("lease_lost", "crashed"):
        return Problem(409, "lease_expired", "the lease expired, and the task was taken back")
    return Problem(409, "not_owner", "this processor does not hold the task under this fence")


def remote_failure(text: str) -> Failed:
    """The failed outcome that a remote worker reports: its text cleaned, without secrets, and cut to what the tables take."""
    said = clean_text(masked(text[: 4 * LAST_ERROR_CHARACTERS]), LAST_ERROR_CHARACTERS)
    detail = cut_bytes(clean_text(masked(text[-4 * FAILURE_BYTES :]), 5 * FAILURE_BYTES), FAILURE_BYTES)
    return Failed(error=said, error_type="remote", detail=detail)
