"""`worker serve` while its database is away, or hangs: 503 in time, and over by itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.processes import Daemon, environment
from tests.servers import PrivateCluster
from tests.serving import TOKEN, Served, error_of
from tests.waiting import wait_for
from tests.workplace import Workplace, frozen


def test_an_absent_database_is_waited_for_unready(private_cluster: Callable[..., PrivateCluster], tmp_path: Path) -> None:
    cluster = private_cluster()
    url = cluster.dsn
    cluster.stop()
    environ = environment(tmp_path, DATABASE_URL=url, WORKER_HTTP_TOKENS=TOKEN)
    process = Daemon((sys.executable, "-m", "worker", "serve", "--port", "0"), environ, tmp_path, "waiting")
    try:
        port = process.wait_for_event("http_started", 20)["port"]
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False, timeout=20) as http:
            process.wait_for_event("database_lost")
            for method, path, body in (
                ("GET", "/api/tasks", None),
                ("POST", "/api/tasks", {"payload": 1}),
                ("POST", "/api/tasks/next", {"processor": "p"}),
                ("PUT", "/api/tasks/1/complete", {"processor": "p", "fence": 1}),
                ("PUT", "/api/tasks/1/heartbeat", {"processor": "p", "fence": 1}),
                ("GET", "/api/leases", None),
                ("POST", "/api/leases", {"resource": "r", "holder": "h"}),
                ("GET", "/api/generator", None),
            ):
                answer = http.request(method, path, json=body)
                assert error_of(answer) == (503, "database_unavailable"), path
                assert answer.headers["retry-after"] == "1"
            assert http.get("/healthz").status_code == 200
            assert error_of(http.get("/readyz")) == (503, "not_ready")
            assert "worker_database_up 0.0" in http.get("/metrics").text
            cluster.start()
            process.wait_for_event("http_ready", 20)
            assert http.get("/api/tasks").status_code == 200
            wait_for(lambda: http.get("/readyz").status_code == 200)
    finally:
        process.kill()


def test_an_outage_is_503_and_over_by_itself(workplace: Workplace, serve: Callable[..., Served]) -> None:
    served = serve(workplace.url)
    first = workplace.add("remote")
    task = served.claimed(lease_seconds=600)
    with workplace.outage():
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for answer in (
                served.http.get("/api/tasks"),
                served.http.post("/api/tasks/next", json={"processor": "p"}),
                served.tell("heartbeat", task),
                served.tell("complete", task),
            ):
                assert error_of(answer) == (503, "database_unavailable")
            assert served.http.get("/healthz").status_code == 200
            if served.http.get("/readyz").status_code == 503:
                break
        assert error_of(served.http.get("/readyz")) == (503, "not_ready")
    wait_for(lambda: served.http.get("/readyz").status_code == 200)
    assert served.tell("complete", task).status_code == 202
    assert workplace.job(first).state == "succeeded"
    workplace.add("remote")
    assert served.claimed()["attempt"] == 1
    assert not served.process.find("internal_error")


def test_a_database_that_hangs_costs_each_request_a_bounded_time(
    private_workplace: Workplace, serve: Callable[..., Served]
) -> None:
    served = serve(private_workplace.url, WORKER_LEASE_SECONDS="12", WORKER_CLAIM_TIMEOUT_SECONDS="2")
    private_workplace.add("remote")
    served.claim(queue="none")
    with frozen(private_workplace.backends("http %") + private_workplace.backends("pool")):
        answer = served.http.post("/api/tasks/next", json={"processor": "p"})  # within the time that the client allows it
        assert error_of(answer)[0] == 503
        assert served.http.get("/healthz").status_code == 200
    wait_for(lambda: served.claim() is not None, 30)
