"""Enqueue many jobs in the caller's own transaction: all of them or none, in chunks, each of them one statement.

Everybody writes in the order of the keys, so that two callers with common keys wait for each other, but never in a circle.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import asyncpg

from worker.new_job import RESERVED_KEY_PREFIX, NewJob, new_job_from
from worker.store.enqueueing import SURELY_FITTING_CHARACTERS, Enqueued, in_schema, refuse_oversized

CHUNK_JOBS = 1_000
_CHUNK_CHARACTERS = 4_000_000
_ROUNDS = 100


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

    return await _enqueue(connection, keys, read, schema, _write_all)


def _key_of(fields: Mapping[str, object]) -> str | None:
    """What the order goes by, before anything is checked."""
    key = fields.get("key") if type(fields) is dict or isinstance(fields, Mapping) else None
    return key if isinstance(key, str) else None


async def enqueue_checked(connection: asyncpg.Connection, jobs: Sequence[NewJob], *, schema: str = "public") -> list[Enqueued]:
    """`enqueue_many` for jobs that have been checked already."""
    return await _enqueue(connection, [job.key for job in jobs], jobs.__getitem__, schema, _write_all)


async def enqueue_part(connection: asyncpg.Connection, jobs: Sequence[NewJob], *, schema: str = "public") -> list[Enqueued]:
    """`enqueue_checked` as one of many steps of the caller's transaction, without a savepoint: when anything is raised, all of that
    has to be rolled back. Raises KeyVanished where the others begin again."""
    return await _enqueue(connection, [job.key for job in jobs], jobs.__getitem__, schema, _write_once)


_Read = Callable[[int], NewJob]
_Write = Callable[[asyncpg.Connection, Mapping[str, int], _Read, str], Awaitable[dict[str, Enqueued]]]


async def _enqueue(
    connection: asyncpg.Connection, keys: list[str | None], read: _Read, schema: str, write: _Write
) -> list[Enqueued]:
    # One random part a call: keys that follow each other fill an index twice as fast as random ones.
    generated = f"{RESERVED_KEY_PREFIX}{uuid.uuid4()}"
    all_keys = [key if key is not None else f"{generated}-{place:06}" for place, key in enumerate(keys)]
    last = len(all_keys) - 1
    places = dict(zip(reversed(all_keys), range(last, -1, -1), strict=True))  # where each is for the first time
    repeated = [place for place, key in enumerate(all_keys) if places[key] != place] if len(places) < len(all_keys) else []
    for place in repeated:
        read(place)  # what is not written is checked all the same
    answers_by_key = await write(connection, places, read, schema)
    answers = [answers_by_key[key] for key in all_keys]
    for place in repeated:
        answers[place] = answers[place]._replace(created=False)
    return answers


class KeyVanished(Exception):
    """A job that was in the way of one of ours came and went while we looked. The message is their key."""


async def _write_all(connection: asyncpg.Connection, places: Mapping[str, int], read: _Read, schema: str) -> dict[str, Enqueued]:
    """The answers by key. `places`: by key, what `read` is to be asked for."""
    vanished = ""
    for _ in range(_ROUNDS):
        try:
            async with _all_or_nothing(connection):
                return await _write_once(connection, places, read, schema)
        except KeyVanished as error:
            # To insert its key behind those that follow it could close a circle of callers that wait for each other: let go of
            # everything, and begin again. No savepoint a chunk for that: beyond 64 of them every snapshot in the whole server
            # would have to look up whose they are.
            vanished = str(error)
    raise RuntimeError(f"key {vanished!r} comes and goes, giving up")


class _Chunk(NamedTuple):
    """Jobs on their way in the order of their keys, made ready for one statement."""

    keys: Sequence[str]
    places: Sequence[int]
    """Of each among those given."""
    statement: str
    columns: Sequence[object]
    """Its arguments behind keys, places and the moment."""
    large: Sequence[tuple[int, NewJob]]
    """Those that the server has to measure first, with their places."""


class _Written(NamedTuple):
    """What has become of a chunk: the keys of the new jobs with their ids, and the jobs that were there before."""

    keys: Sequence[str]
    ids: Sequence[int]
    old: Mapping[str, Enqueued]

    def add_to(self, answers: dict[str, Enqueued]) -> None:
        answers.update(zip(self.keys, map(Enqueued, self.ids, repeat(True), repeat("ready")), strict=True))
        answers.update(self.old)


async def _write_once(connection: asyncpg.Connection, places: Mapping[str, int], read: _Read, schema: str) -> dict[str, Enqueued]:
    """While the server writes a chunk, the answers of the one before are taken, and the next one is read: checked, and turned into
    JSON."""
    chunks = _chunks(places, read)
    answers: dict[str, Enqueued] = {}
    written = _Written((), (), {})
    started_at = await connection.fetchval(READ_MICROSECONDS)
    chunk = next(chunks, None)
    while chunk is not None:
        for place, job in chunk.large:
            try:
                await refuse_oversized(connection, job)
            except ValueError as error:
                raise ValueError(f"job {place}: {error}") from None
        writing = asyncio.create_task(_write_chunk(connection, chunk, started_at, schema))
        try:
            await asyncio.sleep(0)  # it has been sent
            written.add_to(answers)
            chunk = next(chunks, None)
        except BaseException:
            writing.cancel()
            await asyncio.wait({writing})
            if not writing.cancelled():
                writing.exception()  # ours is the one to tell
            raise
        written = await writing
    written.add_to(answers)
    return answers


async def _write_chunk(connection: asyncpg.Connection, chunk: _Chunk, started_at: int, schema: str) -> _Written:
    written = await _insert(connection, chunk, started_at, schema)
    if len(written.keys) + len(written.old) == len(chunk.keys):
        return written
    # In the way, and younger than the statement, which has waited for them to be committed.
    answered = {*written.keys, *written.old}
    missing = [key for key in chunk.keys if key not in answered]
    found = await _find(connection, missing, schema)
    for key in missing:
        if key not in found:
            raise KeyVanished(key)
    return written._replace(old={**written.old, **found})


READ_MICROSECONDS = """
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
"""

# One microsecond apart in the order given: rows are written in key order, but run first come, first served.
INSERT_MANY = """
WITH new AS (
    INSERT INTO {schema}.jobs (idempotency_key, kind, queue, priority, payload, available_at, max_attempts)
    SELECT n.key, n.kind, n.queue, n.priority, n.payload::jsonb,
        COALESCE(
            n.run_at::timestamptz,
            timestamptz 'epoch' + ($3::bigint + n.place) * interval '1 microsecond'
                + n.delay * interval '1 second'),
        n.max_attempts
    FROM unnest(
            $1::text[], $2::int8[], $4::text[], $5::text[], $6::text[], $7::int2[], $8::text[], $9::float8[], $10::int4[])
        AS n (key, place, payload, kind, queue, priority, run_at, delay, max_attempts)
"""

# The same for jobs that differ in nothing but key and payload: most of the arrays are one value.
INSERT_MANY_ALIKE = """
WITH new AS (
    INSERT INTO {schema}.jobs (idempotency_key, kind, queue, priority, payload, available_at, max_attempts)
    SELECT n.key, $5::text, $6::text, $7::int2, n.payload::jsonb,
        COALESCE(
            $8::text::timestamptz,
            timestamptz 'epoch' + ($3::bigint + n.place) * interval '1 microsecond'
                + $9::float8 * interval '1 second'),
        $10::int4
    FROM unnest($1::text[], $2::int8[], $4::text[]) AS n (key, place, payload)
"""

# One row of arrays comes back, a good deal cheaper than a row for each.
_NEW_ONES = """
    RETURNING idempotency_key, id
)
SELECT array_agg(idempotency_key), array_agg(id) FROM new
"""

# With the jobs that have one of the keys already, as the snapshot of the statement shows them; where none is in the way nobody
# looks for them. Index jobs_idempotency_key_key. A join, and not `= ANY`: a plan that was made while the table was small would
# go on comparing each row with each key (measured: 1,500 jobs/s in place of 80,000).
_NEW_ONES_AND_OLD = """
    ON CONFLICT (idempotency_key) DO NOTHING
    RETURNING idempotency_key, id
)
SELECT n.*, o.*
FROM (SELECT array_agg(idempotency_key), array_agg(id) FROM new) AS n,
    (SELECT array_agg(j.idempotency_key), array_agg(j.id), array_agg(j.state)
    FROM unnest($1::text[]) AS k (key) JOIN {schema}.jobs AS j ON j.idempotency_key = k.key
    WHERE (SELECT count(*) FROM new) < cardinality($1::text[])) AS o
"""


async def _insert(connection: asyncpg.Connection, chunk: _Chunk, started_at: int, schema: str) -> _Written:
    """Insert those whose keys are not there."""
    row = await connection.fetchrow(in_schema(chunk.statement, schema), chunk.keys, chunk.places, started_at, *chunk.columns)
    assert row is not None  # an aggregate
    keys, ids, *there = row
    if not there or there[0] is None:
        return _Written(keys or (), ids or (), {})
    new = set(keys or ())  # an old one that was deleted meanwhile can be among them
    old = {key: Enqueued(id, False, state) for key, id, state in zip(*there, strict=True) if key not in new}
    return _Written(keys or (), ids or (), old)


# The same way.
FIND_BY_KEYS = """
SELECT j.idempotency_key, j.id, j.state
FROM unnest($1::text[]) AS k (key) JOIN {schema}.jobs AS j ON j.idempotency_key = k.key
"""


async def _find(connection: asyncpg.Connection, keys: Sequence[str], schema: str) -> dict[str, Enqueued]:
    rows = await connection.fetch(in_schema(FIND_BY_KEYS, schema), keys)
    return {key: Enqueued(id, False, state) for key, id, state in rows}


def _chunks(places: Mapping[str, int], read: _Read) -> Iterator[_Chunk]:
    """In the order of the keys: strings compare here as COLLATE "C" does there."""
    keys: list[str] = []
    jobs: list[NewJob] = []
    characters = 0
    for key in sorted(places):
        job = read(places[key])
        keys.append(key)
        jobs.append(job)
        characters += len(job.payload)
        if len(jobs) >= CHUNK_JOBS or characters >= _CHUNK_CHARACTERS:
            yield _chunk(keys, [places[key] for key in keys], jobs)
            keys, jobs, characters = [], [], 0
    if jobs:
        yield _chunk(keys, [places[key] for key in keys], jobs)


def _chunk(keys: Sequence[str], places: Sequence[int], jobs: Sequence[NewJob]) -> _Chunk:
    kind, payload, _, queue, priority, run_at, delay_seconds, max_attempts = zip(*jobs, strict=True)
    rest = (kind, queue, priority, run_at, delay_seconds, max_attempts)
    are_alike = all(column.count(column[0]) == len(column) for column in rest)
    # Callers' keys do not begin so, and the keys are sorted. A random key is nobody else's.
    are_generated = keys[0].startswith(RESERVED_KEY_PREFIX) and keys[-1].startswith(RESERVED_KEY_PREFIX)
    # Without looking for conflicts a fifth of the server's time is saved.
    statement = (INSERT_MANY_ALIKE if are_alike else INSERT_MANY) + (_NEW_ONES if are_generated else _NEW_ONES_AND_OLD)
    columns = (payload, *((column[0] for column in rest) if are_alike else rest))
    large = [(place, job) for place, job in zip(places, jobs, strict=True) if len(job.payload) > SURELY_FITTING_CHARACTERS]
    return _Chunk(keys, places, statement, columns, large)


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
