"""What each statement does to the row of a job: which row it matches, and what it makes of it.

Pure functions: the row before to the row after, None where the statement does not match. `live` stands for what the database's
clock says. tests/test_model.py runs the real statement on every row that the model reaches and compares. A mutant is
a condition left out, by its name in `without`.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import Literal, NamedTuple

MAX_ATTEMPTS = 2

State = Literal["ready", "running", "succeeded", "dead", "cancelled"]
Verb = Literal["complete", "retry", "bury", "give_back"]
NONE: Set[str] = frozenset()


class Row(NamedTuple):
    """One row of `jobs`. `live`: lease_until is still to come."""

    id: int
    state: State = "ready"
    owner: str | None = None
    fence: int = 0
    live: bool = False
    attempts: int = 0

    def ended(self, state: State, attempts: int | None = None) -> Row:
        """Without a lease; the fence stays."""
        return Row(self.id, state, None, self.fence, False, self.attempts if attempts is None else attempts)


def owned(row: Row, id: int, owner: str, fence: int, without: Set[str] = NONE) -> bool:
    """What every write about an attempt matches."""
    return row.id == id and (row.owner == owner or "owner" in without) and (row.fence == fence or "fence" in without)


def claim(row: Row, owner: str, fence: int, without: Set[str] = NONE) -> Row | None:
    if (row.state == "ready" or "claim re-check" in without) and row.attempts < MAX_ATTEMPTS:
        return Row(row.id, "running", owner, fence, True, row.attempts + 1)
    return None


def renew(row: Row, id: int, owner: str, fence: int, without: Set[str] = NONE) -> Row | None:
    if owned(row, id, owner, fence) and (row.live or "renewal's expiry" in without):
        return row._replace(live=True)
    return None


def end(row: Row, id: int, owner: str, fence: int, verb: Verb, without: Set[str] = NONE) -> Row | None:
    """COMPLETE and SETTLE. The time is not looked at: until the row has moved on, the end of an attempt counts."""
    if not owned(row, id, owner, fence, without):
        return None
    match verb:
        case "complete":
            return row.ended("succeeded")
        case "retry":
            return row.ended("dead" if row.attempts >= MAX_ATTEMPTS else "ready")
        case "bury":
            return row.ended("dead")
        case "give_back":
            return row.ended("ready", row.attempts if "refund" in without else max(row.attempts - 1, 0))


def reap(row: Row, without: Set[str] = NONE) -> Row | None:
    if row.state == "running" and (not row.live or "reap re-check" in without):
        return row.ended("dead" if row.attempts >= MAX_ATTEMPTS and "burial" not in without else "ready")
    return None


def recover(row: Row, owner: str, held: Collection[tuple[int, int]], bound: int) -> Row | None:
    """What a claim without an answer has taken: this owner's, not held in the process, and not newer than the bound."""
    if row.state == "running" and row.owner == owner and row.fence <= bound and (row.id, row.fence) not in held:
        return row.ended("ready", max(row.attempts - 1, 0))
    return None


def cancel(row: Row) -> Row | None:
    return row.ended("cancelled") if row.state in ("ready", "running") else None


def retry(row: Row) -> Row | None:
    return row.ended("ready", 0) if row.state in ("dead", "cancelled") else None


Ruling = Literal["done", "mine", "moved on", "undecided", "gone"]


def rule(row: Row | None, ledger: tuple[int, int] | None, *, locked: bool, id: int, owner: str, fence: int) -> Ruling:
    """How an attempt ended of which nobody knows. A locked row is not judged: the commit that holds it may be our own."""
    there = row is not None and row.id == id
    if ledger == (id, fence):
        return "done"
    if row is None or not there:
        return "gone"
    if locked:
        return "undecided"
    if row.fence == fence and row.state == "succeeded":
        return "done"
    return "mine" if row.fence == fence and row.owner == owner else "moved on"
