"""`worker jobs`: look at jobs, retry, cancel and prune them."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from worker.cli.printing import (
    counted,
    is_terminal,
    print_error,
    print_json,
    print_json_text,
    print_line,
    print_rows,
    safe,
    safe_lines,
)
from worker.cli.reaching import DataDir, Embedded, Json, with_schema
from worker.cli.verbs import CANCEL, RETRY, apply, choose
from worker.new_job import RESERVED_KEY_PREFIX
from worker.settings import Settings
from worker.store import pruning, reports
from worker.store.connection import Connection, Database
from worker.store.reports import JobDetails, JobFilter, JobSummary

app = typer.Typer(help="Look at jobs, retry, cancel and prune them.", no_args_is_help=True, rich_markup_mode=None)

MOST_ID = 2**63 - 1
_SHOWN_ERROR_CHARACTERS = 60
LIST_COLUMNS = ("id", "state", "kind", "queue", "attempts", "available_at", "worker", "key", "last_error")

States = Annotated[
    list[str] | None,
    typer.Option("--state", help=f"Only jobs in this state: {', '.join(reports.STATES)}. May be repeated."),
]
Kind = Annotated[str | None, typer.Option("--kind", help="Only jobs of this kind.")]
Queue = Annotated[str | None, typer.Option("--queue", help="Only jobs of this queue.")]
Key = Annotated[str | None, typer.Option("--key", help="Only the job with this idempotency key.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say how many jobs it would be; change nothing.")]
Ids = Annotated[list[int] | None, typer.Argument(metavar="ID", min=1, max=MOST_ID, show_default=False)]


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
        print_rows(
            LIST_COLUMNS,
            [_columns(summary) for summary in summaries],
            nothing="no jobs",
            folded=("key", "last_error"),
            spared=("worker", "queue", "available_at"),
        )


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
        print_json_text(_details_json(details))
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
    """Give dead or cancelled jobs fresh attempts: these ids, or all that match a filter.

    By filter it takes the dead ones, unless --state says cancelled.
    """
    chosen = choose(RETRY, ids, _filter(state, kind, queue, key))
    apply(RETRY, chosen, dry_run, json, embedded, data_dir)


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
    """Cancel ready or running jobs: these ids, or all that match a filter.

    A running job's worker is told, and can write nothing about it any more.
    """
    chosen = choose(CANCEL, ids, _filter(state, kind, queue, key))
    apply(CANCEL, chosen, dry_run, json, embedded, data_dir)


@app.command("prune")
def prune(embedded: Embedded = False, data_dir: DataDir = None) -> None:
    """Delete now what has outlived its retention, as the daemons do all the time."""

    async def work(connection: Connection, database: Database, settings: Settings) -> pruning.Pruned:
        return await pruning.prune_all(
            connection,
            database,
            retention_seconds=settings.retention_seconds,
            dead_retention_seconds=settings.dead_retention_seconds,
            ledger_retention_seconds=settings.ledger_retention_seconds,
        )

    pruned = with_schema(embedded, data_dir, work, limit_seconds=None)
    print_line(
        f"pruned {counted(pruned.jobs, 'job')}, {counted(pruned.failures, 'failure')} of jobs that are gone, "
        f"{counted(pruned.ledger, 'ledger row')}, {pruned.processes} process{'' if pruned.processes == 1 else 'es'}, "
        f"{counted(pruned.leases, 'lease')}"
    )


def _filter(states: Sequence[str] | None, kind: str | None, queue: str | None, key: str | None) -> JobFilter:
    try:
        return JobFilter(states=tuple(states or ()), kind=kind, queue=queue, key=key)
    except ValueError as error:
        option, _, reason = str(error).partition(": ")
        raise typer.BadParameter(reason, param_hint=f"--{option}") from None


def _columns(summary: JobSummary) -> tuple[object, ...]:
    key: str | None = summary.key
    error = summary.last_error
    available_at = summary.available_at if summary.completed_at is None else None  # what has ended is not due again
    if is_terminal():
        available_at = available_at and available_at.partition(".")[0]
        # A generated key says nothing to anybody.
        key = None if summary.key.startswith(RESERVED_KEY_PREFIX) else summary.key
        if error is not None and len(error) > _SHOWN_ERROR_CHARACTERS:
            error = error[:_SHOWN_ERROR_CHARACTERS] + "…"
    return (
        summary.id,
        summary.state,
        summary.kind,
        summary.queue,
        f"{summary.attempts}/{summary.max_attempts}",
        available_at,
        summary.worker,
        key,
        error,
    )


def _details_json(details: JobDetails) -> str:
    """Payload and result are taken over as they are stored: to read and write them again could change a number."""
    head = json_text.dumps(asdict(details.summary), ensure_ascii=False)
    failures = json_text.dumps([asdict(failure) for failure in details.failures], ensure_ascii=False)
    return f'{head[:-1]}, "payload": {details.payload}, "result": {details.result or "null"}, "failures": {failures}}}'
