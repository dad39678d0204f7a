"""Two clocks: how long a process may believe in one lease. Time goes in ticks, of which a lease has T.

The database's clock judges. The process counts ticks of its own, from before it sends a renewal, and its clock may miss as many of
them as the margin M has while a belief lasts: rates differ, by no more than M in T. What either clock shows is nowhere compared, so
no skew and no jump is in this model at all. A request may take any time, and its answer may never come.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

from tests.model.checker import Promise, Protocol, Step

T, M = 5, 1


class Request(NamedTuple):
    """A renewal under way."""

    age: int = 0
    """Local ticks since before it was sent."""
    slack: int = M
    """Ticks that the local clock may miss yet."""
    renewed: bool | None = None
    """What the database has said; None: it has not come to it."""


class Belief(NamedTuple):
    remaining: int = T
    """Of the lease, by the database's clock."""
    taken: bool = False
    """The reaper has moved the row on."""
    trust: int = T - M
    """Of the lease, by the local clock; 0: the handler is stopped."""
    slack: int = M
    request: Request | None = None


def trust(without: Set[str] = frozenset()) -> Protocol[Belief]:
    """The protocol, or a mutant of it. It begins with a claim that has just been answered."""

    def steps(now: Belief) -> Iterator[Step[Belief]]:
        yield Step("a tick", _tick(now, misses=False), "tick")
        requests = [] if now.request is None else [now.request.slack]
        if min(now.slack, *requests, T) > 0 or "clock that never stops" in without:
            yield Step("a tick, which the local clock misses", _tick(now, misses=True), "tick")
        if now.remaining == 0 and not now.taken:
            yield Step("the reaper takes the job", now._replace(taken=True), "reap")
        request = now.request
        if request is None:
            if now.trust > 0:
                yield Step("a renewal is sent", now._replace(request=Request()), "send")
            return
        yield Step("the renewal's answer is lost", now._replace(request=None), "lose", fault=True)
        if request.renewed is None:
            lives = now.remaining > 0 and not now.taken
            renewed = now._replace(remaining=T if lives else now.remaining, request=request._replace(renewed=lives))
            yield Step("the database renews" if lives else "the database refuses", renewed, "renew")
        elif request.renewed:
            age = 0 if "moment before sending" in without else request.age
            margin = 0 if "margin" in without else M
            longer = max(T - margin - age, 0)
            yield Step("the answer comes: renewed", now._replace(trust=longer, slack=request.slack, request=None), "answer")
        else:
            yield Step("the answer comes: lost", now._replace(trust=0, slack=M, request=None), "answer")

    return Protocol(start=Belief(), steps=steps, promises=PROMISES, sights=SIGHTS)


def _tick(now: Belief, *, misses: bool) -> Belief:
    passed = 0 if misses else 1
    request = now.request
    if request is not None:
        request = request._replace(age=min(request.age + passed, T), slack=max(request.slack - misses, 0))
    return now._replace(
        remaining=max(now.remaining - 1, 0),
        trust=max(now.trust - passed, 0),
        slack=max(now.slack - misses, 0),
        request=request,
    )


def _stopped_in_time(_before: Belief, step: Step[Belief]) -> bool:
    after = step.after
    return after.trust == 0 or (not after.taken and after.remaining >= after.trust + min(after.slack, M))


PROMISES: dict[str, Promise[Belief]] = {"stopped before the lease can pass on": _stopped_in_time}

SIGHTS: dict[str, Promise[Belief]] = {
    "the lease passes on": lambda before, step: step.verb == "reap",
    "a renewal comes too late": lambda before, step: step.verb == "renew" and step.after.request == Request(T, 0, False),
    "an answer comes so late that it is worth nothing": lambda before, step: (
        before.request is not None and before.request.renewed is True and step.verb == "answer" and step.after.trust == 0
    ),
}
