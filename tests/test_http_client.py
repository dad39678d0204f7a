"""TaskClient, the remote worker in Python: the daemon's rules from the other side of an HTTP connection."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.processes import await_for, environment
from tests.serving import TOKEN, Served
from tests.workplace import Workplace
from worker import LeaseLost, RemoteTask, TaskClient
from worker.errors import ConfigError


def client(served: Served, **fields: object) -> TaskClient:
    return TaskClient(served.url, bearer=TOKEN, processor="python-1", **fields)  # type: ignore[arg-type]


# --- one request each


async def test_a_task_is_enqueued_claimed_and_completed(served: Served, queue: str) -> None:
    async with client(served) as tasks:
        id, created = await tasks.enqueue("resize", {"n": 2**70}, key=f"{queue}-1", queue=queue)
        assert created
        assert await tasks.enqueue("resize", {}, key=f"{queue}-1", queue=queue) == (id, False)
        task = await tasks.claim(queue=queue, lease_seconds=60)
        assert task is not None
        assert (task.id, task.kind, task.payload, task.attempt, task.processor) == (id, "resize", {"n": 2**70}, 1, "python-1")
        assert 50 < task.remaining_seconds() <= 54
        task.ensure_lease(for_seconds=50)
        with pytest.raises(LeaseLost):
            task.ensure_lease(for_seconds=60)
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


async def test_a_wrong_token_is_a_matter_of_configuration(served: Served) -> None:
    async with TaskClient(served.url, bearer="not-a-token-of-tests") as tasks:
        with pytest.raises(ConfigError, match="not accepted"):
            await tasks.claim()
    for url in ("localhost:8080", "ftp://x", ""):
        with pytest.raises(ConfigError):
            TaskClient(url)
    with pytest.raises(ConfigError, match="processor"):
        TaskClient(served.url, processor="")


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
        await asyncio.sleep(3.5)
        assert task.remaining_seconds() > 0
        return "done"

    id = served.add()
    async with client(served) as tasks:
        assert await tasks.run_one(handler, lease_seconds=1) == "completed"
    row = served.job(id)
    assert (row.state, row.attempts, row.result) == ("succeeded", 1, "done")


async def test_a_task_that_was_taken_stops_its_handler(served: Served, queue: str) -> None:
    stopped = asyncio.Event()

    async def handler(task: RemoteTask) -> object:
        served.ask("SELECT cancel_job(%s)", task.id)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.set()
            with pytest.raises(LeaseLost):
                task.ensure_lease()
            raise
        return None

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
            await asyncio.sleep(60)
        finally:
            [row] = served.ask("SELECT lease_until > now() AS live FROM jobs WHERE id = %s", id)
            assert row.live, "it went on after its lease"
        return None

    try:
        async with client(served) as tasks:
            assert await tasks.run_one(handler, lease_seconds=5) == "lost"
    finally:
        os.kill(served.process.pid, signal.SIGCONT)


async def test_heartbeats_survive_a_server_that_is_away_for_a_moment(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url)

    async def handler(task: RemoteTask) -> object:
        os.kill(served.process.pid, signal.SIGSTOP)
        await asyncio.sleep(1.2)
        os.kill(served.process.pid, signal.SIGCONT)
        await asyncio.sleep(3)
        return "done"

    served.add()
    async with client(served) as tasks:
        assert await tasks.run_one(handler, lease_seconds=3) == "completed"


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
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(task.id)
            raise
        return None

    async with client(served) as tasks:
        run = asyncio.create_task(tasks.run(handler, queue=queue, lease_seconds=60, concurrency=3))
        await await_for(lambda: len(running) == 3)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert sorted(cancelled) == ids
    rows = served.ask("SELECT state, attempts FROM jobs WHERE queue = %s", queue)
    assert {(row.state, row.attempts) for row in rows} == {("ready", 0)}


async def test_run_works_several_at_a_time_until_it_is_cancelled(served: Served, queue: str) -> None:
    ids = [served.add(queue=queue) for _ in range(30)]
    at_once = most = 0

    async def handler(task: RemoteTask) -> object:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.02)
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
    await asyncio.sleep(60)
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
    row = workplace.wait_for_state(id, "ready", timeout_seconds=6)
    assert (row.attempts, row.crashes, row.last_error) == (1, 0, "lease lost: http:killed")


# --- a connection that loses answers


class eating:  # noqa: N801  (used like a function)
    """The address of a proxy that passes every request on and loses the first of every `every` answers to `method`."""

    def __init__(self, served: Served, *, every: int, method: str = "POST") -> None:
        count = 0

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                nonlocal count
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                answer = served.http.request(self.command, self.path, content=body, headers={"Content-Type": "application/json"})
                if self.command == method:
                    count += 1
                    if count % every == 1:
                        self.close_connection = True
                        return
                self.send_response(answer.status_code)
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            do_GET = do_POST = do_PUT = _pass_on  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(autouse=True)
def _no_task_is_left_behind() -> Iterator[None]:
    yield
    assert threading.active_count() < 20
