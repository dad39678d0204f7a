"""Faults of processes, and of the network between them and the database.

Each returns when it is over, and says whether it did anything: what nobody can have felt proves nothing, and is counted apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

from worker.clock import local_seconds
from worker.store import pulse, sabotage
from worker.store.connection import DATABASE_ERRORS
from worker.torture import handlers, notes, server_faults
from worker.torture.daemons import GRACE_SECONDS, QUERY_SECONDS, Log, Slot
from worker.torture.field import Field
from worker.torture.plan import Step
from worker.torture.proxy import Link, Loss, Proxy

Inject = Callable[[Field, random.Random], Awaitable[bool]]
"""The field, and what is left to chance. Returns whether an effect was seen."""

_STOP_SECONDS: Final = GRACE_SECONDS + 2 * QUERY_SECONDS + 5
_ROLES: Final = ("claim", "commit", "leases", "reaper", "listen", "pool", "generator", "holder")
_EVERY_ROLE: Final = "%"
_DONE_SECONDS: Final = 60.0
_MIXED_WITHIN_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 0.3
_ROUNDS: Final = 5


async def inject(field: Field, step: Step) -> None:
    """Do what the step says; returns when all of it is over."""

    async def one(position: int, name: str) -> None:
        chance = random.Random(f"{name} {step.seed}")
        if position:
            await asyncio.sleep(chance.uniform(0, _MIXED_WITHIN_SECONDS))
        seen = await INJECTIONS[name](field, chance)
        (field.injected if seen else field.unseen)[name] += 1

    async with asyncio.TaskGroup() as group:
        for position, name in enumerate(step.faults):
            group.create_task(one(position, name), name=f"fault {name}")


# --- processes


async def _kill(field: Field, chance: random.Random) -> bool:
    """A daemon, and now and then one of the others right behind it."""
    killed = False
    others = [slot for slot in field.slots if slot.sort != "daemon"]
    for slot in (field.pick(chance, talks=True), *chance.sample(others, chance.randrange(2))):
        async with slot.mishandled:
            life = slot.ask("kill")
            if life.asked == "kill":
                field.note_kill(life)
                killed |= await slot.wait_ended(life, _STOP_SECONDS)
    return killed


async def _freeze(field: Field, chance: random.Random) -> bool:
    slot = field.pick(chance)
    async with slot.mishandled:
        return await slot.freeze(field.lease_seconds * chance.uniform(1.1, 1.6))


async def _stop(field: Field, chance: random.Random) -> bool:
    slot = field.pick(chance)
    async with slot.mishandled:
        life = slot.ask("term")
        return life.asked == "term" and await slot.wait_ended(life, _STOP_SECONDS)


async def _until_done(field: Field, kind: str) -> None:
    """Until no job of this kind is left to be run, or that takes too long."""
    left = 1
    until = local_seconds() + _DONE_SECONDS
    while left and local_seconds() < until:
        await asyncio.sleep(field.lease_seconds / 8)
        with contextlib.suppress(*DATABASE_ERRORS):
            async with field.operator.session() as connection:
                left = await pulse.count_unfinished_of(connection, field.operator.database, kind=kind)


async def _poison(field: Field, chance: random.Random) -> bool:
    before = field.ends_by_themselves()
    await field.load.add(handlers.POISON, 1, seconds=0, max_attempts=2)
    await _until_done(field, handlers.POISON)
    return field.ends_by_themselves() > before


async def _block(field: Field, chance: random.Random) -> bool:
    seconds = field.lease_seconds * chance.uniform(1.1, 1.5)
    begin = notes.size(field.notes)
    await field.load.add(handlers.BLOCK, 1, seconds=seconds)
    await _until_done(field, handlers.BLOCK)
    blocked = (run for run in notes.read(field.notes, begin=begin) if run.kind == handlers.BLOCK and run.ended_at is not None)
    return any((run.ended_at or 0) - run.started_at > field.lease_seconds for run in blocked)


@contextlib.asynccontextmanager
async def _restarted_with(slot: Slot, *, log: Log = "file", environ: Mapping[str, str] | None = None) -> AsyncIterator[None]:
    """A process that is started so for the block, and an ordinary one afterwards."""
    async with slot.mishandled:
        slot.prepare(log=log, environ=environ)
        before = slot.life
        await slot.wait_ended(slot.ask("term"), _STOP_SECONDS)
        try:
            await slot.wait_replaced(before, _STOP_SECONDS)
            yield
        finally:
            slot.prepare()
        await slot.wait_ended(slot.ask("term"), _STOP_SECONDS)


async def _log(field: Field, chance: random.Random) -> bool:
    log: Log = chance.choice(("full_disk", "full_pipe"))
    slot = field.pick(chance, talks=True)
    async with _restarted_with(slot, log=log):
        await asyncio.sleep(field.lease_seconds)
        return slot.has_nowhere_to_write()


async def _clock(field: Field, chance: random.Random) -> bool:
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
    slot = field.pick(chance, talks=True)
    async with _restarted_with(slot, environ=environ):
        life = slot.life
        for jump in ("+10m", "-10m", "+1h"):
            await asyncio.sleep(field.lease_seconds / 2)
            offset.write_text(f"{jump}\n")
        await asyncio.sleep(field.lease_seconds / 2)
    return life.clock_jumped()


# --- connections


async def _terminate(field: Field, chance: random.Random) -> bool:
    """Each role once, then all of them together; of one daemon or of everybody."""
    process = chance.choice((f"t{field.pick(chance, talks=True).number}-%", "t%"))
    ended = 0
    for role in (*chance.sample(_ROLES, len(_ROLES)), _EVERY_ROLE):
        with contextlib.suppress(*DATABASE_ERRORS):
            async with field.operator.session() as connection:
                pids = await sabotage.backends(connection, like=f"{process} {role}")
                found = await sabotage.terminate(connection, pids)
            ended += found
            if role != _EVERY_ROLE:
                field.terminated[role] += found
        await asyncio.sleep(_AGAIN_SECONDS)
    return ended > 0


def _proxies(field: Field, chance: random.Random) -> list[Proxy]:
    """One daemon's, or everybody's."""
    slots = field.slots if chance.random() < 0.4 else [field.pick(chance)]
    return [slot.proxy for slot in slots if slot.proxy is not None]


async def _delay(field: Field, chance: random.Random) -> bool:
    proxies = _proxies(field, chance)
    before = sum(proxy.slowed for proxy in proxies)
    seconds = chance.uniform(0.02, 0.15)
    for proxy in proxies:
        proxy.delay_seconds = seconds
    try:
        await asyncio.sleep(field.lease_seconds)
    finally:
        for proxy in proxies:
            proxy.delay_seconds = 0.0
    return sum(proxy.slowed for proxy in proxies) > before


async def _blackhole(field: Field, chance: random.Random) -> bool:
    proxies = _proxies(field, chance)
    before = sum(proxy.kept for proxy in proxies)
    for proxy in proxies:
        proxy.network.close()
    try:
        await asyncio.sleep(field.lease_seconds * chance.uniform(1.1, 1.6))
    finally:
        for proxy in proxies:
            proxy.network.open()
    return sum(proxy.kept for proxy in proxies) > before


async def _halfopen(field: Field, chance: random.Random) -> bool:
    """Again and again what is sent stays on its way, while new connections work. All of it is delivered in the end."""
    proxies = _proxies(field, chance)
    before = sum(proxy.kept for proxy in proxies)
    seconds = field.lease_seconds * chance.uniform(1.2, 1.6)
    held: list[Link] = []
    try:
        for _ in range(_ROUNDS):
            held += [link for proxy in proxies for link in proxy.delay_requests()]
            await asyncio.sleep(seconds / _ROUNDS)
    finally:
        for link in held:
            link.late.open()
    return sum(proxy.kept for proxy in proxies) > before


async def _reset(field: Field, chance: random.Random) -> bool:
    proxies = _proxies(field, chance)
    broken_off = 0
    for _ in range(6):
        broken_off += sum(proxy.break_off() for proxy in proxies)
        await asyncio.sleep(chance.uniform(0, 2 * _AGAIN_SECONDS))
    return broken_off > 0


async def _lose_commits(field: Field, chance: random.Random, losses: tuple[Loss, ...]) -> bool:
    proxies = [slot.proxy for slot in field.slots if slot.proxy is not None]

    def lost() -> int:
        return sum(proxy.lost_commits[loss] for proxy in proxies for loss in losses)

    before = lost()
    for proxy in proxies:
        proxy.lose_commits([chance.choice(losses) for _ in range(5)])
    try:
        await asyncio.sleep(field.lease_seconds / 2)
    finally:
        for proxy in proxies:
            proxy.lose_commits([])
    return lost() > before


async def _commit_applied(field: Field, chance: random.Random) -> bool:
    return await _lose_commits(field, chance, ("applied", "in_flight"))


async def _commit_undone(field: Field, chance: random.Random) -> bool:
    return await _lose_commits(field, chance, ("undone",))


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
