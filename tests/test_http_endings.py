"""What a remote worker says of its task: a heartbeat, that it is complete, has failed, or is given back; once or again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.servers import WAIT_FOR_US
from tests.serving import Served, error_of
from tests.waiting import wait_for


def test_a_heartbeat_renews_for_as_long_as_was_asked_for(served: Served, queue: str) -> None:
    served.add(queue=queue)
    task = served.claimed(queue=queue, lease_seconds=100)
    served.ask("UPDATE jobs SET lease_until = now() + interval '5 s' WHERE id = %s RETURNING id", task["id"])
    answer = served.tell("heartbeat", task)
    assert answer.status_code == 202
    beaten = answer.json()
    assert 50_000 < beaten["expires_in_ms"] <= 100_000
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


def test_a_row_that_somebody_keeps_locked_holds_up_no_other_completion(served: Served, queue: str) -> None:
    tasks: list[dict[str, Any]] = []
    for _ in range(4):
        served.add(queue=queue)
        tasks.append(served.claimed(queue=queue, lease_seconds=60))
    with psycopg.connect(served.database_url) as other:
        other.execute("SELECT FROM jobs WHERE id = ANY (%s) FOR UPDATE", ([tasks[0]["id"], tasks[1]["id"]],))
        with ThreadPoolExecutor(4) as threads:
            first = threads.submit(served.tell, "complete", tasks[0])
            # The others gather behind it, unless it has given up before anybody looked.
            wait_for(lambda: first.done() or other.execute(WAIT_FOR_US).fetchone() != (0,))
            asked = [first, *(threads.submit(served.tell, "complete", task) for task in tasks[1:])]
            answers = [one.result() for one in asked]
        assert [answer.status_code for answer in answers] == [503, 503, 202, 202]
        assert error_of(answers[0]) == (503, "busy")
        assert answers[0].headers["retry-after"] == "1"
        assert error_of(served.tell("heartbeat", tasks[0])) == (503, "busy")
    assert served.tell("complete", tasks[0]).status_code == 202


# --- said again


@pytest.mark.parametrize("verb", ["complete", "fail", "release"])
def test_what_has_ended_an_attempt_may_be_said_again(served: Served, queue: str, verb: str) -> None:
    id = served.add(queue=queue)
    task = served.claimed(queue=queue)
    assert served.tell(verb, task).status_code == 202
    row, failures = served.job(id), served.failures(id)
    again = served.tell(verb, task)
    assert (again.status_code, again.json()["id"]) == (202, id)
    assert (served.job(id), served.failures(id)) == (row, failures)


def test_a_completion_can_be_repeated_also_where_succeeded_jobs_are_deleted_at_once(
    database_url: str, serve: Callable[..., Served]
) -> None:
    served = serve(database_url, WORKER_RETENTION_SECONDS="0")
    id = served.add()
    task = served.claimed()
    for _ in range(2):
        assert served.tell("complete", task).status_code == 202
    assert served.job(id).state == "succeeded"


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
