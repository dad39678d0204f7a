"""A TaskClient that is stopped, or killed: what becomes of its tasks."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.processes import environment
from tests.serving import TOKEN, Served
from tests.task_clients import client
from tests.waiting import await_for, until_cancelled
from tests.workplace import Workplace
from worker.errors import ConfigError
from worker.http_calls import Answer
from worker.task_calls import RemoteTask

pytestmark = pytest.mark.usefixtures("no_thread_is_left_behind")


async def test_a_client_that_is_stopped_gives_its_tasks_back(served: Served, queue: str) -> None:
    ids = [served.add(queue=queue) for _ in range(3)]
    running: list[int] = []
    cancelled: list[int] = []

    async def handler(task: RemoteTask) -> object:
        running.append(task.id)
        try:
            await until_cancelled()
        except asyncio.CancelledError:
            cancelled.append(task.id)
            raise

    async with client(served) as tasks:
        run = asyncio.create_task(tasks.run(handler, queue=queue, lease_seconds=60, concurrency=3))
        await await_for(lambda: len(running) == 3)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert sorted(cancelled) == ids
    rows = served.ask("SELECT state, attempts FROM jobs WHERE queue = %s", queue)
    assert {(row.state, row.attempts) for row in rows} == {("ready", 0)}


async def test_a_handler_that_ends_as_its_client_is_stopped_has_ended(served: Served, queue: str) -> None:
    id = served.add(queue=queue)

    async def handler(task: RemoteTask) -> object:
        running.cancel()
        return "done"

    async with client(served) as tasks:
        running = asyncio.create_task(tasks.run_one(handler, queue=queue, lease_seconds=60))
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (served.job(id).state, served.job(id).result) == ("succeeded", "done")


async def test_a_client_that_is_stopped_tells_what_has_ended(served: Served, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work is done; only the server was not to be had at the first try."""
    id = served.add(queue=queue)
    refused = asyncio.Event()

    async def handler(task: RemoteTask) -> object:
        return "done"

    async with client(served) as tasks:
        call = tasks._calls.call

        async def refuse_once(method: str, path: str, *more: object, **fields: object) -> Answer:
            if path.endswith("/complete") and not refused.is_set():
                refused.set()
                raise ConnectionError("away")
            return await call(method, path, *more, **fields)  # type: ignore[arg-type]

        monkeypatch.setattr(tasks._calls, "call", refuse_once)
        running = asyncio.create_task(tasks.run_one(handler, queue=queue, lease_seconds=60))
        await refused.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (served.job(id).state, served.job(id).result) == ("succeeded", "done")


async def test_a_handler_that_ends_its_work_when_its_client_is_stopped_has_done_it(served: Served, queue: str) -> None:
    """As for the daemon: giving it back would do it twice."""
    id = served.add(queue=queue)
    started = asyncio.Event()

    async def handler(task: RemoteTask) -> object:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await until_cancelled()
        return "done"

    async with client(served) as tasks:
        running = asyncio.create_task(tasks.run_one(handler, queue=queue, lease_seconds=60))
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (served.job(id).state, served.job(id).result) == ("succeeded", "done")


async def test_a_handler_that_fails_when_its_client_is_stopped_has_used_no_attempt(served: Served, queue: str) -> None:
    id = served.add(queue=queue)
    started = asyncio.Event()

    async def handler(task: RemoteTask) -> object:
        started.set()
        try:
            await until_cancelled()
        finally:
            raise ValueError("its file is half written")

    async with client(served) as tasks:
        running = asyncio.create_task(tasks.run_one(handler, queue=queue, lease_seconds=60))
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (served.job(id).state, served.job(id).attempts) == ("ready", 0)


async def test_a_client_that_is_stopped_gives_back_also_at_the_second_try_and_keeps_the_lease_until_then(
    served: Served, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is busy for a moment costs no attempt."""
    id = served.add(queue=queue)
    started, kept, refused = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(task: RemoteTask) -> object:
        started.set()
        await until_cancelled()

    async with client(served) as tasks:
        call = tasks._calls.call

        async def busy(method: str, path: str, *more: object, **fields: object) -> Answer:
            if path.endswith("/release") and not kept.is_set():
                refused.set()
                raise ConnectionError("503 busy")
            answer = await call(method, path, *more, **fields)  # type: ignore[arg-type]
            if path.endswith("/heartbeat") and refused.is_set():
                kept.set()
            return answer

        monkeypatch.setattr(tasks._calls, "call", busy)
        running = asyncio.create_task(tasks.run_one(handler, queue=queue, lease_seconds=9))
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert kept.is_set()
    assert (served.job(id).state, served.job(id).attempts) == ("ready", 0)


async def test_a_client_that_is_stopped_gives_back_what_it_is_claiming(
    served: Served, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has given the task away, and the answer is on its way; then it is busy for a moment."""
    id = served.add(queue=queue)
    given, arrives, refused = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async with client(served) as tasks:
        call = tasks._calls.call

        async def slow(method: str, path: str, *more: object, **fields: object) -> Answer:
            if path.endswith("/release") and not refused.is_set():
                refused.set()
                raise ConnectionError("503 busy")
            answer = await call(method, path, *more, **fields)  # type: ignore[arg-type]
            if path.endswith("/next"):
                given.set()
                await arrives.wait()
            return answer

        monkeypatch.setattr(tasks._calls, "call", slow)
        claiming = asyncio.create_task(tasks.claim(queue=queue, lease_seconds=60))
        await given.wait()
        assert served.job(id).state == "running"
        claiming.cancel()
        arrives.set()
        with pytest.raises(asyncio.CancelledError):
            await claiming
    assert (served.job(id).state, served.job(id).attempts) == ("ready", 0)


async def test_a_cancelled_attempt_is_cancelled_also_when_its_token_is_accepted_no_more(
    served: Served, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.add(queue=queue)
    started = asyncio.Event()

    async def handler(task: RemoteTask) -> object:
        started.set()
        await until_cancelled()

    async def refuse(*_: object, **__: object) -> Answer:
        raise ConfigError("this token is not accepted")

    async with client(served) as tasks:
        running = asyncio.create_task(tasks.run_one(handler, queue=queue, lease_seconds=60))
        await started.wait()
        monkeypatch.setattr(tasks._calls, "call", refuse)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


def test_a_killed_client_leaves_its_task_to_the_lease(workplace: Workplace, serve: Callable[..., Served]) -> None:
    """H13: nothing has to be cleaned up by hand."""
    workplace.daemon(WORKER_QUEUES="elsewhere")
    served = serve(workplace.url)
    id = served.add()
    program = f"""
import asyncio
from worker import TaskClient
async def handler(task):
    print("started", flush=True)
    await asyncio.Event().wait()
async def main():
    async with TaskClient({served.url!r}, bearer={TOKEN!r}, processor="killed") as tasks:
        await tasks.run_one(handler, lease_seconds=2)
asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment(workplace.directory), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
        finally:
            process.kill()
    row = workplace.wait_for_state(id, "ready")
    assert (row.attempts, row.crashes, row.last_error) == (1, 0, "lease lost: http:killed")
