"""The schema in the database: applied or upgraded whole or not at all, verified before anybody relies on it.

`migrate` gives the same catalog as `psql -f schema.sql`, may run in any number of processes at once, and
doing it twice does nothing. What is in the way and not ours is never touched: the whole migration is refused
with one line that names it.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import asyncpg

from worker.errors import DatabaseUnavailable, SchemaError

SCHEMA_VERSION = 1

# UPGRADES[n - 1] is the SQL from version n to n + 1; schema.sql itself is always the newest. A step runs in
# the migration's one transaction, with the search_path set to the schema.
UPGRADES: tuple[str, ...] = ()

OLDEST_SERVER_VERSION = 14

# What the daemon's role needs. deploy/grants.sql grants the same; a test keeps the two together.
_NEEDED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("table", "schema_version", ("SELECT",)),
    ("table", "jobs", ("SELECT", "INSERT", "UPDATE", "DELETE")),
    ("table", "processed_messages", ("SELECT", "INSERT")),
    ("table", "job_effects", ("SELECT", "INSERT", "DELETE")),
    ("table", "job_failures", ("SELECT", "INSERT", "DELETE")),
    ("table", "processes", ("SELECT", "INSERT", "UPDATE", "DELETE")),
    ("table", "fences", ("SELECT", "INSERT", "UPDATE")),
    ("table", "leases", ("SELECT", "INSERT", "UPDATE", "DELETE")),
    ("table", "generators", ("SELECT", "INSERT", "UPDATE")),
    ("table", "open_transactions", ("SELECT", "INSERT", "DELETE")),
    ("sequence", "fence_seq", ("USAGE",)),
    ("function", "wake_channel", ("EXECUTE",)),
    ("function", "wake_workers", ("EXECUTE",)),
    ("function", "enqueue_job", ("EXECUTE",)),
    ("function", "cancel_job", ("EXECUTE",)),
    ("function", "retry_job", ("EXECUTE",)),
    ("function", "check_fence", ("EXECUTE",)),
    ("function", "lease_expires_in_ms", ("EXECUTE",)),
    ("function", "acquire_lease", ("EXECUTE",)),
    ("function", "renew_lease", ("EXECUTE",)),
    ("function", "release_lease", ("EXECUTE",)),
    ("function", "produce_slots", ("EXECUTE",)),
)


_IN_THE_WAY = (asyncpg.DuplicateTableError, asyncpg.DuplicateFunctionError, asyncpg.DuplicateObjectError)


def schema_text() -> str:
    """The text of schema.sql: from the installed package, or from the top of a checkout."""
    packaged = resources.files("worker") / "schema.sql"
    if packaged.is_file():
        return packaged.read_text("utf-8")
    return (Path(__file__).parents[2] / "schema.sql").read_text("utf-8")


async def migrate(connection: asyncpg.Connection, schema_name: str, *, lock_timeout_seconds: float = 10) -> bool:
    """Apply or upgrade the schema in one transaction; False when it was current already.

    Raises SchemaError for what is refused (no right to create, tables of somebody else, a newer version) and
    DatabaseUnavailable when the database is read-only or another transaction holds a lock for longer than
    `lock_timeout_seconds`; nothing has changed then.
    """
    await _require_writable(connection)
    try:
        # Not the role's default level: after waiting for another migration its result has to be seen.
        async with connection.transaction(isolation="read_committed"):
            return await _migrate_locked(connection, schema_name, lock_timeout_seconds)
    except asyncpg.LockNotAvailableError:
        raise DatabaseUnavailable(
            f"schema {schema_name!r}: another transaction has been in the way for {lock_timeout_seconds:g} "
            "s; nothing was changed, run the migration again when it has ended"
        ) from None
    except _IN_THE_WAY as error:
        raise SchemaError(
            f"schema {schema_name!r}: {error} and is not part of reliable-worker; nothing was changed, "
            "choose another schema with WORKER_SCHEMA"
        ) from None
    except (asyncpg.UniqueViolationError, asyncpg.SerializationError):
        # Somebody who does not take our lock (psql with schema.sql) was creating the same tables.
        raise DatabaseUnavailable(
            f"schema {schema_name!r}: somebody else was changing it at the same time; nothing was changed, run the migration again"
        ) from None


LOCK_MIGRATION = """
SELECT pg_advisory_xact_lock(hashtextextended('reliable-worker schema ' || $1, 0))
"""

# The limits that a role may carry must not end a long upgrade half-way; waiting stays limited by
# lock_timeout. By way of pg_settings, because older servers do not know all of them.
LIFT_TIME_LIMITS = """
SELECT set_config(name, '0', true)
FROM pg_settings
WHERE name IN ('statement_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout')
"""


async def _migrate_locked(connection: asyncpg.Connection, schema_name: str, lock_timeout_seconds: float) -> bool:
    await connection.execute("SELECT set_config('lock_timeout', $1, true)", f"{max(1, round(lock_timeout_seconds * 1000))}ms")
    await connection.execute(LIFT_TIME_LIMITS)
    await connection.execute(LOCK_MIGRATION, schema_name)
    await _create_schema_if_missing(connection, schema_name)
    await connection.execute("SELECT set_config('search_path', quote_ident($1) || ', pg_temp', true)", schema_name)
    version = await read_version(connection, schema_name)
    if version == SCHEMA_VERSION:
        return False
    await _require_create_right(connection, schema_name)
    if version is None:
        await _refuse_foreign_tables(connection, schema_name)
        await connection.execute(_without_transaction_control(schema_text()))
        return True
    if version > SCHEMA_VERSION:
        raise SchemaError(_newer(schema_name, version))
    for step, upgrade in enumerate(UPGRADES[version - 1 :], start=version + 1):
        await connection.execute(upgrade)
        await connection.execute("INSERT INTO schema_version (version) VALUES ($1)", step)
    return True


def _without_transaction_control(text: str) -> str:
    """schema.sql without its own BEGIN and COMMIT (alone on a line): here the transaction is ours."""
    return "\n".join(line for line in text.splitlines() if line not in ("BEGIN;", "COMMIT;"))


READ_VERSION_TABLE = """
SELECT count(*) FILTER (WHERE a.attname = 'version' AND a.atttypid = 'int4'::regtype) = 1
   AND count(*) FILTER (WHERE a.attname = 'applied_at') = 1 AS ours,
       has_table_privilege(c.oid, 'SELECT') AS readable
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relname = 'schema_version' AND c.relkind = 'r'
GROUP BY c.oid
"""


async def read_version(connection: asyncpg.Connection, schema_name: str) -> int | None:
    """The version of the schema that is applied, or None. Raises SchemaError when it may not be read.

    A table schema_version of somebody else counts as none.
    """
    if not await connection.fetchval("SELECT to_regnamespace(quote_ident($1)) IS NOT NULL", schema_name):
        return None
    if not await connection.fetchval("SELECT has_schema_privilege($1, 'USAGE')", schema_name):
        raise SchemaError(f"schema {schema_name!r}: the role {await _role(connection)} may not use it: GRANT USAGE is missing")
    table = await connection.fetchrow(READ_VERSION_TABLE, schema_name)
    if table is None or not table["ours"]:
        return None
    if not table["readable"]:
        raise SchemaError(_missing_grant(schema_name, await _role(connection), "SELECT", "table", "schema_version"))
    version: int | None = await connection.fetchval(f"SELECT max(version) FROM {_quoted(schema_name)}.schema_version")
    return version


async def verify(connection: asyncpg.Connection, schema_name: str) -> None:
    """Return when the daemon can work with this database and this role; nothing is written.

    Raises SchemaError with one line a fault (server too old, schema absent, older or newer, something missing
    from it, each missing grant), DatabaseUnavailable when the database is a standby or read-only: that may
    change by itself.
    """
    await _require_writable(connection)
    server_version = connection.get_server_version().major
    if server_version < OLDEST_SERVER_VERSION:
        raise SchemaError(f"PostgreSQL {server_version} is too old: {OLDEST_SERVER_VERSION} is the oldest supported")
    await require_version(connection, schema_name)
    faults = await _missing_parts(connection, schema_name)
    if faults:
        raise SchemaError(*faults)


async def require_version(connection: asyncpg.Connection, schema_name: str) -> None:
    """Return when the schema has the version that this program knows; nothing else is looked at. Raises SchemaError."""
    version = await read_version(connection, schema_name)
    if version is None:
        raise SchemaError(f"schema {schema_name!r} holds no tables of reliable-worker: apply them with `worker migrate`")
    if version < SCHEMA_VERSION:
        raise SchemaError(
            f"schema {schema_name!r} has version {version}, this program needs {SCHEMA_VERSION}: run `worker migrate`"
        )
    if version > SCHEMA_VERSION:
        raise SchemaError(_newer(schema_name, version))


READ_MISSING_PARTS = """
SELECT n.sort, n.name, n.privilege, COALESCE(c.oid, p.oid) IS NULL AS absent
FROM unnest($2::text[], $3::text[], $4::text[]) WITH ORDINALITY AS n (sort, name, privilege, place)
LEFT JOIN pg_class AS c
    ON n.sort <> 'function' AND c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relname = n.name
    AND c.relkind = CASE n.sort WHEN 'table' THEN 'r' ELSE 'S' END
LEFT JOIN pg_proc AS p
    ON n.sort = 'function' AND p.pronamespace = to_regnamespace(quote_ident($1)) AND p.proname = n.name
WHERE NOT COALESCE(
    CASE n.sort
        WHEN 'table' THEN has_table_privilege(c.oid, n.privilege)
        WHEN 'sequence' THEN has_sequence_privilege(c.oid, n.privilege)
        ELSE has_function_privilege(p.oid, n.privilege)
    END, false)
ORDER BY n.place
"""


async def _missing_parts(connection: asyncpg.Connection, schema_name: str) -> list[str]:
    wanted = [(sort, name, privilege) for sort, name, privileges in _NEEDED for privilege in privileges]
    sorts, names, privileges = zip(*wanted, strict=True)
    rows = await connection.fetch(READ_MISSING_PARTS, schema_name, list(sorts), list(names), list(privileges))
    if not rows:
        return []
    role = await _role(connection)
    faults: list[str] = []
    for row in rows:
        if row["absent"]:
            fault = f"schema {schema_name!r}: the {row['sort']} {row['name']} is missing"
        else:
            fault = _missing_grant(schema_name, role, row["privilege"], row["sort"], row["name"])
        if fault not in faults:
            faults.append(fault)
    return faults


async def _require_writable(connection: asyncpg.Connection) -> None:
    # A standby always says read-only as well, so the more telling one is asked first.
    if await connection.fetchval("SELECT pg_is_in_recovery()"):
        raise DatabaseUnavailable("the database is a standby, which takes no writes: connect to the primary")
    if await connection.fetchval("SELECT current_setting('transaction_read_only')::boolean"):
        raise DatabaseUnavailable("the database is read-only for this role (default_transaction_read_only is on)")


async def _create_schema_if_missing(connection: asyncpg.Connection, schema_name: str) -> None:
    if await connection.fetchval("SELECT to_regnamespace(quote_ident($1)) IS NOT NULL", schema_name):
        return
    if not await connection.fetchval("SELECT has_database_privilege(current_database(), 'CREATE')"):
        raise SchemaError(
            f"schema {schema_name!r} does not exist, and the role {await _role(connection)} may not create "
            "it: CREATE on the database is missing"
        )
    await connection.execute(f"CREATE SCHEMA {_quoted(schema_name)}")


async def _require_create_right(connection: asyncpg.Connection, schema_name: str) -> None:
    if not await connection.fetchval("SELECT has_schema_privilege($1, 'CREATE')", schema_name):
        raise SchemaError(
            f"schema {schema_name!r}: the role {await _role(connection)} may not create tables in it: migrate as the schema's owner"
        )


FIND_FOREIGN_TABLES = """
SELECT relname
FROM pg_class
WHERE relnamespace = to_regnamespace(quote_ident($1)) AND relname = ANY ($2::text[])
ORDER BY relname
"""


async def _refuse_foreign_tables(connection: asyncpg.Connection, schema_name: str) -> None:
    rows = await connection.fetch(FIND_FOREIGN_TABLES, schema_name, [name for sort, name, _ in _NEEDED if sort != "function"])
    if rows:
        raise SchemaError(
            f"schema {schema_name!r} already holds {', '.join(row['relname'] for row in rows)}, not made by "
            "reliable-worker; nothing was changed, choose another schema with WORKER_SCHEMA"
        )


async def _role(connection: asyncpg.Connection) -> str:
    role: str = await connection.fetchval("SELECT current_user::text")
    return repr(role)


def _newer(schema_name: str, version: int) -> str:
    return (
        f"schema {schema_name!r} has version {version}, this program knows only {SCHEMA_VERSION}: a newer "
        "reliable-worker made it, upgrade this one"
    )


def _missing_grant(schema_name: str, role: str, privilege: str, sort: str, name: str) -> str:
    return f"schema {schema_name!r}: the role {role} lacks {privilege} on the {sort} {name}: see grants.sql"


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'
