"""Hostile and clumsy clients: whatever one of them does, the others are served."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import TOKEN, Served, error_of
from tests.waiting import await_for, wait_for, wait_while
from worker.api import connections
from worker.api.auth import Tokens
from worker.api.connections import MOST_UNREAD, RESERVED_DESCRIPTORS
from worker.api.gate import BODY_BYTES, BODY_SECONDS
from worker.api.hosts import NoPool
from worker.api.listening import Server, bind
from worker.api.problems import invalid
from worker.api.state import make_api
from worker.settings import load_settings

JSON = {"Content-Type": "application/json"}
PATHS = ("/api/tasks", "/api/leases", "/api/generator", "/metrics", "/api/tasks/1", "/nowhere")
OPEN_PATHS = ("/healthz", "/readyz", "/openapi.json")


@pytest.fixture
def stranger(served: Served) -> Iterator[httpx.Client]:
    """A client without the token."""
    with httpx.Client(base_url=served.url, trust_env=False, timeout=20) as client:
        yield client


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
    """Sooner than whatever a hostile client does would end by itself."""
    started = time.monotonic()
    assert served.http.get("/api/tasks?limit=1").status_code == 200
    assert time.monotonic() - started < within_seconds
    return True


# --- tokens


@pytest.mark.parametrize("path", PATHS)
def test_without_a_token_nothing_is_said_but_health(stranger: httpx.Client, path: str) -> None:
    answer = stranger.get(path)
    assert error_of(answer) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_probes_and_the_document_need_no_token(stranger: httpx.Client, path: str) -> None:
    assert stranger.get(path).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN} {TOKEN}",
        "Bearer \xff",
    ],
)
def test_a_wrong_token_is_refused_and_told_so(stranger: httpx.Client, authorization: str) -> None:
    answer = stranger.get("/api/tasks", headers={"Authorization": authorization.encode("latin-1")})
    assert error_of(answer) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'


def test_each_of_several_tokens_is_accepted(stranger: httpx.Client) -> None:
    for token in (TOKEN, "another-token-of-tests"):
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert stranger.get("/api/tasks", headers={"Authorization": f"{scheme} {token}"}).status_code == 200


def test_neither_token_nor_payload_nor_query_is_in_the_log(served: Served, queue: str) -> None:
    served.http.post("/api/tasks", json={"payload": "only-in-the-payload", "queue": queue})
    served.tell("complete", served.claimed(queue=queue), output="only-in-the-output")
    served.http.get("/api/tasks?cursor=only-in-the-query")
    served.http.get(f"/secret-path/{TOKEN}")
    served.http.post("/api/tasks", json={"payload": 1, "only-in-a-field": "only-in-a-value"})
    served.http.delete("/api/leases/release?resource=only-in-the-query&holder=h&fence=1")
    served.process.wait_for_event("http_request", route="/api/leases/release", status=404)
    said = served.process.stdout_path.read_text() + served.process.stderr
    assert TOKEN not in said
    assert "only-in" not in said
    assert "secret-path" not in said


# --- what no route is for


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/api/tasks", "GET, POST"),
        ("GET", "/api/tasks/next", "POST"),
        ("POST", "/api/tasks/1", "GET"),
        ("PUT", "/api/leases", "GET, POST"),
        ("POST", "/api/leases/5", "DELETE, GET"),
        ("GET", "/api/leases/renew", "PUT"),
        ("PATCH", "/healthz", "GET, HEAD"),
    ],
)
def test_a_wrong_method_names_the_right_ones(served: Served, method: str, path: str, allowed: str) -> None:
    answer = served.http.request(method, path)
    assert error_of(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == allowed


@pytest.mark.parametrize(
    "path", ["/", "/api", "/api/", "/api/tasks/", "/api//tasks", "/docs", "/%2e%2e/etc/passwd", "/api/tasks/1/explode"]
)
def test_an_unknown_route_is_404_in_the_one_shape(served: Served, path: str) -> None:
    assert error_of(served.http.get(path)) == (404, "not_found")


def routes(served: Served) -> list[tuple[str, str]]:
    """Method and path of each route of the document, with an id that is not there."""
    paths = served.http.get("/openapi.json").json()["paths"]
    return [(method.upper(), path.replace("{id}", "999999")) for path, methods in paths.items() for method in methods]


def test_a_query_that_no_route_knows_is_422_on_every_route_but_the_probes(served: Served) -> None:
    before = served.http.get("/api/generator").json()
    asked = 0
    for method, path in routes(served):
        answer = served.http.request(method, f"{path}?bogus=1")
        if path.startswith("/api/"):
            asked += 1
            assert error_of(answer) == (422, "invalid"), (method, path)
            assert re.search("bogus|the query", answer.json()["message"]), (method, path)
        else:
            assert answer.status_code == 200, path
    assert asked > 20
    body = {"payload": 1, "queue": "unasked"}
    assert served.http.post("/api/tasks?priority=5", json=body).status_code == 422
    assert served.http.get("/api/generator").json() == before
    assert served.ask("SELECT FROM jobs WHERE queue = 'unasked'") == []
    assert served.http.post("/api/tasks/next?", json={"processor": "p", "queue": "unasked"}).status_code == 204


@pytest.mark.parametrize("id", ["abc", "0", "-1", "1.5", "1e3", "99999999999999999999", "%20", "activ", "１２"])
def test_an_id_that_is_none_is_422_on_every_route_that_takes_one(served: Served, id: str) -> None:
    asked = 0
    for method, path in routes(served):
        if "999999" in path:
            asked += 1
            body = {"processor": "p", "holder": "h", "fence": 1}
            del body["holder" if "tasks" in path else "processor"]
            answer = served.http.request(method, path.replace("999999", id), json=None if method == "GET" else body)
            assert error_of(answer) == (422, "invalid"), (method, path)
            assert answer.json()["message"].startswith("id: "), answer.text
    assert asked == 7


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_may_ask_for_the_head_only(stranger: httpx.Client, path: str) -> None:
    answer = stranger.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert stranger.get(path).status_code == 200


# --- bodies


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b" ", b"{", b"nonsense", b"[]", b"null", b'"text"', b"5", b"{'processor': 'p'}", b'{"processor": "p"} x'),
        *(b'{"processor": NaN}', b'{"processor": "p", "lease_seconds": NaN}', b'{"processor": "p", "lease_seconds": Infinity}'),
        *(b'{"processor": "\xff"}', b'\xff\xfe{"processor": "p"}', b'{"processor": "a\\u0000b"}', b'{"processor": "\\ud800"}'),
        *(b"[" * 100_000, b'{"processor": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"processor": ' + b"9" * 5_000 + b"}"),
        *(b'{"processor": 5}', b'{"processor": null}', b'{"processor": {"$ne": ""}}', b'{"processor": "p", "kinds": "k"}'),
        *(b'{"processor": "p", "__proto__": {}}', b'{"processor": "p", "queue": ["default"]}', b'{"processor": "p", "kinds": [1]}'),
    ],
)
def test_a_body_that_is_not_what_is_asked_for_is_422(served: Served, body: bytes) -> None:
    answer = served.http.post("/api/tasks/next", content=body, headers=JSON)
    assert error_of(answer) == (422, "invalid")
    assert len(answer.content) < 2_000


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_a_body_has_to_say_that_it_is_json(served: Served, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = served.http.post("/api/tasks/next", content=b'{"processor": "p"}', headers=headers)
    assert error_of(answer) == (422, "invalid")
    assert "application/json" in answer.json()["message"]


def test_a_refusal_names_the_place_and_never_the_value(served: Served) -> None:
    answer = served.http.post("/api/tasks/next", json={"processor": "p", "queue": ["the-secret"], "lease_seconds": "the-secret"})
    assert "the-secret" not in answer.text
    assert "queue" in answer.json()["message"]
    assert "lease_seconds" in answer.json()["message"]


def test_an_integer_of_more_digits_than_are_read_is_said_in_our_words(served: Served, queue: str) -> None:
    body = '{"payload": %s, "queue": "' + queue + '"}'
    answer = served.http.post("/api/tasks", content=body % ("9" * 4_301), headers=JSON)
    assert error_of(answer) == (422, "invalid")
    assert answer.json()["message"] == "an integer in the body has more than 4,300 digits"
    answer = served.http.post("/api/tasks", content=body % ("9" * 4_300), headers=JSON)
    assert (answer.status_code, "9" * 4_300 in answer.text) == (201, True)


def test_a_10_mb_body_is_413_whether_it_is_announced_or_streamed(served: Served) -> None:
    body = b'{"payload": "' + b"x" * 10_000_000 + b'"}'
    assert error_of(served.http.post("/api/tasks", content=body, headers=JSON)) == (413, "too_large")

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    assert error_of(served.http.post("/api/tasks", content=pieces(), headers=JSON)) == (413, "too_large")
    assert still_serves(served)


def test_a_body_too_large_to_be_read_at_all_is_413_before_it_is_sent(served: Served) -> None:
    with connection(served) as one:
        one.sendall(head("POST", "/api/tasks", "Content-Type: application/json", "Content-Length: 99999999999"))
        assert read_all(one).startswith(b"HTTP/1.1 413 ")
    with connection(served) as one:
        one.sendall(head("POST", "/api/tasks", "Content-Type: application/json", "Content-Length: 3000000", "Expect: 100-continue"))
        answer = read_all(one)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"100 Continue" not in answer
    chunk = b"%x\r\n" % 16_000_000
    for told in (("Content-Length: 3000000", b""), ("Transfer-Encoding: chunked", chunk + b"x" * (BODY_BYTES + 1))):
        with connection(served) as one:
            one.settimeout(BODY_SECONDS / 2)
            one.sendall(head("POST", "/api/tasks", "Content-Type: application/json", told[0]) + told[1])
            assert one.recv(65_536).startswith(b"HTTP/1.1 413 ")  # and nothing more has been sent


def test_a_body_of_exactly_the_limit_is_read(served: Served) -> None:
    text = b'{"payload": 1}'
    assert served.http.post("/api/tasks", content=text.ljust(BODY_BYTES), headers=JSON).status_code == 201
    assert served.http.post("/api/tasks", content=text.ljust(BODY_BYTES + 1), headers=JSON).status_code == 413


def test_a_payload_of_1_mib_fits_with_every_character_escaped(served: Served, queue: str) -> None:
    body = json.dumps({"payload": '"' * 1_000_000, "queue": queue})
    assert len(body) > 2_000_000
    assert served.http.post("/api/tasks", content=body, headers=JSON).status_code == 201


# --- slow and many


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


def test_ten_thousand_idle_connections_crowd_out_nobody(served: Served) -> None:
    """They are bounded: each that is too many takes the place of the one that has been idle for longest."""
    idle: list[socket.socket] = []
    try:
        for number in range(10_000):
            one = socket.create_connection(("127.0.0.1", served.port), timeout=20)
            idle.append(one)
            if number % 500 == 499:
                for old in idle[:-400]:
                    old.close()
                del idle[:-400]
                assert still_serves(served)
    finally:
        for one in idle:
            one.close()


@pytest.fixture
def small(database_url: str, serve: Callable[..., Served]) -> Served:
    """A server that allows 50 connections: it may open few files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (50 + RESERVED_DESCRIPTORS, hard))
    try:
        return serve(database_url)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
            assert await reader.read() == b""
            writer.close()
    finally:
        server.should_exit = True
        await listening


def test_more_connections_than_are_allowed_close_the_idle_ones_first(small: Served) -> None:
    served = small
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
        assert closed() <= 160
        assert not served.process.find("internal_error")
    finally:
        for one in idle:
            one.close()


def test_answers_that_nobody_reads_are_dropped(served: Served, queue: str) -> None:
    for _ in range(12):
        served.add(queue=queue, payload="x" * 1_000_000)
    assert still_serves(served)
    before = sockets(served) + 4  # and the connections of its pool
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(connection(served)) for _ in range(40)]
        for one in readers:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            one.sendall(head("GET", "/api/tasks?limit=12"))
        wait_for(lambda: len(served.process.find("http_request", route="/api/tasks")) >= 40, 60)
        wait_for(lambda: sockets(served) <= before + MOST_UNREAD, 60)
        assert still_serves(served)


def sockets(served: Served) -> int:
    """How many sockets the server has open."""
    links = Path(f"/proc/{served.process.pid}/fd").iterdir()
    return sum(1 for link in links if os.readlink(link).startswith("socket:"))


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


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    with connection(served) as one:
        one.sendall(head("GET", "/healthz") * 20 + head("GET", "/nowhere", "Connection: close"))
        answer = read_all(one)
    assert answer.count(b"HTTP/1.1 200 OK") == 20
    assert answer.rpartition(b"HTTP/1.1 ")[2].startswith(b"404")


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


# --- names


@pytest.mark.parametrize(
    "name",
    ["a/b", "é", "e\u0301", "100%", "a b", "a\tb", "'; DROP TABLE jobs; --", "<img src=x onerror=alert(1)>", "\N{SNOWMAN}" * 100],
)
def test_names_are_compared_code_point_by_code_point_in_a_body_and_percent_encoded(served: Served, queue: str, name: str) -> None:
    name = f"{queue}{name}"
    lease = served.http.post("/api/leases", json={"resource": name, "holder": name[:40]}).json()
    assert lease["resource"] == name
    again = served.http.get(f"/api/leases/{lease['id']}")
    assert again.headers["content-type"] == "application/json"
    assert again.headers["x-content-type-options"] == "nosniff"
    query = httpx.QueryParams({"resource": name, "holder": name[:40], "fence": lease["fence"]})
    answer = served.http.delete(f"/api/leases/release?{query}")
    assert (answer.status_code, answer.json()["state"]) == (200, "released")


@pytest.mark.parametrize(
    "query",
    [
        "resource=%00&holder=h&fence=1",
        "resource=&holder=h&fence=1",
        "resource=r&holder=h&fence=0",
        "resource=r&holder=h",
        "resource=r&holder=h&fence=x",
        "",
        "resource=r&holder=h&fence=1&force=1",
    ],
)
def test_a_query_that_names_no_lease_is_422(served: Served, query: str) -> None:
    assert error_of(served.http.delete(f"/api/leases/release?{query}")) == (422, "invalid")


def test_a_message_is_bounded_and_printable() -> None:
    problem = invalid("x" * 10_000 + "\ud800")
    assert len(problem.message) <= 500
    json.loads(problem.body())


# --- without tokens: this machine's own programs only


@pytest.fixture(scope="module")
def tokenless(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from tests.serving import serving

    with server.database(template=server.template) as url, serving(tmp_path_factory.mktemp("tokenless")) as start:
        yield start(url, token=None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9", "127.0.0.2:80", "[::1]:8080", "LOCALHOST", "localhost."])
def test_without_tokens_programs_that_mean_this_machine_are_served(tokenless: Served, host: str) -> None:
    assert tokenless.http.get("/api/tasks", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "", "10.0.0.1", "[::2]", "0.0.0.0"],
)
def test_without_tokens_a_name_that_was_made_to_lead_here_is_refused(tokenless: Served, host: str) -> None:
    """DNS rebinding: a page of evil.example, whose name leads to 127.0.0.1 now."""
    for path in ("/api/tasks", "/healthz"):
        assert error_of(tokenless.http.get(path, headers={"Host": host})) == (403, "forbidden")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:1"])
def test_without_tokens_a_page_of_another_site_cannot_make_the_browser_ask(tokenless: Served, origin: str) -> None:
    """A cross-site POST needs no preflight where it has no body: only its Origin gives it away."""
    before = tokenless.http.get("/api/generator").json()
    assert error_of(tokenless.http.post("/api/generator/start", headers={"Origin": origin})) == (403, "forbidden")
    assert tokenless.http.get("/api/generator").json() == before
    own = f"http://127.0.0.1:{tokenless.port}"
    assert tokenless.http.post("/api/generator/stop", headers={"Origin": own}).status_code == 200
