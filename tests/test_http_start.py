"""`worker serve` and `worker run --serve` before the first request: addresses, tokens, the extra, and exit statuses."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.commands import worker
from tests.processes import Daemon, environment
from tests.servers import Server
from tests.serving import TOKEN, Served
from tests.workplace import Workplace
from worker.errors import ConfigError
from worker.settings import load_settings, unknown_settings

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"


def run_serve(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return worker("serve", *arguments, directory=directory, timeout_seconds=30, **variables)


# --- where it listens


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_without_a_token_only_loopback_is_served(database_url: str, tmp_path: Path, host: str) -> None:
    done = run_serve(tmp_path, "--host", host, "--port", "0", DATABASE_URL=database_url)
    assert done.returncode == 78
    assert "WORKER_HTTP_TOKENS is not set" in done.stdout
    assert f"--host {host}" in done.stdout


def test_a_bad_address_stops_the_daemon_before_it_claims(workplace: Workplace, tmp_path: Path) -> None:
    done = worker("run", "--serve", "0.0.0.0:0", directory=tmp_path, DATABASE_URL=workplace.url)
    assert done.returncode == 78
    assert "WORKER_HTTP_TOKENS is not set" in done.stdout
    assert "daemon_started" not in done.stdout


def test_with_a_token_any_address_is_served(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url, "--host", "0.0.0.0")
    assert served.http.get("/api/tasks", headers={"Host": "jobs.example"}).status_code == 200


def test_localhost_is_loopback_in_both_families(database_url: str, serve: Callable[..., Served]) -> None:
    served = serve(database_url, "--host", "localhost", token=None)
    assert served.http.get("/api/tasks").status_code == 200


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


# --- configuration


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


# --- the database


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


def test_a_schema_that_does_not_fit_is_78_and_a_database_that_never_comes_69(
    empty_database_url: str, tmp_path: Path, server: Server
) -> None:
    done = run_serve(tmp_path, "--port", "0", DATABASE_URL=empty_database_url)
    assert done.returncode == 78
    assert "worker migrate" in done.stdout
    done = run_serve(tmp_path, "--port", "0", DATABASE_URL=NOWHERE, WORKER_CONNECT_WAIT_SECONDS="0.5")
    assert done.returncode == 69


# --- the extra


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
