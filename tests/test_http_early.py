"""`worker run --migrate --serve` before there is a schema: probes are answered, a stop is clean, and a port is taken at once."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.commands import worker
from tests.hostile_clients import connection, head, read_all
from tests.serving import Served, error_of
from tests.waiting import wait_for
from tests.workplace import Workplace
from worker.api.auth import Tokens
from worker.api.gate import BODY_SECONDS
from worker.api.listening import bind
from worker.errors import PortTaken

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"
MIGRATES = ("--migrate", "--serve", "127.0.0.1:0")


@contextlib.contextmanager
def held_up(workplace: Workplace) -> Iterator[psycopg.Connection[object]]:
    """Whoever wants to apply the schema waits for this transaction."""
    with psycopg.connect(workplace.url) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('reliable-worker schema public', 0))")
        yield other
        other.rollback()


def is_alive_and_starting(served: Served) -> None:
    assert served.http.get("/healthz").status_code == 200
    unready = served.http.get("/readyz")
    assert error_of(unready) == (503, "not_ready")
    assert unready.json()["message"] == "starting"
    assert served.http.get("/api/tasks").status_code == 503


def test_probes_are_answered_while_the_schema_waits_for_a_database(database_url: str, serve: Callable[..., Served]) -> None:
    """Else a liveness probe would restart the process for as long as the database is away."""
    grace = {"WORKER_SHUTDOWN_GRACE_SECONDS": "60"}
    served = serve(database_url, *MIGRATES, command="run", ready=False, DATABASE_URL=NOWHERE, **grace)
    served.process.wait_for_event("database_lost")
    is_alive_and_starting(served)
    assert served.process.stop(30) == 0


def test_it_becomes_ready_once_the_schema_is_there(workplace: Workplace, serve: Callable[..., Served]) -> None:
    with held_up(workplace):
        served = serve(workplace.url, *MIGRATES, command="run", ready=False)
        wait_for(lambda: workplace.backends("migrate", "active"))
        is_alive_and_starting(served)
    wait_for(lambda: served.http.get("/readyz").status_code == 200)
    assert served.http.get("/api/tasks").status_code == 200
    assert served.process.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("times", [1, 3])
def test_a_stop_while_the_schema_waits_and_requests_are_open_is_clean(
    workplace: Workplace, serve: Callable[..., Served], number: signal.Signals, times: int
) -> None:
    with held_up(workplace), contextlib.ExitStack() as stack:
        served = serve(workplace.url, *MIGRATES, command="run", ready=False, WORKER_SHUTDOWN_GRACE_SECONDS="60")
        wait_for(lambda: workplace.backends("migrate", "active"))
        idle, slow = (stack.enter_context(connection(served)) for _ in range(2))
        began = time.monotonic()
        slow.sendall(head("POST", "/api/tasks", "Content-Type: application/json", "Content-Length: 1000") + b"{")
        assert served.http.get("/healthz").status_code == 200
        for _ in range(times - 1):
            served.process.signal(number)
        served.process.signal(number)
        status = served.process.wait()
        # Sooner than the slow request ends by itself, and far sooner than the grace.
        assert time.monotonic() - began < BODY_SECONDS - 1
        assert read_all(idle) == b""
        assert b"HTTP/1.1 2" not in read_all(slow)
    assert status == 0
    assert [entry["status"] for entry in served.process.find("shutdown_complete")] == [0]
    assert served.process.find("internal_error") == []
    assert served.process.stderr == ""


def test_a_database_that_never_comes_is_69_beside_the_interface_too(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url, *MIGRATES, command="run", ready=False, DATABASE_URL=NOWHERE, WORKER_CONNECT_WAIT_SECONDS="0.5")
    assert served.process.wait() == 69
    assert [entry["status"] for entry in served.process.find("shutdown_complete")] == [69]
    assert served.process.stderr == ""


def test_a_port_is_taken_from_the_moment_it_is_bound(database_url: str, tmp_path: Path) -> None:
    """Also by somebody who still waits for a database, and accepts nobody yet."""
    [taken] = bind("127.0.0.1", 0, Tokens([]))
    port = taken.getsockname()[1]
    with taken, socket.create_connection(("127.0.0.1", port)):
        with pytest.raises(PortTaken):
            bind("127.0.0.1", port, Tokens([]))
        done = worker("run", "--serve", f"127.0.0.1:{port}", directory=tmp_path, DATABASE_URL=database_url)
    assert done.returncode == 69
    assert "http_port_taken" in done.stdout
    assert "daemon_started" not in done.stdout
