"""Each fault of `worker torture` does what it is called to real daemons under load. One that did nothing does not count."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from tests.waiting import await_for
from worker.store import pulse
from worker.store.connection import Connection, Database
from worker.torture import faults, running, suite
from worker.torture.field import Field
from worker.torture.load import JOBS_PER_SECOND, Load, Operator
from worker.torture.plan import FAULTS, Step
from worker.torture.running import Wish
from worker.torture.server import own_server

LEASE_SECONDS = 2.0
DAEMONS = 2
MOST_TRIES = 8
"""A fault may meet a process that has just ended, or one of those that hold nothing."""
ROLES = {"claim", "commit", "leases", "reaper", "listen", "pool", "generator"}
"""Those that last; who lives by a named lease opens a connection for each write."""
SOON_SECONDS = 60
FEW = 5


@contextlib.asynccontextmanager
async def field_under_load(directory: Path, names: tuple[str, ...]) -> AsyncIterator[Field]:
    """Real daemons on a server of their own, started again when they end; the faults are left to the test."""
    wish = Wish(seconds=1, processes=DAEMONS, faults=names, seed=1, lease_seconds=LEASE_SECONDS)
    with own_server() as server:
        database = Database(server.dsn, schema="torture", environ={})
        operator = Operator(database)
        load = Load(database, seed=1, jobs_per_second=DAEMONS * JOBS_PER_SECOND, lease_seconds=LEASE_SECONDS)
        await running._install(database, own=True)
        async with running._slots(wish, database, directory, server) as slots, asyncio.TaskGroup() as group:
            field = Field(
                slots=slots,
                load=load,
                operator=operator,
                lease_seconds=LEASE_SECONDS,
                directory=directory,
                own_server=server,
                faketime=suite._faketime(),
            )
            for slot in slots:
                slot.start()
            await running._wait_until_ready(field)
            tasks = [group.create_task(slot.keep_running()) for slot in slots] + [group.create_task(load.run())]
            try:
                yield field
            finally:
                for task in tasks:
                    task.cancel()
                operator.close()
                load.close()


async def everything_works(field: Field) -> None:
    """As many daemons as there are to be, and jobs that get done."""

    async def at_work(connection: Connection) -> bool:
        completed, _ = await pulse.count_completed(connection, field.operator.database, seconds=1.0)
        return completed >= FEW

    await await_for(lambda: field.operator.patiently(SOON_SECONDS, at_work), SOON_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_every_fault_is_seen_to_do_something(tmp_path: Path) -> None:
    names = tuple(name for name in FAULTS if name != "clock" or suite._faketime() is not None)
    unseen: list[str] = []
    async with field_under_load(tmp_path, names) as field:
        for name in names:
            for number in range(MOST_TRIES):
                await everything_works(field)
                seen = await faults.INJECTIONS[name](field, random.Random(f"{name} {number}"))
                # Of connections: each role at least once.
                if seen and (name != "terminate" or {role for role, count in field.terminated.items() if count} >= ROLES):
                    break
            else:
                unseen.append(name)
        await everything_works(field)
    assert unseen == [], field.terminated


@pytest.mark.parametrize("seen", [True, False])
async def test_a_fault_counts_as_injected_only_if_its_effect_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    async def happen(field: Field, chance: random.Random) -> bool:
        return seen

    monkeypatch.setattr(faults, "INJECTIONS", {"kill": happen, "stop": happen})
    nobody = {"slots": [], "load": cast(Load, None), "operator": cast(Operator, None), "own_server": None, "faketime": None}
    field = Field(lease_seconds=1, directory=tmp_path, **nobody)  # type: ignore[arg-type]
    await faults.inject(field, Step(number=0, faults=("kill", "stop"), seed=1, pause_seconds=0))
    counted, other = (field.injected, field.unseen) if seen else (field.unseen, field.injected)
    assert counted == {"kill": 1, "stop": 1}
    assert not other
