"""Enqueue: what the insert trigger costs the application, and what `enqueue_many` costs beside a bare COPY.

Single rows: plain INSERTs, one commit each, from 1, 8 and 32 connections of one client process, while a daemon's tasks are all
busy (with jobs that sleep, so that it takes no time from the rest), with our trigger and without it. Bulk: `enqueue_many` with
all its checks, against a COPY of lines made beforehand into a copy of the table: same defaults, indexes and CHECKs, no trigger.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Final

from worker.bench.arena import Arena, text_of
from worker.bench.handlers import NAP, NOTHING
from worker.bench.results import BenchFailed, Sample
from worker.bench.running import SMALL_BYTES, Bench, usage
from worker.clock import local_seconds
from worker.store import bench_tables, benchmarks
from worker.store.connection import Connection
from worker.store.enqueueing import enqueue_many

# Rows a turn by number of connections, as a share of --jobs.
CONNECTIONS: Final = {1: 8, 8: 4, 32: 2}
WITH: Final = "with our trigger"
WITHOUT: Final = "without it"
BULK: Final = "bulk, enqueue_many"
COPY: Final = "bulk, COPY"


async def measure(bench: Bench) -> None:
    async with bench.arena("enqueue") as on:
        await _measure_singles(bench, on)
    async with bench.arena("bulk") as on:
        await _measure_bulk(bench, on)
    for connections in CONNECTIONS:
        bench.book.compare("enqueue", _name(connections, WITH), _name(connections, WITHOUT))
    bench.book.compare("enqueue", BULK, COPY)


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
    payload = {"n": 1, "text": text_of(SMALL_BYTES)}
    jobs = [{"kind": NOTHING, "payload": payload}] * plan.jobs
    await bench_tables.make_copy_table(on.connection, on.database)
    for turn in range(plan.runs):
        bench.say(f"enqueue, bulk, run {turn + 1} of {plan.runs}")
        await on.empty()
        await bench_tables.empty_copy(on.connection, on.database)
        # Keys as enqueue_many makes them, in their order.
        start = f"auto:{uuid.uuid4()}"
        text = json.dumps(payload, separators=(",", ":"))
        lines = "".join(f"{start}-{number:06}\t{NOTHING}\tdefault\t{text}\n" for number in range(plan.jobs)).encode()
        for name in (BULK, COPY) if turn % 2 == 0 else (COPY, BULK):
            meter = bench.meter(on)
            before = await meter.read()
            started_at = local_seconds()
            if name == BULK:
                await enqueue_many(on.connection, jobs, schema=on.database.schema)
            else:
                await bench_tables.copy_rows(on.connection, on.database, lines)
            seconds = local_seconds() - started_at
            after = await meter.read()
            sample = Sample(value=plan.jobs / seconds, jobs=plan.jobs, seconds=seconds, usage=usage(before, after))
            bench.book.add("enqueue", name, "rows/s", sample)
