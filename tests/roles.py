"""A database role for one test."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

import psycopg

from tests.servers import Server, execute

PASSWORD = "only-for-tests"


@contextlib.contextmanager
def role(server: Server, database_url: str) -> Iterator[str]:
    """The name of a fresh role; with all that it owns or was granted in this database it is gone after the block."""
    name = f"role_{uuid.uuid4().hex[:12]}"
    execute(server.dsn, f"CREATE ROLE {{}} LOGIN PASSWORD '{PASSWORD}'", name)
    try:
        yield name
    finally:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [name])
        execute(database_url, "DROP OWNED BY {}", name)
        execute(server.dsn, "DROP ROLE {}", name)


def url_as(name: str, database_url: str) -> str:
    """The same database, as this role."""
    parts = urlsplit(database_url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{name}:{PASSWORD}@{host}"))
