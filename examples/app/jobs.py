"""The handler of the README. From this directory's parent: `WORKER_HANDLERS=app.jobs:handlers worker run`.

Its own table has to be there first: CREATE TABLE sent (key text PRIMARY KEY, body text NOT NULL)
"""

from __future__ import annotations

from pydantic import BaseModel

from worker import Handlers, Job

handlers = Handlers()


class Welcome(BaseModel):
    message: str
    sleep_ms: int = 0


async def render(welcome: Welcome) -> str:
    return f"Welcome! {welcome.message}"


@handlers.job("welcome", payload=Welcome, timeout_seconds=60)
async def welcome(job: Job[Welcome]) -> dict[str, int]:
    text = await render(job.payload)  # slow work: no transaction is open
    job.effect("INSERT INTO sent (key, body) VALUES ($1, $2)", job.key, text)  # committed with the completion
    return {"length": len(text)}  # stored in jobs.result
