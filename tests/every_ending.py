"""Handlers for each way in which a job can end, and the proof that all of it works on a database."""

from __future__ import annotations

from typing import Any

from tests.inprocess import Run
from tests.waiting import await_for
from worker import Handlers, Job


def everything() -> Handlers:
    """A handler for each way in which a job can end; an effect goes to a table of the user's, found by its own name or not."""
    handlers = Handlers()

    @handlers.job("effect")
    async def effect(job: Job[object]) -> str:
        job.effect("INSERT INTO public.ledger VALUES ($1, $2)", job.key, job.fence)
        job.enqueue("own", {}, key=f"{job.key}-next")
        return "done"

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        async with job.transaction() as tx:
            await tx.execute("INSERT INTO public.ledger VALUES ($1, $2)", job.key, job.fence)
            job.result = await tx.fetchval("SHOW transaction_isolation")

    @handlers.job("fail")
    async def fail(job: Job[object]) -> None:
        raise ValueError("no")

    return handlers


async def everything_works(run: Run, jobs: int = 1) -> None:
    """Jobs of each kind end as they should, each at its first attempt, with one effect each."""
    for number in range(jobs):
        await run.enqueue("effect", key=f"effect{number}")
        await run.enqueue("fail", key=f"fail{number}", max_attempts=2)
    for number in range(jobs):
        for key, wanted in (
            (f"effect{number}", ("succeeded", 1)),
            (f"effect{number}-next", ("succeeded", 1)),
            (f"fail{number}", ("dead", 2)),
        ):
            row = await run.ended(await id_of(run, key))
            assert (row["state"], row["attempts"]) == wanted, row["last_error"]
    assert await run.value("SELECT count(*) FROM public.ledger") == 2 * jobs
    assert await run.value("SELECT count(DISTINCT key) FROM public.ledger") == 2 * jobs


async def id_of(run: Run, key: str) -> int:
    """The id of the job with this key, once there is one."""
    table = '"' + run.schema.replace('"', '""') + '".jobs'

    async def find() -> Any:
        return await run.value(f"SELECT id FROM {table} WHERE idempotency_key = $1", key)

    return int(await await_for(find))
