"""`worker jobs retry` and `worker jobs cancel`: what they do to some jobs, by id or by filter, and what they say of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from worker.cli.printing import counted, print_error, print_json, print_line
from worker.cli.reaching import Work, with_schema
from worker.settings import Settings
from worker.store import reports
from worker.store.connection import Connection, Database
from worker.store.reports import Answer, JobFilter


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """What `retry` and `cancel` differ in."""

    name: str
    done: str
    apply: Callable[[Connection, Database, Sequence[int]], Awaitable[list[Answer]]]
    result_state: str
    possible: tuple[str, ...]
    by_default: tuple[str, ...]


RETRY = Verb(
    name="retry",
    done="retried",
    apply=reports.retry_jobs,
    result_state="ready",
    possible=reports.RETRYABLE,
    by_default=("dead",),
)
CANCEL = Verb(
    name="cancel",
    done="cancelled",
    apply=reports.cancel_jobs,
    result_state="cancelled",
    possible=reports.CANCELLABLE,
    by_default=reports.CANCELLABLE,
)


def choose(verb: Verb, ids: Sequence[int] | None, wanted: JobFilter) -> list[int] | JobFilter:
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


def apply(
    verb: Verb,
    chosen: list[int] | JobFilter,
    dry_run: bool,
    json: bool,
    embedded: bool,
    data_dir: Path | None,
) -> None:
    """Do it, or say how many it would be. Exit status 1 when one that was named by its id is not in the state that was wanted."""
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


def _counting(verb: Verb, chosen: list[int] | JobFilter) -> Work[int]:
    async def work(connection: Connection, database: Database, settings: Settings) -> int:
        if isinstance(chosen, JobFilter):
            return await reports.count_jobs(connection, database, chosen)
        return await reports.count_ids(connection, database, chosen, verb.possible)

    return work


def _applying(verb: Verb, chosen: list[int] | JobFilter) -> Work[list[Answer]]:
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
