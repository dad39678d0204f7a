"""How a command gets to its database: the one that is configured, or the private one of `--embedded`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

import typer

from worker.settings import Settings, load_settings
from worker.store import schema
from worker.store.connection import Connection, Database, SessionLimits
from worker.store.standbys import believe

if TYPE_CHECKING:
    from worker.cluster import Cluster

T = TypeVar("T")
Work: TypeAlias = Callable[[Connection, Database, Settings], Coroutine[None, None, T]]

STATEMENT_SECONDS = 30.0
COMMAND_SECONDS = 120.0

Embedded = Annotated[bool, typer.Option("--embedded", help="Use a private PostgreSQL of this user; started when needed.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Where the private PostgreSQL keeps its data.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@contextlib.contextmanager
def reach(embedded: bool, data_dir: Path | None) -> Iterator[Settings]:
    """The settings of the environment; with `embedded` those of a private PostgreSQL that runs as long as the
    block.

    Raises ConfigError, ClusterError.
    """
    if not embedded:
        if data_dir is not None:
            raise typer.BadParameter("it needs --embedded", param_hint="--data-dir")
        yield load_settings()
        return
    cluster = start_cluster(data_dir)
    try:
        yield load_settings(database_url=cluster.dsn)
    finally:
        cluster.stop()


def start_cluster(data_dir: Path | None) -> Cluster:
    """The private PostgreSQL, started or found; whoever calls has to stop it."""
    from worker.cluster import default_data_dir, start_or_adopt

    return start_or_adopt(data_dir or default_data_dir(os.environ))


def database_of(settings: Settings) -> Database:
    """How to reach the database of these settings, for commands."""
    return Database(
        settings.database_url.get_secret_value() if settings.database_url else None,
        schema=settings.schema_name,
        connect_timeout_seconds=settings.connect_timeout_seconds,
        limits=SessionLimits.of(lease_seconds=settings.lease_seconds, query_timeout_seconds=settings.query_timeout_seconds),
        pooler=settings.pooler is not None,
    )


@contextlib.asynccontextmanager
async def connected(
    database: Database,
    *,
    statement_seconds: float = STATEMENT_SECONDS,
    settings: Mapping[str, str] | None = None,
) -> AsyncIterator[Connection]:
    """A connection for the block; left in peace, or dropped when that takes too long."""
    connection = await database.connect("command", statement_timeout_seconds=statement_seconds, settings=settings)
    try:
        yield connection
    finally:
        with contextlib.suppress(OSError, TimeoutError):
            await connection.close(timeout=1)


def with_schema(
    embedded: bool,
    data_dir: Path | None,
    work: Work[T],
    *,
    limit_seconds: float | None = COMMAND_SECONDS,
    session: Mapping[str, str] | None = None,
) -> T:
    """What `work` returns, given a connection to a database that holds our schema, in the version that this
    program knows. Raises SchemaError if it does not, ConnectionError when a synchronous standby is not known to have what was
    written.

    A private PostgreSQL gets the schema here: nobody else would give it one.
    """

    async def run(settings: Settings) -> T:
        database = database_of(settings)
        async with asyncio.timeout(limit_seconds), connected(database, settings=session) as connection:
            if embedded:
                await schema.migrate(connection, database.schema)
            else:
                await schema.require_version(connection, database.schema)
            done = await work(connection, database, settings)
            believe(connection)  # what is printed now is an acknowledgement
            return done

    with reach(embedded, data_dir) as settings:
        return asyncio.run(run(settings))
