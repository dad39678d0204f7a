"""Commands about the process and its surroundings: run, migrate, check, health."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from typing import Annotated

import typer

from worker.cli.printing import print_error, print_line, print_rows
from worker.cli.reaching import DataDir, Embedded, connected, database_of, reach
from worker.cli.refusal import refused
from worker.cli.serve import http_address, require_extra
from worker.errors import ConfigError
from worker.health import HealthFile, all_well, read_verdicts
from worker.settings import Settings, load_settings, unknown_settings
from worker.store import schema
from worker.store.connection import ConnectFailed, Database
from worker.store.reports import describe_session
from worker.store.statistics import sees_all_sessions
from worker.store.waiting import HTTP_LANES, LANES, verify_room, verify_session


def run(
    embedded: Embedded = False,
    data_dir: DataDir = None,
    burst: Annotated[
        bool,
        typer.Option(
            "--burst",
            help="End with 0 once no job of these queues and kinds is due, running or to be tried again.",
        ),
    ] = False,
    migrate: Annotated[bool, typer.Option("--migrate", help="Apply or upgrade the schema first.")] = False,
    serve: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve the HTTP interface as well, in this process.", show_default=False)
    ] = None,
) -> None:
    """Run the daemon: claim jobs, run their handlers, until SIGTERM."""
    from worker import daemon

    http = None if serve is None else http_address(serve)
    try:
        with reach(embedded, data_dir) as settings:
            if embedded and settings.database_url is not None:
                # Not on standard output, which holds the log and nothing else.
                url = shlex.quote(settings.database_url.get_secret_value())
                print(f"DATABASE_URL={url}", file=sys.stderr, flush=True)
            status = daemon.run(settings, burst=burst, migrate=migrate or embedded, http=http)
    except ConfigError as error:
        raise refused(error) from None
    raise typer.Exit(status)


def migrate(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit status 1 when the schema is not current.")] = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Apply or upgrade the schema; does nothing when it is current."""

    async def work(settings: Settings) -> tuple[int | None, bool]:
        database = database_of(settings)
        async with connected(database) as connection:
            applied = False if check else await schema.migrate(connection, database.schema)
            return await schema.read_version(connection, database.schema), applied

    with reach(embedded, data_dir) as settings:
        version, applied = asyncio.run(work(settings))
    what = f"schema {settings.schema_name!r}"
    if version == schema.SCHEMA_VERSION:
        print_line(f"{what}: version {version} {'applied' if applied else 'is current'}")
        return
    print_line(
        f"{what}: {'not applied' if version is None else f'version {version}'}, this program has version {schema.SCHEMA_VERSION}"
    )
    raise typer.Exit(1)


def check(embedded: Embedded = False, data_dir: DataDir = None) -> None:
    """Check settings, database, schema, grants and TLS, and say what is wrong."""
    with reach(embedded, data_dir) as settings:
        # These refuse an address that cannot be right.
        database, listen = database_of(settings), _listen_database_of(settings)
        faults = _token_faults(settings)
        if not faults:
            print_line("settings: valid")
        for name, nearest in unknown_settings():
            print_line(f"settings: {name} is no setting and does nothing; the nearest is {nearest}")
        faults += _runtime_dir_faults(settings)
        try:
            faults += asyncio.run(_check_database(settings, database, listen))
        except ConfigError as error:
            faults += error.lines
        except Exception:
            # It is said above all that the database is away; what else is wrong must not be lost for that.
            for fault in faults:
                print_error(fault)
            raise
        finally:
            _print_stop_time(settings)
    if faults:
        raise ConfigError(*faults)


def _listen_database_of(settings: Settings) -> Database | None:
    if settings.listen_database_url is None:
        return None
    url = settings.listen_database_url.get_secret_value()
    return Database(url, connect_timeout_seconds=settings.connect_timeout_seconds, variable="WORKER_LISTEN_DATABASE_URL")


def _token_faults(settings: Settings) -> list[str]:
    """What `worker serve` would say of the tokens, where there are any and it is installed."""
    if settings.http_tokens is None and settings.http_tokens_file is None:
        return []
    try:
        require_extra()
    except ConfigError:
        return []
    from worker.api.auth import read_tokens

    try:
        read_tokens(settings)
    except ConfigError as error:
        return list(error.lines)
    return []


def _runtime_dir_faults(settings: Settings) -> list[str]:
    """What `worker run` would say, by doing what it does."""
    try:
        HealthFile(settings.runtime_dir, f"check-{os.getpid()}").remove()
    except ConfigError as error:
        return list(error.lines)
    print_line(f"heartbeats: {settings.runtime_dir}")
    return []


async def _check_database(settings: Settings, database: Database, listen: Database | None) -> list[str]:
    """Print what is well and return what is not."""
    from worker.daemon import load_handlers

    async with asyncio.timeout(30), connected(database) as connection:
        session = await describe_session(connection)
        print_line(f"database: {database.target.where}, PostgreSQL {session.server_version}")
        print_line(f"TLS: {session.tls_version or 'not in use'}")
        hidden = "hidden, so `worker stats` knows this role's transactions only; as a member of pg_read_all_stats it would all"
        print_line(f"sessions of other roles: {'visible' if await sees_all_sessions(connection) else hidden}")
        faults: list[str] = []
        try:
            await schema.verify(connection, database.schema)
            print_line(f"schema: {database.schema!r}, version {schema.SCHEMA_VERSION}")
            print_line("grants: complete")
        except ConfigError as error:
            faults += error.lines
        try:
            load_handlers(settings.handlers)
            print_line(f"handlers: {settings.handlers or 'built-ins'}")
        except ConfigError as error:
            faults += error.lines
        try:
            await verify_session(connection, database)
            # As `worker run` does; LISTEN may have an address of its own.
            lanes = LANES if listen is None else LANES - 1
            await verify_room(connection, database, pool_size=settings.pool_size, lanes=lanes)
            most = lanes + settings.pool_size + 1  # a second one for commits, where there is room
            print_line(f"connections: at most {most} for `worker run`, {most + HTTP_LANES + settings.pool_size} with --serve")
            if database.pooler:
                print_line("pooler: the role carries the limits")
        except ConfigError as error:
            faults += error.lines
    if listen is not None:
        try:
            async with asyncio.timeout(30), connected(listen):
                print_line(f"LISTEN: {listen.target.where}")
        except ConnectFailed as error:
            if not error.refused:
                raise
            faults.append(str(error))
    return faults


def _print_stop_time(settings: Settings) -> None:
    grace, margin, query = (
        settings.shutdown_grace_seconds,
        settings.lease_margin_seconds,
        settings.query_timeout_seconds,
    )
    print_line(
        f"stop time-out: the service manager must allow more than {grace + margin + 2 * query:g} s "
        f"(grace {grace:g} + margin {margin:g} + 2 x query time-out {query:g})"
    )


def health(embedded: Embedded = False, data_dir: DataDir = None) -> None:
    """Exit 0 when this host's daemons are alive and making progress. Asks no database: --embedded changes nothing."""
    # A stand-in, as the address of the database is not needed here.
    settings = load_settings(database_url="postgresql://localhost/")
    verdicts = read_verdicts(settings.runtime_dir)
    if not verdicts:
        print_error(f"no daemon has left a heartbeat in {settings.runtime_dir}")
        raise typer.Exit(1)
    print_rows(("process", "pid", "health"), [(verdict.id, verdict.pid, verdict.text) for verdict in verdicts], nothing="")
    if not all_well(verdicts):
        raise typer.Exit(1)
