"""Enqueue: what the insert trigger costs the application, and what `enqueue_many` costs beside a bare COPY.

Single rows: plain INSERTs, one commit each, from 1, 8 and 32 connections of one client process, while a daemon's tasks are all
busy (with jobs that sleep, so that it takes no time from the rest), with our trigger and without it. Bulk: `enqueue_many` with
all its checks, against a COPY of lines made beforehand into a copy of the table: same defaults, indexes and CHECKs, no trigger.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable
from typing import Final

from worker.bench.arena import Arena, text_of
from worker.bench.handlers import NAP, NOTHING
from worker.bench.results import BenchFailed, Sample
from worker.bench.running import SMALL_BYTES, Bench, usage
from worker.clock import local_seconds
from worker.store import bench_tables, benchmarks
from worker.store.bulk import enqueue_many
from worker.store.connection import Connection

# Rows a turn by number of connections, as a share of --jobs.
CONNECTIONS: Final = {1: 8, 8: 4, 32: 2}
WITH: Final = "with our trigger"
WITHOUT: Final = "without it"
BULK: Final = "bulk, keys {}, enqueue_many"
COPY: Final = "bulk, keys {}, COPY"
# A key of the caller's may be there already, one that was generated cannot.
GIVEN: Final = "given"
GENERATED: Final = "generated"


async def measure(bench: Bench) -> None:
    async with bench.arena("enqueue") as on:
        await _measure_singles(bench, on)
    async with bench.arena("bulk") as on:
        await _measure_bulk(bench, on)
    for connections in CONNECTIONS:
        bench.book.compare("enqueue", _name(connections, WITH), _name(connections, WITHOUT))
    for keys in (GIVEN, GENERATED):
        bench.book.compare("enqueue", BULK.format(keys), COPY.format(keys))


def _name(connections: int, trigger: str) -> str:
    return f"single, {connections} connection{'s' if connections > 1 else ''}, {trigger}"


async def _measure_singles(bench: Bench, on: Arena) -> None:
    plan = bench.plan
    tasks = plan.tasks[0]
    connections: list[Connection] = []
    for number in range(tasks):
        await bench_tables.insert_one(on.connection, on.database, key=f"nap-{number}", kind=NAP, payload="{}")
    async with bench.daemons(on, tasks=tasks) as running:
        await on.wait_until_running(tasks, running)
        try:
            for _ in range(max(CONNECTIONS)):
                connections.append(await on.database.connect("bench enqueue"))
            for turn in range(plan.runs):
                for count, share in CONNECTIONS.items():
                    bench.say(f"enqueue, {count} connections, run {turn + 1} of {plan.runs}")
                    # The second of two windows finds a larger table: take turns.
                    for trigger in (WITH, WITHOUT) if turn % 2 == 0 else (WITHOUT, WITH):
                        set_trigger = bench_tables.enable_trigger if trigger == WITH else bench_tables.disable_trigger
                        await set_trigger(on.connection, on.database)
                        sample = await _singles(bench, on, connections[:count], max(plan.jobs // share, count))
                        bench.book.add("enqueue", _name(count, trigger), "commits/s", sample)
            if await benchmarks.count_running(on.connection, on.database) != tasks:
                raise BenchFailed("the daemon did not stay busy while rows were enqueued")
        finally:
            for connection in connections:
                connection.terminate()


async def _singles(bench: Bench, on: Arena, connections: list[Connection], rows: int) -> Sample:
    payload = json.dumps({"n": 1, "text": text_of(SMALL_BYTES)})
    keys = iter([f"order-{uuid.uuid4()}" for _ in range(rows)])

    async def enqueue_all(connection: Connection) -> None:
        for key in keys:
            await bench_tables.insert_one(connection, on.database, key=key, kind=NOTHING, payload=payload)

    for connection in connections:  # prepared and planned before the clock starts; the trigger's state is part of the plan
        await bench_tables.insert_one(connection, on.database, key=f"warm-{uuid.uuid4()}", kind=NOTHING, payload=payload)
    meter = bench.meter(on)
    before = await meter.read()
    started_at = local_seconds()
    async with asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(enqueue_all(connection), name="enqueue")
    seconds = local_seconds() - started_at
    after = await meter.read()
    return Sample(value=rows / seconds, jobs=rows, seconds=seconds, usage=usage(before, after))


async def _measure_bulk(bench: Bench, on: Arena) -> None:
    plan = bench.plan
    await bench_tables.make_copy_table(on.connection, on.database)
    for turn in range(plan.runs):
        for keys in (GIVEN, GENERATED):
            bench.say(f"enqueue, bulk, keys {keys}, run {turn + 1} of {plan.runs}")
            await on.empty()
            await bench_tables.empty_copy(on.connection, on.database)
            for name in (BULK, COPY) if turn % 2 == 0 else (COPY, BULK):
                sample = await _bulk(bench, on, keys) if name == BULK else await _copy(bench, on, keys)
                bench.book.add("enqueue", name.format(keys), "rows/s", sample)


async def _bulk(bench: Bench, on: Arena, keys: str) -> Sample:
    fields = {"kind": NOTHING, "payload": _bulk_payload()}
    rows = bench.plan.jobs
    jobs = [fields | {"key": f"order-{number:06}"} for number in range(rows)] if keys == GIVEN else [fields] * rows
    return await _timed(bench, on, enqueue_many(on.connection, jobs, schema=on.database.schema))


async def _copy(bench: Bench, on: Arena, keys: str) -> Sample:
    # Keys as enqueue_many makes them, in their order.
    start = "order" if keys == GIVEN else f"auto:{uuid.uuid4()}"
    text = json.dumps(_bulk_payload(), separators=(",", ":"))
    lines = "".join(f"{start}-{number:06}\t{NOTHING}\tdefault\t{text}\n" for number in range(bench.plan.jobs)).encode()
    return await _timed(bench, on, bench_tables.copy_rows(on.connection, on.database, lines))


def _bulk_payload() -> dict[str, object]:
    return {"n": 1, "text": text_of(SMALL_BYTES)}


async def _timed(bench: Bench, on: Arena, writing: Awaitable[object]) -> Sample:
    meter = bench.meter(on)
    before = await meter.read()
    started_at = local_seconds()
    await writing
    seconds = local_seconds() - started_at
    after = await meter.read()
    return Sample(value=bench.plan.jobs / seconds, jobs=bench.plan.jobs, seconds=seconds, usage=usage(before, after))
