"""Who is let in: by a token, and without tokens this machine's own programs only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving import TOKEN, Served, error_of, serving

PATHS = ("/api/tasks", "/api/leases", "/api/generator", "/metrics", "/api/tasks/1", "/nowhere")


OPEN_PATHS = ("/healthz", "/readyz", "/openapi.json")


@pytest.fixture
def stranger(served: Served) -> Iterator[httpx.Client]:
    """A client without the token."""
    with httpx.Client(base_url=served.url, trust_env=False, timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_without_a_token_nothing_is_said_but_health(stranger: httpx.Client, path: str) -> None:
    answer = stranger.get(path)
    assert error_of(answer) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_probes_and_the_document_need_no_token(stranger: httpx.Client, path: str) -> None:
    assert stranger.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_may_ask_for_the_head_only(stranger: httpx.Client, path: str) -> None:
    answer = stranger.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
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


# --- without tokens


@pytest.fixture(scope="module")
def tokenless(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:

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
