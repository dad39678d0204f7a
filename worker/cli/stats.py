"""`worker stats`: the state of the queue in numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from worker.cli.printing import Table, print_json, print_line, print_rows
from worker.cli.reaching import DataDir, Embedded, Json, with_schema
from worker.settings import Settings
from worker.store.connection import Connection, Database
from worker.store.figures import Backlog, Statistics
from worker.store.statistics import statistics

_TOTALS = ("ready", "scheduled", "running", "expired", "succeeded", "dead", "cancelled")
_BACKLOG_HEAD = ("ready", "later", "running", "expired", "oldest s", "jobs/s", "failed/h")
_BACKLOG = ("ready", "scheduled", "running", "expired", "oldest_ready_seconds", "throughput", "failures")


def stats(
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, every 2 s, until Ctrl-C; with --json a document a line.")] = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Show backlog, ages, leases, failures and rates, per queue and kind, and the processes."""
    if watch:
        from worker.cli import watching

        watching.watch(embedded, data_dir, json=json)
        return

    async def work(connection: Connection, database: Database, settings: Settings) -> Statistics:
        return await statistics(connection, database)

    print_statistics(with_schema(embedded, data_dir, work), json)


def print_statistics(numbers: Statistics, json: bool) -> None:
    """One document, or some tables."""
    if json:
        print_json(asdict(numbers))
        return
    for place, (names, rows) in enumerate(tables_of(numbers)):
        if place:
            print_line("")
        print_rows(names, rows, nothing="")


def tables_of(numbers: Statistics) -> Iterator[Table]:
    """The totals, then queues, kinds and processes as far as there are any."""
    durations = numbers.duration_seconds
    oldest = "oldest_transaction_seconds" if numbers.sees_all_transactions else "oldest_transaction_seconds (own sessions only)"
    rows: list[tuple[str, object]] = [(name, getattr(numbers, name)) for name in _TOTALS]
    rows += [
        ("oldest_ready_seconds", numbers.oldest_ready_seconds),
        ("throughput", numbers.throughput),
        ("retry_rate", numbers.retry_rate),
        ("lost_leases", numbers.lost_leases),
        ("duration_seconds p50", durations["p50"]),
        ("duration_seconds p95", durations["p95"]),
        (oldest, numbers.oldest_transaction_seconds),
        *((f"unknown kind {kind}", jobs) for kind, jobs in numbers.unknown_kinds.items()),
    ]
    # "~": counting exactly would read the whole table.
    yield Table(("what", "value"), [(name, _marked(name, value, numbers)) for name, value in rows])
    for what, parts in (("queue", numbers.queues), ("kind", numbers.kinds)):
        if parts:
            yield Table(("what", *_BACKLOG_HEAD), [(f"{what} {name}", *_backlog(parts[name])) for name in sorted(parts)])
    if numbers.processes:
        yield Table(
            ("process", "pid", "host", "queues", "busy", "slots", "seen_at"),
            [
                (
                    process.id,
                    process.pid,
                    process.hostname,
                    ",".join(process.queues),
                    process.busy,
                    process.slots,
                    process.seen_at if process.live else f"{process.seen_at} (gone)",
                )
                for process in numbers.processes
            ],
        )


def _marked(name: str, value: object, numbers: Statistics) -> object:
    if value is None or name.partition(" ")[0] not in numbers.estimated:
        return value
    return f"~{value:.3g}" if isinstance(value, float) else f"~{value}"


def _backlog(part: Backlog) -> tuple[object, ...]:
    return tuple(getattr(part, name) for name in _BACKLOG)
