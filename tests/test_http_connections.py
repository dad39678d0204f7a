"""Slow, idle and too many connections: whatever one client does with them, the others are served."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from tests.hostile_clients import connection, head, read_all, still_serves
from tests.processes import open_sockets
from tests.serving import TOKEN, Served
from tests.waiting import await_for, wait_for, wait_while
from worker.api import connections
from worker.api.auth import Tokens
from worker.api.connections import HEAD_SECONDS, MOST_UNREAD, RESERVED_DESCRIPTORS
from worker.api.hosts import NoPool
from worker.api.listening import Server, bind
from worker.api.state import make_api
from worker.settings import load_settings


@pytest.fixture
def small(database_url: str, serve: Callable[..., Served]) -> Served:
    """A server that allows 50 connections: it may open few files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (50 + RESERVED_DESCRIPTORS, hard))
    try:
        return serve(database_url)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- slow ones


def test_a_slow_body_holds_no_connection_to_the_database_and_ends_in_time(served: Served) -> None:
    """More slow bodies than the server has connections: everybody else is served meanwhile."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connection(served)) for _ in range(30)]
        for one in slow:
            one.sendall(head("POST", "/api/tasks", "Content-Type: application/json", "Content-Length: 1000") + b"{")

        def others_are_served_meanwhile() -> bool:
            for one in slow:
                one.sendall(b" ")
            return still_serves(served)

        wait_while(others_are_served_meanwhile, 3)
        answers = [read_all(one) for one in slow]
    assert {answer.partition(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 408 Request Timeout"}
    assert all(b'"error":"timeout"' in answer for answer in answers)


def test_a_slow_head_and_a_silent_connection_are_closed(served: Served) -> None:
    with connection(served) as silent, connection(served) as slow:
        started = time.monotonic()
        slow.sendall(b"GET /api/tasks HTTP/1.1\r\nX-A: ")

        def goes_on_with_its_head() -> bool:
            return slow.send(b"a") == 1

        wait_while(goes_on_with_its_head, 3)
        assert read_all(silent) == read_all(slow) == b""
        assert time.monotonic() - started > 5


def test_answers_that_nobody_reads_are_dropped(served: Served, queue: str) -> None:
    for _ in range(12):
        served.add(queue=queue, payload="x" * 1_000_000)
    assert still_serves(served)
    before = len(open_sockets(served.process.pid)) + 4  # and the connections of its pool
    answered = len(served.process.find("http_request", route="/api/tasks"))
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(connection(served)) for _ in range(40)]
        for one in readers:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            one.sendall(head("GET", "/api/tasks?limit=12"))
        wait_for(lambda: len(served.process.find("http_request", route="/api/tasks")) >= answered + 40, 60)
        wait_for(lambda: len(open_sockets(served.process.pid)) <= before + MOST_UNREAD, 60)
        assert still_serves(served)


# --- many


def test_many_requests_at_once_are_served_or_told_to_come_again(served: Served) -> None:
    statuses: list[int] = []

    def ask() -> None:
        with httpx.Client(base_url=served.url, headers=served.http.headers, trust_env=False, timeout=30) as client:
            for _ in range(5):
                statuses.append(client.get("/api/tasks?limit=1").status_code)

    threads = [threading.Thread(target=ask) for _ in range(60)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(statuses) == 300
    assert set(statuses) <= {200, 503}
    assert 200 in statuses
    assert still_serves(served)


def test_ten_thousand_idle_connections_crowd_out_nobody(small: Served) -> None:
    """They are bounded: each that is too many takes the place of the one that has been idle for longest."""
    idle: list[socket.socket] = []
    try:
        for number in range(10_000):
            one = socket.create_connection(("127.0.0.1", small.port), timeout=20)
            idle.append(one)
            if number % 500 == 499:
                assert still_serves(small)
                for old in idle[:-400]:
                    old.close()
                del idle[:-400]
        assert not small.process.find("internal_error")
    finally:
        for one in idle:
            one.close()


def test_more_connections_than_are_allowed_close_the_idle_ones_first(small: Served) -> None:
    served = small
    began = time.monotonic()
    idle = [socket.create_connection(("127.0.0.1", served.port), timeout=20) for _ in range(200)]
    try:
        assert still_serves(served)

        def closed() -> int:
            number = 0
            for one in idle:
                one.setblocking(False)
                try:
                    number += one.recv(1) == b""
                except ConnectionResetError:
                    number += 1
                except BlockingIOError:
                    pass
            return number

        wait_for(lambda: closed() >= 145, 30)
        # Where that took long, those that may stay were closed as well: they have sent no head.
        assert closed() <= 160 or time.monotonic() - began > HEAD_SECONDS
        assert not served.process.find("internal_error")
    finally:
        for one in idle:
            one.close()


@pytest.mark.parametrize("body", [b"{}", b"{", b""], ids=["whole", "a_part", "none"])
def test_a_connection_whose_request_was_refused_before_its_body_is_an_idle_one_afterwards(small: Served, body: bytes) -> None:
    """Else anybody could hold all of them, without a token."""
    refused = b"POST /api/tasks HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
    with contextlib.ExitStack() as held:
        for _ in range(120):
            one = held.enter_context(connection(small))
            one.sendall(refused)
            assert one.recv(65_536).startswith(b"HTTP/1.1 401 ")
            one.sendall(body)
        assert still_serves(small)
    assert not small.process.find("internal_error")


async def test_a_connection_whose_request_was_refused_before_its_body_is_closed_like_any_idle_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.1)
    tokens = Tokens([TOKEN])
    sockets = bind("127.0.0.1", 0, tokens)
    api = make_api(load_settings({"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}), tokens, NoPool())
    server = Server(api, sockets, stop_seconds=1)
    port = sockets[0].getsockname()[1]
    listening = asyncio.create_task(server.listen())
    try:
        async with asyncio.timeout(60):
            await await_for(lambda: server.started)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /api/tasks HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 401 ")
            writer.write(b"{}")
            with contextlib.suppress(ConnectionResetError):  # it was closed before these two bytes came
                assert await reader.read() == b""
            writer.close()
    finally:
        server.should_exit = True
        await listening
