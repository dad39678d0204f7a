"""Effects once per key, whatever becomes of the job's row; and what the ledger of keys is not asked to keep."""

from __future__ import annotations

from typing import Any

import pytest

from tests.effect_rows import APPLY, TABLE
from tests.inprocess import both_shapes, running
from tests.waiting import await_for
from worker import Handlers, Job, events


@both_shapes
@pytest.mark.parametrize("deletes", [False, True], ids=["", "retention 0"])
async def test_whatever_is_done_to_the_jobs_table_a_key_has_one_effect(
    database_url: str, shape: dict[str, Any], deletes: bool
) -> None:
    handlers, ran = Handlers(), []

    @handlers.job("write")
    async def write(job: Job[object]) -> str:
        ran.append(job.fence)
        job.effect(APPLY, job.key, 1)
        return "done"

    options = {"retention_seconds": 0} if deletes else {}
    async with running(database_url, handlers, **shape, **options) as run:
        await run.connection.execute(TABLE)

        async def again(times: int) -> None:
            await await_for(lambda: len(run.log.find(events.JOB_SUCCEEDED)) == times)

        await run.enqueue("write", key="k")
        await again(1)
        assert await run.value("SELECT count(*) FROM jobs") == (0 if deletes else 1)
        if not deletes:  # requeue by plain SQL
            await run.connection.execute("UPDATE jobs SET state = 'ready', completed_at = NULL, attempts = 0")
            await again(2)
            await run.connection.execute("DELETE FROM jobs")  # prune by plain SQL
        else:
            await run.enqueue("write", key="k")
            await again(2)
        await run.enqueue("write", key="k")
        await again(3)
        said = run.log.find(events.EFFECT_ALREADY_APPLIED, key="k")
        assert len(said) == 2
        assert len(ran) == 3
        assert await run.value("SELECT count(*) FROM applied") == 1
        assert await run.value("SELECT fence FROM job_effects WHERE idempotency_key = 'k'") == ran[0]
        # Only as long as the ledger row lives.
        await run.connection.execute("DELETE FROM job_effects; DELETE FROM jobs")
        await run.enqueue("write", key="k")
        await again(4)
        assert await run.value("SELECT count(*) FROM applied") == 2


async def test_a_follow_up_alone_is_an_effect_too(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("first")
    async def first(job: Job[object]) -> None:
        job.enqueue("second", {"of": job.key}, queue="elsewhere")

    async with running(database_url, handlers) as run:
        id = (await run.run("first", key="k"))["id"]
        await run.connection.execute("UPDATE jobs SET state = 'ready', completed_at = NULL WHERE id = $1", id)
        await run.said(events.EFFECT_ALREADY_APPLIED, job_id=id)
        assert await run.value("SELECT count(*) FROM jobs WHERE kind = 'second'") == 1


async def test_generated_keys_leave_no_ledger_row_and_jobs_without_effects_neither(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("write")
    async def write(job: Job[object]) -> None:
        job.effect(APPLY, job.key, 1)

    @handlers.job("own")
    async def own(job: Job[object]) -> None:
        async with job.transaction() as tx:
            await tx.execute(APPLY, job.key, 1)

    @handlers.job("nothing")
    async def nothing(job: Job[object]) -> None: ...

    async with running(database_url, handlers) as run:
        await run.connection.execute(TABLE)
        for kind, key in (("write", None), ("own", None), ("nothing", "chosen")):
            assert (await run.run(kind, key=key))["state"] == "succeeded"
        assert await run.value("SELECT count(*) FROM applied WHERE key LIKE 'auto:%'") == 2
        assert await run.value("SELECT count(*) FROM job_effects") == 0


async def test_a_retention_of_zero_deletes_what_succeeds_and_keeps_what_failed(database_url: str) -> None:
    handlers = Handlers()

    @handlers.job("work")
    async def work(job: Job[object]) -> None:
        if job.payload == "own":
            async with job.transaction() as tx:
                await tx.execute(APPLY, job.key, 1)
                job.result = "nowhere to go"
            return
        job.effect(APPLY, job.key, 1)
        if job.payload == "fail" or (job.payload == "second" and job.attempt == 1):
            raise ValueError("no")

    async with running(database_url, handlers, retention_seconds=0) as run:
        await run.connection.execute(TABLE)
        for payload in ("own", "fine", "second"):
            await run.enqueue("work", payload, key=payload)
        await run.run("work", "fail", key="fail", max_attempts=1)
        await await_for(lambda: len(run.log.find(events.JOB_SUCCEEDED)) == 3)
        assert await run.column("SELECT idempotency_key FROM jobs") == ["fail"]
        assert await run.column("SELECT DISTINCT key FROM applied ORDER BY 1") == ["fine", "own", "second"]
        assert await run.value("SELECT count(*) FROM job_effects") == 3
        assert await run.column("SELECT job_id FROM job_failures") == await run.column("SELECT id FROM jobs")
