"""Settle: the fenced statements that end an attempt, and the look that resolves an outcome nobody acknowledged.

Every one matches id, owner and fence, goes through jobs_pkey (`state = 'running'` is left out on purpose: it says nothing that
ownership does not, and offers the planner the expiry index, which an old snapshot keeps full of dead entries), and returns
(id, fence). What is missing from the answer has lost its lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker.domain import ClaimedJob, Verdict
from worker.store.leasing import Key

if TYPE_CHECKING:
    from worker.store.connection import Connection, Database


class Completion(NamedTuple):
    """One attempt that is to end as succeeded."""

    id: int
    fence: int
    result: str | None
    """JSON text."""
    has_effects: bool


_HELD = """
WITH held AS (
    SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::boolean[]) AS h(id, fence, result, has_effects)
), done AS ("""

# For remote workers, each with a name of its own: $5 is an array beside the others.
_HELD_BY_SEVERAL = """
WITH held AS (
    SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::boolean[], $5::text[])
        AS h(id, fence, result, has_effects, owner)
), done AS ("""

_KEEP = """
    UPDATE {schema}.jobs AS j
    SET state = 'succeeded', completed_at = now(), lease_owner = NULL, lease_until = NULL, last_error = NULL,
        result = held.result::jsonb
    FROM held
    WHERE j.id = held.id AND j.fence = held.fence AND j.lease_owner = $5
    RETURNING j.id, j.fence, j.idempotency_key, held.has_effects AND NOT j.idempotency_key ^@ 'auto:' AS needs_ledger
)"""

_DELETE = """
    DELETE FROM {schema}.jobs AS j
    USING held
    WHERE j.id = held.id AND j.fence = held.fence AND j.lease_owner = $5
    RETURNING j.id, j.fence, j.idempotency_key, held.has_effects AND NOT j.idempotency_key ^@ 'auto:' AS needs_ledger
), forgotten AS (
    DELETE FROM {schema}.job_failures AS f USING done WHERE f.job_id = done.id
)"""

# One row of arrays: what is done and whether it needs a ledger row, and whose ledger row is new. Half of the cost of a row for
# each; a join of the two would be a nested loop over the whole group.
_WITH_LEDGER = """, ledger AS (
    INSERT INTO {schema}.job_effects (idempotency_key, job_id, fence)
    SELECT done.idempotency_key, done.id, done.fence FROM done
    WHERE done.needs_ledger
    ORDER BY done.idempotency_key
    ON CONFLICT (idempotency_key) DO NOTHING
    RETURNING job_id, fence
)
SELECT d.*, l.* FROM
    (SELECT array_agg(id), array_agg(fence), array_agg(needs_ledger) FROM done) AS d,
    (SELECT array_agg(job_id), array_agg(fence) FROM ledger) AS l
"""

_WITHOUT_LEDGER = "\nSELECT array_agg(id), array_agg(fence) FROM done\n"

# jobs_pkey, rows in the order of the arrays, which are sorted by id. Nothing depends on that order, which the plan for a table of a
# few pages may change: this is the first statement of its transaction that locks job rows, two of them never want a row of each
# other's (each locks what it owns), and our others skip what is locked, or take one row, or rows that no process holds. Somebody
# else's statement over many rows may meet it half-way; should this one be the one that is refused (40P01, 55P03), the writer tries
# again. The same holds for SETTLE.
COMPLETE = {
    (deletes, ledger): _HELD + (_DELETE if deletes else _KEEP) + (_WITH_LEDGER if ledger else _WITHOUT_LEDGER)
    for deletes in (False, True)
    for ledger in (False, True)
}


async def complete(
    connection: Connection,
    database: Database,
    completions: Sequence[Completion],
    *,
    owner: str,
    deletes: bool,
) -> dict[Key, bool]:
    """End these attempts as succeeded and enter the keys of those with effects into the ledger.

    Returns, by (id, fence), whether the key's effect had been applied before: then its effects are to be skipped. `deletes`
    removes the rows instead of keeping them as history. With effects, call it inside the transaction that applies them.
    """
    ids, fences, results, has_effects = zip(*sorted(completions), strict=True)
    with_ledger = any(has_effects)
    text = database.sql(COMPLETE[deletes, with_ledger])
    row = await connection.fetchrow(text, ids, fences, results, has_effects, owner)
    assert row is not None  # an aggregate
    if row[0] is None:
        return {}
    done = zip(row[0], row[1], strict=True)
    if not with_ledger:
        return dict.fromkeys(done, False)
    new = set() if row[3] is None else set(zip(row[3], row[4], strict=True))
    return {key: needs_ledger and key not in new for key, needs_ledger in zip(done, row[2], strict=True)}


COMPLETE_FOR_SEVERAL = _HELD_BY_SEVERAL + _KEEP.replace("$5", "held.owner") + _WITHOUT_LEDGER


async def complete_for_several(
    connection: Connection, database: Database, completions: Sequence[tuple[Completion, str]]
) -> set[Key]:
    """End these attempts, each of its own owner and without effects, as succeeded; returns those that had their lease."""
    ordered = sorted(completions, key=lambda one: one[0][:2])  # several may want to end the same attempt
    ids, fences, results, has_effects = map(list, zip(*(completion for completion, _ in ordered), strict=True))
    owners = [owner for _, owner in ordered]
    row = await connection.fetchrow(database.sql(COMPLETE_FOR_SEVERAL), ids, fences, results, has_effects, owners)
    assert row is not None  # an aggregate
    return set() if row[0] is None else set(zip(row[0], row[1], strict=True))


class Settlement(NamedTuple):
    """One attempt that is to end unfinished."""

    id: int
    fence: int
    verdict: Verdict


class Settled(NamedTuple):
    state: str
    queue: str


# jobs_pkey. Failures of a job are kept for its last 20 attempts: 19 older ones and the one inserted here.
SETTLE = """
WITH held AS (
    SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::float8[], $5::text[], $6::text[], $7::text[])
        AS h(id, fence, verb, delay_seconds, outcome, error, detail)
), settled AS (
    UPDATE {schema}.jobs AS j
    SET state = CASE WHEN held.verb = 'bury' OR held.verb = 'retry' AND j.attempts >= j.max_attempts THEN 'dead' ELSE 'ready' END,
        completed_at = CASE WHEN held.verb = 'bury' OR held.verb = 'retry' AND j.attempts >= j.max_attempts THEN now() END,
        attempts = CASE held.verb WHEN 'give_back' THEN GREATEST(j.attempts - 1, 0) ELSE j.attempts END,
        available_at = COALESCE(now() + held.delay_seconds * interval '1 second', j.available_at),
        last_error = COALESCE(held.error, j.last_error),
        lease_owner = NULL, lease_until = NULL
    FROM held
    WHERE j.id = held.id AND j.fence = held.fence AND j.lease_owner = $8
    RETURNING j.id, j.fence, j.state, j.queue, j.attempts, held.outcome, held.detail
), failures AS (
    INSERT INTO {schema}.job_failures (job_id, fence, attempt, worker, outcome, error)
    SELECT s.id, s.fence, s.attempts, $8, s.outcome, s.detail FROM settled AS s WHERE s.outcome IS NOT NULL
    ON CONFLICT (job_id, fence) DO NOTHING
), trimmed AS (
    DELETE FROM {schema}.job_failures AS f
    USING settled AS s
    WHERE s.outcome IS NOT NULL AND f.job_id = s.id AND f.fence <= (
        SELECT g.fence FROM {schema}.job_failures AS g WHERE g.job_id = s.id ORDER BY g.fence DESC OFFSET 19 LIMIT 1)
)
SELECT id, fence, state, queue FROM settled
"""


async def settle(
    connection: Connection, database: Database, settlements: Sequence[Settlement], *, owner: str
) -> dict[Key, Settled]:
    """Return these jobs to ready or bury them, as their verdicts say. By (id, fence); missing: the lease was lost."""
    ordered = sorted(settlements, key=lambda settlement: settlement.id)
    ids, fences, verdicts = zip(*ordered, strict=True)
    rows = await connection.fetch(
        database.sql(SETTLE), ids, fences, *(list(column) for column in zip(*verdicts, strict=True)), owner
    )
    return {(row[0], row[1]): Settled(row[2], row[3]) for row in rows}


WAKE = "SELECT {schema}.wake_workers(queue) FROM unnest($1::text[]) AS queue"


async def wake(connection: Connection, database: Database, queues: Sequence[str]) -> None:
    """Tell a hungry process, if there is one, that jobs of these queues became ready."""
    await connection.execute(database.sql(WAKE), list(queues))


BRIEF_LOCKS = "SELECT set_config('lock_timeout', $1, true)"


async def wait_briefly_for_locks(connection: Connection, *, seconds: float) -> None:
    """In this transaction: what cannot be locked within this time is refused (55P03)."""
    await connection.execute(BRIEF_LOCKS, f"{int(seconds * 1000)}ms")


class Ruling(NamedTuple):
    """What the database says of an attempt whose last word was not acknowledged."""

    state: str | None
    """None: the row is gone."""
    mine: bool
    """Owner and fence are still ours: it has not been settled, write again."""
    done: bool
    """The completion is committed (by this attempt, not by another)."""
    undecided: bool
    """The row is locked: by our own commit, which may still be in flight, or by somebody else. Look again."""


# jobs_pkey. Only a row that can be locked is judged: a commit that is still in flight holds its lock. The presence is written so
# that this transaction has something to commit: its clean end then proves that the commits before it have reached a synchronous
# standby too.
RULE = """
WITH proof AS (
    UPDATE {schema}.processes SET seen_at = now() WHERE id = $3
), held AS (
    SELECT * FROM unnest($1::bigint[], $2::bigint[], $4::text[]) AS h(id, fence, key)
), locked AS MATERIALIZED (
    SELECT j.id, j.fence, j.state, j.lease_owner FROM {schema}.jobs AS j
    WHERE j.id = ANY ($1) ORDER BY j.id FOR NO KEY UPDATE SKIP LOCKED
)
SELECT held.id, held.fence, locked.state,
    COALESCE(locked.fence = held.fence AND locked.lease_owner IS NOT DISTINCT FROM $3, false) AS mine,
    COALESCE(locked.fence = held.fence AND locked.state = 'succeeded', false)
        OR EXISTS (
            SELECT FROM {schema}.job_effects AS e
            WHERE e.idempotency_key = held.key AND e.job_id = held.id AND e.fence = held.fence) AS done,
    locked.id IS NULL AND EXISTS (SELECT FROM {schema}.jobs AS j WHERE j.id = held.id) AS undecided
FROM held LEFT JOIN locked ON locked.id = held.id
"""


async def rule(connection: Connection, database: Database, jobs: Sequence[ClaimedJob], *, owner: str) -> dict[Key, Ruling]:
    """Look under a row lock how these attempts ended; waits for nobody."""
    ids, fences, keys = [job.id for job in jobs], [job.fence for job in jobs], [job.key for job in jobs]
    rows = await connection.fetch(database.sql(RULE), ids, fences, owner, keys)
    return {(row[0], row[1]): Ruling(*row[2:]) for row in rows}


# --- a handler's own transaction -----------------------------------------------------------------------------------------

GUARD = "INSERT INTO {schema}.open_transactions (job_id, fence) VALUES ($1, $2)"


async def open_own(connection: Connection, database: Database, job: ClaimedJob, *, owner: str, deletes: bool) -> bool | None:
    """Inside a transaction just begun: take the fence (which completes the job and locks its row), then the ledger row.

    None: the lease is lost. True: the key's effect had been applied before. False: go on.
    """
    answer = await complete(connection, database, [Completion(job.id, job.fence, None, True)], owner=owner, deletes=deletes)
    already_applied = answer.get((job.id, job.fence))
    if already_applied is False:
        await connection.execute(database.sql(GUARD), job.id, job.fence)
    return already_applied


# jobs_pkey. The row may be deleted already (RETENTION 0): then there is nowhere to store a result.
RESULT = "UPDATE {schema}.jobs SET result = $3::text::jsonb WHERE id = $1 AND fence = $2 AND state = 'succeeded'"
UNGUARD = "DELETE FROM {schema}.open_transactions WHERE job_id = $1 AND fence = $2"


async def close_own(connection: Connection, database: Database, job: ClaimedJob, *, result: str | None) -> bool:
    """Just before COMMIT. False: this is not the transaction that took the fence, it was ended by hand; do not commit."""
    removed: str = await connection.execute(database.sql(UNGUARD), job.id, job.fence)
    if removed != "DELETE 1":
        return False
    if result is not None:
        await connection.execute(database.sql(RESULT), job.id, job.fence, result)
    return True
