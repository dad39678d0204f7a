"""Bodies: what is not what is asked for, and how much is read of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.hostile_clients import connection, head, read_all, still_serves
from tests.serving import Served, error_of
from worker.api.gate import BODY_BYTES, BODY_SECONDS
from worker.api.problems import invalid

JSON = {"Content-Type": "application/json"}


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


def test_a_message_is_bounded_and_printable() -> None:
    problem = invalid("x" * 10_000 + "\ud800")
    assert len(problem.message) <= 500
    json.loads(problem.body())


def test_an_integer_of_more_digits_than_are_read_is_said_in_our_words(served: Served, queue: str) -> None:
    body = '{"payload": %s, "queue": "' + queue + '"}'
    answer = served.http.post("/api/tasks", content=body % ("9" * 4_301), headers=JSON)
    assert error_of(answer) == (422, "invalid")
    assert answer.json()["message"] == "an integer in the body has more than 4,300 digits"
    answer = served.http.post("/api/tasks", content=body % ("9" * 4_300), headers=JSON)
    assert (answer.status_code, "9" * 4_300 in answer.text) == (201, True)


# --- large ones


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


def test_a_payload_of_1_mib_fits_with_every_character_escaped(serve: Callable[..., Served], database_url: str, queue: str) -> None:
    served = serve(database_url, WORKER_LEASE_SECONDS="60", WORKER_QUERY_TIMEOUT_SECONDS="20")  # a busy machine takes its time
    body = json.dumps({"payload": '"' * 1_000_000, "queue": queue})
    assert len(body) > 2_000_000
    assert served.http.post("/api/tasks", content=body, headers=JSON).status_code == 201
