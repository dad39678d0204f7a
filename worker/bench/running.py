"""One measured run, and what all scenarios share.

Time: from the first claim, as the database recorded it (`jobs.started_at`, so just before the first handler started), to the
moment at which the database first answered that all jobs of the run had ended, so just after the last commit. Both are the
database's clock; process start-up is left out, the writing of the last completion is in.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from worker.bench import machine
from worker.bench.arena import Arena, arena, text_of
from worker.bench.daemons import NO_SETTINGS, Daemon, daemon_environ, daemons
from worker.bench.handlers import EFFECT
from worker.bench.results import BenchFailed, Book, Sample, Usage
from worker.clock import local_seconds
from worker.settings import Settings
from worker.store import benchmarks, costs
from worker.store.benchmarks import Filling
from worker.store.connection import Database

TIMING: Final = (
    "from the first claim as the database recorded it (just before the first handler) to the moment the database first answered "
    "that all jobs of the run had ended (just after the last commit), both by the database's clock"
)
SMALL_BYTES: Final = 64
PARTS: Final = 6

# Before the jobs become due, for the readings.
_READ_BEFORE_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is to be measured."""

    jobs: int
    rows: int
    ledger_rows: int
    minutes: float
    runs: int
    tasks: tuple[int, ...]
    scenarios: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Bench:
    """One bench: what it measures on, how much, and what came of it so far."""

    plan: Plan
    settings: Settings
    directory: Path
    """For logs and state files of the daemons."""
    schema_prefix: str
    database_of: Callable[[str], Database]
    """How to reach a schema of ours."""
    say: Callable[[str], None]
    postmaster: int | None
    """The server's main process, where it runs on this machine and can be seen."""
    statements_view: str | None
    book: Book = field(default_factory=Book)
    left_behind: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def arena(self, name: str) -> AsyncIterator[Arena]:
        """A schema for the block, with our tables in it."""
        async with arena(self.database_of(f"{self.schema_prefix}_{name}"), self.left_behind.append) as made:
            yield made

    @contextlib.asynccontextmanager
    async def daemons(
        self, on: Arena, *, tasks: int, count: int = 1, extra: Mapping[str, str] = NO_SETTINGS
    ) -> AsyncIterator[list[Daemon]]:
        """Real daemons on this schema for the block, with `extra` in their environment."""
        environ = daemon_environ(self.settings, schema=on.database.schema, tasks=tasks, directory=self.directory, extra=extra)
        async with daemons(environ, self.directory, count) as started:
            yield started

    def meter(self, on: Arena, running: Sequence[Daemon] = ()) -> Meter:
        return Meter(on, postmaster=self.postmaster, pids=[daemon.pid for daemon in running], view=self.statements_view)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the counters said at one moment."""

    worker_cpu_seconds: float | None
    server_cpu_seconds: float | None
    bench_cpu_seconds: float
    wal_bytes: int
    statements: costs.Statements | None
    cores: Cores
    """Read last."""


@dataclass(frozen=True, slots=True)
class Cores:
    """How long each core has been busy, at one moment."""

    at: float
    busy_seconds: tuple[float, ...] | None

    def shares_until(self, later: Cores) -> list[float] | None:
        """How busy each core was between the two; None where nobody tells."""
        if self.busy_seconds is None or later.busy_seconds is None:
            return None
        seconds = max(later.at - self.at, 1e-6)
        return [(end - begin) / seconds for begin, end in zip(self.busy_seconds, later.busy_seconds, strict=True)]


def look_at_cores() -> Cores:
    return Cores(local_seconds(), machine.busy_core_seconds())


class Meter:
    """Reads the counters before and after a run. Without daemons the loop under test is the bench's own."""

    def __init__(self, on: Arena, *, postmaster: int | None, pids: Sequence[int], view: str | None) -> None:
        self._arena = on
        self._postmaster = postmaster
        self._pids = pids
        self._view = view

    async def read(self) -> Reading:
        bench_seconds = time.process_time()
        worker_seconds: float | None = bench_seconds
        if self._pids:
            times = [seconds for seconds in map(machine.process_cpu_seconds, self._pids) if seconds is not None]
            worker_seconds = sum(times) if len(times) == len(self._pids) else None
        connection = self._arena.connection
        return Reading(
            worker_cpu_seconds=worker_seconds,
            server_cpu_seconds=None if self._postmaster is None else machine.server_cpu_seconds(self._postmaster),
            bench_cpu_seconds=bench_seconds,
            wal_bytes=await costs.wal_bytes(connection),
            statements=None if self._view is None else await costs.count_statements(connection, self._view),
            cores=look_at_cores(),
        )


def usage(before: Reading, after: Reading, *, cores: list[float] | None = None, counted: costs.Counters | None = None) -> Usage:
    """What was used between two readings; `cores`, if they were looked at apart from them."""
    statements = effects = None
    if before.statements is not None and after.statements is not None:
        statements = after.statements.ours - before.statements.ours
        effects = after.statements.effects - before.statements.effects
    if cores is None:
        cores = before.cores.shares_until(after.cores)
    return Usage(
        worker_cpu_seconds=_difference(before.worker_cpu_seconds, after.worker_cpu_seconds),
        server_cpu_seconds=_difference(before.server_cpu_seconds, after.server_cpu_seconds),
        bench_cpu_seconds=after.bench_cpu_seconds - before.bench_cpu_seconds,
        cores_busy=None if cores is None else sum(cores),
        least_busy_core=None if cores is None else min(cores),
        wal_bytes=after.wal_bytes - before.wal_bytes,
        dead_tuples=None if counted is None else counted.dead,
        hot_updates=None if counted is None else counted.hot,
        transactions=None if counted is None else counted.transactions,
        statements=statements,
        effect_statements=effects,
    )


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def jobs_of(kind: str, count: int, payload_bytes: int = SMALL_BYTES) -> Filling:
    """Jobs as most scenarios take them."""
    return Filling(count=count, kind=kind, text=text_of(payload_bytes))


async def drain(
    bench: Bench,
    on: Arena,
    filling: Filling,
    *,
    first: int | None = None,
    tasks: int,
    processes: int = 1,
    extra: Mapping[str, str] = NO_SETTINGS,
    under_old_snapshot: bool = False,
) -> Sample:
    """Jobs a second over the `first` of these jobs (all of them, if not said), which become due together.

    Raises BenchFailed when not every one of them has succeeded, or an effect is missing.
    """
    jobs = first or filling.count
    async with bench.daemons(on, tasks=tasks, count=processes, extra=extra) as running:
        await on.wait_until_idle(running)
        filled, due_at = await on.fill(filling, daemons=running)
        measured = benchmarks.Jobs(filled.first_id, filled.first_id + jobs - 1)
        meter = bench.meter(on, running)
        async with contextlib.AsyncExitStack() as stack:
            if under_old_snapshot:
                await stack.enter_async_context(benchmarks.old_snapshot(on.database))
            await asyncio.sleep(max(await on.seconds_until(due_at) - _READ_BEFORE_SECONDS, 0))
            await costs.report(on.connection)
            counted_before, questions = await costs.counters(on.connection, on.database), on.questions
            before = await meter.read()
            await asyncio.sleep(max(await on.seconds_until(due_at), 0))
            cores = look_at_cores()
            ended_at = await on.wait_for_end(measured, running)
            shares = cores.shares_until(look_at_cores())
            after = await meter.read()
        for daemon in running:
            await daemon.stop()
    used = None
    if first is None:  # else more jobs than these were at work meanwhile
        used = usage(before, after, cores=shares, counted=await _counted_since(on, counted_before, questions))
    tally = await benchmarks.tally(on.connection, on.database, measured)
    if tally.succeeded != jobs or (filling.kind == EFFECT and tally.effects != jobs):
        raise BenchFailed(f"of {jobs} jobs {tally.succeeded} succeeded, with {tally.effects} effects")
    seconds = ended_at - tally.first_claim_at
    return Sample(
        value=jobs / seconds,
        jobs=jobs,
        seconds=seconds,
        usage=used,
        retried=tally.retried,
        parts=await _rates(on, measured, tally.first_claim_at),
    )


async def _rates(on: Arena, jobs: benchmarks.Jobs, first_claim_at: float) -> tuple[float, ...]:
    """Jobs a second in each sixth of the run, as the completions were recorded."""
    places = [jobs.number * part // PARTS for part in range(1, PARTS + 1)]
    moments = [first_claim_at, *await benchmarks.completed_at(on.connection, on.database, jobs, places)]
    sizes = [place - before for before, place in zip([0, *places[:-1]], places, strict=True)]
    # A group of jobs completes at one moment: where a sixth is smaller than a group there is no rate.
    return tuple(
        size / (until - since) if until > since else 0.0
        for size, since, until in zip(sizes, moments[:-1], moments[1:], strict=True)
    )


async def _counted_since(on: Arena, before: costs.Counters, questions: int) -> costs.Counters:
    """What the server's statistics have counted since, now that the daemons have ended."""
    await costs.report(on.connection)
    now = await costs.counters(on.connection, on.database)
    ours = on.questions - questions
    return costs.Counters(now.dead - before.dead, now.hot - before.hot, max(now.transactions - before.transactions - ours, 0))
