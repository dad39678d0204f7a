"""Named leases and the generator over HTTP: the routes, renewals of many, and rivals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.rows import namedtuple_row

from tests.serving import TOKEN, Served, error_of
from tests.waiting import any_moment, await_for, wait_for
from worker.api.name_beats import ROLE, NameBeats
from worker.api.problems import Problem
from worker.holding import HeldName
from worker.keeper import LEASE_SETTINGS
from worker.lease_http import HttpTransport
from worker.name_renewals import terms_of
from worker.store.connection import Database, Lane
from worker.store.lease_renewals import Renewal
from worker.store.leases import Lease

FIELDS = {
    *("id", "resource", "holder", "fence", "ttl_seconds", "metadata", "state", "expires_in_ms"),
    *("created_at", "renewed_at", "released_at"),
}


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
    assert 0 < lease["expires_in_ms"] <= 30_000
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
    assert 30_000 < answer.json()["retry_after_ms"] <= 60_000


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
    assert 20_000 < second["expires_in_ms"] <= 40_000
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


def test_a_renewal_takes_a_body_or_a_query(served: Served, name: str) -> None:
    lease = acquire(served, name)
    query = httpx.QueryParams(of(lease))
    renewed = served.http.put(f"/api/leases/renew?{query}")
    assert (renewed.status_code, renewed.json()["renewed_at"] is not None) == (200, True)
    assert error_of(served.http.put(f"/api/leases/renew?{query.set('fence', lease['fence'] + 1)}")) == (404, "not_held")
    for wrong in ("", f"?{query.remove('holder')}", f"?{query}&ttl_seconds=5", "?fence=x"):
        assert error_of(served.http.put(f"/api/leases/renew{wrong}")) == (422, "invalid"), wrong
    assert error_of(served.http.put(f"/api/leases/renew?{query}", json=of(lease))) == (422, "invalid")
    assert error_of(served.http.put("/api/leases/renew", json=of(lease) | {"ttl_seconds": 5})) == (422, "invalid")


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


# --- renewals of many


async def test_renewals_that_come_together_are_one_statement(database_url: str) -> None:
    database = Database(database_url, environ={})
    lane = Lane(database, ROLE, settings=LEASE_SETTINGS)
    beats = NameBeats(database, lane, statement_seconds=10, limit_seconds=30)
    with psycopg.connect(database_url, autocommit=True, row_factory=namedtuple_row) as db, psycopg.connect(database_url) as other:
        got = db.execute(
            "SELECT n, a.* FROM generate_series(1, 60) AS n, LATERAL acquire_lease('name-' || n, 'h', 60 + n) AS a ORDER BY n"
        ).fetchall()
        db.execute("SELECT release_lease('name-1', 'h', %s)", [got[0].fence])
        db.execute("UPDATE leases SET expires_at = clock_timestamp() WHERE resource = 'name-2'")
        other.execute("SELECT FROM leases WHERE resource = 'name-3' FOR UPDATE")
        wishes = [Renewal(f"name-{one.n}", "h", one.fence) for one in got]
        strangers = [wishes[9]._replace(holder="x"), wishes[9]._replace(fence=1), Renewal("nowhere", "h", 1)]
        # All of them wait before the loop begins; one asks twice.
        asked = [asyncio.create_task(beats.renew(wish)) for wish in (*wishes, wishes[5], *strangers)]
        await await_for(lambda: beats._coalescer._waiting == len(asked))
        loop = asyncio.create_task(beats.run())
        try:
            answers = await asyncio.gather(*asked, return_exceptions=True)
        finally:
            loop.cancel()
            await lane.close(1)
        refusals = [answer.code for answer in answers if isinstance(answer, Problem)]
        assert refusals == ["not_held", "not_held", "busy", "not_held", "not_held", "not_held"]
        renewed = [answer for answer in answers if isinstance(answer, Lease)]
        assert [lease.resource for lease in renewed] == [*(wish.resource for wish in wishes[3:]), "name-6"]
        assert all(lease.ttl_seconds - 30 < lease.expires_in_ms / 1000 <= lease.ttl_seconds for lease in renewed)
        rows = db.execute("SELECT resource, xmin::text AS by FROM leases WHERE renewed_at IS NOT NULL").fetchall()
        assert len(rows) == 57
        assert len({row.by for row in rows}) == 1


async def test_three_hundred_names_are_renewed_over_http_in_fewer_statements(served: Served, name: str) -> None:
    got = served.ask(
        "SELECT a.*, %s || n AS resource FROM generate_series(1, 300) AS n, LATERAL acquire_lease(%s || n, 'h', 600) AS a",
        name,
        name,
    )
    held = [
        HeldName(
            resource=one.resource, holder="h", id=one.id, fence=one.fence, terms=terms_of(600), asked_at=0, remaining_seconds=600
        )
        for one in got
    ]
    transport = HttpTransport(served.url, TOKEN)
    try:
        renewed = await transport.renew_many(held, limit_seconds=60)
    finally:
        await transport.close(1)
    assert (len(renewed.expires_in_ms), renewed.lost) == (300, frozenset())
    [row] = served.ask(
        "SELECT count(*) AS renewed, count(DISTINCT xmin::text) AS statements FROM leases"
        " WHERE renewed_at IS NOT NULL AND starts_with(resource, %s)",
        name,
    )
    assert (row.renewed, row.statements < 300) == (300, True)


# --- rivals


def test_fifty_clients_have_never_two_holders_and_fences_rise(served: Served, name: str) -> None:
    history: list[int] = []
    inside: list[str] = []
    refusals: set[tuple[int, str]] = set()

    def fight(number: int) -> None:
        """Until it has held the lease once."""
        choices = Random(number)

        def acquired() -> dict[str, Any] | None:
            # With an id: what was acquired although the answer was that the database is away, is answered then.
            wish = {"resource": name, "holder": f"h{number}", "ttl_seconds": 600, "request_id": "only"}
            answer = served.http.post("/api/leases", json=wish)
            if answer.status_code == 201:
                lease: dict[str, Any] = answer.json()
                return lease
            refusals.add(error_of(answer))
            any_moment(choices, 0.1)
            return None

        lease = wait_for(acquired, 90)
        assert lease is not None
        inside.append(lease["holder"])
        history.append(lease["fence"])
        assert inside == [lease["holder"]]
        inside.pop()
        told: list[int] = []

        def released() -> bool:
            told.append(served.http.request("DELETE", "/api/leases/release", json=of(lease)).status_code)
            return told[-1] != 503

        wait_for(released, 60)
        assert told[-1] == 200 or 503 in told  # that may have been released, and the next one has it

    with ThreadPoolExecutor(50) as threads:
        list(threads.map(fight, range(50)))
    assert refusals <= {(409, "held"), (503, "busy"), (503, "database_unavailable")}
    assert len(history) == 50
    assert history == sorted(set(history))
    wait_for(lambda: served.http.get("/readyz").status_code == 200)


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
