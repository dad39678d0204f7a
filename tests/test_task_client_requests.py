"""TaskClient, a request at a time: what it sends and returns, what it refuses, and whom it does not believe."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.serving import TOKEN, Served, eating
from tests.task_clients import HELD, client
from worker import LeaseLost, Leases, TaskClient
from worker.clock import local_seconds
from worker.errors import ConfigError
from worker.http_calls import Answer
from worker.task_calls import RemoteTask

pytestmark = pytest.mark.usefixtures("no_thread_is_left_behind")


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


@pytest.mark.parametrize("verb", ["complete", "fail", "release"])
async def test_a_task_whose_end_may_have_been_told_is_trusted_no_more(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Whoever goes on behind it, a thread say: another may have the task by now, and no late heartbeat brings it back."""
    remaining: list[float] = []

    async def lose(_method: str, path: str, *_: object, **__: object) -> Answer:
        if path.endswith("/heartbeat"):
            return Answer(202, {"expires_in_ms": 60_000})
        remaining.append(task.remaining_seconds())
        raise ConnectionError("no answer")

    async with TaskClient("http://127.0.0.1:9") as tasks:
        monkeypatch.setattr(tasks._calls, "call", lose)
        task = RemoteTask(**HELD, lease_seconds=60, trusted_until=local_seconds() + 50)
        with pytest.raises(ConnectionError):
            await getattr(tasks, verb)(task, *(["late"] if verb == "fail" else []))
        await tasks.heartbeat(task)
        with pytest.raises(LeaseLost, match="its end has been told") as loss:
            task.ensure_lease()
    assert remaining == [0]
    assert task.remaining_seconds() == 0
    assert loss.value.reason == "lease_lost"


async def test_an_end_that_was_refused_or_never_sent_leaves_the_task_as_it_was(served: Served, queue: str) -> None:
    served.add(queue=queue)
    async with client(served) as tasks, TaskClient("http://127.0.0.1:9", timeout_seconds=1) as nowhere:
        task = await tasks.claim(queue=queue, lease_seconds=600)
        assert task is not None
        with pytest.raises(ConnectionError):
            await nowhere.complete(task)
        task.ensure_lease()
        with pytest.raises(ValueError, match="too large"):
            await tasks.complete(task, "x" * 2**21)
        task.ensure_lease()
        await tasks.release(task)
        with pytest.raises(LeaseLost):
            task.ensure_lease()
        with pytest.raises(ValueError, match="NaN"):
            await tasks.complete(task, float("nan"))
        with pytest.raises(LeaseLost):
            task.ensure_lease()


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


@pytest.mark.parametrize("proxy", ["ftp://me:sesame@proxy.example", "socks5://me:sesame@proxy.example:1080"])
async def test_a_proxy_that_cannot_be_used_is_a_matter_of_configuration_each_time(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with TaskClient("http://server.example", timeout_seconds=5) as tasks:
        for _ in range(20):  # more often than it has connections
            with pytest.raises(ConfigError, match=r"server\.example:80: .* (proxy|SOCKS)") as refused:
                await tasks.enqueue("k", "x")
            assert "sesame" not in str(refused.value)


async def test_an_answer_that_comes_drop_by_drop_is_none() -> None:
    """Each piece comes in time, all of them never would."""
    with answering(200, b" " * 1_000, pause_seconds=0.1) as url:
        async with TaskClient(url, timeout_seconds=0.5) as tasks:
            with pytest.raises(ConnectionError, match="no answer in time"):
                await tasks.enqueue("k", "x")
