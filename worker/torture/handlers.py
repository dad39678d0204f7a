"""The handlers that the daemons of `worker torture` run: every way in which an attempt can end.

Each notes its start and its end in a file, and lets what it leaves in the database carry its own fence: the effect row, the result,
the text of an error. So a mix-up of two attempts shows in what the database recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Final

from pydantic import BaseModel

from worker.errors import Discard, Retry, Snooze
from worker.handlers import Handlers
from worker.job import Job
from worker.torture.job_rules import Kinds
from worker.torture.notes import NOTES, Notebook

STARTED: Final = "torture_handler_started"
"""The line in the daemon's log."""

NOTHING: Final = "torture.nothing"
EFFECT: Final = "torture.effect"
TRANSACTION: Final = "torture.transaction"
THREAD: Final = "torture.thread"
CHAIN: Final = "torture.chain"
FAIL: Final = "torture.fail"
SNOOZE: Final = "torture.snooze"
RETRY: Final = "torture.retry"
DISCARD: Final = "torture.discard"
READ: Final = "torture.read"
SPOILT: Final = "torture.spoilt"
BLOCK: Final = "torture.block"
POISON: Final = "torture.poison"

KINDS: Final = Kinds(
    with_effect=frozenset({EFFECT, TRANSACTION, THREAD, CHAIN, FAIL, SNOOZE, RETRY, READ, BLOCK, SPOILT}),
    with_next=frozenset({CHAIN}),
    refusing=frozenset({DISCARD}),
    snoozing=frozenset({SNOOZE}),
)
DEAF: Final = frozenset({THREAD, BLOCK})
"""Cannot be told to stop."""

_SCHEMA = os.environ.get("WORKER_SCHEMA", "public").replace('"', '""')
INSERT: Final = f'INSERT INTO "{_SCHEMA}".torture_effects (key, job_id, fence) VALUES ($1, $2, $3)'
SPOILT_INSERT: Final = INSERT.replace("$3", "('spoilt under fence ' || $3::bigint)::bigint")
"""What the server says of it names the fence."""

handlers = Handlers()
_notebook = Notebook(os.environ.get(NOTES, os.devnull), os.environ.get("WORKER_NAME", "nobody"))


class Payload(BaseModel):
    seconds: float
    """How long it takes."""
    failures: int = 0
    """How many attempts fail first."""


@contextlib.contextmanager
def _noted(job: Job[Payload]) -> Iterator[None]:
    _notebook.write("start", subject=str(job.id), fence=job.fence, kind=job.kind)
    job.log.info(STARTED)
    try:
        yield
    finally:
        _notebook.write("end", subject=str(job.id), fence=job.fence, kind=job.kind)


def _with_effect(job: Job[Payload]) -> dict[str, int]:
    job.effect(INSERT, job.key, job.id, job.fence)
    return {"fence": job.fence}


@handlers.job(NOTHING, payload=Payload)
async def nothing(job: Job[Payload]) -> dict[str, int]:
    """No effect: its completion commits itself."""
    with _noted(job):
        await asyncio.sleep(job.payload.seconds)
        return {"fence": job.fence}


@handlers.job(EFFECT, payload=Payload)
async def effect(job: Job[Payload]) -> dict[str, int]:
    with _noted(job):
        await asyncio.sleep(job.payload.seconds)
        return _with_effect(job)


@handlers.job(TRANSACTION, payload=Payload)
async def transaction(job: Job[Payload]) -> None:
    """Its own fenced transaction, open for a moment."""
    with _noted(job):
        await asyncio.sleep(job.payload.seconds)
        async with job.transaction() as connection:
            await connection.execute(INSERT, job.key, job.id, job.fence)
            await asyncio.sleep(0.01)
            job.result = {"fence": job.fence}


@handlers.job(READ, payload=Payload)
async def read(job: Job[Payload]) -> dict[str, int]:
    """Uses the shared connections on the way."""
    with _noted(job):
        async with job.connection() as connection:
            await connection.fetchval("SELECT 1")
        await asyncio.sleep(job.payload.seconds)
        return _with_effect(job)


@handlers.job(THREAD, payload=Payload)
def thread(job: Job[Payload]) -> dict[str, int]:
    """A plain `def`, which cannot be stopped."""
    with _noted(job):
        time.sleep(job.payload.seconds)
        return _with_effect(job)


@handlers.job(CHAIN, payload=Payload)
async def chain(job: Job[Payload]) -> dict[str, int]:
    """With a follow-up job, in the same transaction."""
    with _noted(job):
        await asyncio.sleep(job.payload.seconds)
        job.enqueue(EFFECT, {"seconds": 0.01}, key=f"{job.key}/next")
        return _with_effect(job)


@handlers.job(FAIL, payload=Payload)
async def fail(job: Job[Payload]) -> dict[str, int]:
    with _noted(job):
        await asyncio.sleep(job.payload.seconds)
        if job.attempt <= job.payload.failures:
            raise RuntimeError(f"asked to fail under fence {job.fence}")
        return _with_effect(job)


@handlers.job(SNOOZE, payload=Payload)
async def snooze(job: Job[Payload]) -> dict[str, int]:
    """Comes back later, as often as its fences are odd."""
    with _noted(job):
        if job.fence % 2:
            raise Snooze(job.payload.seconds)
        return _with_effect(job)


@handlers.job(RETRY, payload=Payload)
async def retry(job: Job[Payload]) -> dict[str, int]:
    with _noted(job):
        if job.attempt == 1:
            raise Retry(job.payload.seconds, f"asked to come back under fence {job.fence}")
        return _with_effect(job)


@handlers.job(DISCARD, payload=Payload)
async def discard(job: Job[Payload]) -> None:
    with _noted(job):
        raise Discard(f"refused under fence {job.fence}")


@handlers.job(SPOILT, payload=Payload)
async def spoilt(job: Job[Payload]) -> dict[str, object] | None:
    """What it leaves cannot be written, whoever shares its transaction: an effect, a result, the text of an error."""
    with _noted(job):
        await asyncio.sleep(job.payload.seconds)
        match job.attempt % 3:
            case 0:
                raise RuntimeError(f"asked to fail\0\ud800 under fence {job.fence}")
            case 1:
                job.effect(SPOILT_INSERT, job.key, job.id, job.fence)
                return None
            case _:
                return {"fence": job.fence, "text": "\0"}


@handlers.job(BLOCK, payload=Payload, timeout_seconds=120)
async def block(job: Job[Payload]) -> dict[str, int]:
    """Blocks the loop of its process."""
    with _noted(job):
        time.sleep(job.payload.seconds)  # noqa: ASYNC251  (that is the fault)
        return _with_effect(job)


@handlers.job(POISON, payload=Payload)
async def poison(job: Job[Payload]) -> None:
    """Kills the process it runs in."""
    with _noted(job):
        os.kill(os.getpid(), signal.SIGKILL)
