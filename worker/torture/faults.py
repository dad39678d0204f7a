"""Faults of processes, and of the network between them and the database. Each returns when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

from worker.store import audit, sabotage
from worker.store.connection import DATABASE_ERRORS
from worker.torture import handlers, server_faults
from worker.torture.daemons import GRACE_SECONDS, QUERY_SECONDS, Log, Slot
from worker.torture.field import Field
from worker.torture.plan import Step
from worker.torture.proxy import Link, Loss, Proxy

Inject = Callable[[Field, random.Random], Awaitable[None]]
"""The field, and what is left to chance."""

_STOP_SECONDS: Final = GRACE_SECONDS + 2 * QUERY_SECONDS + 5
_ROLES: Final = ("claim", "commit", "leases", "reaper", "listen", "pool", "generator", "holder")
_EVERY_ROLE: Final = "%"
_POISONED_SECONDS: Final = 60.0
_MIXED_WITHIN_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 0.3
_ROUNDS: Final = 5


async def inject(field: Field, step: Step) -> None:
    """Do what the step says; returns when all of it is over."""

    async def one(position: int, name: str) -> None:
        chance = random.Random(f"{name} {step.seed}")
        if position:
            await asyncio.sleep(chance.uniform(0, _MIXED_WITHIN_SECONDS))
        await INJECTIONS[name](field, chance)
        field.injected[name] += 1

    async with asyncio.TaskGroup() as group:
        for position, name in enumerate(step.faults):
            group.create_task(one(position, name), name=f"fault {name}")


# --- processes


async def _kill(field: Field, chance: random.Random) -> None:
    slot = field.pick(chance)
    async with slot.mishandled:
        life = slot.ask("kill")
        field.note_kill(life)
        await slot.wait_ended(life, _STOP_SECONDS)


async def _freeze(field: Field, chance: random.Random) -> None:
    slot = field.pick(chance)
    async with slot.mishandled:
        await slot.freeze(field.lease_seconds * chance.uniform(1.1, 1.6))


async def _stop(field: Field, chance: random.Random) -> None:
    slot = field.pick(chance)
    async with slot.mishandled:
        await slot.wait_ended(slot.ask("term"), _STOP_SECONDS)


async def _poison(field: Field, chance: random.Random) -> None:
    await field.load.add(handlers.POISON, 1, seconds=0, max_attempts=2)
    async with asyncio.timeout(_POISONED_SECONDS):
        left = 1
        while left:
            await asyncio.sleep(field.lease_seconds / 4)
            with contextlib.suppress(*DATABASE_ERRORS):
                async with field.operator.session() as connection:
                    left = await audit.count_unfinished_of(connection, field.operator.database, kind=handlers.POISON)


async def _block(field: Field, chance: random.Random) -> None:
    seconds = field.lease_seconds * chance.uniform(1.1, 1.5)
    await field.load.add(handlers.BLOCK, 1, seconds=seconds)
    await asyncio.sleep(seconds + 0.5)


@contextlib.asynccontextmanager
async def _restarted_with(slot: Slot, *, log: Log = "file", environ: Mapping[str, str] | None = None) -> AsyncIterator[None]:
    """A process that is started so for the block, and an ordinary one afterwards."""
    async with slot.mishandled:
        slot.prepare(log=log, environ=environ)
        await slot.wait_ended(slot.ask("term"), _STOP_SECONDS)
        try:
            await asyncio.sleep(_AGAIN_SECONDS)
            yield
        finally:
            slot.prepare()
        await slot.wait_ended(slot.ask("term"), _STOP_SECONDS)


async def _log(field: Field, chance: random.Random) -> None:
    log: Log = chance.choice(("full_disk", "full_pipe"))
    async with _restarted_with(field.pick(chance), log=log):
        await asyncio.sleep(field.lease_seconds)


async def _clock(field: Field, chance: random.Random) -> None:
    assert field.faketime is not None
    offset = field.directory / f"offset-{chance.getrandbits(32):08x}"
    environ = {
        "LD_PRELOAD": str(field.faketime),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        # Not to be read anew at every look at the clock, which would make the process stand still for seconds.
        "FAKETIME_CACHE_DURATION": "1",
        # The wall clock jumps; nobody's monotonic clock does.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    offset.write_text("+0\n")
    async with _restarted_with(field.pick(chance), environ=environ):
        for jump in ("+10m", "-10m", "+1h"):
            await asyncio.sleep(field.lease_seconds / 2)
            offset.write_text(f"{jump}\n")
        await asyncio.sleep(field.lease_seconds / 2)


# --- connections


async def _terminate(field: Field, chance: random.Random) -> None:
    """Each role once, then all of them together; of one process or of all."""
    process = chance.choice((f"t{field.pick(chance).number}-%", "t%"))
    for role in (*chance.sample(_ROLES, len(_ROLES)), _EVERY_ROLE):
        with contextlib.suppress(*DATABASE_ERRORS):
            async with field.operator.session() as connection:
                pids = await sabotage.backends(connection, like=f"{process} {role}")
                await sabotage.terminate(connection, pids)
        await asyncio.sleep(_AGAIN_SECONDS)


def _proxies(field: Field, chance: random.Random) -> list[Proxy]:
    """One daemon's, or everybody's."""
    slots = field.slots if chance.random() < 0.4 else [field.pick(chance)]
    return [slot.proxy for slot in slots if slot.proxy is not None]


async def _delay(field: Field, chance: random.Random) -> None:
    proxies = _proxies(field, chance)
    seconds = chance.uniform(0.02, 0.15)
    for proxy in proxies:
        proxy.delay_seconds = seconds
    try:
        await asyncio.sleep(field.lease_seconds)
    finally:
        for proxy in proxies:
            proxy.delay_seconds = 0.0


async def _blackhole(field: Field, chance: random.Random) -> None:
    proxies = _proxies(field, chance)
    for proxy in proxies:
        proxy.network.close()
    try:
        await asyncio.sleep(field.lease_seconds * chance.uniform(1.1, 1.6))
    finally:
        for proxy in proxies:
            proxy.network.open()


async def _halfopen(field: Field, chance: random.Random) -> None:
    """Again and again what is sent stays on its way, while new connections work. All of it is delivered in the end."""
    proxies = _proxies(field, chance)
    seconds = field.lease_seconds * chance.uniform(1.2, 1.6)
    held: list[Link] = []
    try:
        for _ in range(_ROUNDS):
            held += [link for proxy in proxies for link in proxy.delay_requests()]
            await asyncio.sleep(seconds / _ROUNDS)
    finally:
        for link in held:
            link.late.open()


async def _reset(field: Field, chance: random.Random) -> None:
    proxies = _proxies(field, chance)
    for _ in range(6):
        for proxy in proxies:
            proxy.break_off()
        await asyncio.sleep(chance.uniform(0, 2 * _AGAIN_SECONDS))


async def _lose_commits(field: Field, chance: random.Random, losses: tuple[Loss, ...]) -> None:
    proxies = [slot.proxy for slot in field.slots if slot.proxy is not None]
    for proxy in proxies:
        proxy.lose_commits([chance.choice(losses) for _ in range(5)])
    try:
        await asyncio.sleep(field.lease_seconds / 2)
    finally:
        for proxy in proxies:
            proxy.lose_commits([])


async def _commit_applied(field: Field, chance: random.Random) -> None:
    await _lose_commits(field, chance, ("applied", "in_flight"))


async def _commit_undone(field: Field, chance: random.Random) -> None:
    await _lose_commits(field, chance, ("undone",))


INJECTIONS: Final[Mapping[str, Inject]] = {
    "kill": _kill,
    "freeze": _freeze,
    "stop": _stop,
    "poison": _poison,
    "block": _block,
    "log": _log,
    "clock": _clock,
    "terminate": _terminate,
    "delay": _delay,
    "blackhole": _blackhole,
    "halfopen": _halfopen,
    "reset": _reset,
    "commit_applied": _commit_applied,
    "commit_undone": _commit_undone,
    **server_faults.INJECTIONS,
}
