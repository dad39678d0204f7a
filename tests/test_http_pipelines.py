"""Requests that are sent before the one ahead of them is answered: how many, in which order, and at what cost."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.hostile_clients import connection, head, read_all, still_serves
from tests.serving import Served
from tests.waiting import await_for
from worker.api.auth import Tokens
from worker.api.connections import MOST_PIPELINED, Connection
from worker.api.gate import Gate, Receive, Scope, Send
from worker.api.hosts import NoPool
from worker.api.listening import Server, bind
from worker.api.state import make_api
from worker.settings import load_settings


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    with connection(served) as one:
        one.sendall(head("GET", "/healthz") * 20 + head("GET", "/nowhere", "Connection: close"))
        answer = read_all(one)
    assert answer.count(b"HTTP/1.1 200 OK") == 20
    assert answer.rpartition(b"HTTP/1.1 ")[2].startswith(b"404")


def test_as_many_requests_as_may_wait_are_answered_and_reading_goes_on(served: Served) -> None:
    with connection(served) as one, one.makefile("rb") as answers:
        for _ in range(5):
            one.sendall(head("GET", "/healthz") * (MOST_PIPELINED + 1))
            for _ in range(MOST_PIPELINED + 1):
                assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
                lines = list(iter(answers.readline, b"\r\n"))
                [length] = [int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")]
                answers.read(length)
        one.sendall(head("GET", "/nowhere", "Connection: close"))
        assert answers.read().startswith(b"HTTP/1.1 404")


def test_a_flood_of_pipelined_requests_is_closed_before_it_takes_memory(database_url: str, serve: Callable[..., Served]) -> None:
    """Tiny requests without a token, of which one read holds thousands."""
    served = serve(database_url)
    assert still_serves(served)
    before = peak_bytes(served)
    with connection(served) as one:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            one.sendall(b"GET / HTTP/1.1\r\n\r\n" * 200_000)
        read_all(one)
        assert still_serves(served)
    assert peak_bytes(served) - before < 20_000_000
    assert served.process.find("internal_error") == []


def peak_bytes(served: Served) -> int:
    """The most memory that the server has had so far."""
    [line] = [line for line in Path(f"/proc/{served.process.pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


# --- from inside


@contextlib.asynccontextmanager
async def served_here() -> AsyncIterator[int]:
    """A server in this loop; its port."""
    tokens = Tokens([])
    sockets = bind("127.0.0.1", 0, tokens)
    api = make_api(load_settings({"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}), tokens, NoPool())
    server = Server(api, sockets, stop_seconds=1)
    listening = asyncio.create_task(server.listen())
    try:
        async with asyncio.timeout(60):
            await await_for(lambda: server.started)
            yield sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await listening


async def test_nothing_more_is_read_while_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reading: list[tuple[int, bool]] = []
    complete = Connection.on_response_complete

    def note(self: Connection) -> None:
        complete(self)
        reading.append((len(self.pipeline), not self.flow.read_paused))

    monkeypatch.setattr(Connection, "on_response_complete", note)
    async with served_here() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("GET", "/healthz") * 19 + head("GET", "/nowhere"))
        await reader.readuntil(b"HTTP/1.1 404")
        await await_for(lambda: len(reading) == 20)
        writer.write(head("GET", "/healthz", "Connection: close"))
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 1
        writer.close()
    assert [waiting for waiting, _ in reading[:20]] == [*range(18, -1, -1), 0]
    assert [reads for _, reads in reading[:20]] == [False] * 18 + [True] * 2


async def test_a_body_that_waits_until_those_before_it_are_answered_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Connection] = []
    too_slow = Connection._too_slow

    def note(self: Connection) -> None:
        late.append(self)
        too_slow(self)

    answering, pass_gate = asyncio.Event(), Gate.__call__

    async def closed(self: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        await answering.wait()
        await pass_gate(self, scope, receive, send)

    monkeypatch.setattr(Connection, "_too_slow", note)
    monkeypatch.setattr("worker.api.connections.REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(Gate, "__call__", closed)
    async with served_here() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("GET", "/healthz") * 2 + head("POST", "/nowhere", "Content-Length: 5"))
        await await_for(lambda: len(late) == 3)
        writer.write(b"12345" + head("GET", "/healthz", "Connection: close"))
        answering.set()
        answers = await reader.read()
        writer.close()
    assert [answer[:3] for answer in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404", b"200"]


async def test_a_flood_of_offers_to_go_on_in_another_protocol_takes_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is read twice."""
    depths: list[int] = []
    stay = Connection._stay

    def note(self: Connection, rest: bytes) -> bytes:
        frame, depth = sys._getframe(), 0
        while frame.f_back is not None:
            frame, depth = frame.f_back, depth + 1
        depths.append(depth)
        return stay(self, rest)

    monkeypatch.setattr(Connection, "_stay", note)
    async with served_here() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n" * 900)
        with contextlib.suppress(ConnectionResetError):
            assert (await reader.read()).count(b"HTTP/1.1 ") <= 1
        writer.close()
    assert 30 < len(depths) <= MOST_PIPELINED + 1
    assert max(depths) == min(depths)
