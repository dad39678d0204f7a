"""One named lease, two clients, and a resource behind check_fence. No clock: a lease may expire at any moment.

A client may stop for any time between any two steps, and never believes that it has lost anything: what it holds, it uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

from tests.model.checker import Promise, Protocol, Step

MOST_FENCES = 4


class Lease(NamedTuple):
    """The row of `leases`."""

    holder: str
    fence: int
    live: bool
    """Neither released nor expired."""
    released: bool
    request: str


class Client(NamedTuple):
    name: str
    fence: int = 0
    """What it was told that it has; 0: nothing."""
    requests: int = 0
    """It asks by this number until it has an answer."""
    drawn: int = 0
    """A mutant's: a fence drawn before the row is locked."""


class Names(NamedTuple):
    lease: Lease | None = None
    sequence: int = 0
    seen: int = 0
    """The resource's row in `fences`."""
    written: int = 0
    """The highest fence under which the resource was written."""
    clients: tuple[Client, Client] = (Client("a"), Client("b"))


def names(without: Set[str] = frozenset(), *, namesakes: bool = False) -> Protocol[Names]:
    """The protocol, or a mutant of it. `namesakes`: both clients call themselves the same."""

    def steps(now: Names) -> Iterator[Step[Names]]:
        lease = now.lease
        if lease is not None:
            if lease.live:
                yield Step("the lease expires", now._replace(lease=lease._replace(live=False)), "expire")
            else:
                yield Step("the row is pruned", now._replace(lease=None), "prune")
        for place, client in enumerate(now.clients):
            yield from _acquire(now, place, client, without)
            if client.fence:
                yield from _use(now, place, client, without)

    start = Names(clients=(Client("a"), Client("a" if namesakes else "b")))
    return Protocol(start=start, steps=steps, promises=PROMISES, sights=SIGHTS)


def _with(now: Names, place: int, client: Client) -> Names:
    return now._replace(clients=(client, now.clients[1]) if place == 0 else (now.clients[0], client))


def _acquire(now: Names, place: int, client: Client, without: Set[str]) -> Iterator[Step[Names]]:
    lease, who, request = now.lease, f"client {place + 1}", f"{place + 1}.{client.requests}"
    is_mine = lease is not None and (lease.holder, lease.request) == (client.name, request)
    answered = client._replace(requests=client.requests + 1, drawn=0)
    if lease is not None and is_mine:
        if lease.live:
            told = _with(now, place, answered._replace(fence=lease.fence))
            yield Step(f"{who} asks again: acquired, fence {lease.fence}", told, "again", (client.name, lease.fence))
        else:
            yield Step(f"{who} asks again: ended", _with(now, place, answered), "ended")
        return
    if now.sequence >= MOST_FENCES:
        return
    if "fence under the lock" in without and not client.drawn:
        drawn = now.sequence + 1
        yield Step(f"{who} draws fence {drawn}", _with(now._replace(sequence=drawn), place, client._replace(drawn=drawn)))
        return
    if lease is not None and lease.live and "acquisition's expiry" not in without:
        return
    fence = client.drawn or now.sequence + 1
    if "sequence" in without:
        fence = 1 if lease is None else lease.fence + 1
    taken = now._replace(lease=Lease(client.name, fence, True, False, request), sequence=max(now.sequence, fence))
    by = (client.name, fence)
    yield Step(f"{who} acquires: fence {fence}", _with(taken, place, answered._replace(fence=fence)), "acquire", by)
    yield Step(f"{who} acquires: fence {fence}, unheard", _with(taken, place, client._replace(drawn=0)), "acquire", by, fault=True)


def _use(now: Names, place: int, client: Client, without: Set[str]) -> Iterator[Step[Names]]:
    lease, who, by = now.lease, f"client {place + 1}", (client.name, client.fence)
    if lease is not None:
        is_held = lease.holder == client.name and (lease.fence == client.fence or "fence" in without)
        if is_held and (lease.live or ("renewal's expiry" in without and not lease.released)):
            yield Step(f"{who} renews fence {client.fence}", now._replace(lease=lease._replace(live=True)), "renew", by)
        if is_held and lease.live:
            released = now._replace(lease=lease._replace(live=False, released=True))
            yield Step(f"{who} releases fence {client.fence}", _with(released, place, client._replace(fence=0)), "release", by)
    if client.fence >= now.seen or "check_fence" in without:
        seen = max(now.seen, client.fence)
        yield Step(f"{who} writes under fence {client.fence}", now._replace(seen=seen, written=seen), "write", by)
    else:
        yield Step(f"{who} is refused under fence {client.fence}", now, "refused", by)


def _one_holder(before: Names, step: Step[Names]) -> bool:
    return step.verb != "acquire" or before.lease is None or not before.lease.live


def _fences_rise(before: Names, step: Step[Names]) -> bool:
    """Those of the resource, in the order of its acquisitions; over the whole of time unless a rival has drawn since."""
    if step.verb != "acquire":
        return True
    fence = step.by[1] if step.by else 0
    last = max(before.written, before.lease.fence if before.lease else 0, *(client.fence for client in before.clients))
    return fence > last


def _own_fence(before: Names, step: Step[Names]) -> bool:
    if step.verb not in ("renew", "release"):
        return True
    return before.lease is not None and step.by == (before.lease.holder, before.lease.fence)


def _no_late_renewal(before: Names, step: Step[Names]) -> bool:
    return step.verb != "renew" or (before.lease is not None and before.lease.live)


def _writes_in_order(before: Names, step: Step[Names]) -> bool:
    return step.verb != "write" or (step.by is not None and step.by[1] >= before.written)


def _again_is_the_same(before: Names, step: Step[Names]) -> bool:
    return step.verb != "again" or (before.lease is not None and before.lease.live and step.after.lease == before.lease)


PROMISES: dict[str, Promise[Names]] = {
    "one live holder": _one_holder,
    "fences rise": _fences_rise,
    "only the holder under its fence": _own_fence,
    "no late renewal": _no_late_renewal,
    "writes in the order of fences": _writes_in_order,
    "a request repeated is one acquisition": _again_is_the_same,
}

SIGHTS: dict[str, Promise[Names]] = {
    "a former holder is refused by the resource": lambda before, step: step.verb == "refused",
    "a lost answer is asked for again": lambda before, step: step.verb == "again",
    "a request whose lease is over": lambda before, step: step.verb == "ended",
    "an acquisition after a prune": lambda before, step: step.verb == "acquire" and before.lease is None and before.sequence > 0,
}
