"""`worker migrate`, `check` and `health`: what is there, what is missing, and what to do about it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psycopg
import pytest

from tests.commands import worker, worker_at_a_terminal
from tests.processes import ROOT
from tests.psql import grant
from tests.roles import role, url_as
from tests.servers import Server


def test_migrate_says_what_it_did_and_check_what_is_missing(empty_database_url: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = worker("migrate", *arguments, directory=tmp_path, DATABASE_URL=empty_database_url, WORKER_SCHEMA="Odd-Name")
        assert result.stderr == ""
        return result.returncode, result.stdout

    assert run("--check") == (1, "schema 'Odd-Name': not applied, this program has version 1\n")
    assert run() == (0, "schema 'Odd-Name': version 1 applied\n")
    assert run() == (0, "schema 'Odd-Name': version 1 is current\n")
    assert run("--check") == (0, "schema 'Odd-Name': version 1 is current\n")


def test_check_names_an_address_and_a_runtime_directory_that_cannot_be_right(tmp_path: Path) -> None:
    result = worker("check", directory=tmp_path, DATABASE_URL="mysql://localhost/app")
    assert (result.returncode, result.stdout) == (78, "")
    assert "DATABASE_URL" in result.stderr
    (tmp_path / "file").write_text("")
    directory = str(tmp_path / "file" / "run")
    result = worker("check", directory=tmp_path, DATABASE_URL="postgresql://127.0.0.1:1/db", WORKER_RUNTIME_DIR=directory)
    assert result.returncode == 69
    assert "settings: valid" in result.stdout
    assert f"WORKER_RUNTIME_DIR='{directory}': cannot write there" in result.stderr


def test_check_names_each_fault_and_the_stop_time_out(server: Server, database_url: str, tmp_path: Path) -> None:
    checked = {"DATABASE_URL": database_url, "WORKER_SHUTDOWN_GRACE_SECONDS": "7", "WORKER_POOL_SIZE": "3"}
    result = worker("check", directory=tmp_path, **checked)
    assert result.returncode == 0, result.stderr
    for line in (
        *("settings: valid", "schema: 'public', version 1", "grants: complete", "TLS: not in use"),
        "connections: at most 9 for `worker run`, 16 with --serve",
    ):
        assert line in result.stdout.splitlines()
    assert "must allow more than 16 s" in result.stdout
    with role(server, database_url) as name:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
        result = worker(
            "check",
            directory=tmp_path,
            DATABASE_URL=url_as(name, database_url),
            WORKER_POOLER="transaction",
            WORKER_PORT="x",
            WORKER_HANDLERS="no_such_module:handlers",
            WORKER_LISTEN_DATABASE_URL=database_url,
        )
    assert result.returncode == 78
    assert "WORKER_PORT is no setting" in result.stdout
    assert "lacks UPDATE on the table jobs" in result.stderr
    assert "statement_timeout" in result.stderr
    assert "cannot import 'no_such_module'" in result.stderr
    assert "LISTEN: " in result.stdout
    assert "must allow more than 14 s" in result.stdout


def test_a_role_that_sees_its_own_sessions_only_is_no_fault_and_marked(server: Server, database_url: str, tmp_path: Path) -> None:
    with role(server, database_url) as name, psycopg.connect(database_url) as other:
        grant(database_url, "daemon", name)
        other.execute("SELECT 1")  # a transaction that the role is not shown
        as_role = {"DATABASE_URL": url_as(name, database_url)}
        result = worker("check", directory=tmp_path, **as_role)
        assert (result.returncode, result.stderr) == (0, "")
        assert "sessions of other roles: hidden" in result.stdout
        assert "pg_read_all_stats" in result.stdout
        shown = worker("stats", directory=tmp_path, **as_role).stdout.splitlines()
        assert "oldest_transaction_seconds (own sessions only)\t-" in shown
        document = json.loads(worker("stats", "--json", directory=tmp_path, **as_role).stdout)
        assert document["oldest_transaction_seconds"] is None
        assert "oldest_transaction_seconds" in document["estimated"]
    result = worker("check", directory=tmp_path, DATABASE_URL=database_url)
    assert "sessions of other roles: visible" in result.stdout.splitlines()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORKER_HTTP_TOKENS": "short"}, "WORKER_HTTP_TOKENS: token 1 must be at least 16"),
        ({"WORKER_HTTP_TOKENS": ",,"}, "WORKER_HTTP_TOKENS holds no token"),
        ({"WORKER_HTTP_TOKENS_FILE": "/no/such/file"}, "WORKER_HTTP_TOKENS_FILE='/no/such/file' cannot be read: No such file"),
    ],
)
def test_check_names_tokens_that_serve_refuses(database_url: str, tmp_path: Path, variables: dict[str, str], said: str) -> None:
    result = worker("check", directory=tmp_path, DATABASE_URL=database_url, **variables)
    assert result.returncode == 78
    assert f"worker: {said}" in result.stderr
    assert "settings: valid" not in result.stdout
    assert "schema: 'public', version 1" in result.stdout, "the rest is checked all the same"
    refused = worker("serve", "--port", "0", directory=tmp_path, DATABASE_URL=database_url, **variables)
    assert (refused.returncode, said in refused.stdout) == (78, True)


def test_check_accepts_tokens_that_serve_accepts(database_url: str, tmp_path: Path) -> None:
    result = worker("check", directory=tmp_path, DATABASE_URL=database_url, WORKER_HTTP_TOKENS="a-token-that-is-long-enough")
    assert (result.returncode, result.stderr) == (0, "")
    assert "settings: valid" in result.stdout.splitlines()
    assert "long-enough" not in result.stdout


def test_without_the_extra_check_says_nothing_of_tokens(database_url: str, tmp_path: Path) -> None:
    """Such a process serves nothing."""
    (tmp_path / "fastapi.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = worker("check", directory=tmp_path, DATABASE_URL=database_url, PYTHONPATH=path, WORKER_HTTP_TOKENS="short")
    assert (result.returncode, result.stderr) == (0, "")


def test_health_is_1_where_no_daemon_is(tmp_path: Path) -> None:
    result = worker("health", directory=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"worker: no daemon has left a heartbeat in {tmp_path}\n"
    assert worker_at_a_terminal("health", directory=tmp_path)[1].count("no daemon has left") == 1
