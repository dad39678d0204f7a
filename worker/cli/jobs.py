"""`worker jobs`: look at jobs, retry, cancel and prune them."""

from __future__ import annotations

import json as json_text
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from worker.cli.printing import is_terminal, print_error, print_json, print_line, print_rows, safe, safe_lines
from worker.cli.reaching import DataDir, Embedded, Json, with_schema
from worker.settings import Settings
from worker.store import pruning, reports
from worker.store.connection import Connection, Database
from worker.store.reports import Answer, JobDetails, JobFilter, JobSummary

app = typer.Typer(help="Look at jobs, retry, cancel and prune them.", no_args_is_help=True, rich_markup_mode=None)

MOST_ID = 2**63 - 1
LIST_COLUMNS = ("id", "state", "kind", "queue", "attempts", "available_at", "worker", "key", "last_error")

States = Annotated[
    list[str] | None,
    typer.Option("--state", help=f"Only jobs in this state: {', '.join(reports.STATES)}. May be repeated."),
]
Kind = Annotated[str | None, typer.Option("--kind", help="Only jobs of this kind.")]
Queue = Annotated[str | None, typer.Option("--queue", help="Only jobs of this queue.")]
Key = Annotated[str | None, typer.Option("--key", help="Only the job with this idempotency key.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say how many jobs it would be; change nothing.")]
Ids = Annotated[
    list[int] | None, typer.Argument(metavar="[ID]...", min=1, max=MOST_ID, show_default=False)
]


@app.command("list")
def list_jobs(
    state: States = None,
    kind: Kind = None,
    queue: Queue = None,
    key: Key = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Show at most so many.")] = 50,
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """List jobs, newest first."""
    wanted = _filter(state, kind, queue, key)

    async def work(connection: Connection, database: Database, settings: Settings) -> list[JobSummary]:
        return await reports.list_jobs(connection, database, wanted, limit=limit)

    summaries = with_schema(embedded, data_dir, work)
    if json:
        print_json([asdict(summary) for summary in summaries])
    else:
        print_rows(LIST_COLUMNS, [_columns(summary) for summary in summaries], nothing="no jobs")


@app.command("show")
def show_job(
    id: Annotated[int, typer.Argument(min=1, max=MOST_ID)],
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Show all of one job: payload, result, and its last failures."""

    async def work(connection: Connection, database: Database, settings: Settings) -> JobDetails | None:
        return await reports.show_job(connection, database, id)

    details = with_schema(embedded, data_dir, work)
    if details is None:
        print_error(f"there is no job {id}")
        raise typer.Exit(1)
    if json:
        print_line(_details_json(details))
        return
    for name, value in asdict(details.summary).items():
        print_line(f"{name}: {'-' if value is None else safe(str(value))}")
    print_line(f"payload: {safe(details.payload)}")
    print_line(f"result: {'-' if details.result is None else safe(details.result)}")
    for failure in details.failures:
        head = f"attempt {failure.attempt}, fence {failure.fence}, {failure.failed_at}, {failure.worker}"
        print_line(f"failure: {head}, {failure.outcome}:")
        print_line("  " + safe_lines(failure.error).replace("\n", "\n  "))


@app.command("retry")
def retry_jobs(
    ids: Ids = None,
    state: States = None,
    kind: Kind = None,
    queue: Queue = None,
    key: Key = None,
    dry_run: DryRun = False,
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Give dead or cancelled jobs fresh attempts: these ids, or all that match a filter (the dead, unless --state says else)."""
    wanted = _eligible(_filter(state, kind, queue, key), reports.RETRYABLE, ("dead",))
    _apply(
        "retry", "ready", ids, wanted, reports.retry_jobs, dry_run=dry_run, json=json, place=(embedded, data_dir)
    )


@app.command("cancel")
def cancel_jobs(
    ids: Ids = None,
    state: States = None,
    kind: Kind = None,
    queue: Queue = None,
    key: Key = None,
    dry_run: DryRun = False,
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Cancel ready or running jobs: these ids, or all that match a filter. A running one can change nothing from then on."""
    wanted = _eligible(_filter(state, kind, queue, key), reports.CANCELLABLE, reports.CANCELLABLE)
    _apply(
        "cancel",
        "cancelled",
        ids,
        wanted,
        reports.cancel_jobs,
        dry_run=dry_run,
        json=json,
        place=(embedded, data_dir),
    )
