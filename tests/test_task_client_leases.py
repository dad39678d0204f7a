"""TaskClient and the lease of its task: kept alive while the handler works, and never outlasted by it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.serving import Served
from tests.task_clients import HELD, client
from tests.waiting import await_for, await_while, until_cancelled
from tests.workplace import Workplace
from worker import LeaseLost, TaskClient
from worker.clock import local_seconds
from worker.http_calls import Answer
from worker.task_calls import RemoteTask

pytestmark = pytest.mark.usefixtures("no_thread_is_left_behind")


async def test_a_long_task_is_kept_alive(workplace: Workplace, serve: Callable[..., Served]) -> None:
    workplace.daemon(WORKER_QUEUES="elsewhere")  # it reaps
    served = serve(workplace.url)

    async def handler(task: RemoteTask) -> object:
        first = served.job(task.id).lease_until
        await await_for(lambda: served.job(task.id).lease_until > first + timedelta(seconds=8), 60)
        assert task.remaining_seconds() > 0
        return "done"

    id = served.add()
    async with client(served) as tasks:
        assert await tasks.run_one(handler, lease_seconds=7) == "completed"
    row = served.job(id)
    assert (row.state, row.attempts, row.result) == ("succeeded", 1, "done")


async def test_a_task_that_was_taken_stops_its_handler(served: Served, queue: str) -> None:
    stopped = asyncio.Event()

    async def handler(task: RemoteTask) -> object:
        served.ask("SELECT cancel_job(%s)", task.id)
        try:
            await until_cancelled()
        except asyncio.CancelledError:
            stopped.set()
            with pytest.raises(LeaseLost):
                task.ensure_lease()
            raise

    served.add(queue=queue)
    async with client(served) as tasks:
        assert await tasks.run_one(handler, queue=queue, lease_seconds=6) == "lost"
    assert stopped.is_set()


async def test_a_server_that_is_silent_stops_the_handler_before_the_lease_can_pass_on(
    database_url: str, serve: Callable[..., Served]
) -> None:
    """The trusted-until rule: no answer is not a licence to go on."""
    served = serve(database_url)
    id = served.add()

    async def handler(task: RemoteTask) -> object:
        os.kill(served.process.pid, signal.SIGSTOP)
        try:
            await until_cancelled()
        finally:
            [row] = served.ask("SELECT lease_until > now() AS live FROM jobs WHERE id = %s", id)
            assert row.live, "it went on after its lease"

    try:
        async with client(served) as tasks:
            # A tenth of it is the margin: what a machine that stands still at that moment has.
            assert await tasks.run_one(handler, lease_seconds=20) == "lost"
    finally:
        os.kill(served.process.pid, signal.SIGCONT)


async def test_heartbeats_survive_a_server_that_is_away_for_a_moment(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url)

    async def handler(task: RemoteTask) -> object:
        first = served.job(task.id).lease_until
        os.kill(served.process.pid, signal.SIGSTOP)
        try:
            await await_while(lambda: task.lost is None, 5)  # the first heartbeat is sent after 4
        finally:
            os.kill(served.process.pid, signal.SIGCONT)
        await await_for(lambda: served.job(task.id).lease_until > first + timedelta(seconds=3), 30)
        return "done"

    served.add()
    async with client(served) as tasks:
        assert await tasks.run_one(handler, lease_seconds=12) == "completed"


async def test_a_heartbeat_without_an_answer_does_not_outlast_the_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent shortly before the trust runs out, it would be waited for beyond the end of the lease."""
    stopped = asyncio.Event()

    async def handler(task: RemoteTask) -> object:
        try:
            await until_cancelled()
        finally:
            stopped.set()

    async def never(*_: object, **__: object) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    async with TaskClient("http://127.0.0.1:9") as tasks:
        monkeypatch.setattr(tasks._calls, "call", never)
        task = RemoteTask(**HELD, lease_seconds=1, trusted_until=local_seconds() + 0.9)
        async with asyncio.timeout(30):
            assert await tasks.attempt(task, handler) == "lost"
    assert stopped.is_set()
    with pytest.raises(LeaseLost) as loss:
        task.ensure_lease()
    assert loss.value.reason == "lease_untrusted"


async def test_a_task_whose_claim_was_answered_late_is_renewed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answers were lost, and most of the lease was over when the last one came."""

    async def handler(task: RemoteTask) -> object:
        return await await_for(lambda: task.remaining_seconds() > 50, 30)

    async def accept(*_: object, **__: object) -> Answer:
        return Answer(202, {"expires_in_ms": 60_000})

    async with TaskClient("http://127.0.0.1:9") as tasks:
        monkeypatch.setattr(tasks._calls, "call", accept)
        task = RemoteTask(**HELD, lease_seconds=60, trusted_until=local_seconds() + 10)
        assert await tasks.attempt(task, handler) == "completed"
