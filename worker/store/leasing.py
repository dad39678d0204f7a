"""Renew: one statement for everything a process holds, and the look that tells a lost lease from a locked row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker.store.standbys import believe

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database

Key = tuple[int, int]
"""(id, fence): what memory and answers are keyed by, never the id alone."""

# Index jobs_pkey. A row that somebody else keeps locked is passed over: it must not hold up the other renewals.
RENEW = """
WITH mine AS MATERIALIZED (
    SELECT j.id, j.fence
    FROM unnest($1::bigint[], $2::bigint[]) AS held(id, fence)
    JOIN {schema}.jobs AS j ON j.id = held.id
    WHERE j.fence = held.fence AND j.lease_owner = $3 AND j.lease_until > now()
    FOR NO KEY UPDATE OF j SKIP LOCKED
)
UPDATE {schema}.jobs AS j
SET lease_until = now() + $4 * interval '1 second'
FROM mine
WHERE j.id = mine.id AND j.fence = mine.fence AND j.lease_owner = $3
RETURNING j.id, j.fence
"""


async def renew(connection: Connection, database: Database, *, held: Sequence[Key], owner: str, lease_seconds: float) -> set[Key]:
    """Extend every live lease in `held`; those missing from the answer are lost, or their row is locked (see `look`).

    Raises ConnectionError when a synchronous standby is not known to have it: who is promoted may know of shorter leases.
    """
    ids, fences = [id for id, _ in held], [fence for _, fence in held]
    rows = await connection.fetch(database.sql(RENEW), ids, fences, owner, lease_seconds)
    believe(connection)
    return {(row[0], row[1]) for row in rows}


class Standing(NamedTuple):
    """What a row says of an attempt. `mine`: owner and fence are still ours; `completed`: it has succeeded under our fence."""

    state: str
    mine: bool
    live: bool
    completed: bool


# Index jobs_pkey. A plain read: it sees the last committed row and waits for nobody.
LOOK = """
SELECT j.id, held.fence, j.state, j.fence = held.fence AND j.lease_owner IS NOT DISTINCT FROM $3 AS mine,
    j.lease_until > now() IS TRUE AS live, j.fence = held.fence AND j.state = 'succeeded' AS completed
FROM unnest($1::bigint[], $2::bigint[]) AS held(id, fence)
JOIN {schema}.jobs AS j ON j.id = held.id
"""


async def look(connection: Connection, database: Database, *, held: Sequence[Key], owner: str) -> dict[Key, Standing]:
    """How each attempt stands now; a row that is gone is missing from the answer."""
    ids, fences = [id for id, _ in held], [fence for _, fence in held]
    rows = await connection.fetch(database.sql(LOOK), ids, fences, owner)
    return {(row[0], row[1]): Standing(*row[2:]) for row in rows}


# Index jobs_pkey. It locks nothing for longer than it takes to say so.
UNLOCKED = """
SELECT j.id, j.fence
FROM unnest($1::bigint[], $2::bigint[]) AS held(id, fence)
JOIN {schema}.jobs AS j ON j.id = held.id
WHERE j.fence = held.fence AND j.lease_owner = $3
FOR NO KEY UPDATE OF j SKIP LOCKED
"""


async def unlocked(connection: Connection, database: Database, *, held: Sequence[Key], owner: str) -> set[Key]:
    """Those of `held` that are still ours, and whose rows no transaction keeps locked."""
    ids, fences = [id for id, _ in held], [fence for _, fence in held]
    rows = await connection.fetch(database.sql(UNLOCKED), ids, fences, owner)
    return {(row[0], row[1]) for row in rows}


# Written before the renewals of the same beat, so that a presence never outlives the leases it stands for: a job is reaped
# only after its process counts as lost. An upsert, since a presence that somebody deleted must come back.
PRESENCE = """
INSERT INTO {schema}.processes AS p
    (id, name, hostname, pid, version, queues, slots, busy, hungry, health, seen_at, expires_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10::text::jsonb, now(), now() + $11 * interval '1 second')
ON CONFLICT (id) DO UPDATE
SET busy = EXCLUDED.busy, health = EXCLUDED.health, seen_at = now(), expires_at = EXCLUDED.expires_at
"""


class Presence(NamedTuple):
    """One process as the others see it."""

    id: str
    name: str
    hostname: str
    pid: int
    version: str
    queues: list[str]
    slots: int


async def write_presence(
    connection: Connection,
    database: Database,
    presence: Presence,
    *,
    busy: int,
    hungry: bool,
    health: str,
    lease_seconds: float,
) -> None:
    """Say that this process lives, for one lease length. `health` is JSON text; `hungry` counts for a new row only."""
    await connection.execute(database.sql(PRESENCE), *presence, busy, hungry, health, lease_seconds)


HUNGRY = "UPDATE {schema}.processes SET hungry = $2 WHERE id = $1"


async def set_hungry(connection: Connection, database: Database, *, process_id: str, hungry: bool) -> bool:
    """Say whether an INSERT should send a NOTIFY for this process. False: its presence is not there (yet), nothing was said."""
    status: str = await connection.execute(database.sql(HUNGRY), process_id, hungry)
    return status == "UPDATE 1"


LEAVE = "DELETE FROM {schema}.processes WHERE id = $1"


async def remove_presence(connection: Connection, database: Database, *, process_id: str) -> None:
    """This process has stopped and holds nothing."""
    await connection.execute(database.sql(LEAVE), process_id)
