"""TaskClient, the remote worker in Python: the daemon's rules from the other side of an HTTP connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.processes import environment
from tests.serving import TOKEN, Served, eating
from tests.waiting import await_for, await_while, until_cancelled, wait_for
from tests.workplace import Workplace
from worker import LeaseLost, Leases, TaskClient
from worker.clock import local_seconds
from worker.errors import ConfigError
from worker.http_calls import Answer
from worker.task_calls import RemoteTask

HELD: dict[str, Any] = {"id": 1, "key": "k", "kind": "k", "queue": "q", "payload": 1, "fence": 1, "attempt": 1, "processor": "p"}


def client(served: Served, **fields: object) -> TaskClient:
    return TaskClient(served.url, bearer=TOKEN, processor="python-1", **fields)  # type: ignore[arg-type]


# --- one request each


async def test_a_task_is_enqueued_claimed_and_completed(served: Served, queue: str) -> None:
    async with client(served) as tasks:
        id, created = await tasks.enqueue("resize", {"n": 2**70}, key=f"{queue}-1", queue=queue)
        assert created
        assert await tasks.enqueue("resize", {}, key=f"{queue}-1", queue=queue) == (id, False)
        task = await tasks.claim(queue=queue, lease_seconds=600)
        assert task is not None
        assert (task.id, task.kind, task.payload, task.attempt, task.processor) == (id, "resize", {"n": 2**70}, 1, "python-1")
        assert 500 < task.remaining_seconds() <= 540
        task.ensure_lease(for_seconds=500)
        with pytest.raises(LeaseLost):
            task.ensure_lease(for_seconds=541)
        await tasks.complete(task, {"done": True})
        assert await tasks.claim(queue=queue) is None
    assert served.job(id).result == {"done": True}


async def test_a_task_can_be_due_later(served: Served, queue: str) -> None:
    async with client(served) as tasks:
        run_at = datetime.now(UTC) + timedelta(hours=1)
        id, _ = await tasks.enqueue("later", 1, queue=queue, run_at=run_at, priority=3, max_attempts=1)
        row = served.job(id)
        assert (row.available_at, row.priority, row.max_attempts) == (run_at, 3, 1)
        await tasks.enqueue("later", 1, queue=queue, delay_seconds=60)
        assert await tasks.claim(queue=queue) is None


async def test_what_is_refused_is_a_value_error_that_names_it(served: Served, queue: str) -> None:
    async with client(served) as tasks:
        with pytest.raises(ValueError, match="lease_seconds"):
            await tasks.claim(queue=queue, lease_seconds=0)
        with pytest.raises(ValueError, match="kind"):
            await tasks.enqueue("k" * 200, 1)
        with pytest.raises(ValueError, match="NaN"):
            await tasks.enqueue("k", float("nan"))
        with pytest.raises(TypeError, match="kinds"):
            await tasks.claim(queue=queue, kinds="resize")  # it would be read as six kinds of one letter


async def test_a_wrong_token_is_a_matter_of_configuration(served: Served) -> None:
    async with TaskClient(served.url, bearer="not-a-token-of-tests") as tasks:
        with pytest.raises(ConfigError, match="not accepted"):
            await tasks.claim()


@pytest.mark.parametrize(
    "url", ["localhost:8080", "ftp://x", "", "http://", "http://[::1", "http://h:99999", "http://h:x", "http://-\N{SNOWMAN}.x y"]
)
def test_an_address_that_cannot_be_right_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="the address of the server must be"):
        TaskClient(url)


@pytest.mark.parametrize(
    "bearer", ["", "read-from-a-file\n", "two words of it", "caf\N{LATIN SMALL LETTER E WITH ACUTE}-of-sixteen"]
)
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(bearer: str) -> None:
    with pytest.raises(ConfigError, match="bearer: letters") as refused:
        TaskClient("http://127.0.0.1:9", bearer=bearer)
    assert not bearer or bearer.strip() not in str(refused.value)


@pytest.mark.parametrize("processor", ["", "x" * 129, "\N{SNOWMAN}" * 43, "a\0b", "\udcff"])
def test_a_processor_that_no_server_takes_is_refused_at_once(processor: str) -> None:
    with pytest.raises(ConfigError, match="processor: "):
        TaskClient("http://127.0.0.1:9", processor=processor)


def test_a_host_whose_name_is_no_text_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lets it be any bytes."""
    monkeypatch.setattr(socket, "gethostname", lambda: "caf\udce9" + "\udcff" * 60)
    for name in (TaskClient("http://127.0.0.1:9").processor, Leases("postgresql://h/x").holder):
        assert name.startswith("caf?")
        assert len(name.encode()) <= 128


async def test_a_lost_answer_to_a_claim_is_asked_for_again_and_the_same_task_comes(served: Served, queue: str) -> None:
    served.add(queue=queue)
    served.add(queue=queue)
    with eating(served, every=2) as url:
        async with TaskClient(url, bearer=TOKEN, processor="python-1") as tasks:
            task = await tasks.claim(queue=queue, lease_seconds=60)
    assert task is not None
    assert [row.id for row in served.ask("SELECT id FROM jobs WHERE queue = %s AND state = 'running'", queue)] == [task.id]


async def test_a_claim_without_an_answer_gives_up_in_the_end() -> None:
    async with TaskClient("http://127.0.0.1:9", timeout_seconds=1) as tasks:
        started = time.monotonic()
        with pytest.raises(ConnectionError):
            await tasks.claim()
        assert time.monotonic() - started > 0.5


# --- the life of an attempt


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


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


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


@pytest.mark.parametrize("output", [float("nan"), "\x00", {1, 2}, "x" * 1_100_000], ids=["nan", "nul", "set", "large"])
async def test_an_output_that_cannot_be_stored_fails_the_attempt(served: Served, queue: str, output: object) -> None:
    async def handler(task: RemoteTask) -> object:
        return output

    id = served.add(queue=queue, max_attempts=1)
    async with client(served) as tasks:
        assert await tasks.run_one(handler, queue=queue) == "failed"
    assert served.job(id).state == "dead"


async def test_a_long_task_is_kept_alive(workplace: Workplace, serve: Callable[..., Served]) -> None:
    workplace.daemon(WORKER_QUEUES="elsewhere")  # it reaps
    served = serve(workplace.url)

    async def handler(task: RemoteTask) -> object:
        first = served.job(task.id).lease_until
        await await_for(lambda: served.job(task.id).lease_until > first + timedelta(seconds=3), 30)
        assert task.remaining_seconds() > 0
        return "done"

    id = served.add()
    async with client(served) as tasks:
        assert await tasks.run_one(handler, lease_seconds=2) == "completed"
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
        assert await tasks.run_one(handler, queue=queue, lease_seconds=3) == "lost"
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
            assert await tasks.run_one(handler, lease_seconds=10) == "lost"
    finally:
        os.kill(served.process.pid, signal.SIGCONT)


async def test_heartbeats_survive_a_server_that_is_away_for_a_moment(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url)

    async def handler(task: RemoteTask) -> object:
        first = served.job(task.id).lease_until
        os.kill(served.process.pid, signal.SIGSTOP)
        try:
            await await_while(lambda: task.lost is None, 1.2)
        finally:
            os.kill(served.process.pid, signal.SIGCONT)
        await await_for(lambda: served.job(task.id).lease_until > first + timedelta(seconds=3), 30)
        return "done"

    served.add()
    async with client(served) as tasks:
        assert await tasks.run_one(handler, lease_seconds=3) == "completed"


async def test_a_heartbeat_without_an_answer_does_not_outlast_the_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent shortly before the trust runs out, it would be waited for beyond the end of the lease."""
    stopped = asyncio.Event()

    async def handler(task: RemoteTask) -> object:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return None

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
        task = RemoteTask(**HELD, lease_seconds=60, trusted_until=local_seconds() + 3)
        assert await tasks.attempt(task, handler) == "completed"


async def test_an_end_that_could_not_be_told_is_told_again(served: Served, queue: str) -> None:
    id = served.add(queue=queue)

    async def handler(task: RemoteTask) -> object:
        return "done"

    with eating(served, every=2, method="PUT") as url:
        async with TaskClient(url, bearer=TOKEN, processor="python-1") as tasks:
            assert await tasks.run_one(handler, queue=queue, lease_seconds=60) == "completed"
    assert (served.job(id).state, served.job(id).attempts) == ("succeeded", 1)


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


async def test_a_client_that_is_stopped_gives_back_what_it_is_claiming(
    served: Served, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has given the task away, and the answer is on its way."""
    id = served.add(queue=queue)
    given, arrives = asyncio.Event(), asyncio.Event()

    async with client(served) as tasks:
        call = tasks._calls.call

        async def slow(method: str, path: str, *more: object, **fields: object) -> Answer:
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
        await asyncio.Event().wait()
        return None

    async def refuse(*_: object, **__: object) -> Answer:
        raise ConfigError("this token is not accepted")

    async with client(served) as tasks:
        running = asyncio.create_task(tasks.run_one(handler, queue=queue, lease_seconds=60))
        await started.wait()
        monkeypatch.setattr(tasks._calls, "call", refuse)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


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
        await await_for(lambda: not served.ask("SELECT FROM jobs WHERE queue = %s AND state <> 'succeeded'", queue))
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
        async with client(served, timeout_seconds=0.3) as tasks:
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
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.kill()
    row = workplace.wait_for_state(id, "ready")
    assert (row.attempts, row.crashes, row.last_error) == (1, 0, "lease lost: http:killed")


# --- somebody on the way who answers in the server's place


@contextlib.contextmanager
def answering(status: int, body: bytes, *, pause_seconds: float = 0) -> Iterator[str]:
    """The address of something that answers everything so, byte by byte with such pauses."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                for place in range(len(body)):
                    self.wfile.write(body[place : place + 1])
                    time.sleep(pause_seconds)

        do_POST = do_PUT = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("status", [404, 409])
async def test_a_proxys_refusal_is_no_word_about_the_lease(status: int) -> None:
    """A gateway that has lost its way to the server says 404, in JSON of its own."""
    with answering(status, b'{"message": "no route matched"}') as url:
        async with TaskClient(url) as tasks:
            task = RemoteTask(**HELD, lease_seconds=60, trusted_until=local_seconds() + 50)
            with pytest.raises(ConnectionError, match=f"{status} that is not of"):
                await tasks.heartbeat(task)
            assert task.lost is None
            task.ensure_lease()


@pytest.mark.parametrize("body", [b"<html>too large</html>", b"", b'{"error": "too_large", "message": "too much"}'])
async def test_what_is_too_large_for_somebody_on_the_way_is_refused_and_not_tried_for_ever(body: bytes) -> None:
    with answering(413, body) as url:
        async with TaskClient(url) as tasks:
            with pytest.raises(ValueError, match="too large"):
                await tasks.enqueue("k", "x")


async def test_an_answer_that_comes_drop_by_drop_is_none() -> None:
    """Each piece comes in time, all of them never would."""
    with answering(200, b" " * 1_000, pause_seconds=0.1) as url:
        async with TaskClient(url, timeout_seconds=0.5) as tasks:
            with pytest.raises(ConnectionError, match="no answer in time"):
                await tasks.enqueue("k", "x")


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_for(lambda: set(threading.enumerate()) <= before)
