"""A TaskClient that is stopped while it claims, and the answer is lost or does not come."""

from __future__ import annotations

import asyncio

import pytest

from tests.serving import Served
from tests.task_clients import client
from tests.waiting import await_for
from worker.http_calls import Answer
from worker.store.trouble import ConnectFailed

pytestmark = pytest.mark.usefixtures("no_thread_is_left_behind")


@pytest.mark.parametrize("meanwhile", ["it pauses before the next try", "the answer is on its way"])
async def test_a_client_that_is_stopped_asks_again_for_what_a_lost_answer_may_have_given_and_gives_it_back(
    served: Served, queue: str, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    id = served.add(queue=queue)
    given, is_lost, pauses = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def delay_seconds(failures: int) -> float:
        pauses.set()
        return 0.01 if claiming.cancelling() else 60

    monkeypatch.setattr("worker.task_calls.delay_seconds", delay_seconds)
    async with client(served) as tasks:
        call = tasks._calls.call

        async def lose_one(method: str, path: str, *more: object, **fields: object) -> Answer:
            answer = await call(method, path, *more, **fields)  # type: ignore[arg-type]
            if not given.is_set():
                given.set()
                await is_lost.wait()
                raise ConnectionError("the answer is lost")
            return answer

        monkeypatch.setattr(tasks._calls, "call", lose_one)
        claiming = asyncio.create_task(tasks.claim(queue=queue, lease_seconds=60))
        await given.wait()
        assert served.job(id).state == "running"
        if meanwhile == "it pauses before the next try":
            is_lost.set()
            await pauses.wait()
        claiming.cancel()
        is_lost.set()
        with pytest.raises(asyncio.CancelledError):
            await claiming
    assert (served.job(id).state, served.job(id).attempts) == ("ready", 0)


async def test_a_client_that_is_stopped_asks_for_a_lost_answer_no_longer_than_for_any_other(
    served: Served, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def lose(*_: object, **__: object) -> Answer:
        nonlocal asked
        asked += 1
        raise ConnectionError("the answer is lost")

    async with client(served, timeout_seconds=0.5) as tasks:
        monkeypatch.setattr(tasks._calls, "call", lose)
        claiming = asyncio.create_task(tasks.claim(queue=queue))
        await await_for(lambda: asked)
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(20):
                await claiming
    assert asked > 1


async def test_a_client_that_is_stopped_while_nobody_can_be_reached_does_not_ask_again(
    served: Served, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has been sent, so that nothing has been given."""
    asked = 0

    async def away(*_: object, **__: object) -> Answer:
        nonlocal asked
        asked += 1
        raise ConnectFailed("away", sqlstate=None, refused=False)

    async with client(served) as tasks:
        monkeypatch.setattr(tasks._calls, "call", away)
        monkeypatch.setattr("worker.task_calls.delay_seconds", lambda failures: 0.01 if claiming.cancelling() else 60)
        claiming = asyncio.create_task(tasks.claim(queue=queue))
        await await_for(lambda: asked)
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
    assert asked == 1


async def test_what_a_lost_answer_may_have_given_is_asked_for_by_the_next_claim_on_the_same_terms(
    served: Served, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is out of reach for longer than one claim tries."""
    id = served.add(queue=queue)
    monkeypatch.setattr("worker.task_calls.delay_seconds", lambda failures: 0.01)
    async with client(served) as tasks:
        call = tasks._calls.call

        async def lose(*of: object, **fields: object) -> Answer:
            await call(*of, **fields)  # type: ignore[arg-type]
            raise ConnectionError("the answer is lost")

        monkeypatch.setattr(tasks._calls, "call", lose)
        with pytest.raises(ConnectionError):
            await tasks.claim(queue=queue, lease_seconds=60)
        monkeypatch.setattr(tasks._calls, "call", call)
        assert await tasks.claim(queue=queue, lease_seconds=30) is None
        task = await tasks.claim(queue=queue, lease_seconds=60)
        assert task is not None
        assert (task.id, task.attempt) == (id, 1)
        assert await tasks.claim(queue=queue, lease_seconds=60) is None
