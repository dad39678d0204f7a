"""`worker run --serve`: the HTTP interface in a daemon's process, and neither disturbs the other."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest
from psycopg import sql

from tests.inprocess import quick
from tests.roles import role, url_as
from tests.servers import Server
from tests.serving import TOKEN, Served
from tests.waiting import await_for, wait_for
from tests.workplace import Workplace
from worker import Handlers, Worker
from worker.api.hosting import Hosting
from worker.api.state import LANES, Api
from worker.store.waiting import LANES as DAEMON_LANES

PATIENT = {"WORKER_LEASE_SECONDS": "60", "WORKER_CLAIM_TIMEOUT_SECONDS": "15", "WORKER_QUERY_TIMEOUT_SECONDS": "15"}
"""Where nothing has to expire: no stall of the machine becomes an outage."""


def test_a_daemon_can_serve_beside_its_pool(workplace: Workplace, serve: Callable[..., Served]) -> None:
    served = serve(
        workplace.url,
        *("--serve", "127.0.0.1:0"),
        command="run",
        WORKER_HANDLERS="tests.handlers_for_tests:handlers",
        WORKER_QUEUES="default",
        **PATIENT,
    )
    wait_for(lambda: served.http.get("/readyz").status_code == 200)
    assert served.http.get("/api/leases").json()["worker"] == {"status": "STARTED"}
    local = served.http.post("/api/tasks", json={"kind": "nap", "payload": {}}).json()
    workplace.wait_for_state(local["id"], "succeeded")
    remote = served.http.post("/api/tasks", json={"kind": "remote", "payload": {}, "queue": "remote"}).json()
    task = served.claimed(queue="remote")
    assert task["id"] == remote["id"]
    assert served.tell("complete", task).status_code == 202
    metrics = served.http.get("/metrics").text
    assert "worker_pool_slots 4.0" in metrics
    assert 'worker_completed_total{by="http"} 1.0' in metrics
    assert served.process.stop() == 0


def test_a_server_alone_runs_no_pool(served: Served) -> None:
    assert served.http.get("/api/leases").json()["worker"] == {"status": "STOPPED"}
    assert "worker_pool_" not in served.http.get("/metrics").text


def test_a_handler_that_blocks_the_loop_holds_up_no_probe_and_no_heartbeat(
    workplace: Workplace, serve: Callable[..., Served]
) -> None:
    served = serve(
        workplace.url,
        *("--serve", "127.0.0.1:0"),
        command="run",
        WORKER_HANDLERS="tests.handlers_for_tests:handlers",
        **PATIENT,
    )
    served.add("remote", queue="remote")
    wait_for(lambda: served.http.get("/readyz").status_code == 200)
    task = served.claimed(queue="remote", lease_seconds=60)
    workplace.add("block", {"seconds": 100}, key="blocks")
    workplace.wait_for_notes("start", "blocks")
    for _ in range(8):
        assert served.http.get("/healthz").status_code == 200
        assert served.tell("heartbeat", task).status_code == 202
    assert served.tell("complete", task).status_code == 202
    assert workplace.notes("end", "blocks") == []  # it blocks still


def test_a_daemon_whose_claim_loop_hangs_is_alive_but_not_ready(private_workplace: Workplace, serve: Callable[..., Served]) -> None:
    """Healthy while not consuming: the database answers, and the claim loop does not get through."""
    served = serve(
        private_workplace.url,
        *("--serve", "127.0.0.1:0"),
        command="run",
        WORKER_HANDLERS="tests.handlers_for_tests:handlers",
        WORKER_POLL_SECONDS="0.1",
        WORKER_CLAIM_TIMEOUT_SECONDS="0.2",
        WORKER_CONNECT_TIMEOUT_SECONDS="0.5",
    )
    wait_for(lambda: served.http.get("/readyz").status_code == 200, 30)
    with private_workplace.db.transaction():
        # Claims cannot read the table; SELECT 1 still can be answered.
        private_workplace.db.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")

        def unready() -> bool:
            answer = served.http.get("/readyz")
            return answer.status_code == 503 and answer.json()["message"] == "claim loop"

        wait_for(unready, 30)
        assert served.http.get("/healthz").status_code == 200
    wait_for(lambda: served.http.get("/readyz").status_code == 200, 30)


def test_the_connections_of_both_have_to_fit_into_the_limit_of_the_role(server: Server, workplace: Workplace) -> None:
    """Rather than claiming what it could never complete."""
    served_by = {"WORKERS": "2", "WORKER_POOL_SIZE": "2", "WORKER_HTTP_TOKENS": TOKEN, **PATIENT}
    needed = DAEMON_LANES + 2 + LANES + 2
    with role(server, workplace.url) as name:
        for what in ("TABLES", "SEQUENCES"):
            grant = sql.SQL("GRANT ALL ON ALL {} IN SCHEMA public TO {}").format(sql.SQL(what), sql.Identifier(name))
            workplace.db.execute(grant)
        url = url_as(name, workplace.url)
        limit = sql.SQL("ALTER ROLE {} CONNECTION LIMIT {}")
        workplace.db.execute(limit.format(sql.Identifier(name), sql.Literal(needed - 1)))
        refused = workplace.daemon("--serve", "127.0.0.1:0", ready=False, DATABASE_URL=url, **served_by)
        assert refused.wait() == 78
        [event] = refused.find("config_invalid")
        assert f"up to {needed} connections ({DAEMON_LANES} of its loops, {LANES + 2} of the HTTP interface" in event["error"]
        alone = workplace.daemon(DATABASE_URL=url, **served_by)
        assert alone.stop() == 0
        wait_for(lambda: workplace.ask("SELECT pid FROM pg_stat_activity WHERE usename = %s", name) == [])
        workplace.db.execute(limit.format(sql.Identifier(name), sql.Literal(needed)))
        process = workplace.daemon("--serve", "127.0.0.1:0", DATABASE_URL=url, **served_by)
        port = process.wait_for_event("http_started")["port"]
        headers = {"Authorization": f"Bearer {TOKEN}"}
        # All of its lanes at work, and the pool.
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False, timeout=20) as http:
            process.wait_for_event("http_ready")
            http.post("/api/tasks", json={"kind": "remote", "queue": "remote", "payload": 1})
            task = http.post("/api/tasks/next", json={"processor": "p", "queue": "remote"}).json()
            word = {"processor": "p", "fence": task["fence"]}
            lease = http.post("/api/leases", json={"resource": "r", "holder": "h"}).json()
            renewal = {"resource": "r", "holder": "h", "fence": lease["fence"]}
            assert http.put(f"/api/tasks/{task['id']}/heartbeat", json=word).status_code == 202
            assert http.put("/api/leases/renew", json=renewal).status_code == 200
            assert http.put(f"/api/tasks/{task['id']}/complete", json=word).status_code == 202
        assert process.stop() == 0
        assert process.find("database_lost") == []


def test_a_drain_is_not_disturbed_by_the_server_beside_it(workplace: Workplace, serve: Callable[..., Served]) -> None:
    served = serve(
        workplace.url,
        *("--serve", "127.0.0.1:0"),
        command="run",
        WORKER_HANDLERS="tests.handlers_for_tests:handlers",
        WORKER_SHUTDOWN_GRACE_SECONDS="600",
        **PATIENT,
    )
    id = workplace.add("nap", {"seconds": 1.5}, key="naps")
    workplace.wait_for_notes("start", "naps")
    with socket.create_connection(("127.0.0.1", served.port)) as idle:
        served.process.signal(signal.SIGTERM)
        wait_for(lambda: refused(served))
        assert served.process.wait(60) == 0  # and not only when the grace is over
        assert idle.recv(1) == b""
    assert workplace.job(id).state == "succeeded"
    assert served.process.find("shutdown_complete")[0]["status"] == 0


def refused(served: Served) -> bool:
    """It accepts nothing more, or says that it is stopping."""
    try:
        return served.http.get("/readyz").status_code == 503
    except httpx.TransportError:
        return True


async def test_a_server_that_does_not_end_holds_up_its_daemon_within_the_budget_only(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then nobody else ends the process."""
    is_free = threading.Event()

    async def hang(api: Api, limit_seconds: float) -> bool:
        await await_for(is_free.is_set, 120)
        return True

    monkeypatch.setattr(Api, "finish", hang)
    monkeypatch.setattr("worker.api.hosting._JOIN_SECONDS", 90)
    worker = Worker(Handlers(), quick(database_url, shutdown_grace_seconds=0, query_timeout_seconds=0.5))
    with Hosting(worker.settings, host="127.0.0.1", port=0).beside(worker):
        worker.request_stop("test")
        began = time.monotonic()
    assert time.monotonic() - began < 60
    is_free.set()
    await await_for(lambda: "http" not in {thread.name for thread in threading.enumerate()})


@pytest.mark.parametrize(("all_went_back", "status"), [(True, 0), (False, 75)])
def test_what_the_server_leaves_to_the_end_of_its_lease_decides_the_status_of_its_daemon(
    database_url: str, monkeypatch: pytest.MonkeyPatch, all_went_back: bool, status: int
) -> None:
    async def finish(api: Api, limit_seconds: float) -> bool:
        return all_went_back

    monkeypatch.setattr(Api, "finish", finish)
    worker = Worker(Handlers(), quick(database_url))
    with Hosting(worker.settings, host="127.0.0.1", port=0).beside(worker):
        pass
    assert worker.status == status
