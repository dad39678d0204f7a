"""`worker enqueue`: one job from the command line, or many from a file of JSON lines."""

from __future__ import annotations

import contextlib
import json as json_text
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import IO, Annotated

import typer

from worker.cli.printing import counted, print_error, print_json, print_line, print_note
from worker.cli.reaching import DataDir, Embedded, Json, Work, with_schema
from worker.domain_json import decode_json
from worker.new_job import DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE, NewJob, new_job, new_job_from
from worker.settings import Settings
from worker.store.bulk import KeyVanished, enqueue_checked, enqueue_part
from worker.store.connection import Connection, Database
from worker.store.enqueueing import Enqueued, refuse_oversized
from worker.store.standbys import prove

CHUNK_JOBS = 5_000
CHUNK_BYTES = 8 * 1024 * 1024
LINE_BYTES = 16 * 1024 * 1024
# A file may come from a program that takes its time; the transaction waits for it.
PATIENT_SESSION = {"idle_in_transaction_session_timeout": "0"}


def enqueue(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", show_default=False)] = None,
    payload: Annotated[
        str | None,
        typer.Argument(metavar="PAYLOAD", help="JSON; - reads standard input, @FILE a file.", show_default=False),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Idempotency key: the same key is one job.")] = None,
    queue: Annotated[str, typer.Option(help="Only processes that serve it take the job.")] = DEFAULT_QUEUE,
    priority: Annotated[int, typer.Option(help="Higher runs first.")] = 0,
    delay: Annotated[float | None, typer.Option(metavar="SECONDS", help="Not before so many seconds.")] = None,
    at: Annotated[str | None, typer.Option(metavar="ISO8601", help="Not before this moment, time zone included.")] = None,
    max_attempts: Annotated[int, typer.Option(help="Dead after so many failures.")] = DEFAULT_MAX_ATTEMPTS,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON lines, one job each, all or none of them; - reads standard input."),
    ] = None,
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Enqueue one job, or all jobs of a file: prints id, created and state of each as a line of JSON.

    For a file the lines stand in its order, and a count is said on standard error; with --json they are one array.
    """
    if file is None:
        if kind is None or payload is None:
            raise typer.BadParameter("KIND and PAYLOAD are needed, or --file", param_hint="PAYLOAD")
        try:
            job = new_job(
                kind,
                read_payload(payload),
                key=key,
                queue=queue,
                priority=priority,
                run_at=None if at is None else _moment(at),
                delay_seconds=delay,
                max_attempts=max_attempts,
            )
        except (TypeError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
        print_json(with_schema(embedded, data_dir, _enqueue_one(job))._asdict())
        return
    if kind is not None:
        raise typer.BadParameter("give KIND and PAYLOAD or --file, not both", param_hint="--file")
    of_one = (key, queue, priority, delay, at, max_attempts)
    if of_one != (None, DEFAULT_QUEUE, 0, None, None, DEFAULT_MAX_ATTEMPTS):
        raise typer.BadParameter("what is said of one job stands in its line, not beside the file", param_hint="--file")
    with _open(file) as source, tempfile.TemporaryFile("w+", encoding="utf-8") as answers:
        with _progress(source) as show:
            bulk = _Bulk(source, answers, show)
            with_schema(embedded, data_dir, bulk.enqueue, limit_seconds=None, session=PATIENT_SESSION)
        # Only now are they true: all or none.
        answers.seek(0)
        for number, line in enumerate(answers):
            answer = line.rstrip("\n")
            print_line(f"{',' if number else '['}{answer}" if json else answer)
        if json:
            print_line("]" if bulk.jobs else "[]")
        print_note(f"{counted(bulk.jobs, 'job')}: {bulk.created} created, {bulk.jobs - bulk.created} there before")


def _enqueue_one(job: NewJob) -> Work[Enqueued]:
    async def work(connection: Connection, database: Database, settings: Settings) -> Enqueued:
        try:
            await refuse_oversized(connection, job)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        [answer] = await enqueue_checked(connection, [job], schema=database.schema)
        if not answer.created:
            await prove(connection)
        return answer

    return work


class _Bulk:
    """One file on its way into the database, in one transaction, a bounded part of it in memory."""

    def __init__(self, source: IO[bytes], answers: IO[str], show: Callable[[int], None]) -> None:
        self._source = source
        self._answers = answers
        self._show = show
        self.jobs = 0
        self.created = 0

    async def enqueue(self, connection: Connection, database: Database, settings: Settings) -> None:
        """Write all jobs or none. Raises typer.BadParameter that names the first bad line."""
        async with connection.transaction(isolation="read_committed"):
            for chunk, bytes_read in self._chunks():
                for number, job in chunk:
                    try:
                        await refuse_oversized(connection, job)
                    except ValueError as error:
                        raise _bad_line(number, error) from None
                try:
                    answers = await enqueue_part(connection, [job for _, job in chunk], schema=database.schema)
                except KeyVanished as error:
                    print_error(f"key {str(error)!r} came and went meanwhile; nothing was enqueued, try again")
                    raise typer.Exit(1) from None
                self.jobs += len(answers)
                self.created += sum(answer.created for answer in answers)
                self._answers.writelines(f"{json_text.dumps(answer._asdict())}\n" for answer in answers)
                self._show(bytes_read)
            if self.created < self.jobs:
                await prove(connection)

    def _chunks(self) -> Iterator[tuple[list[tuple[int, NewJob]], int]]:
        """Lists of (line number, job), each with how many bytes of the file had been read by then."""
        chunk: list[tuple[int, NewJob]] = []
        number = chunk_bytes = bytes_read = 0
        while line := self._source.readline(LINE_BYTES):
            number += 1
            bytes_read += len(line)
            chunk_bytes += len(line)
            if len(line) == LINE_BYTES:
                raise _bad_line(number, ValueError(f"longer than {LINE_BYTES // 1024 // 1024} MiB"))
            if line.strip():
                chunk.append((number, _read_line(number, line)))
            if len(chunk) >= CHUNK_JOBS or chunk_bytes >= CHUNK_BYTES:
                yield chunk, bytes_read
                chunk, chunk_bytes = [], 0
        if chunk:
            yield chunk, bytes_read


def _read_line(number: int, line: bytes) -> NewJob:
    try:
        # A byte order mark at the front of a file is no fault of its author's.
        fields = decode_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        if not isinstance(fields, dict):
            raise ValueError("an object is needed")
        if isinstance(fields.get("run_at"), str):
            fields["run_at"] = _moment(fields["run_at"], "run_at")
        return new_job_from(fields)
    except (TypeError, ValueError) as error:
        raise _bad_line(number, error) from None


def _bad_line(number: int, error: Exception) -> typer.BadParameter:
    return typer.BadParameter(f"line {number}: {error}", param_hint="--file")


def read_payload(text: str) -> object:
    """The value of PAYLOAD: JSON, `-` for standard input, `@FILE` for a file. Raises ValueError, typer.BadParameter."""
    json: str | bytes = text
    if text == "-" or text.startswith("@"):
        with _open(text.removeprefix("@")) as source:
            json = source.read(LINE_BYTES)
        if len(json) == LINE_BYTES:
            raise ValueError(f"payload: longer than {LINE_BYTES // 1024 // 1024} MiB")
    try:
        return decode_json(json)
    except ValueError as error:
        raise ValueError(f"payload: not JSON: {error}") from None


def _moment(text: str, name: str = "at") -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is no ISO 8601 moment such as 2030-01-31T08:00:00Z") from None
    if moment.utcoffset() is None:
        raise ValueError(f"{name}: {text!r} has no time zone, so it is no moment: add one, for example Z")
    return moment


@contextlib.contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    with open(descriptor, "rb") as source:
        yield source


@contextlib.contextmanager
def _progress(source: IO[bytes]) -> Iterator[Callable[[int], None]]:
    """A bar for a person; for anybody else nothing. What is yielded takes the number of bytes read."""
    if not sys.stderr.isatty():
        yield lambda bytes_read: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    status = os.fstat(source.fileno())
    size = status.st_size if stat.S_ISREG(status.st_mode) else None
    columns = (TextColumn("enqueueing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=size)
        yield lambda bytes_read: bar.update(task, completed=bytes_read)
