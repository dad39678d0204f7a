"""A torture from beginning to end: load, faults one after the other, quiet, and then the check of what the database wrote down."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker.clock import local_seconds
from worker.store import generating, pulse, recording, sabotage, schema
from worker.store.connection import DATABASE_ERRORS, Connection, Database, safe_text
from worker.torture import plan as plans
from worker.torture.daemons import Slot, daemon_environ
from worker.torture.faults import inject
from worker.torture.field import NOTES_FILE, Field
from worker.torture.load import JOBS_PER_SECOND, Load, Operator
from worker.torture.proxy import Proxy
from worker.torture.reach import connect_to, url_of
from worker.torture.server import OwnServer
from worker.torture.timing import BEFORE_SECONDS, NINE_TENTHS, RETURN_SECONDS, SLACK_SECONDS, WINDOW_SECONDS, Done, Ended, Usual

_OTHERS: Final = 2
"""Instances of the generator, and programs that live by named leases."""

_START_SECONDS: Final = 60.0
_COME_BACK_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 1.5
_QUIET_SECONDS: Final = 60.0
_LONGEST_QUIET_SECONDS: Final = 1_800.0
_LOOK_AGAIN_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 20.0
_REMOVE_SECONDS: Final = 60.0
_MIGRATE_SECONDS: Final = 60.0


class TortureFailed(Exception):
    """It could not be carried out. The message says why; nothing is said about the daemons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What somebody asked for."""

    seconds: float
    processes: int
    faults: tuple[str, ...]
    seed: int
    lease_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What happened, for the check."""

    field: Field
    usual: Usual
    quiet: bool
    """Whether all jobs had ended in time."""


@contextlib.asynccontextmanager
async def tortured(
    wish: Wish,
    database: Database,
    *,
    directory: Path,
    own_server: OwnServer | None,
    faketime: Path | None,
    say: Callable[[str], None],
    on_left_behind: Callable[[str], None],
) -> AsyncIterator[Passed]:
    """Torture the daemons; inside the block the recorded history is there to be read. The schema goes with the block.

    Raises SchemaError when the role may not create a schema, TortureFailed when the daemons do not start.
    """
    operator = Operator(database)
    load = Load(database, seed=wish.seed, jobs_per_second=wish.processes * JOBS_PER_SECOND, lease_seconds=wish.lease_seconds)
    try:
        await _install(database, own=own_server is not None)
        async with _slots(wish, database, directory, own_server) as slots:
            field = Field(
                slots=slots,
                load=load,
                operator=operator,
                lease_seconds=wish.lease_seconds,
                directory=directory,
                own_server=own_server,
                faketime=faketime,
            )
            usual, quiet = await _run(wish, field, say)
        load.close()
        say("checking")
        yield Passed(field=field, usual=usual, quiet=quiet)
    finally:
        operator.close()
        load.close()
        await _remove(database, on_left_behind)


async def _install(database: Database, *, own: bool) -> None:
    connection = await database.connect("torture", statement_timeout_seconds=_MIGRATE_SECONDS)
    try:
        await schema.migrate(connection, database.schema)
        await recording.install(connection, database)
        if own:
            await sabotage.make_daemon_role(connection, database)
    finally:
        connection.terminate()


async def _remove(database: Database, on_left_behind: Callable[[str], None]) -> None:
    try:
        async with asyncio.timeout(_REMOVE_SECONDS):
            connection = await database.connect(
                "torture", statement_timeout_seconds=_REMOVE_SECONDS, settings={"lock_timeout": "30s"}
            )
            try:
                await sabotage.remove_schema(connection, database)
            finally:
                connection.terminate()
    except DATABASE_ERRORS as error:
        on_left_behind(f'schema "{database.schema}" could not be removed ({safe_text(error)}): drop it with CASCADE')


@contextlib.asynccontextmanager
async def _slots(wish: Wish, database: Database, directory: Path, own_server: OwnServer | None) -> AsyncIterator[list[Slot]]:
    """So many places for daemons, each behind a proxy of its own where a fault needs one; all processes end with the block."""
    environ = daemon_environ(
        schema=database.schema, lease_seconds=wish.lease_seconds, directory=directory, notes=directory / NOTES_FILE
    )
    user = sabotage.DAEMON_ROLE if own_server is not None else None
    needs_proxy = any(plans.FAULTS[name].needs in ("proxy", "plain") or name == "standby" for name in wish.faults)
    slots: list[Slot] = []
    async with contextlib.AsyncExitStack() as stack:
        try:
            sorts = ["daemon"] * wish.processes + ["generator", "holder"] * _OTHERS
            for number, sort in enumerate(sorts):
                proxy: Proxy | None = None
                if needs_proxy:
                    proxy = await stack.enter_async_context(Proxy(connect_to(database)).listening())
                url = url_of(database, user=user, through_port=None if proxy is None else proxy.port)
                slots.append(Slot(number, sort, environ=environ, directory=directory, url=url, proxy=proxy))
            yield slots
        finally:
            for slot in slots:
                slot.kill()


async def _run(wish: Wish, field: Field, say: Callable[[str], None]) -> tuple[Usual, bool]:
    """Returns what was usual before the first fault, and whether everything had ended in the end."""
    say("starting")
    for slot in field.slots:
        slot.start()
    await _wait_until_ready(field)
    keeping = [asyncio.create_task(slot.keep_running(), name=f"slot {slot.number}") for slot in field.slots]
    loading = asyncio.create_task(field.load.run(), name="load")
    try:
        usual = await _measure_usual(field)
        await _torture(wish, field, usual, say)
        loading.cancel()
        await asyncio.wait({loading})
        say("waiting until every job has ended")
        await field.operator.patiently(_COME_BACK_SECONDS, lambda connection: generating.stop(connection, field.operator.database))
        quiet = await _wait_for_quiet(field)
    finally:
        for task in (loading, *keeping):
            task.cancel()
        await asyncio.wait({loading, *keeping})
    for task in (loading, *keeping):
        if not task.cancelled():
            task.result()
    lives = [slot.ask("term") for slot in field.slots]
    for slot, life in zip(field.slots, lives, strict=True):
        await slot.wait_ended(life, _STOP_SECONDS)
    return usual, quiet


async def _wait_until_ready(field: Field) -> None:
    until = local_seconds() + _START_SECONDS
    while True:
        async with field.operator.session() as connection:
            if await pulse.count_processes(connection, field.operator.database) >= len(field.daemons):
                return
        for slot in field.slots:
            if slot.has_ended():
                raise TortureFailed(f"a daemon ended with status {slot.life.process.poll()}: {slot.last_words()}")
        if local_seconds() > until:
            raise TortureFailed(f"the daemons are not there after {_START_SECONDS:g} s")
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)


async def _measure_usual(field: Field) -> Usual:
    await asyncio.sleep(_SETTLE_SECONDS + BEFORE_SECONDS)
    async with field.operator.session() as connection:
        await field.read_clock(connection)
        completed_per_second = await _completed(connection, field)
    if completed_per_second == 0:
        raise TortureFailed("the daemons complete nothing, before anything was done to them")
    offered_per_second = len(field.daemons) * JOBS_PER_SECOND
    return Usual(min(completed_per_second, offered_per_second), offered_per_second)


async def _torture(wish: Wish, field: Field, usual: Usual, say: Callable[[str], None]) -> None:
    until = local_seconds() + wish.seconds
    for step in plans.plan(wish.seed, wish.faults):
        say(f"{until - local_seconds():.0f} s to go: {' and '.join(step.faults)}")
        kills = len(field.killed)
        before = await field.operator.patiently(_COME_BACK_SECONDS, lambda connection: _completed(connection, field))
        began = field.database_us()
        unseen = field.unseen.total()
        await inject(field, step)
        ended_at = local_seconds()
        field.done.append(Done(step.faults, began, field.database_us(ended_at)))
        await _watch_return(field, usual.of(before))
        back_at = local_seconds()
        if len(step.faults) == 1 and field.unseen.total() == unseen:
            field.ended.append(Ended(step.faults[0], began, field.database_us(ended_at), field.database_us()))
            if step.faults == ("kill",):
                # Nothing else is done until its jobs should be back: their recovery is to be seen alone.
                await asyncio.sleep(max(ended_at + wish.lease_seconds + SLACK_SECONDS - local_seconds(), 0))
                field.killed[kills:] = [kill._replace(alone=True) for kill in field.killed[kills:]]
        # What comes next is to be measured by a time in which nothing was wrong.
        pause_seconds = max(back_at + BEFORE_SECONDS - local_seconds(), 0) + step.pause_seconds
        if local_seconds() + pause_seconds > until:
            return
        await asyncio.sleep(pause_seconds)


async def _completed(connection: Connection, field: Field) -> float:
    """Jobs a second, lately."""
    completed, _ = await pulse.count_completed(connection, field.operator.database, seconds=BEFORE_SECONDS)
    return completed / BEFORE_SECONDS


async def _watch_return(field: Field, before_per_second: float) -> None:
    """Until the throughput is back, or should have been."""
    started_at = local_seconds()
    while local_seconds() - started_at < RETURN_SECONDS + WINDOW_SECONDS:
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        try:
            async with field.operator.session() as connection:
                await field.read_clock(connection)
                completed, _ = await pulse.count_completed(connection, field.operator.database, seconds=WINDOW_SECONDS)
        except DATABASE_ERRORS:
            continue
        if local_seconds() - started_at >= WINDOW_SECONDS and completed >= before_per_second * WINDOW_SECONDS * NINE_TENTHS:
            return


async def _wait_for_quiet(field: Field) -> bool:
    """Whether all jobs have ended. Gives up when for a while none has: slow ones with which a process was lost take their time, as
    they run one by one."""

    async def count(connection: Connection) -> int:
        return sum(await pulse.count_unfinished(connection, field.operator.database))

    begin = local_seconds()
    fewest, since = math.inf, begin
    while (now := local_seconds()) < min(since + _QUIET_SECONDS + 3 * field.lease_seconds, begin + _LONGEST_QUIET_SECONDS):
        unfinished = await field.operator.patiently(_COME_BACK_SECONDS, count)
        if unfinished == 0:
            return True
        if unfinished < fewest:
            fewest, since = unfinished, now
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)
    return False


def skipped(names: Sequence[str], *, own: bool, checks_host: bool, encrypted: bool, faketime: Path | None) -> Mapping[str, str]:
    """Which of these faults cannot be had here, and why."""
    found: dict[str, str] = {}
    for name in names:
        match plans.FAULTS[name].needs:
            case "own_server" if not own:
                found[name] = "it breaks a whole server, so it needs one of its own: --embedded"
            case "proxy" | "plain" if checks_host:
                found[name] = "sslmode=verify-full would refuse the proxy, whose host is another one"
            case "plain" if encrypted:
                found[name] = "the connection is encrypted, a COMMIT cannot be seen on its way"
            case "faketime" if faketime is None:
                found[name] = (
                    "libfaketime is not installed (apt-get install libfaketime), and nothing else moves one process's clock"
                )
    return found
