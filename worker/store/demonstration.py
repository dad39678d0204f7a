"""What `worker demo` asks its own throw-away database, to show that what it claims is true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

# Every try to write an effect leaves a note, also one that finds the row there already. Notes of a transaction that
# rolls back vanish with it: what is left has been committed.
NOTE_EFFECTS = """
CREATE TABLE {schema}.demo_notes (idempotency_key text NOT NULL);
CREATE FUNCTION {schema}.demo_note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO {schema}.demo_notes VALUES (NEW.idempotency_key);
    RETURN NEW;
END
$$;
CREATE TRIGGER demo_note BEFORE INSERT ON {schema}.processed_messages
    FOR EACH ROW EXECUTE FUNCTION {schema}.demo_note();
"""


async def note_effects(connection: Connection, database: Database) -> None:
    """From now on each committed effect is counted, however often it happens."""
    await connection.execute(database.sql(NOTE_EFFECTS))


class Progress(NamedTuple):
    total: int
    ended: int
    running: int


READ_PROGRESS = """
SELECT count(*), count(*) FILTER (WHERE state IN ('succeeded', 'dead', 'cancelled')), count(*) FILTER (WHERE state = 'running')
FROM {schema}.jobs
"""


async def read_progress(connection: Connection, database: Database) -> Progress:
    """How many jobs there are, have ended, and run."""
    return Progress(*await connection.fetchrow(database.sql(READ_PROGRESS)))


READ_HELD = """
SELECT id
FROM {schema}.jobs
WHERE state = 'running' AND lease_owner ^@ ($1 || '-')
ORDER BY id
"""


async def read_held(connection: Connection, database: Database, name: str) -> list[int]:
    """The jobs that the processes with this name hold."""
    return [row["id"] for row in await connection.fetch(database.sql(READ_HELD), name)]


class Outcome(NamedTuple):
    """What became of all jobs, and of those that were held by a process when it was killed."""

    jobs: int
    succeeded: int
    once: int
    missing: int
    repeated: int
    recovered: int
    recovery_seconds: float | None


READ_OUTCOME = """
WITH effects AS (
    SELECT j.id, j.state, j.completed_at, (
        SELECT count(*) FROM {schema}.demo_notes AS n WHERE n.idempotency_key = j.idempotency_key) AS times
    FROM {schema}.jobs AS j
)
SELECT count(*), count(*) FILTER (WHERE state = 'succeeded'),
    count(*) FILTER (WHERE times = 1), count(*) FILTER (WHERE times = 0), count(*) FILTER (WHERE times > 1),
    count(*) FILTER (WHERE id = ANY ($1) AND state = 'succeeded'),
    extract(epoch FROM max(completed_at) FILTER (WHERE id = ANY ($1)))::float8 - $2::float8
FROM effects
"""


async def read_outcome(connection: Connection, database: Database, *, held: Sequence[int], killed_at_seconds: float) -> Outcome:
    """The final count. `killed_at_seconds` is a moment of `read_clock`."""
    return Outcome(*await connection.fetchrow(database.sql(READ_OUTCOME), list(held), killed_at_seconds))


async def read_clock(connection: Connection) -> float:
    """The database's own clock, in seconds since 1970."""
    seconds: float = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    return seconds
