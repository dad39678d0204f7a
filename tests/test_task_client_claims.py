"""A TaskClient that is stopped while it claims, and the answer is lost or does not come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from tests.serving import Served
from tests.task_clients import client
from tests.waiting import await_for
from worker import TaskClient
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


@pytest.mark.parametrize("ends", ["after its tries", "by a time-out of its caller's", "by a refusal of somebody in between"])
async def test_what_a_lost_answer_may_have_given_is_asked_for_by_the_next_claim_on_the_same_terms(
    served: Served, queue: str, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The server is out of reach for longer than one claim asks."""
    id = served.add(queue=queue)
    monkeypatch.setattr("worker.task_calls.delay_seconds", lambda failures: 0.01)
    async with client(served) as tasks:
        with losing_answers(tasks, monkeypatch, then_forbidden="refusal" in ends):
            match ends:
                case "after its tries":
                    with pytest.raises(ConnectionError):
                        await tasks.claim(queue=queue, lease_seconds=60)
                case "by a time-out of its caller's":
                    monkeypatch.setattr("worker.task_calls._CLAIM_TRIES", 1_000_000)
                    monkeypatch.setattr(tasks._calls, "timeout_seconds", 0.1)
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(1):
                            await tasks.claim(queue=queue, lease_seconds=60)
                case _:
                    with pytest.raises(ValueError, match="forbidden"):
                        await tasks.claim(queue=queue, lease_seconds=60)
        assert served.job(id).state == "running"
        assert await tasks.claim(queue=queue, lease_seconds=30) is None
        task = await tasks.claim(queue=queue, lease_seconds=60)
        assert task is not None
        assert (task.id, task.attempt) == (id, 1)
        assert await tasks.claim(queue=queue, lease_seconds=60) is None


async def test_a_task_whose_answer_was_lost_so_long_ago_that_its_lease_is_not_trusted_goes_back(
    served: Served, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No handler is to start on it; the next in the queue comes, this one as a rule, with its attempt refunded."""
    id = served.add(queue=queue)
    monkeypatch.setattr("worker.task_calls.delay_seconds", lambda failures: 0.01)
    async with client(served) as tasks:
        with losing_answers(tasks, monkeypatch), pytest.raises(ConnectionError):
            await tasks.claim(queue=queue, lease_seconds=600)
        lost = served.job(id).fence
        served.db.execute("UPDATE jobs SET lease_until = clock_timestamp() + interval '10 seconds' WHERE id = %s", (id,))
        task = await tasks.claim(queue=queue, lease_seconds=600)
        assert task is not None
        assert (task.id, task.attempt) == (id, 1)
        assert task.fence > lost
        assert task.remaining_seconds() > 60


async def test_a_task_whose_release_has_no_answer_is_not_asked_for_again(
    served: Served, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be somebody else's by then."""
    served.add(queue=queue)
    async with client(served, timeout_seconds=1) as tasks:
        call, asked = tasks._calls.call, []

        async def lose(method: str, path: str, *more: object, **fields: object) -> Answer:
            asked.append(path)
            if path.endswith("/release"):
                raise ConnectionError("the answer is lost, and what was asked comes later")
            answer = await call(method, path, *more, **fields)  # type: ignore[arg-type]
            if len(asked) == 1:
                raise ConnectionError("the answer is lost")
            return answer

        monkeypatch.setattr("worker.task_calls.delay_seconds", lambda failures: 0.01 if claiming.cancelling() else 60)
        monkeypatch.setattr(tasks._calls, "call", lose)
        claiming = asyncio.create_task(tasks.claim(queue=queue, lease_seconds=600))
        await await_for(lambda: asked)
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
        assert len([path for path in asked if path.endswith("/release")]) > 1
        assert await tasks.claim(queue=queue, lease_seconds=600) is None


@contextlib.contextmanager
def losing_answers(tasks: TaskClient, monkeypatch: pytest.MonkeyPatch, *, then_forbidden: bool = False) -> Iterator[None]:
    """What is asked is done, and no answer arrives; the second one comes from somebody in between."""
    call, asked = tasks._calls.call, 0

    async def lose(*of: object, **fields: object) -> Answer:
        nonlocal asked
        asked += 1
        if then_forbidden and asked > 1:
            return Answer(403, {"message": "forbidden"})
        await call(*of, **fields)  # type: ignore[arg-type]
        raise ConnectionError("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(tasks._calls, "call", lose)
        yield
