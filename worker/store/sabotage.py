"""What `worker torture` does to a database while it records: an operator's work, and faults that a statement can cause.

Sessions are those of a superuser where it says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

OPERATOR_SETTINGS: Final = {
    # The torture goes on while the server is told to refuse writes, and while it waits for a standby.
    "default_transaction_read_only": "off",
    "synchronous_commit": "local",
}

DAEMON_ROLE: Final = "worker_torture"
"""The daemons' role on a server of the torture's own: no superuser, whom no connection limit would stop."""


class Session(NamedTuple):
    """The server as it is reached."""

    server_version: str
    encrypted: bool
    """Nobody on the way can read what is said."""


SESSION = """
SELECT current_setting('server_version'),
    COALESCE((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), false)
"""


async def describe(connection: Connection) -> Session:
    return Session(*await connection.fetchrow(SESSION))


MAKE_ROLE = """
DO $$ BEGIN
    CREATE ROLE {role} LOGIN;
EXCEPTION WHEN duplicate_object THEN NULL;
END $$;
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role};
GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO {role};
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role};
""".replace("{role}", DAEMON_ROLE)


async def make_daemon_role(connection: Connection, database: Database) -> None:
    """As superuser: the role, with everything that is in the schema."""
    await connection.execute(database.sql(MAKE_ROLE))


async def remove_schema(connection: Connection, database: Database) -> None:
    await connection.execute(database.sql("DROP SCHEMA IF EXISTS {schema} CASCADE"))


# --- an operator's work

SOME = "SELECT id FROM {schema}.jobs WHERE id = ANY ($1::bigint[]) AND state = ANY ($2::text[]) AND kind <> ALL ($3::text[])"


async def ids_in_state(
    connection: Connection, database: Database, ids: Sequence[int], states: Sequence[str], *, but_kinds: Sequence[str]
) -> list[int]:
    """Which of these jobs are in one of these states."""
    return [row[0] for row in await connection.fetch(database.sql(SOME), list(ids), list(states), list(but_kinds))]


CANCEL = "SELECT {schema}.cancel_job(id) FROM unnest($1::bigint[]) AS id"
RETRY = "SELECT {schema}.retry_job(id) FROM unnest($1::bigint[]) AS id"


async def cancel(connection: Connection, database: Database, ids: Sequence[int]) -> None:
    await connection.execute(database.sql(CANCEL), sorted(ids))


async def retry(connection: Connection, database: Database, ids: Sequence[int]) -> None:
    await connection.execute(database.sql(RETRY), sorted(ids))


# As a restore, or somebody who cleans up too much: the row goes, the ledger stays.
FORGET = """
DELETE FROM {schema}.jobs WHERE id = ANY ($1::bigint[]) AND state = 'succeeded' AND idempotency_key !~ '(^auto:|/next$)'
RETURNING idempotency_key, kind
"""


async def forget(connection: Connection, database: Database, ids: Sequence[int]) -> list[tuple[str, str]]:
    """Delete these jobs if they have succeeded; their keys and kinds, to be enqueued once more."""
    return [(row[0], row[1]) for row in await connection.fetch(database.sql(FORGET), sorted(ids))]


# --- what a holder of a named lease does

# check_fence keeps the resource's row locked to the end of the transaction: the rows come in the order of the checks.
WRITE_GUARDED = """
INSERT INTO {schema}.torture_guarded (resource, fence)
SELECT $1, $2 WHERE {schema}.check_fence($1, $2)
"""


async def write_guarded(connection: Connection, database: Database, *, resource: str, fence: int) -> None:
    """A write to a resource that refuses lower fences than it has seen (RW001)."""
    await connection.execute(database.sql(WRITE_GUARDED), resource, fence)


# --- faults of connections

# application_name is "<process> <role>".
BACKENDS = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE $1 AND backend_type = 'client backend'
ORDER BY pid
"""
WAITING = BACKENDS.replace("ORDER BY", "AND wait_event = 'SyncRep'\nORDER BY")
TERMINATE = "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM unnest($1::int[]) AS pid"


async def backends(connection: Connection, *, like: str, wait_for_standby: bool = False) -> list[int]:
    """Server processes of sessions whose application_name is LIKE this."""
    return [row[0] for row in await connection.fetch(WAITING if wait_for_standby else BACKENDS, like)]


async def terminate(connection: Connection, pids: Sequence[int]) -> int:
    """As the sessions' own role, or as superuser. Returns how many were there to be ended."""
    return int(await connection.fetchval(TERMINATE, list(pids)))


# --- faults of the whole server, as superuser

STARTED = "SELECT pg_postmaster_start_time()::text"


async def server_started(connection: Connection) -> str:
    """Which start of the server this is."""
    return str(await connection.fetchval(STARTED))


async def set_server(connection: Connection, name: str, value: str) -> None:
    """ALTER SYSTEM and reload. `name` and `value` are ours, never anybody's input."""
    await connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
    await connection.execute("SELECT pg_reload_conf()")


async def reset_server(connection: Connection, name: str) -> None:
    await connection.execute(f"ALTER SYSTEM RESET {name}")
    await connection.execute("SELECT pg_reload_conf()")


async def limit_connections(connection: Connection, most: int) -> None:
    """Of the daemons' role; -1: as many as there is room for."""
    await connection.execute(f"ALTER ROLE {DAEMON_ROLE} CONNECTION LIMIT {int(most)}")
