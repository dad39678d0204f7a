"""What is not HTTP, too much of it, and what of HTTP is seldom used."""

from __future__ import annotations

import contextlib
import http.client
import json
import time

import pytest

from tests.hostile_clients import connection, head, read_all, still_serves
from tests.serving import Served


@pytest.mark.parametrize(
    "bad",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\n",
        b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: elsewhere\r\n\r\n",
        b"CONNECT /path HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_not_http_is_answered_in_the_one_shape_and_closed(served: Served, bad: bytes) -> None:
    with connection(served) as one:
        one.sendall(bad)
        answer = read_all(one)
    status, _, rest = answer.partition(b"\r\n")
    assert status == b"HTTP/1.1 400 Bad Request"
    assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"] == "bad_request"


@pytest.mark.parametrize(
    "flood", [b"GET /" + b"a" * 200_000, b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 20_000, b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000]
)
def test_an_endless_head_is_431(served: Served, flood: bytes) -> None:
    with connection(served) as one:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            one.sendall(flood)
        answer = read_all(one)
    assert answer[:12] in (b"HTTP/1.1 431", b"")  # sent while it still floods, it may not get through
    assert still_serves(served)


def test_a_head_that_is_just_too_large_hears_why(served: Served) -> None:
    with connection(served) as one:
        one.sendall(head("GET", "/healthz", "X-A: " + "a" * 70_000))
        assert read_all(one).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("pause_seconds", [0, 0.1], ids=["in_one_piece", "in_two"])
def test_a_client_that_offers_to_go_on_in_http_2_is_served_as_if_it_had_not(
    served: Served, queue: str, pause_seconds: float
) -> None:
    """Java's offers it with its first requests. The parser ends a request with such an offer before its body."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")
    body = json.dumps({"payload": 1, "queue": queue}).encode()
    with connection(served) as one:
        for framing, sent in (
            (f"Content-Length: {len(body)}", body),
            ("Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)),
        ):
            start = head("POST", "/api/tasks", *offer, "Content-Type: application/json", framing)
            for piece in (start, sent) if pause_seconds else (start + sent,):
                one.sendall(piece)
                time.sleep(pause_seconds)
            with http.client.HTTPResponse(one) as answer:
                answer.begin()
                assert (answer.status, json.loads(answer.read())["queue"]) == (201, queue)
        one.sendall(head("GET", "/healthz", *offer) + head("GET", "/nowhere", "Connection: close"))
        answers = read_all(one)
    assert answers.startswith(b"HTTP/1.1 200 OK")
    assert answers.rpartition(b"HTTP/1.1 ")[2].startswith(b"404")
    assert len(served.ask("SELECT FROM jobs WHERE queue = %s", queue)) == 2
