"""Whose task it is: over HTTP nobody renews or ends an attempt that is over, somebody else's, or a daemon's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving import Served, error_of
from tests.stopping import LONG_LEASE
from tests.workplace import POLL_NEVER, Workplace

VERBS = ("heartbeat", "complete", "fail", "release")


@pytest.mark.parametrize("verb", VERBS)
def test_a_task_that_is_not_there_cannot_be_ended(served: Served, verb: str) -> None:
    answer = served.http.put(f"/api/tasks/99999999/{verb}", json={"processor": "p1", "fence": 1})
    assert error_of(answer) == (404, "not_found")


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


@pytest.mark.parametrize("verb", VERBS)
def test_neither_a_namesake_nor_another_name_gets_in_without_the_fence(served: Served, queue: str, verb: str) -> None:
    served.add(queue=queue)
    earlier = served.claimed(queue=queue)
    id = served.add(queue=queue)
    task = served.claimed(queue=queue, lease_seconds=60)
    before = served.job(id)
    for fence in (earlier["fence"], task["fence"] + 1):
        assert error_of(served.tell(verb, task | {"fence": fence})) == (409, "not_owner")
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
    workplace.daemon(**LONG_LEASE, **POLL_NEVER)
    workplace.wait_until_only_notifications_wake()
    served.tell("release", task)
    workplace.wait_for_state(task["id"], "succeeded")


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
