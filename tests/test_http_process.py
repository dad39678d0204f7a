"""`worker serve` and `worker run --serve` as processes: start, stop, outages, probes, exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from psycopg import sql

from tests.commands import worker
from tests.processes import Daemon, below_a_namespace, environment, process_1_of
from tests.roles import role, url_as
from tests.servers import WAIT_FOR_US, PrivateCluster, Server
from tests.serving import TOKEN, Served, error_of
from tests.waiting import wait_for
from tests.workplace import Workplace, frozen
from worker.api.gate import BODY_SECONDS
from worker.api.state import LANES
from worker.errors import ConfigError
from worker.settings import load_settings, unknown_settings
from worker.store.waiting import LANES as DAEMON_LANES

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"


# --- start


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


def test_what_is_under_way_is_answered_before_the_end(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url)
    id = served.add()
    task = served.claimed(lease_seconds=60)
    answers: list[int] = []
    with served.db.transaction():
        served.db.execute("LOCK TABLE processed_messages IN ACCESS EXCLUSIVE MODE")
        # A list waits for nothing; the completion waits for its row.
        served.db.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", (id,))
        asking = threading.Thread(target=lambda: answers.append(served.tell("complete", task).status_code))
        asking.start()
        wait_for(lambda: served.ask(WAIT_FOR_US)[0][0])
        served.process.signal(signal.SIGTERM)
        asking.join(30)
    assert answers in ([202], [503])
    assert served.process.wait() == 0
    with pytest.raises(httpx.ConnectError):
        served.http.get("/healthz")


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


def test_a_claim_that_nobody_takes_any_more_goes_back_before_the_end(database_url: str, serve: Callable[..., Served]) -> None:
    """Worker and server are stopped at the same moment: the task keeps its attempt, and does not wait for its lease to end."""
    patient = {"WORKER_LEASE_SECONDS": "60", "WORKER_CLAIM_TIMEOUT_SECONDS": "20", "WORKER_SHUTDOWN_GRACE_SECONDS": "20"}
    served = serve(database_url, **patient)
    id = served.add()
    served.db.execute(
        "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_sleep(CASE NEW.state WHEN 'running' THEN 2 ELSE 0.25 END); RETURN NEW; END $$;"
        " CREATE TRIGGER slow BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION slowly()"
    )
    text = b'{"processor": "p1"}'
    head = f"POST /api/tasks/next HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    claiming = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text)
        wait_for(lambda: served.ask(claiming))
    assert served.process.stop() == 0
    assert (served.job(id).state, served.job(id).attempts) == ("ready", 0)


def test_it_serves_a_private_database_that_nobody_has_given_a_schema(data_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "worker", "serve", "--port", "0", "--embedded", "--data-dir", str(data_dir)]
    process = Daemon(command, environment(tmp_path), tmp_path, "serve-embedded")
    try:
        process.wait_for_event("http_ready", 60)
        port = process.find("http_started")[0]["port"]
        assert httpx.post(f"http://127.0.0.1:{port}/api/tasks", json={"payload": 1}, trust_env=False).status_code == 201
        assert process.stop() == 0
    finally:
        process.kill()


# --- configuration


def run_serve(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return worker("serve", *arguments, directory=directory, timeout_seconds=30, **variables)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_without_a_token_only_loopback_is_served(database_url: str, tmp_path: Path, host: str) -> None:
    done = run_serve(tmp_path, "--host", host, "--port", "0", DATABASE_URL=database_url)
    assert done.returncode == 78
    assert "WORKER_HTTP_TOKENS is not set" in done.stdout
    assert f"--host {host}" in done.stdout


def test_with_a_token_any_address_is_served(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url, "--host", "0.0.0.0")
    assert served.http.get("/api/tasks", headers={"Host": "jobs.example"}).status_code == 200


def test_localhost_is_loopback_in_both_families(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url, "--host", "localhost", token=None)
    assert served.http.get("/api/tasks").status_code == 200


def test_tokens_come_from_a_file_one_a_line(database_url: str, serve: Callable[..., Served], tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# of the team\n\n  first-token-of-this-file  \n{TOKEN}\n")
    served = serve(database_url, token=None, WORKER_HTTP_TOKENS_FILE=str(file))
    for token, status in ((TOKEN, 200), ("first-token-of-this-file", 200), ("# of the team", 401), ("x" * 20, 401)):
        assert served.http.get("/api/tasks", headers={"Authorization": f"Bearer {token}"}).status_code == status


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORKER_HTTP_TOKENS": "short"}, "token 1 must be at least 16"),
        ({"WORKER_HTTP_TOKENS": f"{TOKEN},this one has spaces in it"}, "token 2 must be"),
        ({"WORKER_HTTP_TOKENS": ",,"}, "holds no token"),
        ({"WORKER_HTTP_TOKENS_FILE": "/no/such/file"}, "cannot be read: No such file"),
        ({"WORKER_HTTP_TOKENS_FILE": "/dev/null"}, "holds no token"),
        ({"WORKER_HTTP_TOKENS": TOKEN, "WORKER_HTTP_TOKENS_FILE": "/dev/null"}, "both set: keep one"),
        ({"WORKER_LEASE_SECONDS": "abc"}, "WORKER_LEASE_SECONDS='abc'"),
    ],
)
def test_what_cannot_be_meant_stops_the_start_and_shows_no_token(
    database_url: str, tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    done = run_serve(tmp_path, "--port", "0", DATABASE_URL=database_url, **variables)
    assert done.returncode == 78
    assert said in done.stdout
    assert "config_invalid" in done.stdout
    assert TOKEN not in done.stdout + done.stderr


def test_the_settings_of_tokens_are_settings() -> None:
    environ = {"DATABASE_URL": NOWHERE, "WORKER_HTTP_TOKENS": TOKEN}
    settings = load_settings(environ)
    assert TOKEN not in repr(settings)
    assert unknown_settings(environ | {"WORKER_HTTP_TOKENS_FILE": "x"}) == []
    with pytest.raises(ConfigError, match="both set"):
        load_settings(environ | {"WORKER_HTTP_TOKENS_FILE": "x"})


def test_a_port_that_is_taken_is_69_so_that_a_service_manager_tries_again(database_url: str, tmp_path: Path) -> None:
    """An old process may be about to leave; the units try no more after 78."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        alone = run_serve(tmp_path, "--port", port, DATABASE_URL=database_url)
        beside = worker("run", "--serve", f"127.0.0.1:{port}", directory=tmp_path, DATABASE_URL=database_url)
    for done in (alone, beside):
        assert done.returncode == 69
        first, last = map(json.loads, done.stdout.splitlines())
        assert (first["event"], last["event"], last["status"]) == ("http_port_taken", "shutdown_complete", 69)
        assert first["error"].startswith(f"--host 127.0.0.1 --port {port}: cannot listen there")
        assert done.stderr == ""


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_that_cannot_be_had_is_78(database_url: str, tmp_path: Path, host: str) -> None:
    for command in (("serve", "--host", host, "--port", "0"), ("run", "--serve", f"{host}:0")):
        done = worker(*command, directory=tmp_path, DATABASE_URL=database_url, WORKER_HTTP_TOKENS=TOKEN)
        assert done.returncode == 78
        assert host in done.stdout
        assert "config_invalid" in done.stdout


def test_wrong_usage_is_2(tmp_path: Path) -> None:
    assert run_serve(tmp_path, "--port", "99999", DATABASE_URL=NOWHERE).returncode == 2
    for address in ("8080", "localhost", ":8080", "localhost:x", "localhost:99999"):
        done = worker("run", "--serve", address, directory=tmp_path, DATABASE_URL=NOWHERE)
        assert done.returncode == 2, address


def test_without_the_extra_it_says_how_to_get_it(database_url: str, tmp_path: Path) -> None:
    """And nothing else needs it: `worker run` works without."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('fastapi', 'uvicorn', 'httptools', 'prometheus_client', 'httpx', 'starlette'):\n"
        "    sys.modules[name] = None\n"
    )
    for command in (("serve", "--port", "0"), ("run", "--serve", "127.0.0.1:0")):
        done = worker(*command, directory=tmp_path, DATABASE_URL=database_url)
        assert done.returncode == 78
        assert 'pip install "reliable-worker[http]"' in done.stderr + done.stdout
    assert worker("run", "--burst", directory=tmp_path, DATABASE_URL=database_url).returncode == 0
    code = "import worker\ntry:\n    worker.TaskClient\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, check=True)
    assert "reliable-worker[http]" in done.stdout


def test_a_daemon_without_it_imports_none_of_it(database_url: str, tmp_path: Path) -> None:
    code = (
        "import sys, runpy\nsys.argv = ['worker', 'run', '--burst']\n"
        "try:\n    runpy.run_module('worker', run_name='__main__')\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "heavy = {'fastapi', 'starlette', 'uvicorn', 'httptools', 'httpx', 'prometheus_client', 'anyio'}\n"
        "found = {name for name in sys.modules if name.partition('.')[0] in heavy or name.startswith('worker.api')}\n"
        "assert not found, found\n"
    )
    environ = environment(tmp_path, DATABASE_URL=database_url)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


# --- the database away


def test_an_absent_database_is_waited_for_unready(
    private_cluster: Callable[..., PrivateCluster], serve: Callable[..., Served], tmp_path: Path
) -> None:
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
    served = serve(private_workplace.url)
    private_workplace.add("remote")
    served.claim(queue="none")
    with frozen(private_workplace.backends("http %") + private_workplace.backends("pool")):
        answer = served.http.post("/api/tasks/next", json={"processor": "p"})  # within the time that the client allows it
        assert error_of(answer)[0] == 503
        assert served.http.get("/healthz").status_code == 200
    wait_for(lambda: served.claim() is not None)


def test_a_schema_that_does_not_fit_is_78_and_a_database_that_never_comes_69(
    empty_database_url: str, tmp_path: Path, server: Server
) -> None:
    done = run_serve(tmp_path, "--port", "0", DATABASE_URL=empty_database_url)
    assert done.returncode == 78
    assert "worker migrate" in done.stdout
    done = run_serve(tmp_path, "--port", "0", DATABASE_URL=NOWHERE, WORKER_CONNECT_WAIT_SECONDS="0.5")
    assert done.returncode == 69


# --- in a daemon's process


def test_a_daemon_can_serve_beside_its_pool(workplace: Workplace, serve: Callable[..., Served]) -> None:
    served = serve(
        workplace.url,
        *("--serve", "127.0.0.1:0"),
        command="run",
        WORKER_HANDLERS="tests.handlers_for_tests:handlers",
        WORKER_QUEUES="default",
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
    served = serve(workplace.url, *("--serve", "127.0.0.1:0"), command="run", WORKER_HANDLERS="tests.handlers_for_tests:handlers")
    workplace.add("remote", key="remote")
    served.ask("UPDATE jobs SET queue = 'remote' RETURNING id")
    wait_for(lambda: served.http.get("/readyz").status_code == 200)
    task = served.claimed(queue="remote", lease_seconds=60)
    workplace.add("block", {"seconds": 15}, key="blocks")
    workplace.wait_for_notes("start", "blocks")
    for _ in range(8):
        assert served.http.get("/healthz").status_code == 200
        assert served.tell("heartbeat", task).status_code == 202
    assert served.tell("complete", task).status_code == 202
    assert workplace.notes("end", "blocks") == []  # it blocks still


def test_a_drain_is_not_disturbed_by_the_server_beside_it(workplace: Workplace, serve: Callable[..., Served]) -> None:
    served = serve(
        workplace.url,
        *("--serve", "127.0.0.1:0"),
        command="run",
        WORKER_HANDLERS="tests.handlers_for_tests:handlers",
        WORKER_SHUTDOWN_GRACE_SECONDS="600",
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
    wait_for(lambda: served.http.get("/readyz").status_code == 200)
    with private_workplace.db.transaction():
        # Claims cannot read the table; SELECT 1 still can be answered.
        private_workplace.db.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")

        def unready() -> bool:
            answer = served.http.get("/readyz")
            return answer.status_code == 503 and answer.json()["message"] in ("claim loop", "database")

        wait_for(unready, 15)
        assert served.http.get("/healthz").status_code == 200
    wait_for(lambda: served.http.get("/readyz").status_code == 200, 15)


def test_the_connections_of_both_have_to_fit_into_the_limit_of_the_role(server: Server, workplace: Workplace) -> None:
    """Rather than claiming what it could never complete."""
    served_by = {"WORKERS": "2", "WORKER_POOL_SIZE": "2", "WORKER_HTTP_TOKENS": TOKEN}
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


def test_a_bad_address_stops_the_daemon_before_it_claims(workplace: Workplace, tmp_path: Path) -> None:
    done = worker("run", "--serve", "0.0.0.0:0", directory=tmp_path, DATABASE_URL=workplace.url)
    assert done.returncode == 78
    assert "WORKER_HTTP_TOKENS is not set" in done.stdout
    assert "daemon_started" not in done.stdout
