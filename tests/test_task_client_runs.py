"""TaskClient at work: what becomes of each attempt, and a run of many of them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

import pytest

from tests.serving import TOKEN, Served, eating
from tests.task_clients import client
from tests.waiting import await_for
from worker import TaskClient
from worker.errors import ConfigError
from worker.task_calls import RemoteTask

pytestmark = pytest.mark.usefixtures("no_thread_is_left_behind")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


async def test_a_handlers_result_is_the_output_and_its_error_a_failed_attempt(served: Served, queue: str) -> None:
    async def handler(task: RemoteTask) -> object:
        if task.payload == "bad":
            raise RuntimeError("no such page")
        return {"length": 3}

    async with client(served) as tasks:
        good, bad = served.add(queue=queue, payload="good"), served.add(queue=queue, payload="bad", max_attempts=1)
        assert await tasks.run_one(handler, queue=queue) == "completed"
        assert await tasks.run_one(handler, queue=queue) == "failed"
        assert await tasks.run_one(handler, queue=queue) is None
    assert served.job(good).result == {"length": 3}
    assert (served.job(bad).state, served.job(bad).last_error) == ("dead", "RuntimeError: no such page")


@pytest.mark.parametrize(
    "error",
    [ValueError("a\x00b"), ValueError("a\ud800b"), Unprintable(), SystemExit(3), KeyboardInterrupt()],
    ids=["nul", "surrogate", "unprintable", "exit", "interrupt"],
)
async def test_whatever_a_handler_raises_is_that_tasks_failure_and_nothing_more(
    served: Served, queue: str, error: BaseException
) -> None:
    async def handler(task: RemoteTask) -> object:
        if task.payload == "bad":
            raise error

    bad, good = served.add(queue=queue, payload="bad", max_attempts=1), served.add(queue=queue)
    async with client(served) as tasks:
        run = asyncio.create_task(tasks.run(handler, queue=queue))
        await await_for(lambda: served.job(good).state == "succeeded")
        run.cancel()
        await asyncio.wait({run})
    assert (served.job(bad).state, type(error).__name__ in served.job(bad).last_error) == ("dead", True)


@pytest.mark.parametrize("output", [float("nan"), "\x00", {1, 2}, "x" * 1_100_000], ids=["nan", "nul", "set", "large"])
async def test_an_output_that_cannot_be_stored_fails_the_attempt(served: Served, queue: str, output: object) -> None:
    async def handler(task: RemoteTask) -> object:
        return output

    id = served.add(queue=queue, max_attempts=1)
    async with client(served) as tasks:
        assert await tasks.run_one(handler, queue=queue) == "failed"
    assert served.job(id).state == "dead"


async def test_an_end_that_could_not_be_told_is_told_again(served: Served, queue: str) -> None:
    id = served.add(queue=queue)

    async def handler(task: RemoteTask) -> object:
        return "done"

    with eating(served, every=2, method="PUT") as url:
        async with TaskClient(url, bearer=TOKEN, processor="python-1") as tasks:
            assert await tasks.run_one(handler, queue=queue, lease_seconds=60) == "completed"
    assert (served.job(id).state, served.job(id).attempts) == ("succeeded", 1)


# --- many


async def test_run_works_several_at_a_time_until_it_is_cancelled(served: Served, queue: str) -> None:
    ids = [served.add(queue=queue) for _ in range(32)]
    at_once = most = 0
    together = asyncio.Barrier(4)

    async def handler(task: RemoteTask) -> object:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        async with asyncio.timeout(30):
            await together.wait()
        at_once -= 1
        return task.id

    async with client(served) as tasks:
        run = asyncio.create_task(tasks.run(handler, queue=queue, concurrency=4, lease_seconds=60))
        await await_for(lambda: not served.ask("SELECT FROM jobs WHERE queue = %s AND state <> 'succeeded'", queue), 60)
        run.cancel()
        await asyncio.wait({run})
    assert most == 4
    assert {row.result for row in served.ask("SELECT result FROM jobs WHERE queue = %s", queue)} == set(ids)


async def test_run_waits_out_an_absent_server(
    database_url: str, serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(database_url)
    done = asyncio.Event()

    async def handler(task: RemoteTask) -> object:
        done.set()
        return None

    caplog.set_level(logging.WARNING, "worker.tasks")
    os.kill(served.process.pid, signal.SIGSTOP)
    try:
        async with client(served, timeout_seconds=1) as tasks:
            run = asyncio.create_task(tasks.run(handler, concurrency=1))
            await await_for(lambda: "no answer" in caplog.text, 20)
            assert not run.done()
            os.kill(served.process.pid, signal.SIGCONT)
            served.add()
            await asyncio.wait_for(done.wait(), 20)
            run.cancel()
            await asyncio.wait({run})
    finally:
        os.kill(served.process.pid, signal.SIGCONT)


async def test_what_waiting_cannot_mend_ends_the_run(served: Served, queue: str) -> None:
    async def handler(task: RemoteTask) -> None: ...

    async with TaskClient(served.url, bearer="not-a-token-of-tests") as tasks:
        with pytest.raises(ConfigError, match="not accepted"):
            await tasks.run(handler, concurrency=2)
    async with client(served) as tasks:
        with pytest.raises(ValueError, match="lease_seconds"):
            await tasks.run(handler, queue=queue, lease_seconds=0, concurrency=2)
        with pytest.raises(ValueError, match="concurrency"):
            await tasks.run(handler, queue=queue, concurrency=0)
