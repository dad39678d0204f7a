"""What is asked for: methods, paths, queries, ids and names, and what is said where no route is for it."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.serving import Served, error_of


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


@pytest.mark.parametrize(
    "id",
    ["abc", "0", "-1", "1.5", "1e3", "9" * 19, "9" * 20, "9" * 4_301, "9" * 60_000, "%20", "activ", "１２"],
    ids=lambda id: id if len(id) < 30 else f"{len(id)}-digits",
)
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


def routes(served: Served) -> list[tuple[str, str]]:
    """Method and path of each route of the document, with an id that is not there."""
    paths = served.http.get("/openapi.json").json()["paths"]
    return [(method.upper(), path.replace("{id}", "999999")) for path, methods in paths.items() for method in methods]


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
