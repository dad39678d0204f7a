"""What a hostile or clumsy client of a server under test sends and reads, byte by byte; and whether the others are served."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx

from tests.serving import TOKEN, Served
from worker.api.gate import BODY_SECONDS


@contextlib.contextmanager
def connection(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as one:
        yield one


def read_all(one: socket.socket) -> bytes:
    """Everything until the server closes."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := one.recv(65_536):
            answer += piece
    return answer


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {TOKEN}", *lines, "", ""]).encode()


def still_serves(served: Served, *, within_seconds: float = BODY_SECONDS - 1) -> bool:
    """Who comes only now, and sooner than whatever a hostile client does would end by itself."""
    started = time.monotonic()
    with httpx.Client(base_url=served.url, headers=served.http.headers, trust_env=False, timeout=20) as newcomer:
        assert newcomer.get("/api/tasks?limit=1").status_code == 200
    assert time.monotonic() - started < within_seconds
    return True
