"""The handlers that the daemons of `worker bench` run."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from worker.clock import local_seconds
from worker.handlers import Handlers
from worker.job import Job

NOTHING: Final = "bench.nothing"
EFFECT: Final = "bench.effect"
MOMENT: Final = "bench.moment"
NAP: Final = "bench.nap"

DAY_SECONDS: Final = 86_400.0

_SCHEMA = os.environ.get("WORKER_SCHEMA", "public").replace('"', '""')
# A plain INSERT: a second one for the same key would fail its job, and with it the run.
_EFFECT_ROW = f'INSERT INTO "{_SCHEMA}".processed_messages (idempotency_key, message) VALUES ($1, $2)'

handlers = Handlers()


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
