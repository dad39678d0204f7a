"""`worker serve` from its start to its end: stop signals, what is under way, and what hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import Daemon, below_a_namespace, environment, process_1_of
from tests.serving import TOKEN, Served
from tests.waiting import wait_for, wait_while
from worker.api.gate import BODY_SECONDS


def test_it_says_where_it_listens_and_serves_until_it_is_told_to_stop(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url)
    started = served.process.find("http_started")[0]
    assert (started["host"], started["port"], started["tokens"]) == ("127.0.0.1", served.port, True)
    assert served.http.get("/readyz").json() == {"status": "ready"}
    assert served.process.stop() == 0
    names = [event["event"] for event in served.process.events]
    assert names[-3:] == ["shutdown_started", "http_stopped", "shutdown_complete"]
    assert served.process.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_every_stop_signal_is_a_clean_stop(database_url: str, serve: Callable[..., Served], number: signal.Signals) -> None:
    process = serve(database_url).process
    process.signal(number)
    assert process.wait() == 0


def test_as_process_1_it_hears_a_stop(database_url: str, serve: Callable[..., Served], tmp_path: Path) -> None:
    environ = environment(tmp_path, DATABASE_URL=database_url, WORKER_HTTP_TOKENS=TOKEN)
    command = (*below_a_namespace(), sys.executable, "-m", "worker", "serve", "--port", "0")
    outer = Daemon(command, environ, tmp_path, "as-process-1")
    try:
        assert outer.wait_for_event("http_ready", 20)["pid"] == 1
        os.kill(process_1_of(outer), signal.SIGTERM)
        assert outer.wait() == 0
    finally:
        outer.kill()


def test_what_is_under_way_is_answered_before_the_end(database_url: str, serve: Callable[..., Served]) -> None:
    patient = {"WORKER_LEASE_SECONDS": "60", "WORKER_QUERY_TIMEOUT_SECONDS": "20", "WORKER_SHUTDOWN_GRACE_SECONDS": "20"}
    served = serve(database_url, **patient)
    id = served.add()
    task = served.claimed(lease_seconds=60)
    answers: list[int] = []
    hold_up_updates(served)
    asking = threading.Thread(target=lambda: answers.append(served.tell("complete", task).status_code))
    asking.start()
    stop_amidst_an_update(served)
    asking.join(30)
    assert answers == [202]
    assert served.process.wait() == 0
    assert served.job(id).state == "succeeded"
    with pytest.raises(httpx.ConnectError):
        served.http.get("/healthz")


def test_a_claim_that_nobody_takes_any_more_goes_back_before_the_end(database_url: str, serve: Callable[..., Served]) -> None:
    """Worker and server are stopped at the same moment: the task keeps its attempt, and does not wait for its lease to end."""
    patient = {"WORKER_LEASE_SECONDS": "60", "WORKER_CLAIM_TIMEOUT_SECONDS": "20", "WORKER_SHUTDOWN_GRACE_SECONDS": "20"}
    served = serve(database_url, **patient, WORKER_QUERY_TIMEOUT_SECONDS="20")
    id = served.add()
    hold_up_updates(served)
    text = b'{"processor": "p1"}'
    head = f"POST /api/tasks/next HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text)
        wait_for(lambda: updates_under_way(served))
    stop_amidst_an_update(served)
    assert served.process.wait() == 0
    assert (served.job(id).state, served.job(id).attempts) == ("ready", 0)


def hold_up_updates(served: Served) -> None:
    """From now on a job's update waits for a lock that we have, and one that gives it back takes its time afterwards."""
    served.db.execute(
        "CREATE FUNCTION wait_for_us() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7), pg_sleep(CASE NEW.state WHEN 'ready' THEN 0.25 ELSE 0 END);"
        " RETURN NEW; END $$;"
        " CREATE TRIGGER held_up BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION wait_for_us(); SELECT pg_advisory_lock(7)"
    )


def updates_under_way(served: Served) -> list[Any]:
    return served.ask("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'")


def stop_amidst_an_update(served: Served) -> None:
    """The update goes on once the server has begun to stop."""
    wait_for(lambda: updates_under_way(served))
    served.process.signal(signal.SIGTERM)
    served.process.wait_for_event("shutdown_started")
    wait_while(lambda: served.process.process.poll() is None and updates_under_way(served), 0.5)
    served.ask("SELECT pg_advisory_unlock(7)")


def test_a_request_that_hangs_does_not_hold_up_the_end(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url, WORKER_SHUTDOWN_GRACE_SECONDS="1")
    with half_a_request(served):
        started = time.monotonic()
        assert served.process.stop() == 0
        assert 0.9 < time.monotonic() - started < BODY_SECONDS - 1


def test_a_second_signal_skips_the_grace(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url, WORKER_SHUTDOWN_GRACE_SECONDS="60")
    with half_a_request(served):
        served.process.signal(signal.SIGTERM)
        served.process.wait_for_event("shutdown_started")
        assert served.process.process.poll() is None
        started = time.monotonic()
        served.process.signal(signal.SIGTERM)
        assert served.process.wait() == 0
        assert time.monotonic() - started < BODY_SECONDS - 1


@contextlib.contextmanager
def half_a_request(served: Served) -> Iterator[None]:
    """While the block runs the server waits for the rest of a body."""
    head = ["POST /api/tasks HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}", "Content-Length: 9", "Expect: 100-continue"]
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as slow:
        slow.sendall("\r\n".join([*head, "", ""]).encode())
        assert slow.recv(1000).startswith(b"HTTP/1.1 100 ")  # it asks for it
        slow.sendall(b"{")
        yield
