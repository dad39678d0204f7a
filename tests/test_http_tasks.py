"""Tasks over HTTP are jobs: one table, one state machine, one fence. The contract of each route, as a client sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.servers import WAIT_FOR_US
from tests.serving import Served, error_of
from tests.waiting import wait_for
from tests.workplace import POLL_NEVER, Workplace

FIELDS = {
    *("id", "key", "kind", "queue", "payload", "state", "processor", "fence", "attempt", "scheduled_at", "started_at"),
    *("last_heartbeat_at", "expires_in_ms", "completed_at", "output"),
}
VERBS = ("heartbeat", "complete", "fail", "release")


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
    [left] = served.ask("SELECT extract(epoch FROM available_at - now()) AS seconds FROM jobs WHERE id = %s", delayed["id"])
    assert 50 < left.seconds <= 60


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


# --- claim


def test_a_claim_is_the_daemons_claim_with_an_owner_of_its_own(served: Served, queue: str) -> None:
    id = served.add(queue=queue, payload={"a": 1})
    task = served.claimed("worker one", queue=queue, lease_seconds=60)
    row = served.job(id)
    assert (task["id"], task["payload"], task["attempt"], task["processor"]) == (id, {"a": 1}, 1, "worker one")
    assert (row.state, row.lease_owner, row.attempts, row.fence) == ("running", "http:worker one", 1, task["fence"])
    assert 59_000 < task["expires_in_ms"] <= 60_000
    assert (row.lease_until - row.started_at).total_seconds() == 60
    assert task["last_heartbeat_at"] is None
    assert served.claim(queue=queue) is None


def test_a_claim_without_a_lease_length_gets_that_of_the_settings(served: Served, queue: str) -> None:
    served.add(queue=queue)
    assert 1_000 < served.claimed(queue=queue)["expires_in_ms"] <= 2_000


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


# --- heartbeat, complete, fail, release


def test_a_heartbeat_renews_for_as_long_as_was_asked_for(served: Served, queue: str) -> None:
    served.add(queue=queue)
    task = served.claimed(queue=queue, lease_seconds=100)
    served.ask("UPDATE jobs SET lease_until = now() + interval '5 s' WHERE id = %s RETURNING id", task["id"])
    answer = served.tell("heartbeat", task)
    assert answer.status_code == 202
    beaten = answer.json()
    assert 99_000 < beaten["expires_in_ms"] <= 100_000
    assert beaten["last_heartbeat_at"] > beaten["started_at"]
    assert beaten["fence"] == task["fence"]


def test_a_completion_stores_its_output_and_no_ledger_row(served: Served, queue: str) -> None:
    served.add(queue=queue, idempotency_key=f"{queue}-key")
    task = served.claimed(queue=queue)
    answer = served.tell("complete", task, output={"pages": [1, 2.5, None]})
    assert answer.status_code == 202
    row = served.job(task["id"])
    assert (row.state, row.result, row.lease_owner, row.last_error) == ("succeeded", {"pages": [1, 2.5, None]}, None, None)
    shown = answer.json()
    assert (shown["state"], shown["output"], shown["processor"]) == ("succeeded", {"pages": [1, 2.5, None]}, "p1")
    assert shown["completed_at"] is not None
    # Effects are what the ledger is for, and a remote worker has none: as for the daemon's own jobs without effects.
    assert served.ask("SELECT FROM job_effects WHERE idempotency_key = %s", f"{queue}-key") == []


def test_a_completion_without_output_stores_none(served: Served, queue: str) -> None:
    served.add(queue=queue)
    task = served.claimed(queue=queue)
    assert served.tell("complete", task).json()["output"] is None
    assert served.job(task["id"]).result is None


@pytest.mark.parametrize(
    "output", ['"\\u0000"', '"\\ud800"', "NaN", "-Infinity", "1e999", "[" * 100_000 + "]" * 100_000, '"%s"' % ("x" * 1_100_000)]
)
def test_an_output_that_cannot_be_stored_is_refused_and_changes_nothing(served: Served, queue: str, output: str) -> None:
    id = served.add(queue=queue)
    task = served.claimed(queue=queue, lease_seconds=60)
    before = served.job(id)
    body = f'{{"processor": "p1", "fence": {task["fence"]}, "output": {output}}}'
    answer = served.http.put(f"/api/tasks/{id}/complete", content=body, headers={"Content-Type": "application/json"})
    assert error_of(answer) == (422, "invalid")
    assert "x" * 20 not in answer.text
    assert served.job(id) == before
    assert served.tell("complete", task).status_code == 202


def test_a_failure_is_retried_with_the_backoff_of_a_local_one_until_it_is_dead(served: Served, queue: str) -> None:
    id = served.add(queue=queue, max_attempts=2)
    task = served.claimed(queue=queue)
    answer = served.tell("fail", task, error="boom\x00 \N{SNOWMAN}")
    assert answer.status_code == 202
    assert answer.json()["state"] == "ready"
    row = served.job(id)
    assert (row.attempts, row.last_error, row.lease_owner) == (1, "boom\N{REPLACEMENT CHARACTER} \N{SNOWMAN}", None)
    [delay] = served.ask(
        "SELECT extract(epoch FROM available_at - f.failed_at)::float8 AS seconds FROM jobs, job_failures AS f"
        " WHERE id = %s AND job_id = id",
        id,
    )
    assert 0.025 <= delay.seconds <= 0.05
    again = wait_for(lambda: served.claim(queue=queue))
    assert served.tell("fail", again, error="x" * 20_000).json()["state"] == "dead"
    row, failures = served.job(id), served.failures(id)
    assert len(row.last_error) == 1_000
    assert [(one.attempt, one.outcome, one.worker, one.fence) for one in failures] == [
        (1, "error", "http:p1", task["fence"]),
        (2, "error", "http:p1", again["fence"]),
    ]
    assert len(failures[1].error.encode()) <= 8_192


def test_an_error_text_that_is_no_unicode_is_cleaned_not_refused(served: Served, queue: str) -> None:
    id = served.add(queue=queue)
    task = served.claimed(queue=queue)
    body = f'{{"processor": "p1", "fence": {task["fence"]}, "error": "half \\ud83d a face"}}'
    answer = served.http.put(f"/api/tasks/{id}/fail", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 202
    assert served.job(id).last_error == "half ? a face"


def test_a_password_in_an_error_text_is_not_stored(served: Served, queue: str) -> None:
    id = served.add(queue=queue)
    served.tell("fail", served.claimed(queue=queue), error="cannot reach postgresql://app:hunter22@db/app")
    assert "hunter22" not in served.job(id).last_error + served.failures(id)[0].error


def test_a_release_refunds_the_attempt_and_keeps_the_place(served: Served, queue: str) -> None:
    first, second = served.add(queue=queue), served.add(queue=queue)
    before = served.job(first)
    task = served.claimed(queue=queue)
    answer = served.tell("release", task)
    assert (answer.status_code, answer.json()["state"], answer.json()["attempt"]) == (202, "ready", 0)
    row = served.job(first)
    assert (row.attempts, row.available_at, row.fence, row.last_error) == (0, before.available_at, task["fence"], None)
    assert served.failures(first) == []
    assert [served.claimed(queue=queue)["id"] for _ in range(2)] == [first, second]


@pytest.mark.parametrize("verb", ["complete", "fail", "release"])
def test_what_has_ended_an_attempt_may_be_said_again(served: Served, queue: str, verb: str) -> None:
    id = served.add(queue=queue)
    task = served.claimed(queue=queue)
    assert served.tell(verb, task).status_code == 202
    row, failures = served.job(id), served.failures(id)
    again = served.tell(verb, task)
    assert (again.status_code, again.json()["id"]) == (202, id)
    assert (served.job(id), served.failures(id)) == (row, failures)


def test_a_failure_said_again_after_another_claim_does_not_harm_that_one(served: Served, queue: str) -> None:
    served.add(queue=queue)
    task = served.claimed(queue=queue)
    served.tell("fail", task)
    newer = wait_for(lambda: served.claim("p2", queue=queue))
    assert served.tell("fail", task).status_code == 202
    assert served.job(task["id"]).fence == newer["fence"]
    assert served.tell("complete", newer).status_code == 202


def test_something_else_about_an_attempt_that_has_ended_is_a_conflict(served: Served, queue: str) -> None:
    served.add(queue=queue)
    task = served.claimed(queue=queue)
    served.tell("complete", task, output=1)
    for verb in ("fail", "release"):
        assert error_of(served.tell(verb, task)) == (409, "already_processed")
    assert served.tell("heartbeat", task).json()["state"] == "succeeded"
    assert served.job(task["id"]).result == 1
    served.add(queue=queue)
    released = served.claimed(queue=queue)
    served.tell("release", released)
    for verb in ("heartbeat", "complete", "fail"):
        assert error_of(served.tell(verb, released)) == (409, "not_owner")


@pytest.mark.parametrize("verb", VERBS)
def test_a_task_that_is_not_there_cannot_be_ended(served: Served, verb: str) -> None:
    answer = served.http.put(f"/api/tasks/99999999/{verb}", json={"processor": "p1", "fence": 1})
    assert error_of(answer) == (404, "not_found")


@pytest.mark.parametrize("verb", VERBS)
def test_neither_a_namesake_nor_another_name_gets_in_without_the_fence(served: Served, queue: str, verb: str) -> None:
    id = served.add(queue=queue)
    task = served.claimed(queue=queue, lease_seconds=60)
    before = served.job(id)
    assert error_of(served.tell(verb, task | {"fence": task["fence"] + 1})) == (409, "not_owner")
    assert error_of(served.tell(verb, task | {"fence": 1})) == (409, "not_owner")
    assert error_of(served.tell(verb, task, processor="p2")) == (409, "not_owner")
    assert served.job(id) == before
    served.tell("complete", task)
    assert error_of(served.tell(verb, task | {"fence": task["fence"] + 1})) == (409, "already_processed")
    assert error_of(served.tell(verb, task, processor="p2")) == (409, "already_processed")


@pytest.mark.parametrize("verb", VERBS)
def test_a_daemons_job_cannot_be_ended_over_http(served: Served, queue: str, verb: str) -> None:
    id = served.add(queue=queue)
    served.ask(
        "UPDATE jobs SET state = 'running', lease_owner = 'host-00000000', lease_until = now() + interval '1 min', fence = 77"
        " WHERE id = %s RETURNING id",
        id,
    )
    assert served.http.get(f"/api/tasks/{id}").json()["processor"] == "host-00000000"
    answer = served.http.put(f"/api/tasks/{id}/{verb}", json={"processor": "host-00000000", "fence": 77})
    assert error_of(answer) == (409, "not_owner")


def test_a_heartbeat_on_an_expired_lease_is_refused_and_a_late_completion_counts(served: Served, queue: str) -> None:
    served.add(queue=queue)
    task = served.claimed(queue=queue)
    served.lapse(task["id"])
    assert error_of(served.tell("heartbeat", task)) == (409, "lease_expired")
    assert served.tell("complete", task).status_code == 202


def test_a_cancelled_task_can_be_neither_renewed_nor_ended(served: Served, queue: str) -> None:
    id = served.add(queue=queue)
    task = served.claimed(queue=queue, lease_seconds=60)
    served.ask("SELECT cancel_job(%s)", id)
    for verb in VERBS:
        assert error_of(served.tell(verb, task)) == (409, "already_processed")
    assert served.job(id).state == "cancelled"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"fence": 1}, "processor"),
        ({"processor": "p"}, "fence"),
        ({"processor": "p", "fence": "1"}, "fence"),
        ({"processor": "p", "fence": 1.5}, "fence"),
        ({"processor": "p", "fence": 0}, "fence"),
        ({"processor": "p", "fence": 2**63}, "fence"),
        ({"processor": "", "fence": 1}, "processor"),
        ({"processor": "p" * 129, "fence": 1}, "processor"),
        ({"processor": "p", "fence": 1, "force": True}, "force"),
    ],
)
def test_who_speaks_and_under_which_fence_is_always_needed(served: Served, body: dict[str, object], named: str) -> None:
    for verb in VERBS:
        answer = served.http.put(f"/api/tasks/1/{verb}", json=body)
        assert error_of(answer) == (422, "invalid")
        assert named in answer.json()["message"]


# --- with a daemon on the same table


def test_an_expired_task_is_lost_not_crashed_and_goes_to_the_next(workplace: Workplace, serve: Callable[..., Served]) -> None:
    """A remote worker has no presence: nobody can tell its end from a lost connection, so it makes no suspect of its task."""
    workplace.daemon(WORKER_QUEUES="elsewhere")
    served = serve(workplace.url)
    id = served.add(max_attempts=2)
    task = served.claimed(lease_seconds=1)
    row = workplace.wait_for_state(id, "ready")
    assert (row.crashes, row.attempts, row.last_error) == (0, 1, "lease lost: http:p1")
    [failure] = served.failures(id)
    assert (failure.outcome, failure.worker, failure.fence) == ("lease_lost", "http:p1", task["fence"])
    for verb in VERBS:
        assert error_of(served.tell(verb, task)) == (409, "lease_expired")
    newer = served.claimed("p2", lease_seconds=60)
    assert newer["fence"] > task["fence"]
    for verb in VERBS:
        assert error_of(served.tell(verb, task))[0] == 409
    assert served.tell("complete", newer).status_code == 202
    assert error_of(served.tell("complete", task)) == (409, "already_processed")


def test_an_expired_last_attempt_is_dead(workplace: Workplace, serve: Callable[..., Served]) -> None:
    workplace.daemon(WORKER_QUEUES="elsewhere")
    served = serve(workplace.url)
    id = served.add(max_attempts=1)
    task = served.claimed(lease_seconds=1)
    workplace.wait_for_state(id, "dead")
    assert error_of(served.tell("complete", task)) == (409, "already_processed")


def test_a_release_wakes_an_idle_daemon(workplace: Workplace, serve: Callable[..., Served]) -> None:
    served = serve(workplace.url)
    workplace.ask("INSERT INTO jobs (idempotency_key, kind, payload) VALUES ('mine', 'nap', '{}') RETURNING id")
    task = served.claimed(lease_seconds=60)
    workplace.daemon(**POLL_NEVER)
    workplace.wait_until_only_notifications_wake()
    served.tell("release", task)
    workplace.wait_for_state(task["id"], "succeeded")


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


def test_daemons_and_remote_workers_share_a_queue_and_each_job_is_done_once(
    workplace: Workplace, serve: Callable[..., Served]
) -> None:
    workplace.daemon()
    served = serve(workplace.url)
    ids = workplace.add_many(200, "nap")
    done: list[int] = []

    def remote(number: int) -> None:
        while task := served.claim(f"remote-{number}", lease_seconds=60):
            assert served.tell("complete", task).status_code == 202
            done.append(task["id"])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(remote, range(4)))
    workplace.wait_until_all("succeeded")
    local = set(workplace.ledger())
    assert local | set(done) == set(ids)
    assert not local & set(done)
    assert len(done) == len(set(done))


def test_a_completion_can_be_repeated_also_where_succeeded_jobs_are_deleted_at_once(
    database_url: str, serve: Callable[..., Served]
) -> None:
    served = serve(database_url, WORKER_RETENTION_SECONDS="0")
    id = served.add()
    task = served.claimed()
    for _ in range(2):
        assert served.tell("complete", task).status_code == 202
    assert served.job(id).state == "succeeded"


def test_a_row_that_somebody_keeps_locked_holds_up_no_other_completion(served: Served, queue: str) -> None:
    tasks: list[dict[str, Any]] = []
    for _ in range(4):
        served.add(queue=queue)
        tasks.append(served.claimed(queue=queue, lease_seconds=60))
    with psycopg.connect(served.database_url) as other:
        other.execute("SELECT FROM jobs WHERE id = ANY (%s) FOR UPDATE", ([tasks[0]["id"], tasks[1]["id"]],))
        with ThreadPoolExecutor(4) as threads:
            first = threads.submit(served.tell, "complete", tasks[0])
            wait_for(lambda: other.execute(WAIT_FOR_US).fetchone() != (0,))
            # The others gather behind it.
            asked = [first, *(threads.submit(served.tell, "complete", task) for task in tasks[1:])]
            answers = [one.result() for one in asked]
        assert [answer.status_code for answer in answers] == [503, 503, 202, 202]
        assert error_of(answers[0]) == (503, "busy")
        assert answers[0].headers["retry-after"] == "1"
        assert error_of(served.tell("heartbeat", tasks[0])) == (503, "busy")
    assert served.tell("complete", tasks[0]).status_code == 202
