"""Enqueue in the caller's own transaction, on the caller's own connection, whatever codecs it has.

A duplicate key never aborts the transaction: the first job's id comes back with `created=False`. Several keys
in one transaction belong in key order, as `enqueue_many` writes them, or two callers can block each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import asyncpg

from worker.domain_json import decode_json
from worker.new_job import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_QUEUE,
    RESERVED_KEY_PREFIX,
    NewJob,
    new_job,
    new_job_from,
)

PAYLOAD_BYTES = 1_048_576
# Shorter text cannot become more than PAYLOAD_BYTES of jsonb: "1," takes the most, 12 bytes for 2 characters.
_SURELY_FITTING_CHARACTERS = 150_000

CHUNK_JOBS = 1_000
_CHUNK_CHARACTERS = 4_000_000
_ROUNDS = 100

_FIRST_POLL_SECONDS = 0.05
_SLOWEST_POLL_SECONDS = 1.0


class Enqueued(NamedTuple):
    """The job that has the key: a new one when `created`, else the one there before, in whatever state."""

    id: int
    created: bool
    state: str


class Finished(NamedTuple):
    """How a job ended: `succeeded` with its result, `dead` or `cancelled` with its last error."""

    state: str
    result: object
    error: str | None


# The arguments are the fields of NewJob.
ENQUEUE = """
SELECT id, created, state
FROM {schema}.enqueue_job(
    kind => $1,
    payload => $2::text::jsonb,
    key => $3,
    queue => $4,
    priority => $5,
    run_at => COALESCE($6::text::timestamptz, clock_timestamp() + $7::float8 * interval '1 second'),
    max_attempts => $8)
"""


async def enqueue(
    connection: asyncpg.Connection,
    kind: str,
    payload: object,
    *,
    key: str | None = None,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    run_at: datetime | None = None,
    delay_seconds: float | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    schema: str = "public",
) -> Enqueued:
    """Enqueue one job; it runs once the caller's transaction has committed, not before `run_at` or the delay.

    Raises TypeError or ValueError, naming the field, before anything is written: the caller's transaction
    goes on.
    """
    job = new_job(
        kind,
        payload,
        key=key,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay_seconds=delay_seconds,
        max_attempts=max_attempts,
    )
    await refuse_oversized(connection, job)
    row = await connection.fetchrow(_in_schema(ENQUEUE, schema), *job)
    return Enqueued(row["id"], row["created"], row["state"])


async def enqueue_many(
    connection: asyncpg.Connection, jobs: Iterable[Mapping[str, object]], *, schema: str = "public"
) -> list[Enqueued]:
    """Enqueue all of `jobs` or none, in chunks; the answers are in the order of `jobs`.

    Each is a mapping with the arguments of `enqueue`, `payload` required, `kind` "message" if absent. All of
    them are due in the order given. A key that occurs twice is enqueued once. Inside a transaction of the
    caller a failure leaves that transaction usable. Raises TypeError or ValueError beginning with `job 3:`
    (counted from 0) and the field.
    """
    given = list(jobs)
    keys = [_key_of(fields) for fields in given]

    def read(place: int) -> NewJob:
        try:
            return new_job_from(given[place])
        except (TypeError, ValueError):
            for position, fields in enumerate(given):  # the first at fault is the one to name
                try:
                    new_job_from(fields)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"job {position}: {error}") from None
            raise

    return await _enqueue(connection, keys, read, schema)


def _key_of(fields: Mapping[str, object]) -> str | None:
    """What the order goes by, before anything is checked."""
    key = fields.get("key") if isinstance(fields, Mapping) else None
    return key if isinstance(key, str) else None


async def enqueue_checked(connection: asyncpg.Connection, jobs: Sequence[NewJob], *, schema: str = "public") -> list[Enqueued]:
    """`enqueue_many` for jobs that have been checked already."""
    return await _enqueue(connection, [job.key for job in jobs], jobs.__getitem__, schema)


async def _enqueue(
    connection: asyncpg.Connection, keys: list[str | None], read: Callable[[int], NewJob], schema: str
) -> list[Enqueued]:
    """While the server writes a chunk, the next one is read: checked, and turned into JSON."""
    # One random part a call: keys that follow each other fill an index twice as fast as random ones.
    generated = f"{RESERVED_KEY_PREFIX}{uuid.uuid4()}"
    all_keys = [key if key is not None else f"{generated}-{place:06}" for place, key in enumerate(keys)]
    places: dict[str, int] = {}
    for place, key in enumerate(all_keys):
        places.setdefault(key, place)
    for place, key in enumerate(all_keys):
        if places[key] != place:
            read(place)  # what is not written is checked all the same
    answers: dict[str, Enqueued] = {}
    # Key order, the same for everybody: two callers with common keys wait for each other, but never in a circle. Strings compare
    # here as COLLATE "C" does there.
    chunks = _chunks(sorted(places.items()), read)
    async with _all_or_nothing(connection):
        started_at = await connection.fetchval(READ_MICROSECONDS)
        chunk = next(chunks, None)
        while chunk is not None:
            for item in chunk:
                try:
                    await refuse_oversized(connection, item.job)
                except ValueError as error:
                    raise ValueError(f"job {item.place}: {error}") from None
            writing = asyncio.create_task(_write_chunk(connection, chunk, started_at, schema, answers))
            try:
                await asyncio.sleep(0)  # it has been sent
                chunk = next(chunks, None)
            except BaseException:
                writing.cancel()
                await asyncio.wait({writing})
                if not writing.cancelled():
                    writing.exception()  # ours is the one to tell
                raise
            await writing
    if len(places) < len(all_keys):  # one that was here before is a repetition
        repeated = [places[key] != place for place, key in enumerate(all_keys)]
        return [
            answers[key]._replace(created=False) if again else answers[key] for key, again in zip(all_keys, repeated, strict=True)
        ]
    return [answers[key] for key in all_keys]


class _Item(NamedTuple):
    """One job on its way, and its place among those given."""

    key: str
    place: int
    job: NewJob


async def _write_chunk(
    connection: asyncpg.Connection,
    chunk: Sequence[_Item],
    started_at: int,
    schema: str,
    answers: dict[str, Enqueued],
) -> None:
    if _are_generated(chunk):
        answers.update((key, Enqueued(id, True, "ready")) for key, id in await _insert(connection, chunk, started_at, schema))
        return
    await connection.execute("SAVEPOINT enqueue_chunk")
    for _ in range(_ROUNDS):
        found = {key: Enqueued(id, True, "ready") for key, id in await _insert(connection, chunk, started_at, schema)}
        if there := [item.key for item in chunk if item.key not in found]:
            for key, id, state in await _find(connection, there, schema):
                found[key] = Enqueued(id, False, state)
        if len(found) == len(chunk):
            await connection.execute("RELEASE SAVEPOINT enqueue_chunk")
            answers.update(found)
            return
        # A row that was in the way has gone between the two statements (pruned). To insert its key behind those that follow it
        # could close a circle of callers that wait for each other: let go of the whole chunk, and begin again.
        await connection.execute("ROLLBACK TO SAVEPOINT enqueue_chunk")
    missing = next(item.key for item in chunk if item.key not in found)
    raise RuntimeError(f"key {missing!r} comes and goes, giving up")


def _are_generated(items: Sequence[_Item]) -> bool:
    """They are sorted, and callers' keys do not begin so. A random key is nobody else's."""
    return items[0].key.startswith(RESERVED_KEY_PREFIX) and items[-1].key.startswith(RESERVED_KEY_PREFIX)


READ_MICROSECONDS = """
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
"""

# One microsecond apart in the order given: rows are written in key order, but run first come, first served. One row of arrays
# comes back, a good deal cheaper than a row for each.
INSERT_MANY = """
WITH new AS (
    INSERT INTO {schema}.jobs (idempotency_key, kind, queue, priority, payload, available_at, max_attempts)
    SELECT n.key, n.kind, n.queue, n.priority, n.payload::jsonb,
        COALESCE(
            n.run_at::timestamptz,
            timestamptz 'epoch' + ($4::bigint + n.place) * interval '1 microsecond'
                + n.delay * interval '1 second'),
        n.max_attempts
    FROM unnest(
            $1::text[], $2::text[], $3::int8[], $5::text[], $6::text[], $7::int2[], $8::text[], $9::float8[], $10::int4[])
        AS n (key, payload, place, kind, queue, priority, run_at, delay, max_attempts)
    {on_conflict}
    RETURNING idempotency_key, id
)
SELECT array_agg(idempotency_key), array_agg(id) FROM new
"""

# The same for jobs that differ in nothing but key and payload: most of the arrays are one value.
INSERT_MANY_ALIKE = """
WITH new AS (
    INSERT INTO {schema}.jobs (idempotency_key, kind, queue, priority, payload, available_at, max_attempts)
    SELECT n.key, $5::text, $6::text, $7::int2, n.payload::jsonb,
        COALESCE(
            $8::text::timestamptz,
            timestamptz 'epoch' + ($4::bigint + n.place) * interval '1 microsecond'
                + $9::float8 * interval '1 second'),
        $10::int4
    FROM unnest($1::text[], $2::text[], $3::int8[]) AS n (key, payload, place)
    {on_conflict}
    RETURNING idempotency_key, id
)
SELECT array_agg(idempotency_key), array_agg(id) FROM new
"""


_ON_CONFLICT = "ON CONFLICT (idempotency_key) DO NOTHING"


async def _insert(connection: asyncpg.Connection, items: Sequence[_Item], started_at: int, schema: str) -> list[tuple[str, int]]:
    """Key and id of those that were not there."""
    keys, places, jobs = zip(*items, strict=True)
    kind, payload, _, queue, priority, run_at, delay_seconds, max_attempts = zip(*jobs, strict=True)
    columns = (kind, queue, priority, run_at, delay_seconds, max_attempts)
    are_alike = all(column.count(column[0]) == len(column) for column in columns)
    template = INSERT_MANY_ALIKE if are_alike else INSERT_MANY
    # Left out it saves a fifth of the server's time.
    text = _in_schema(template.replace("{on_conflict}", "" if _are_generated(items) else _ON_CONFLICT), schema)
    rest = (column[0] for column in columns) if are_alike else columns
    row = await connection.fetchrow(text, keys, payload, places, started_at, *rest)
    assert row is not None  # an aggregate
    return [] if row[0] is None else list(zip(row[0], row[1], strict=True))


FIND_BY_KEYS = """
SELECT idempotency_key, id, state
FROM {schema}.jobs
WHERE idempotency_key = ANY ($1::text[])
"""


async def _find(connection: asyncpg.Connection, keys: Sequence[str], schema: str) -> list[asyncpg.Record]:
    rows: list[asyncpg.Record] = await connection.fetch(_in_schema(FIND_BY_KEYS, schema), keys)
    return rows


def _chunks(order: Iterable[tuple[str, int]], read: Callable[[int], NewJob]) -> Iterator[list[_Item]]:
    chunk: list[_Item] = []
    characters = 0
    for key, place in order:
        job = read(place)
        chunk.append(_Item(key, place, job))
        characters += len(job.payload)
        if len(chunk) >= CHUNK_JOBS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


@contextlib.asynccontextmanager
async def _all_or_nothing(connection: asyncpg.Connection) -> AsyncIterator[None]:
    """A transaction, or a savepoint in the caller's, also when that one was begun by hand."""
    if not connection.is_in_transaction():
        async with connection.transaction(isolation="read_committed"):
            yield
        return
    await connection.execute("SAVEPOINT enqueue_many")
    try:
        yield
    except BaseException:
        if not connection.is_closed():
            await connection.execute("ROLLBACK TO SAVEPOINT enqueue_many; RELEASE SAVEPOINT enqueue_many")
        raise
    await connection.execute("RELEASE SAVEPOINT enqueue_many")


async def refuse_oversized(connection: asyncpg.Connection, job: NewJob) -> None:
    """Raise ValueError for a payload that the table would refuse: asked first, it aborts no transaction."""
    if len(job.payload) <= _SURELY_FITTING_CHARACTERS:
        return
    size: int = await connection.fetchval("SELECT pg_column_size($1::text::jsonb)", job.payload)
    if size > PAYLOAD_BYTES:
        raise ValueError(f"payload: 1 MiB ({PAYLOAD_BYTES:,} bytes) as stored is allowed, this has {size:,}")


READ_STATE = """
SELECT state, result::text AS result, last_error
FROM {schema}.jobs
WHERE id = $1
"""


async def wait(connection: asyncpg.Connection, id: int, *, timeout_seconds: float, schema: str = "public") -> Finished:
    """Wait until the job has ended; polls, ever more slowly up to once a second.

    Raises TimeoutError when it has not ended in time, LookupError when there is no such job (any more: a
    retention of 0 deletes a job as it succeeds). In a transaction that began before the job ended only read
    committed sees its end.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    pause_seconds = _FIRST_POLL_SECONDS
    while True:
        # Each look may take a second even at the very end, so that a limit of 0 is one look.
        row = await connection.fetchrow(_in_schema(READ_STATE, schema), id, timeout=max(deadline - loop.time(), 1.0))
        if row is None:
            raise LookupError(f"there is no job {id}")
        if row["state"] == "succeeded":
            result = row["result"]
            return Finished("succeeded", None if result is None else decode_json(result), None)
        if row["state"] in ("dead", "cancelled"):
            return Finished(row["state"], None, row["last_error"])
        remaining_seconds = deadline - loop.time()
        if remaining_seconds <= 0:
            raise TimeoutError(f"job {id} is still {row['state']} after {timeout_seconds:g} s")
        await asyncio.sleep(min(pause_seconds, remaining_seconds))
        pause_seconds = min(pause_seconds * 1.5, _SLOWEST_POLL_SECONDS)


def _in_schema(template: str, schema: str) -> str:
    return template.replace("{schema}", '"' + schema.replace('"', '""') + '"')
