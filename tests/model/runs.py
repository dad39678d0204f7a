"""Which models are run, how far, and which conditions are left out to see that somebody notices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from tests.model.checker import NOTHING_IS_LOST, Protocol
from tests.model.jobs import jobs
from tests.model.names import names
from tests.model.trust import trust
from tests.model.world import Bounds

_OPERATOR = Bounds(fences=3, crash=True, cancel=True, retry=True, deletion=True)
_EVERYTHING = replace(_OPERATOR, late_recovery=True)

SOUND: dict[str, Protocol[Any]] = {
    "one faulty process, crash, operator, two claims": jobs(replace(_OPERATOR, fences=2)),
    "one faulty process, late recovery, two claims": jobs(Bounds(fences=2, late_recovery=True)),
    "connections that hold, crash, operator, four claims": jobs(replace(_OPERATOR, fences=4, faulty="")),
    "two clocks": trust(),
    "a named lease": names(),
    "a named lease, two clients of one name": names(namesakes=True),
}

DEEP: dict[str, Protocol[Any]] = {
    **SOUND,
    "one faulty process, crash, operator, three claims": jobs(_OPERATOR),
    "one faulty process, late recovery, crash, operator, two claims": jobs(replace(_EVERYTHING, fences=2)),
    "two faulty processes, two claims": jobs(Bounds(fences=2, faulty="ab")),
}


class Mutant(NamedTuple):
    name: str
    protocol: Protocol[Any]
    breaks: str
    """The promise that must be found broken."""
    steps: int
    """Of the shortest way there."""


MUTANTS = (
    Mutant("writes match the owner, not the fence", jobs(_EVERYTHING, {"fence"}), "one live lease", 6),
    Mutant("writes match the fence, not the owner", jobs(_EVERYTHING, {"owner"}), "no stale write", 4),
    Mutant("renew without a look at the expiry", jobs(_EVERYTHING, {"renewal's expiry"}), "no late renewal", 3),
    Mutant("reap what was found, without looking again", jobs(_EVERYTHING, {"reap re-check"}), "one live lease", 7),
    Mutant("claim what was found, without looking again", jobs(_EVERYTHING, {"claim re-check"}), "one live lease", 3),
    Mutant("the effect in a transaction of its own", jobs(_EVERYTHING, {"one transaction"}), "effect and completion together", 2),
    Mutant("no ledger", jobs(_EVERYTHING, {"ledger"}), "one effect a key", 7),
    Mutant("a lost COMMIT is taken for a failure", jobs(_EVERYTHING, {"look"}), "the last word is true", 5),
    Mutant("zero rows are the last word", jobs(_EVERYTHING, {"second look"}), "the last word is true", 6),
    Mutant("give back what is not held, however new", jobs(_EVERYTHING, {"recovery's bound"}), "one live lease", 4),
    Mutant("release without a refund", jobs(_EVERYTHING, {"refund"}), "attempts add up", 3),
    Mutant("expired on the last attempt becomes ready", jobs(_EVERYTHING, {"burial"}), "attempts add up", 7),
    Mutant("fences counted in the row", jobs(_EVERYTHING, {"sequence"}), "fences rise", 5),
    Mutant("nobody reaps", jobs(Bounds(fences=2, faulty="", crash=True), {"reaper"}), NOTHING_IS_LOST, 2),
    Mutant("trust from the answer on", trust({"moment before sending"}), "stopped before the lease can pass on", 4),
    Mutant("no margin", trust({"margin"}), "stopped before the lease can pass on", 3),
    Mutant(
        "a clock that stands while the host sleeps", trust({"clock that never stops"}), "stopped before the lease can pass on", 2
    ),
    Mutant("acquire without a look at the expiry", names({"acquisition's expiry"}), "one live holder", 2),
    Mutant("the fence is drawn before the row is locked", names({"fence under the lock"}), "fences rise", 5),
    Mutant("fences of names counted in the row", names({"sequence"}), "fences rise", 4),
    Mutant("renew and release by the name alone", names({"fence"}, namesakes=True), "only the holder under its fence", 4),
    Mutant("renew a name late", names({"renewal's expiry"}), "no late renewal", 3),
    Mutant("the resource does not look at the fence", names({"check_fence"}), "writes in the order of fences", 5),
)
