"""The built-in handlers: what a process runs when WORKER_HANDLERS is not set."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from worker.handlers import Handlers
from worker.job import Job

# The schema's own table, so it is named as the other tables of ours are.
RECORD_MESSAGE = """
INSERT INTO {schema}.processed_messages (idempotency_key, message) VALUES ($1, $2)
ON CONFLICT (idempotency_key) DO NOTHING
"""


class Message(BaseModel):
    """Payload of `message`."""

    model_config = ConfigDict(strict=True)

    message: str
    sleep_ms: int = Field(default=0, ge=0, le=15_000)


class Sleep(BaseModel):
    """Payload of `sleep`."""

    sleep_duration_seconds: float = Field(ge=0, le=86_400, allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """Faults made on purpose, to watch recovery. A step is a second of a `sleep` job, or what is left of it."""

    crash: float = 0.0
    """Probability a step that the job kills its process, without a word."""
    latency: float = 0.0
    """Probability a step that the job blocks the event loop for `stall_seconds`."""
    stall_seconds: float = 0.0

    def strike(self) -> None:
        """The faults of one step. Does not return from a crash."""
        if random.random() < self.crash:
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(128 + signal.SIGKILL)  # process 1 of a container is not killed by its own signal
        if random.random() < self.latency:
            time.sleep(self.stall_seconds)


NO_CHAOS = Chaos()
_STEP_SECONDS = 1.0


def builtin_handlers(schema: str, chaos: Chaos = NO_CHAOS) -> Handlers:
    """`message`: an optional pause, then one row in `processed_messages`. `sleep`: a pause, as the generator asks for."""
    handlers = Handlers()
    record_message = RECORD_MESSAGE.replace("{schema}", '"' + schema.replace('"', '""') + '"')

    @handlers.job("message", payload=Message)
    async def message(job: Job[Message]) -> None:
        if job.payload.sleep_ms:
            await asyncio.sleep(job.payload.sleep_ms / 1000)
        job.effect(record_message, job.key, job.payload.message)

    @handlers.job("sleep", payload=Sleep)
    async def sleep(job: Job[Sleep]) -> None:
        remaining_seconds = job.payload.sleep_duration_seconds
        while True:
            chaos.strike()
            await asyncio.sleep(min(remaining_seconds, _STEP_SECONDS))
            remaining_seconds -= _STEP_SECONDS
            if remaining_seconds <= 0:
                return

    return handlers
