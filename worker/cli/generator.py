"""`worker generator`: one of many instances produces jobs; start and stop are a wish in the database, whoever says it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from worker.cli.enqueue import read_payload
from worker.cli.printing import print_json, print_rows
from worker.cli.reaching import DataDir, Embedded, Json, reach, with_schema
from worker.cli.refusal import refused
from worker.errors import ConfigError
from worker.generation import Wish, wish
from worker.new_job import new_job
from worker.settings import Settings
from worker.store import generating
from worker.store.connection import Connection, Database
from worker.store.generating import GeneratorStatus

app = typer.Typer(no_args_is_help=True, help="Produce jobs at a steady rate, from one of many instances at a time.")

Rate = Annotated[float | None, typer.Option(metavar="JOBS", help="Jobs a second; at first 1.", show_default=False)]
Every = Annotated[float | None, typer.Option(metavar="SECONDS", help="One job so often, instead of --rate.", show_default=False)]
Min = Annotated[
    float | None,
    typer.Option("--min", metavar="SECONDS", help="Sleep jobs, with this shortest pause; at first 1.", show_default=False),
]
Max = Annotated[
    float | None,
    typer.Option("--max", metavar="SECONDS", help="Sleep jobs, with this longest pause; at first 10.", show_default=False),
]
KindName = Annotated[
    str | None, typer.Option("--kind", metavar="KIND", help="Produce jobs of this kind, not sleep jobs.", show_default=False)
]
Payload = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="Their payload; - reads standard input, @FILE a file.", show_default=False),
]


@app.command()
def run(
    rate: Rate = None,
    every: Every = None,
    least: Min = None,
    most: Max = None,
    kind: KindName = None,
    payload: Payload = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Run an instance until SIGTERM: produce while holding the lease, else stand by.

    On a database where nobody has said start or stop it is started. The options are put in as by `start`; whether it is started
    stays as it was.
    """
    from worker import generator_process

    wanted = _wish(rate, every, least, most, kind, payload)
    try:
        with reach(embedded, data_dir) as settings:
            status = generator_process.run(settings, wanted, migrate=embedded)
    except ConfigError as error:
        raise refused(error) from None
    raise typer.Exit(status)


@app.command()
def start(
    rate: Rate = None,
    every: Every = None,
    least: Min = None,
    most: Max = None,
    kind: KindName = None,
    payload: Payload = None,
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Want it started; what is not given stays as it is. The instances follow within a second."""
    wanted = _wish(rate, every, least, most, kind, payload)

    async def work(connection: Connection, database: Database, settings: Settings) -> GeneratorStatus:
        try:
            return await generating.start(connection, database, wanted)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    _print(with_schema(embedded, data_dir, work), json)


@app.command()
def stop(json: Json = False, embedded: Embedded = False, data_dir: DataDir = None) -> None:
    """Want it stopped: when this returns, nothing more is produced."""

    async def work(connection: Connection, database: Database, settings: Settings) -> GeneratorStatus:
        return await generating.stop(connection, database)

    _print(with_schema(embedded, data_dir, work), json)


@app.command()
def status(json: Json = False, embedded: Embedded = False, data_dir: DataDir = None) -> None:
    """Show whether it is started, which instance produces, and how much."""

    async def work(connection: Connection, database: Database, settings: Settings) -> GeneratorStatus:
        return await generating.status(connection, database)

    _print(with_schema(embedded, data_dir, work), json)


def _wish(
    rate: float | None, every: float | None, least: float | None, most: float | None, kind: str | None, payload: str | None
) -> Wish:
    if (kind is None) != (payload is None):
        raise typer.BadParameter("--kind and --payload belong together", param_hint="--kind" if payload else "--payload")
    try:
        job = None if kind is None or payload is None else new_job(kind, read_payload(payload))
        return wish(rate=rate, every=every, min=least, max=most, job=job)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


def _print(status: GeneratorStatus, json: bool) -> None:
    if json:
        print_json(asdict(status))
    else:
        print_rows(("what", "value"), list(asdict(status).items()), nothing="")
