"""Requests to a served API that are under way: sent by hand, while its statements stand still."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator

from tests.serving import TOKEN, Served


@contextlib.contextmanager
def raw_request(served: Served, method: str, path: str, body: object) -> Iterator[socket.socket]:
    """A request sent by hand on a connection that is closed at the end of the block."""
    text = json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(head.encode() + text)
        yield connection


def all_is_taken_in(served: Served) -> None:
    """What was sent to the server before, or that a client has gone, is known to it: its loop has gone round a few times since."""
    for _ in range(5):
        assert served.http.get("/healthz").status_code == 200


@contextlib.contextmanager
def frozen_backends(served: Served) -> Iterator[None]:
    """The server processes that work for claims and outcomes stand still."""
    served.claim(queue="none")
    served.http.put("/api/tasks/99999999/complete", json={"processor": "p", "fence": 1})
    for pid in backends(served):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        thaw(served)


def thaw(served: Served) -> None:
    for pid in backends(served):
        os.kill(pid, signal.SIGCONT)


def backends(served: Served) -> list[int]:
    rows = served.ask(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'reliable-worker http %%'"
    )
    return [row.pid for row in rows]
