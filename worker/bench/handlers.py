"""The handlers that the daemons of `worker bench` run."""

from __future__ import annotations

import asyncio
import os
import zlib
from typing import Final

from pydantic import BaseModel

from worker.clock import local_seconds
from worker.handlers import Handlers
from worker.job import Job

NOTHING: Final = "bench.nothing"
EFFECT: Final = "bench.effect"
MOMENT: Final = "bench.moment"
NAP: Final = "bench.nap"
FAULTY: Final = "bench.faulty"
SHARED: Final = "bench.shared"
BUSY: Final = "bench.busy"

GUILTY_NUMBER: Final = 51
GUILTY: Final = "one fails"
COUNTERS: Final = 1_000

DAY_SECONDS: Final = 86_400.0

_SCHEMA = os.environ.get("WORKER_SCHEMA", "public").replace('"', '""')
# A plain INSERT: a second one for the same key would fail its job, and with it the run.
_EFFECT_ROW = f'INSERT INTO "{_SCHEMA}".processed_messages (idempotency_key, message) VALUES ($1, $2)'
# It fails, for its job alone, when there is nothing to divide by.
_FAULTY_ROW = f'INSERT INTO "{_SCHEMA}".processed_messages (idempotency_key, message) VALUES ($1, (1 / $2::int)::text)'
_HIT = f'UPDATE "{_SCHEMA}".bench_counters SET hits = hits + 1 WHERE id = $1'

handlers = Handlers()


class Batch(BaseModel):
    """Payload of FAULTY: what the scenario says about the whole batch, and the job's number in it."""

    n: int
    text: str


class Moment(BaseModel):
    """Payload of BUSY."""

    seconds: float


@handlers.job(NOTHING)
async def nothing(job: Job[object]) -> None:
    """What a job costs by itself."""


@handlers.job(EFFECT)
async def effect(job: Job[object]) -> None:
    """One effect row, committed with the completion."""
    job.effect(_EFFECT_ROW, job.key, "m")


@handlers.job(MOMENT)
async def moment(job: Job[object]) -> float:
    """When the handler started, on the clock that all processes of this host share."""
    return local_seconds()


@handlers.job(NAP, timeout_seconds=DAY_SECONDS)
async def nap(job: Job[object]) -> None:
    """Keep a worker task busy until the daemon is killed."""
    await asyncio.sleep(DAY_SECONDS)


@handlers.job(FAULTY, payload=Batch)
async def faulty(job: Job[Batch]) -> None:
    """One effect row; where the batch says so, that of one job cannot be applied. Each round has a statement text of its own."""
    fails, _, number = job.payload.text.partition(", ")
    is_guilty = fails == GUILTY and job.payload.n == GUILTY_NUMBER
    job.effect(f"{_FAULTY_ROW} /* {int(number)} */", job.key, 0 if is_guilty else 1)


@handlers.job(SHARED)
async def shared(job: Job[object]) -> None:
    """One update of a row that many jobs update, in no order."""
    job.effect(_HIT, zlib.crc32(job.key.encode()) % COUNTERS)


@handlers.job(BUSY, payload=Moment)
async def busy(job: Job[Moment]) -> None:
    """Keep a worker task busy for a moment, without a core."""
    await asyncio.sleep(job.payload.seconds)
