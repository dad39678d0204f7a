"""`worker jobs`: look at jobs, retry, cancel and prune them."""

from __future__ import annotations

import json as json_text
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
from worker.cli.reaching import DataDir, Embedded, Json, Work, with_schema
from worker.new_job import RESERVED_KEY_PREFIX
from worker.settings import Settings
from worker.store import pruning, reports
from worker.store.connection import Connection, Database
from worker.store.reports import Answer, JobDetails, JobFilter, JobSummary

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
    chosen = _choose(_RETRY, ids, _filter(state, kind, queue, key))
    _apply(_RETRY, chosen, dry_run, json, embedded, data_dir)


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
    chosen = _choose(_CANCEL, ids, _filter(state, kind, queue, key))
    _apply(_CANCEL, chosen, dry_run, json, embedded, data_dir)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verb:
    """What `retry` and `cancel` differ in."""

    name: str
    done: str
    apply: Callable[[Connection, Database, Sequence[int]], Awaitable[list[Answer]]]
    result_state: str
    possible: tuple[str, ...]
    by_default: tuple[str, ...]


_RETRY = _Verb(
    name="retry",
    done="retried",
    apply=reports.retry_jobs,
    result_state="ready",
    possible=reports.RETRYABLE,
    by_default=("dead",),
)
_CANCEL = _Verb(
    name="cancel",
    done="cancelled",
    apply=reports.cancel_jobs,
    result_state="cancelled",
    possible=reports.CANCELLABLE,
    by_default=reports.CANCELLABLE,
)


def _filter(states: Sequence[str] | None, kind: str | None, queue: str | None, key: str | None) -> JobFilter:
    try:
        return JobFilter(states=tuple(states or ()), kind=kind, queue=queue, key=key)
    except ValueError as error:
        option, _, reason = str(error).partition(": ")
        raise typer.BadParameter(reason, param_hint=f"--{option}") from None


def _choose(verb: _Verb, ids: Sequence[int] | None, wanted: JobFilter) -> list[int] | JobFilter:
    """The jobs that a command is for: ids or a filter, never both, never everything by accident."""
    if ids:
        if not wanted.is_empty:
            raise typer.BadParameter("give ids or a filter, not both", param_hint="ID")
        return sorted(set(ids))
    if wanted.is_empty:
        raise typer.BadParameter("give ids, or a filter such as --kind or --state", param_hint="ID")
    for state in wanted.states:
        if state not in verb.possible:
            text = f"{verb.name} is for {' and '.join(verb.possible)} jobs, not for {state} ones"
            raise typer.BadParameter(text, param_hint="--state")
    return replace(wanted, states=wanted.states or verb.by_default)


def _apply(
    verb: _Verb,
    chosen: list[int] | JobFilter,
    dry_run: bool,
    json: bool,
    embedded: bool,
    data_dir: Path | None,
) -> None:
    if dry_run:
        jobs = with_schema(embedded, data_dir, _counting(verb, chosen))
        if json:
            print_json({"jobs": jobs, "dry_run": True})
        else:
            print_line(f"would {verb.name} {counted(jobs, 'job')}")
        return
    answers = with_schema(embedded, data_dir, _applying(verb, chosen), limit_seconds=None)
    if json:
        print_json([{"id": answer.id, "state": answer.state} for answer in answers])
    elif isinstance(chosen, JobFilter):
        done = sum(answer.state == verb.result_state for answer in answers)
        print_line(f"{verb.done} {counted(done, 'job')}")
    else:
        for answer in answers:
            if answer.state is not None:
                print_line(f"{answer.id} {answer.state}")
    for answer in answers:
        if answer.locked:
            print_error(f"job {answer.id}: another transaction holds it, try again")
        elif answer.state is None:
            print_error(f"job {answer.id}: there is no such job")
        elif answer.state != verb.result_state:
            print_error(f"job {answer.id}: is {answer.state} and stays so")
    # By filter a job may well have moved on meanwhile: that is no failure.
    if any(answer.locked or (isinstance(chosen, list) and answer.state != verb.result_state) for answer in answers):
        raise typer.Exit(1)


def _counting(verb: _Verb, chosen: list[int] | JobFilter) -> Work[int]:
    async def work(connection: Connection, database: Database, settings: Settings) -> int:
        if isinstance(chosen, JobFilter):
            return await reports.count_jobs(connection, database, chosen)
        return await reports.count_ids(connection, database, chosen, verb.possible)

    return work


def _applying(verb: _Verb, chosen: list[int] | JobFilter) -> Work[list[Answer]]:
    async def work(connection: Connection, database: Database, settings: Settings) -> list[Answer]:
        answers: list[Answer] = []
        if isinstance(chosen, JobFilter):
            while ids := await reports.find_ids(connection, database, chosen, after_id=answers[-1].id if answers else 0):
                answers += await verb.apply(connection, database, ids)
        else:
            for start in range(0, len(chosen), reports.BATCH_JOBS):
                answers += await verb.apply(connection, database, chosen[start : start + reports.BATCH_JOBS])
        return answers

    return work


def _columns(summary: JobSummary) -> tuple[object, ...]:
    key: str | None = summary.key
    error, available_at = summary.last_error, summary.available_at
    if is_terminal():
        available_at = available_at.partition(".")[0]
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
