"""Tasks over HTTP are jobs: how they are enqueued, looked at and listed, as a client sees it."""

from __future__ import annotations

import json

import pytest

from tests.serving import Served, error_of

FIELDS = {
    *("id", "key", "kind", "queue", "payload", "state", "processor", "fence", "attempt", "scheduled_at", "started_at"),
    *("last_heartbeat_at", "expires_in_ms", "completed_at", "output"),
}

# --- enqueue and look


def test_an_enqueued_task_is_a_job_and_is_shown_with_every_field(served: Served, queue: str) -> None:
    answer = served.http.post("/api/tasks", json={"kind": "resize", "payload": {"n": 1}, "key": f"{queue}-a", "queue": queue})
    assert answer.status_code == 201
    assert answer.headers["cache-control"] == "no-store"
    task = answer.json()
    assert task.keys() == FIELDS
    row = served.job(task["id"])
    assert (row.kind, row.queue, row.payload, row.idempotency_key) == ("resize", queue, {"n": 1}, f"{queue}-a")
    assert (task["state"], task["fence"], task["attempt"], task["processor"]) == ("ready", 0, 0, None)
    assert task == served.http.get(f"/api/tasks/{task['id']}").json()


def test_a_key_that_exists_answers_200_with_the_first_task(served: Served, queue: str) -> None:
    wish = {"payload": 1, "key": f"{queue}-once", "queue": queue}
    first, second = (served.http.post("/api/tasks", json=wish | {"payload": payload}) for payload in (1, 2))
    assert (first.status_code, second.status_code) == (201, 200)
    assert second.json() == first.json()


def test_every_field_of_a_job_can_be_given(served: Served, queue: str) -> None:
    wish = {"payload": None, "queue": queue, "priority": -7, "max_attempts": 2, "run_at": "2031-01-31T08:00:00+01:00"}
    row = served.job(served.http.post("/api/tasks", json=wish).json()["id"])
    assert (row.kind, row.priority, row.max_attempts, row.available_at.isoformat()) == (
        "message",
        -7,
        2,
        "2031-01-31T07:00:00+00:00",
    )
    delayed = served.http.post("/api/tasks", json={"payload": 0, "queue": queue, "delay_seconds": 60}).json()
    [left] = served.ask("SELECT extract(epoch FROM available_at - created_at) AS seconds FROM jobs WHERE id = %s", delayed["id"])
    assert 60 <= left.seconds < 70


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({}, "payload"),
        ({"payload": 1, "colour": "red"}, "colour"),
        ({"payload": 1, "kind": ""}, "kind"),
        ({"payload": 1, "kind": "k" * 129}, "kind"),
        ({"payload": 1, "kind": "é" * 65}, "kind"),
        ({"payload": 1, "queue": "a\x00b"}, "queue"),
        ({"payload": 1, "key": "auto:mine"}, "key"),
        ({"payload": 1, "key": "k" * 513}, "key"),
        ({"payload": 1, "priority": 40_000}, "priority"),
        ({"payload": 1, "priority": "5"}, "priority"),
        ({"payload": 1, "max_attempts": True}, "max_attempts"),
        ({"payload": 1, "max_attempts": 0}, "max_attempts"),
        ({"payload": 1, "run_at": "2031-01-31T08:00:00"}, "run_at"),
        ({"payload": 1, "run_at": 5}, "run_at"),
        ({"payload": 1, "run_at": "2031-01-31T08:00:00Z", "delay_seconds": 1}, "run_at"),
        ({"payload": 1, "delay_seconds": -1}, "delay_seconds"),
        ({"payload": "nul \x00"}, "payload"),
        ({"payload": {"lone": "\ud800"}}, "payload"),
    ],
)
def test_what_no_job_can_be_is_refused_by_name(served: Served, wish: dict[str, object], named: str) -> None:
    answer = served.http.post("/api/tasks", content=json.dumps(wish), headers={"Content-Type": "application/json"})
    assert error_of(answer) == (422, "invalid")
    assert named in answer.json()["message"]


def test_numbers_come_back_as_they_were_sent(served: Served, queue: str) -> None:
    text = f'{{"payload": {{"big": 123456789012345678901234567890, "small": -1}}, "queue": "{queue}"}}'
    task = served.http.post("/api/tasks", content=text, headers={"Content-Type": "application/json"})
    assert '"big": 123456789012345678901234567890' in task.text
    assert (
        '"big": 123456789012345678901234567890' in served.http.post("/api/tasks/next", json={"processor": "p", "queue": queue}).text
    )
    served.ask("UPDATE jobs SET payload = '1.10' WHERE id = %s RETURNING id", task.json()["id"])
    assert '"payload":1.10,' in served.http.get(f"/api/tasks/{task.json()['id']}").text


def test_a_payload_of_1_mib_fits_and_one_of_more_is_refused_by_name(served: Served, queue: str) -> None:
    fits = "x" * (1_048_576 - 100)
    answer = served.http.post("/api/tasks", json={"payload": fits, "queue": queue})
    assert answer.status_code == 201
    assert served.claimed(queue=queue)["payload"] == fits
    answer = served.http.post("/api/tasks", json={"payload": "x" * 1_048_600, "queue": queue})
    assert error_of(answer) == (422, "invalid")
    assert "1 MiB" in answer.json()["message"]


def test_a_task_that_is_not_there_is_404(served: Served) -> None:
    assert error_of(served.http.get("/api/tasks/9999999")) == (404, "not_found")
    for id in ("0", "9223372036854775808", "99999999999999999999999", "x", "-1", "1.5", "%31%zz"):
        assert error_of(served.http.get(f"/api/tasks/{id}")) == (422, "invalid")
    assert error_of(served.http.get("/api/tasks/1/2")) == (404, "not_found")


# --- lists


def test_lists_come_in_pages_newest_first_and_each_task_once(served: Served, queue: str) -> None:
    ids = [served.add(queue=queue) for _ in range(5)]
    seen: list[int] = []
    cursor = ""
    while True:
        page = served.http.get(f"/api/tasks?limit=2{cursor}").json()
        seen += [task["id"] for task in page["items"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert len(seen) == len(set(seen))
    assert seen == sorted(seen, reverse=True)
    assert [id for id in seen if id in ids] == ids[::-1]


def test_started_and_processed_show_what_their_names_say(served: Served, queue: str) -> None:
    for _ in range(3):
        served.add(queue=queue)
    done, started = served.claimed(queue=queue), served.claimed(queue=queue)
    served.tell("complete", done)

    def ids(path: str) -> set[int]:
        return {task["id"] for task in served.http.get(f"{path}?limit=500").json()["items"]}

    assert started["id"] in ids("/api/tasks/started")
    assert done["id"] not in ids("/api/tasks/started")
    assert done["id"] in ids("/api/tasks/processed")
    assert started["id"] not in ids("/api/tasks/processed")


@pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x", "limit=", "cursor=x", "cursor=%00", "limt=5"])
def test_a_page_that_cannot_be_is_refused(served: Served, query: str) -> None:
    assert error_of(served.http.get(f"/api/tasks?{query}")) == (422, "invalid")


def test_a_cursor_belongs_to_its_list(served: Served, queue: str) -> None:
    for _ in range(2):
        served.add(queue=queue)
    cursor = served.http.get("/api/tasks?limit=1").json()["next"]
    assert served.http.get(f"/api/tasks?cursor={cursor}").status_code == 200
    assert error_of(served.http.get(f"/api/tasks/started?cursor={cursor}")) == (422, "invalid")
    assert error_of(served.http.get(f"/api/leases?cursor={cursor}")) == (422, "invalid")


def test_a_page_of_large_payloads_ends_early_and_goes_on_behind(served: Served, queue: str) -> None:
    size = 1_000_000
    served.ask(
        "INSERT INTO jobs (queue, payload) SELECT %s, to_jsonb(repeat('x', %s)) FROM generate_series(1, 20) RETURNING id",
        queue,
        size,
    )
    first = served.http.get("/api/tasks?limit=500")
    assert len(first.content) < 18 * 1024 * 1024
    assert first.json()["next"] is not None
    second = served.http.get(f"/api/tasks?limit=1&cursor={first.json()['next']}").json()["items"]
    assert second[0]["id"] == first.json()["items"][-1]["id"] - 1


@pytest.mark.parametrize("seconds", ["1e300", "1e999", "-1e300", "0", '"60"', "null", "[1]", '{"a": 1}'])
def test_a_length_that_no_claim_can_have_asked_for_makes_no_list_fail_and_no_lease_odd(
    served: Served, queue: str, seconds: str
) -> None:
    """Somebody writes into `meta` by hand."""
    id = served.add(queue=queue)
    task = served.claimed(queue=queue, lease_seconds=60)
    served.ask("UPDATE jobs SET meta = jsonb_set(meta, '{http,lease_seconds}', %s::jsonb) WHERE id = %s RETURNING id", seconds, id)
    for path in ("/api/tasks", "/api/tasks/started"):
        assert served.http.get(f"{path}?limit=500").status_code == 200
    assert served.http.get(f"/api/tasks/{id}").json()["last_heartbeat_at"] is None
    renewed = served.tell("heartbeat", task)
    assert (renewed.status_code, 0 < renewed.json()["expires_in_ms"] <= 60_000) == (202, True)
    assert served.tell("complete", task).status_code == 202
