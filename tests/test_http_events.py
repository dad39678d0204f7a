"""What the log says of the attempts of remote workers: each event with every field that is declared for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from tests.serving import Served
from tests.waiting import wait_for
from worker import events

LOSE_THE_ANSWER = """
CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0
    AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER waits AFTER UPDATE ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (NEW.state = 'running' AND OLD.state = 'ready') EXECUTE FUNCTION wait();
SELECT pg_advisory_lock(7);
"""
"""A claim is committed after its answer was given up."""
BACKOFF_SECONDS = 0.05
JOB_EVENTS = {
    event.name: event
    for event in (events.JOB_CLAIMED, events.JOB_SUCCEEDED, events.JOB_FAILED, events.JOB_DEAD, events.JOB_RELEASED)
}


def told(served: Served, event: events.Event, task: dict[str, Any], **fields: object) -> dict[str, Any]:
    """The one event of this attempt."""
    said = served.process.wait_for_event(event.name, job_id=task["id"], fence=task["fence"], **fields)
    assert len(served.process.find(event.name, job_id=task["id"], fence=task["fence"])) == 1
    return said


def test_every_event_about_a_remote_attempt_has_every_field_that_is_declared(
    database_url: str, serve: Callable[..., Served]
) -> None:
    times = {"WORKER_LEASE_SECONDS": "60", "WORKER_QUERY_TIMEOUT_SECONDS": "20", "WORKER_CLAIM_TIMEOUT_SECONDS": "3"}
    served = serve(database_url, **times, WORKER_LOG_LEVEL="debug", WORKER_BACKOFF_BASE_SECONDS=str(BACKOFF_SECONDS))
    served.add("report", queue="mail", max_attempts=2)
    first = served.claimed(queue="mail", lease_seconds=60)
    served.ask("UPDATE jobs SET started_at = started_at - interval '3 s' WHERE id = %s RETURNING id", first["id"])
    assert served.tell("fail", first, error="boom").status_code == 202
    failed = told(served, events.JOB_FAILED, first)
    assert BACKOFF_SECONDS / 2 <= failed["retry_in_seconds"] <= BACKOFF_SECONDS
    assert 3_000 <= failed["duration_ms"] < 60_000
    assert (failed["kind"], failed["queue"], failed["attempt"], failed["processor"]) == ("report", "mail", 1, "p1")
    assert (failed["error"], failed["error_type"], failed["exception"]) == ("boom", "remote", "boom")

    again = wait_for(lambda: served.claim(queue="mail", lease_seconds=60))
    served.tell("release", again)
    released = told(served, events.JOB_RELEASED, again, reason="requested")
    assert released["attempt"] == 2

    last = served.claimed(queue="mail", lease_seconds=60)
    served.tell("fail", last, error="boom again")
    assert told(served, events.JOB_DEAD, last)["attempt"] == 2

    served.add("report", queue="mail")
    done = served.claimed(queue="mail", lease_seconds=60)
    served.tell("complete", done)
    row = served.job(done["id"])
    took_ms = (row.completed_at - row.started_at).total_seconds() * 1000
    assert abs(told(served, events.JOB_SUCCEEDED, done)["duration_ms"] - took_ms) < 0.01

    id = served.add("lost", queue="mail")
    asked = {"processor": "p1", "queue": "mail", "lease_seconds": 600}
    with psycopg.connect(served.database_url, autocommit=True) as db:
        db.execute(LOSE_THE_ANSWER)
        assert served.http.post("/api/tasks/next", json=asked).status_code == 503
        db.execute("SELECT pg_advisory_unlock(7)")
        db.execute("DROP TRIGGER waits ON jobs; DROP FUNCTION wait()")
    wait_for(lambda: served.claim(queue="mail", lease_seconds=60), 30)
    lost = served.process.wait_for_event("job_released", job_id=id)
    assert (lost["reason"], lost["kind"], lost["queue"], lost["attempt"]) == ("claim_lost", "lost", "mail", 1)
    assert lost["processor"] == "p1"

    said = [entry for entry in served.process.events if entry["event"] in JOB_EVENTS]
    assert {entry["event"] for entry in said} == JOB_EVENTS.keys()
    for entry in said:
        missing = [field for field in JOB_EVENTS[entry["event"]].fields if entry.get(field) is None]
        assert missing == [], entry
