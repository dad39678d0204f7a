"""What is done to the daemons, and in which order: a function of the seed. No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Need = Literal["nothing", "proxy", "plain", "own_server", "faketime"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault."""

    does: str
    needs: Need = "nothing"


FAULTS: Final[Mapping[str, Fault]] = {
    "kill": Fault(does="SIGKILL a daemon"),
    "freeze": Fault(does="SIGSTOP a daemon for longer than a lease"),
    "stop": Fault(does="SIGTERM a daemon under load"),
    "poison": Fault(does="jobs that kill the process they run in"),
    "block": Fault(does="a handler that blocks the event loop for longer than a lease"),
    "log": Fault(does="a daemon whose log goes to a full disk, or into a pipe that nobody reads"),
    "clock": Fault(does="the wall clock of a daemon jumps by minutes, both ways", needs="faketime"),
    "terminate": Fault(does="end the connections of one role: claim, commit, leases, reaper, listen, pool"),
    "delay": Fault(does="a slow network", needs="proxy"),
    "blackhole": Fault(does="a network that carries nothing for longer than a lease, then everything", needs="proxy"),
    "halfopen": Fault(does="requests that arrive when their sender has long given up", needs="proxy"),
    "reset": Fault(does="connections that break off", needs="proxy"),
    "commit_applied": Fault(does="the answer to a COMMIT gets lost, which was applied", needs="plain"),
    "commit_undone": Fault(does="a COMMIT gets lost on its way, and is rolled back", needs="plain"),
    "standby": Fault(does="COMMITs that wait for a standby which is not there, ended meanwhile", needs="own_server"),
    "readonly": Fault(does="the server refuses to write, as after a demotion", needs="own_server"),
    "limit": Fault(does="no more connections are allowed", needs="own_server"),
    "restart": Fault(does="the server is restarted", needs="own_server"),
    "crash": Fault(does="a server process is killed with SIGKILL, and the server recovers", needs="own_server"),
}

_SINGLE_A_MIX: Final = 3
_MIX_OF: Final = (2, 3)
_PAUSE_SECONDS: Final = (0.5, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One fault by itself, or several at once."""

    number: int
    faults: tuple[str, ...]
    seed: int
    """For what is left to chance inside: which daemon, which role, how long."""
    pause_seconds: float
    """After everything is back to normal."""


def plan(seed: int, names: Sequence[str]) -> Iterator[Step]:
    """Steps without end: each of `names` by itself, in an order that changes, a mixture after every third."""
    chance = random.Random(f"plan {seed}")
    number = 0
    while True:
        order = list(names)
        chance.shuffle(order)
        for position, name in enumerate(order, 1):
            yield _step(number, (name,), chance)
            number += 1
            if position % _SINGLE_A_MIX == 0 and len(names) > 1:
                mixed = chance.sample(list(names), min(chance.choice(_MIX_OF), len(names)))
                yield _step(number, tuple(mixed), chance)
                number += 1


def _step(number: int, faults: tuple[str, ...], chance: random.Random) -> Step:
    return Step(number=number, faults=faults, seed=chance.getrandbits(32), pause_seconds=chance.uniform(*_PAUSE_SECONDS))
