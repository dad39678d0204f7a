"""Named leases and the generator over HTTP, and `Leases(url=…)`, which is a program without access to the database."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.processes import wait_for
from tests.serving import TOKEN, Served, error_of
from worker import LeaseHeld, LeaseLost, Leases
from worker.errors import ConfigError
from worker.holding import HeldName
from worker.http_calls import Answer
from worker.lease_http import HttpTransport
from worker.name_renewals import terms_of

FIELDS = {
    *("id", "resource", "holder", "fence", "ttl_seconds", "metadata", "state", "expires_in_ms"),
    *("created_at", "renewed_at", "released_at"),
}


@pytest.fixture
def name(queue: str) -> str:
    return queue


def acquire(served: Served, name: str, holder: str = "a", **fields: Any) -> dict[str, Any]:
    answer = served.http.post("/api/leases", json={"resource": name, "holder": holder, **fields})
    assert answer.status_code == 201, answer.text
    lease: dict[str, Any] = answer.json()
    return lease


def of(lease: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"resource": lease["resource"], "holder": lease["holder"], "fence": lease["fence"]} | other


def lapse(served: Served, lease: dict[str, Any]) -> None:
    served.ask("UPDATE leases SET expires_at = now() - interval '1 ms' WHERE id = %s RETURNING id", lease["id"])


# --- the routes


def test_a_lease_is_acquired_renewed_and_released(served: Served, name: str) -> None:
    lease = acquire(served, name, metadata={"big": 2**70, "host": "x"})
    assert lease.keys() == FIELDS
    assert (lease["resource"], lease["holder"], lease["state"], lease["ttl_seconds"]) == (name, "a", "active", 30)
    assert lease["metadata"] == {"big": 2**70, "host": "x"}
    assert 29_000 < lease["expires_in_ms"] <= 30_000
    assert served.http.get(f"/api/leases/{lease['id']}").json()["fence"] == lease["fence"]

    renewed = served.http.put("/api/leases/renew", json=of(lease))
    assert renewed.status_code == 200
    assert renewed.json()["renewed_at"] is not None

    for _ in range(2):
        released = served.http.request("DELETE", "/api/leases/release", json=of(lease))
        assert (released.status_code, released.json()["state"]) == (200, "released")
    again = acquire(served, name, "b")
    assert again["fence"] > lease["fence"]
    assert (again["renewed_at"], again["released_at"]) == (None, None)


def test_a_lease_that_somebody_holds_is_409_and_says_who_and_for_how_long(served: Served, name: str) -> None:
    acquire(served, name, ttl_seconds=60)
    answer = served.http.post("/api/leases", json={"resource": name, "holder": "b"})
    assert error_of(answer) == (409, "held")
    assert answer.json()["holder"] == "a"
    assert 59_000 < answer.json()["retry_after_ms"] <= 60_000


def test_who_no_longer_holds_it_can_neither_renew_nor_release(served: Served, name: str) -> None:
    """H10: A lapses, B acquires, A releases and renews."""
    a = acquire(served, name, "a", ttl_seconds=1)
    lapse(served, a)
    b = acquire(served, name, "b", ttl_seconds=60)
    for answer in (
        served.http.put("/api/leases/renew", json=of(a)),
        served.http.request("DELETE", "/api/leases/release", json=of(a)),
        served.http.request("DELETE", f"/api/leases/{a['id']}", json={"holder": "a", "fence": a["fence"]}),
        served.http.put("/api/leases/renew", json=of(a, fence=b["fence"])),
        served.http.put("/api/leases/renew", json=of(b, holder="a")),
    ):
        assert error_of(answer) == (404, "not_held")
    assert served.http.put("/api/leases/renew", json=of(b)).status_code == 200


def test_a_repeated_request_gives_the_same_fence_and_the_remaining_time(served: Served, name: str) -> None:
    """H11: the answer to acquire was lost."""
    first = acquire(served, name, request_id="r1", ttl_seconds=60)
    served.ask("UPDATE leases SET expires_at = expires_at - interval '20 s' WHERE id = %s RETURNING id", first["id"])
    second = acquire(served, name, request_id="r1", ttl_seconds=60)
    assert second["fence"] == first["fence"]
    assert 30_000 < second["expires_in_ms"] <= 40_000
    served.http.request("DELETE", "/api/leases/release", json=of(first))
    answer = served.http.post("/api/leases", json={"resource": name, "holder": "a", "request_id": "r1"})
    assert error_of(answer) == (409, "ended")
    assert acquire(served, name, request_id="r2")["fence"] > first["fence"]


@pytest.mark.parametrize("ttl", ["0", "-1", "1e9", '"5s"', '"5"', "NaN", "null", "true", "0.999", "86400.1"])
def test_a_ttl_is_1_second_to_a_day(served: Served, name: str, ttl: str) -> None:
    """H12."""
    body = f'{{"resource": "{name}", "holder": "a", "ttl_seconds": {ttl}}}'
    answer = served.http.post("/api/leases", content=body, headers={"Content-Type": "application/json"})
    assert error_of(answer) == (422, "invalid")


@pytest.mark.parametrize("resource", ["", "x" * 513, "é" * 257, "nul\x00", 5, None])
def test_a_name_that_cannot_be_is_422(served: Served, resource: object) -> None:
    answer = served.http.post("/api/leases", json={"resource": resource, "holder": "a"})
    assert error_of(answer) == (422, "invalid")
    assert "resource" in answer.json()["message"]


LARGE = f'{{"big": "{"x" * 20_000}"}}'


@pytest.mark.parametrize("metadata", ['{"nul": "\\u0000"}', '{"lone": "\\ud800"}', "[]", '"x"', '{"n": 1e999}', LARGE])
def test_metadata_that_cannot_be_stored_is_422(served: Served, name: str, metadata: str) -> None:
    body = f'{{"resource": "{name}", "holder": "a", "metadata": {metadata}}}'
    answer = served.http.post("/api/leases", content=body, headers={"Content-Type": "application/json"})
    assert error_of(answer) == (422, "invalid")


def test_a_release_by_id_needs_holder_and_fence_in_a_body_or_a_query(served: Served, name: str) -> None:
    lease = acquire(served, name)
    path = f"/api/leases/{lease['id']}"
    for query in ("", "?holder=a", f"?fence={lease['fence']}"):
        assert error_of(served.http.delete(path + query)) == (422, "invalid")
    assert error_of(served.http.request("DELETE", path, json={"holder": "a"})) == (422, "invalid")
    assert error_of(served.http.delete(f"{path}?holder=b&fence={lease['fence']}")) == (404, "not_held")
    assert served.http.delete(f"{path}?holder=a&fence={lease['fence']}").json()["state"] == "released"
    assert served.http.request("DELETE", path, json={"holder": "a", "fence": lease["fence"]}).status_code == 200
    both = served.http.request("DELETE", f"{path}?holder=a", json={"holder": "a", "fence": lease["fence"]})
    assert error_of(both) == (422, "invalid")


def test_a_lease_that_is_not_there_is_404(served: Served) -> None:
    assert error_of(served.http.get("/api/leases/9999999")) == (404, "not_found")
    assert error_of(served.http.delete("/api/leases/9999999?holder=a&fence=1")) == (404, "not_held")


def test_the_lists_show_what_their_names_say(served: Served, name: str) -> None:
    active, expired, renewed, released = (acquire(served, f"{name}-{which}") for which in range(4))
    lapse(served, expired)
    served.http.put("/api/leases/renew", json=of(renewed))
    served.http.request("DELETE", "/api/leases/release", json=of(released))

    def shown(path: str) -> set[int]:
        items = served.http.get(f"/api/leases{path}?limit=500").json()["items"]
        return {item["id"] for item in items if item["resource"].startswith(name)}

    assert shown("") == {lease["id"] for lease in (active, expired, renewed, released)}
    assert shown("/active") == {active["id"], renewed["id"]}
    assert shown("/expired") == {expired["id"]}
    assert shown("/renewed") == {renewed["id"]}
    assert shown("/released") == {released["id"]}


def test_lists_of_leases_come_in_pages(served: Served, name: str) -> None:
    leases = [acquire(served, f"{name}-{number:02}") for number in range(5)]
    seen: list[int] = []
    cursor = ""
    while True:
        page = served.http.get(f"/api/leases/active?limit=2{cursor}").json()
        assert len(page["items"]) <= 2
        seen += [item["id"] for item in page["items"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert len(seen) == len(set(seen))
    assert [id for id in seen if id in {lease["id"] for lease in leases}] == [lease["id"] for lease in leases]


def test_one_odd_row_makes_no_list_fail(served: Served, name: str) -> None:
    """I14: written by hand, in SQL."""
    lease = acquire(served, name)
    served.ask("""UPDATE leases SET metadata = '{"n": 1e999}' WHERE id = %s RETURNING id""", lease["id"])
    assert served.http.get(f"/api/leases/{lease['id']}").json()["metadata"] == {"n": 10**999}
    served.ask("""UPDATE leases SET metadata = '{"n": 1e5000}' WHERE id = %s RETURNING id""", lease["id"])
    assert served.http.get(f"/api/leases/{lease['id']}").json()["metadata"] == {}
    odd = served.add(queue=name, payload=None)
    served.ask(
        "UPDATE jobs SET available_at = 'infinity', created_at = '-infinity', meta = '[1]', payload = '1e999' WHERE id = %s"
        " RETURNING id",
        odd,
    )
    worse = served.add(queue=name)
    served.claimed(queue=name)
    served.ask(
        """UPDATE jobs SET meta = '{"http": {"lease_seconds": "x", "started": []}}', lease_until = 'infinity',
        started_at = '294275-01-01' WHERE id = %s RETURNING id""",
        worse,
    )
    for path in ("/api/tasks", "/api/tasks/started"):
        assert served.http.get(f"{path}?limit=500").status_code == 200
    assert served.http.get(f"/api/tasks/{odd}").json()["scheduled_at"] == "infinity"
    shown = served.http.get(f"/api/tasks/{worse}").json()
    assert (shown["expires_in_ms"], shown["last_heartbeat_at"], shown["started_at"]) == (
        None,
        None,
        "294275-01-01T00:00:00.000000Z",
    )


def test_a_lease_whose_acquisition_is_not_committed_is_held_by_nobody_known_for_a_moment(served: Served, name: str) -> None:
    with served.db.transaction():
        served.db.execute("SELECT acquire_lease(%s, 'somebody', 60)", [name])
        answer = served.http.post("/api/leases", json={"resource": name, "holder": "b"})
        assert error_of(answer) == (409, "held")
        assert (answer.json()["holder"], answer.json()["retry_after_ms"]) == (None, 100)


# --- the generator


def test_the_generator_is_started_and_stopped_and_any_instance_says_the_same(
    database_url: str, serve: Callable[..., Served]
) -> None:
    one, other = serve(database_url), serve(database_url)
    stopped = one.http.get("/api/generator").json()
    assert stopped == {"state": "STOPPED", "holder": None, "fence": None, "rate": stopped["rate"], "produced": 0}
    assert one.http.post("/api/generator/start").json()["state"] == "STARTED"
    assert other.http.get("/api/generator").json()["state"] == "STARTED"
    assert other.http.post("/api/generator/stop").json()["state"] == "STOPPED"
    assert one.http.get("/api/generator").json()["state"] == "STOPPED"
    for path in ("/api/generator/start", "/api/generator/stop"):
        assert error_of(one.http.get(path)) == (405, "method_not_allowed")
        assert error_of(one.http.post(path, json={"rate": 5})) == (422, "invalid")
    assert one.http.get("/api/generator").json()["state"] == "STOPPED"


# --- Leases(url=…)


async def test_renewals_begin_with_the_lease_that_is_trusted_for_the_shortest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = HttpTransport("http://127.0.0.1:1", None)
    asked: list[object] = []

    async def call(method: str, path: str, body: dict[str, object], *, seconds: float) -> Answer:
        asked.append(body["resource"])
        return Answer(200, {"expires_in_ms": 3_000})

    monkeypatch.setattr(transport._renewals, "call", call)
    held = [
        HeldName(resource=str(at), holder="h", id=at, fence=1, terms=terms_of(3), asked_at=at, remaining_seconds=3)
        for at in (2, 3, 1)
    ]
    renewed = await transport.renew_many(held, limit_seconds=1)
    assert (asked, len(renewed.expires_in_ms)) == (["1", "2", "3"], 3)
    await transport.close(1)


async def test_a_program_without_the_database_holds_a_lease_over_http(served: Served, name: str) -> None:
    async with Leases(url=served.url, bearer=TOKEN, holder="a") as leases:
        async with leases.hold(name, ttl_seconds=1, metadata={"why": "test"}) as held:
            [row] = served.ask("SELECT * FROM leases WHERE resource = %s", name)
            assert (row.holder, row.fence, row.metadata) == ("a", held.fence, {"why": "test"})
            assert served.http.post("/api/leases", json={"resource": name, "holder": "b"}).json()["holder"] == "a"
            await asyncio.sleep(2.5)  # more than two terms: it is renewed
            held.ensure_lease()
            assert 0 < held.remaining_seconds() <= 1
        acquired = acquire(served, name, "b", ttl_seconds=1)
        assert acquired["fence"] > held.fence
        with pytest.raises(LeaseHeld) as refused:
            async with leases.hold(name):
                pass
        assert refused.value.holder == "b"
        async with leases.hold(name, wait_seconds=5) as again:
            assert again.fence > acquired["fence"]


async def test_a_lease_lost_over_http_stops_the_block(served: Served, name: str) -> None:
    async with Leases(url=served.url, bearer=TOKEN) as leases:

        async def block() -> None:
            async with leases.hold(name, ttl_seconds=1):
                served.ask("UPDATE leases SET fence = nextval('fence_seq'), holder = 'x' WHERE resource = %s RETURNING id", name)
                await asyncio.sleep(10)

        with pytest.raises(LeaseLost) as lost:
            await block()
        assert lost.value.reason == "lease_lost"


async def test_a_server_that_hangs_stops_the_block_before_the_lease_can_pass_on(
    database_url: str, serve: Callable[..., Served], name: str
) -> None:
    served = serve(database_url)
    async with Leases(url=served.url, bearer=TOKEN) as leases:

        async def block() -> None:
            async with leases.hold(name, ttl_seconds=2):
                os.kill(served.process.pid, signal.SIGSTOP)
                await asyncio.sleep(10)

        started = time.monotonic()
        try:
            with pytest.raises(LeaseLost) as lost:
                await block()
            assert lost.value.reason == "lease_untrusted"
            assert time.monotonic() - started < 4.5  # the loss, and a release that nobody answers
        finally:
            os.kill(served.process.pid, signal.SIGCONT)


async def test_a_wrong_token_or_address_is_a_matter_of_configuration(served: Served, name: str) -> None:
    async with Leases(url=served.url, bearer="wrong-token-wrong-token") as leases:
        with pytest.raises(ConfigError, match="not accepted"):
            async with leases.hold(name):
                pass
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        async with Leases(url="ftp://elsewhere"):
            pass


@pytest.fixture
def eater(served: Served) -> Iterator[str]:
    """The address of a proxy that passes requests on and eats every second answer to a POST."""
    count = {"POST": 0}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            answer = served.http.request(self.command, self.path, content=body, headers={"Content-Type": "application/json"})
            count["POST"] += self.command == "POST"
            if self.command == "POST" and count["POST"] % 2 == 1:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_PUT = do_DELETE = _pass_on  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def test_an_acquisition_whose_answer_was_eaten_locks_nobody_out(served: Served, name: str, eater: str) -> None:
    async with Leases(url=eater, bearer=TOKEN, holder="a") as leases:
        started = time.monotonic()
        async with leases.hold(name, ttl_seconds=60) as held:
            assert time.monotonic() - started < 5
            [row] = served.ask("SELECT holder, fence FROM leases WHERE resource = %s", name)
            assert (row.holder, row.fence) == ("a", held.fence)
    [row] = served.ask("SELECT released_at FROM leases WHERE resource = %s", name)
    assert row.released_at is not None


def test_fifty_clients_have_never_two_holders_and_fences_rise(served: Served, name: str) -> None:
    history: list[tuple[int, str]] = []

    def fight(number: int) -> None:
        for _ in range(4):
            answer = served.http.post("/api/leases", json={"resource": name, "holder": f"h{number}", "ttl_seconds": 30})
            if answer.status_code == 409:
                assert answer.json()["error"] == "held"
                continue
            lease = answer.json()
            history.append((lease["fence"], lease["holder"]))  # while it is held: the order is that of the holders
            assert served.http.request("DELETE", "/api/leases/release", json=of(lease)).status_code == 200

    with ThreadPoolExecutor(50) as threads:
        list(threads.map(fight, range(50)))
    fences = [fence for fence, _ in history]
    assert fences == sorted(set(fences))
    assert len(fences) >= 3
    wait_for(lambda: served.http.get("/readyz").status_code == 200)
