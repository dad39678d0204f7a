"""Connections of the package, by its own rules, whatever the environment of the test run says."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from worker.store.connection import Connection, Database


def database(dsn: str, **options: object) -> Database:
    return Database(dsn, **{"environ": {}, **options})  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def connected(dsn: str, **options: object) -> AsyncIterator[Connection]:
    connection = await database(dsn, **options).connect("test")
    try:
        yield connection
    finally:
        await connection.close()


def with_options(dsn: str, options: str) -> str:
    """The same URL with options as they stand in a query."""
    return dsn + ("&" if "?" in dsn else "?") + options
