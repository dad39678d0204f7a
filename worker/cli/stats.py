"""`worker stats`: the state of the queue in numbers."""

from __future__ import annotations

from dataclasses import asdict

from worker.cli.printing import print_json, print_line, print_rows
from worker.cli.reaching import DataDir, Embedded, Json, with_schema
from worker.settings import Settings
from worker.store.connection import Connection, Database
from worker.store.figures import Backlog, Statistics
from worker.store.statistics import statistics

_TOTALS = ("ready", "scheduled", "running", "expired", "succeeded", "dead", "cancelled")
_BACKLOG_HEAD = ("ready", "later", "running", "expired", "oldest s", "jobs/s", "failed/h")
_BACKLOG = ("ready", "scheduled", "running", "expired", "oldest_ready_seconds", "throughput", "failures")


def stats(json: Json = False, embedded: Embedded = False, data_dir: DataDir = None) -> None:
    """Show backlog, ages, leases, failures and rates, per queue and kind, and the processes."""

    async def work(connection: Connection, database: Database, settings: Settings) -> Statistics:
        return await statistics(connection, database)

    numbers = with_schema(embedded, data_dir, work)
    if json:
        print_json(asdict(numbers))
        return
    durations = numbers.duration_seconds
    rows: list[tuple[str, object]] = [(name, getattr(numbers, name)) for name in _TOTALS]
    rows += [
        ("oldest_ready_seconds", numbers.oldest_ready_seconds),
        ("throughput", numbers.throughput),
        ("retry_rate", numbers.retry_rate),
        ("lost_leases", numbers.lost_leases),
        ("duration_seconds p50", durations["p50"]),
        ("duration_seconds p95", durations["p95"]),
        ("oldest_transaction_seconds", numbers.oldest_transaction_seconds),
        *((f"unknown kind {kind}", jobs) for kind, jobs in numbers.unknown_kinds.items()),
    ]
    # "~": counting exactly would read the whole table.
    print_rows(("what", "value"), [(name, _marked(name, value, numbers)) for name, value in rows], nothing="")
    for what, parts in (("queue", numbers.queues), ("kind", numbers.kinds)):
        if parts:
            print_line("")
            print_rows(("what", *_BACKLOG_HEAD), [(f"{what} {name}", *_backlog(parts[name])) for name in sorted(parts)], nothing="")
    if numbers.processes:
        print_line("")
        print_rows(
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
            nothing="",
        )


def _marked(name: str, value: object, numbers: Statistics) -> object:
    if value is None or name.partition(" ")[0] not in numbers.estimated:
        return value
    return f"~{value:.3g}" if isinstance(value, float) else f"~{value}"


def _backlog(part: Backlog) -> tuple[object, ...]:
    return tuple(getattr(part, name) for name in _BACKLOG)
