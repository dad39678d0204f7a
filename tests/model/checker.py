"""Visit every state that a model can reach, breadth first, and say how the first broken promise is reached: by a shortest trace."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S", bound=Hashable)


class Step(NamedTuple, Generic[S]):
    """One thing that may happen, and the state behind it."""

    label: str
    after: S
    verb: str = ""
    """What was done, for the promises to look at; "" for what is no promise's matter."""
    by: tuple[str, int] | None = None
    """Owner and fence that were shown."""
    fault: bool = False
    """It need not happen: nothing may depend on it for the work to end."""


Promise = Callable[[S, Step[S]], bool]
"""Whether this step, from this state, keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol(Generic[S]):
    start: S
    steps: Callable[[S], Iterator[Step[S]]]
    promises: Mapping[str, Promise[S]]
    sights: Mapping[str, Promise[S]] = field(default_factory=dict)
    """What must be seen somewhere: a model in which it cannot happen proves nothing about it."""
    is_goal: Callable[[S], bool] | None = None
    """From every state a goal must be within reach of steps that are no faults."""


class Breach(NamedTuple):
    promise: str
    trace: tuple[str, ...]


class Explored(NamedTuple):
    states: int
    steps: int
    seconds: float
    breach: Breach | None
    unseen: tuple[str, ...]


NOTHING_IS_LOST = "nothing is lost"


def explore(protocol: Protocol[S]) -> Explored:
    """Every state, or the first breach. Without one: is a goal within reach from everywhere, and was everything seen?"""
    began_at = time.monotonic()
    numbers: dict[S, int] = {protocol.start: 0}
    states = [protocol.start]
    came_from: list[tuple[int, str]] = [(0, "")]
    led_from: list[list[int]] = [[]]
    unseen = dict(protocol.sights)
    count = 0
    breach: Breach | None = None
    collects_garbage = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and there are millions of tuples to look through
    try:
        for number, state in enumerate(states):  # grows meanwhile
            for step in protocol.steps(state):
                count += 1
                if step.verb:
                    broken = [name for name, is_kept in protocol.promises.items() if not is_kept(state, step)]
                    if broken:
                        breach = Breach(broken[0], (*_trace(came_from, number), step.label))
                        return Explored(len(states), count, time.monotonic() - began_at, breach, ())
                    for name in [name for name, is_seen in unseen.items() if is_seen(state, step)]:
                        del unseen[name]
                after = numbers.setdefault(step.after, len(states))
                if after == len(states):
                    states.append(step.after)
                    came_from.append((number, step.label))
                    led_from.append([])
                if not step.fault:
                    led_from[after].append(number)
        if protocol.is_goal is not None:
            breach = _lost([protocol.is_goal(state) for state in states], led_from, came_from)
    finally:
        if collects_garbage:
            gc.enable()
    return Explored(len(states), count, time.monotonic() - began_at, breach, tuple(unseen))


def _lost(reaches: list[bool], led_from: list[list[int]], came_from: list[tuple[int, str]]) -> Breach | None:
    """The first state from which no goal can be reached any more; `reaches` says which states are goals."""
    queue = [number for number, is_goal in enumerate(reaches) if is_goal]
    for number in queue:
        for earlier in led_from[number]:
            if not reaches[earlier]:
                reaches[earlier] = True
                queue.append(earlier)
    return None if all(reaches) else Breach(NOTHING_IS_LOST, _trace(came_from, reaches.index(False)))


def _trace(came_from: list[tuple[int, str]], number: int) -> tuple[str, ...]:
    labels = []
    while number:
        number, label = came_from[number]
        labels.append(label)
    return tuple(reversed(labels))
