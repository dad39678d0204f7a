"""Claims over HTTP: which task a remote worker is given, and that the same request is given the same one."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.raw_requests import raw_request
from tests.serving import QUICK, Served, error_of
from tests.waiting import wait_for

# --- which one


def test_a_claim_is_the_daemons_claim_with_an_owner_of_its_own(served: Served, queue: str) -> None:
    id = served.add(queue=queue, payload={"a": 1})
    task = served.claimed("worker one", queue=queue, lease_seconds=60)
    row = served.job(id)
    assert (task["id"], task["payload"], task["attempt"], task["processor"]) == (id, {"a": 1}, 1, "worker one")
    assert (row.state, row.lease_owner, row.attempts, row.fence) == ("running", "http:worker one", 1, task["fence"])
    assert 30_000 < task["expires_in_ms"] <= 60_000
    assert (row.lease_until - row.started_at).total_seconds() == 60
    assert task["last_heartbeat_at"] is None
    assert served.claim(queue=queue) is None


def test_a_claim_without_a_lease_length_gets_that_of_the_settings(served: Served, queue: str) -> None:
    id = served.add(queue=queue)
    assert served.claimed(queue=queue)["expires_in_ms"] <= 1_000 * float(QUICK["WORKER_LEASE_SECONDS"])
    row = served.job(id)
    assert (row.lease_until - row.started_at).total_seconds() == float(QUICK["WORKER_LEASE_SECONDS"])


@pytest.mark.parametrize("seconds", [0, 0.99, -1, 86_401, 1e9, "5", "5s", None, True, [], 1e400])
def test_a_lease_is_1_second_to_a_day(served: Served, queue: str, seconds: object) -> None:
    body = json.dumps({"processor": "p", "queue": queue, "lease_seconds": seconds})
    answer = served.http.post("/api/tasks/next", content=body, headers={"Content-Type": "application/json"})
    if seconds is None:
        assert answer.status_code == 204
    else:
        assert error_of(answer) == (422, "invalid")


def test_claims_take_the_highest_priority_then_the_oldest_and_only_what_is_due(served: Served, queue: str) -> None:
    low, high = served.add(queue=queue, priority=-1), served.add(queue=queue, priority=5)
    later = "UPDATE jobs SET available_at = now() + interval '1 hour' WHERE id = %s RETURNING id"
    served.ask(later, served.add(queue=queue, priority=9))
    middle_old, middle_new = served.add(queue=queue), served.add(queue=queue)
    assert [served.claimed(queue=queue)["id"] for _ in range(4)] == [high, middle_old, middle_new, low]
    assert served.claim(queue=queue) is None
    last = served.add(queue=queue, priority=-5)
    first = served.add(queue=queue, priority=7)
    assert [served.claimed(queue=queue)["id"] for _ in range(2)] == [first, last]


def test_a_claim_of_some_kinds_passes_over_the_others(served: Served, queue: str) -> None:
    other, mine = served.add("other", queue=queue), served.add("mine", queue=queue)
    assert served.claimed(queue=queue, kinds=["mine", "third"])["id"] == mine
    assert served.claim(queue=queue, kinds=["mine"]) is None
    assert served.claimed(queue=queue)["id"] == other
    assert error_of(served.http.post("/api/tasks/next", json={"processor": "p", "kinds": []})) == (422, "invalid")


def test_a_suspect_is_given_to_a_remote_worker_one_at_a_time(served: Served, queue: str) -> None:
    suspects = [served.add(queue=queue, crashes=1) for _ in range(3)]
    ordinary = served.add(queue=queue)
    first, second = (served.claimed(f"{queue} 1", queue=queue, lease_seconds=60) for _ in range(2))
    assert (first["id"], second["id"]) == (suspects[0], ordinary)
    assert served.claim(f"{queue} 1", queue=queue) is None
    assert served.claimed(f"{queue} 2", queue=queue, lease_seconds=60)["id"] == suspects[1]
    served.tell("complete", first)
    assert served.claimed(f"{queue} 1", queue=queue)["id"] == suspects[2]


def test_suspects_of_other_kinds_are_left_alone(served: Served, queue: str) -> None:
    served.add("other", queue=queue, crashes=1)
    mine = served.add("mine", queue=queue, crashes=1)
    assert served.claimed(f"{queue} 1", queue=queue, kinds=["mine"])["id"] == mine


# --- the same request again


def test_a_repeated_request_gets_the_same_task_while_its_lease_lives(served: Served, queue: str) -> None:
    for _ in range(3):
        served.add(queue=queue)
    wish: dict[str, Any] = {"queue": queue, "request_id": "r1", "lease_seconds": 60}
    first, second = served.claimed(**wish), served.claimed(**wish)
    assert (first["id"], first["fence"], first["attempt"]) == (second["id"], second["fence"], second["attempt"])
    assert second["expires_in_ms"] <= first["expires_in_ms"]
    assert served.claimed(**wish | {"request_id": "r2"})["id"] != first["id"]
    assert served.claimed("p2", **wish)["id"] != first["id"]


def test_a_request_whose_task_is_over_claims_anew(served: Served, queue: str) -> None:
    for _ in range(3):
        served.add(queue=queue)
    wish: dict[str, Any] = {"queue": queue, "request_id": "r1"}
    first = served.claimed(**wish)
    served.tell("complete", first)
    second = served.claimed(**wish)
    assert second["id"] != first["id"]
    served.lapse(second["id"])
    assert served.claimed(**wish)["id"] not in (first["id"], second["id"])


def test_equal_requests_at_the_same_moment_get_one_task(served: Served, queue: str) -> None:
    for _ in range(20):
        served.add(queue=queue)
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(served.claimed, queue=queue, request_id="same", lease_seconds=60) for _ in range(8)]
        claimed = [one.result() for one in asked]
    assert len({(task["id"], task["fence"]) for task in claimed}) == 1
    assert [row.state for row in served.ask("SELECT state FROM jobs WHERE queue = %s AND state <> 'ready'", queue)] == ["running"]


def test_equal_requests_to_two_servers_get_one_task(database_url: str, serve: Callable[..., Served]) -> None:
    servers = [serve(database_url), serve(database_url)]
    rounds = 15
    for _ in range(rounds * 4):
        servers[0].add()
    with ThreadPoolExecutor(8) as threads:
        for number in range(rounds):
            wish = {"request_id": f"r{number}", "lease_seconds": 60}
            asked = [threads.submit(servers[turn % 2].claimed, **wish) for turn in range(8)]
            assert len({(one.result()["id"], one.result()["fence"]) for one in asked}) == 1
    assert servers[0].ask("SELECT count(*)::int AS held FROM jobs WHERE state = 'running'")[0].held == rounds


def test_a_lost_answer_and_a_repeated_request_give_the_same_fence(served: Served, queue: str) -> None:
    """The proxy between has eaten the answer; the server noticed nothing."""
    served.add(queue=queue)
    served.add(queue=queue)
    wish = {"processor": "p1", "queue": queue, "request_id": "eaten", "lease_seconds": 60}
    with raw_request(served, "POST", "/api/tasks/next", wish) as connection:
        wait_for(lambda: served.ask("SELECT FROM jobs WHERE queue = %s AND state = 'running'", queue))
        wait_for(lambda: connection.recv(1, socket.MSG_PEEK))  # it is answered, and nobody has read it
    [lost] = served.ask("SELECT id, fence FROM jobs WHERE queue = %s AND state = 'running'", queue)
    again = served.claimed(queue=queue, request_id="eaten", lease_seconds=60)
    assert (again["id"], again["fence"]) == (lost.id, lost.fence)
