"""The built-in handlers: what a process runs when WORKER_HANDLERS is not set."""

from __future__ import annotations

import asyncio

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


def builtin_handlers(schema: str) -> Handlers:
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
        await asyncio.sleep(job.payload.sleep_duration_seconds)

    return handlers
