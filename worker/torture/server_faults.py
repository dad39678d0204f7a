"""Faults of the whole server: only where it is the torture's own. They return as all others do (see faults)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from worker.clock import local_seconds
from worker.store import pulse, sabotage
from worker.store.connection import DATABASE_ERRORS, Connection
from worker.torture.field import Field

_COME_BACK_SECONDS: Final = 60.0
_LOOK_AGAIN_SECONDS: Final = 0.05
_DAEMONS: Final = "t%"
_FEW_CONNECTIONS: Final = 3
_NOTICE_SECONDS: Final = 5.0


async def _undo(field: Field, setting: str) -> None:
    """Whatever state the server is in meanwhile."""
    await field.operator.patiently(_COME_BACK_SECONDS, lambda connection: sabotage.reset_server(connection, setting))


async def _standby(field: Field, chance: random.Random) -> bool:
    """COMMIT is carried out here and waits for a standby. Either its session is ended meanwhile: nobody was told, and it counts. Or
    its client is cut off: who looks now sees nothing of a commit that is still on its way."""
    proxies = [slot.proxy for slot in field.slots if slot.proxy is not None]
    cuts = bool(proxies) and chance.random() < 0.5
    before = field.lost_commits
    async with field.server_lock:
        try:
            async with field.operator.session() as connection:
                await sabotage.set_server(connection, "synchronous_standby_names", "ghost")
            until = local_seconds() + field.lease_seconds / 4
            while local_seconds() < until:
                await asyncio.sleep(field.lease_seconds / 8 if cuts else _LOOK_AGAIN_SECONDS)
                async with field.operator.session() as connection:
                    waiting = await sabotage.backends(connection, like=_DAEMONS, wait_for_standby=True)
                    field.lost_commits += len(waiting)
                    if not cuts:
                        await sabotage.terminate(connection, waiting)
                if cuts:
                    for proxy in proxies:
                        proxy.break_off()
                    await asyncio.sleep(max(until - local_seconds(), 0))
        except DATABASE_ERRORS:
            pass  # another fault has the server as well
        finally:
            await _undo(field, "synchronous_standby_names")
    return field.lost_commits > before


async def _readonly(field: Field, chance: random.Random) -> bool:
    seconds = field.lease_seconds * chance.uniform(0.3, 1.2)
    completed: int | None = None
    async with field.server_lock:
        try:
            async with field.operator.session() as connection:
                await sabotage.set_server(connection, "default_transaction_read_only", "on")
            await asyncio.sleep(seconds)
            async with field.operator.session() as connection:
                completed, _ = await pulse.count_completed(connection, field.operator.database, seconds=seconds / 2)
        except DATABASE_ERRORS:
            pass
        finally:
            await _undo(field, "default_transaction_read_only")
    return completed == 0


async def _limit(field: Field, chance: random.Random) -> bool:
    slot = field.pick(chance)
    pids: list[int] = []
    left = 0
    async with field.server_lock:
        try:
            async with field.operator.session() as connection:
                await sabotage.limit_connections(connection, _FEW_CONNECTIONS)
                pids = await sabotage.backends(connection, like=f"t{slot.number}-%")
                await sabotage.terminate(connection, pids)
            await asyncio.sleep(field.lease_seconds * chance.uniform(0.5, 1.2))
            async with field.operator.session() as connection:
                left = len(await sabotage.backends(connection, like=f"t{slot.number}-%"))
        except DATABASE_ERRORS:
            pass
        finally:
            await field.operator.patiently(_COME_BACK_SECONDS, lambda connection: sabotage.limit_connections(connection, -1))
    return left < len(pids)


async def _restart(field: Field, chance: random.Random) -> bool:
    assert field.own_server is not None
    async with field.server_lock:
        before = await field.operator.patiently(_COME_BACK_SECONDS, sabotage.server_started)
        await field.own_server.restart()
        return await field.operator.patiently(_COME_BACK_SECONDS, sabotage.server_started) != before


async def _crash(field: Field, chance: random.Random) -> bool:
    """The server ends all sessions with the one, and recovers."""
    assert field.own_server is not None
    pids: list[int] = []
    async with field.server_lock:
        with contextlib.suppress(*DATABASE_ERRORS):
            async with field.operator.session() as connection:
                pids = await _sessions_of_daemons(connection)
            if pids:
                field.own_server.kill_backend(chance.choice(pids))
        left = set(pids)
        # On a busy machine the server notices a while later; not at all, if that process had just ended.
        until = local_seconds() + _NOTICE_SECONDS
        while left and local_seconds() < until:
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            left &= set(await field.operator.patiently(_COME_BACK_SECONDS, _sessions_of_daemons))
    return bool(pids) and not left


async def _sessions_of_daemons(connection: Connection) -> list[int]:
    return await sabotage.backends(connection, like=_DAEMONS)


INJECTIONS: Final[Mapping[str, Callable[[Field, random.Random], Awaitable[bool]]]] = {
    "standby": _standby,
    "readonly": _readonly,
    "limit": _limit,
    "restart": _restart,
    "crash": _crash,
}
