"""What keeps a command from its work is said in clear lines, shows no secret, and has an exit status of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from tests.commands import worker
from tests.roles import url_as
from tests.servers import Server


@pytest.mark.parametrize("command", [["jobs", "list"], ["jobs", "retry", "1"], ["stats"], ["enqueue", "k", "1"], ["jobs", "prune"]])
def test_a_database_without_our_schema_is_one_clear_line(empty_database_url: str, tmp_path: Path, command: list[str]) -> None:
    result = worker(*command, directory=tmp_path, DATABASE_URL=empty_database_url)
    assert result.returncode == 78
    assert result.stderr == "worker: schema 'public' holds no tables of reliable-worker: apply them with `worker migrate`\n"


@pytest.mark.parametrize("command", [["run"], ["run", "--migrate"], ["generator", "run"], ["serve"]])
def test_a_process_waits_for_an_absent_database_as_long_as_it_is_told_to(tmp_path: Path, command: list[str]) -> None:
    about = {"DATABASE_URL": "postgresql://127.0.0.1:1/db", "WORKER_CONNECT_WAIT_SECONDS": "0.5"}
    result = worker(*command, *(("--port", "0") if command == ["serve"] else ()), directory=tmp_path, **about)
    assert result.returncode == 69
    said = [entry["error"] for line in result.stdout.splitlines() if (entry := json.loads(line))["event"] == "database_lost"]
    assert said[-1].startswith("no database within 0.5 s: cannot connect to")


@pytest.mark.parametrize(("version", "said"), [(99, "knows only 1: a newer reliable-worker made it"), (0, "run `worker migrate`")])
def test_a_schema_of_another_version_is_refused_by_every_command_that_works_on_it(
    database_url: str, tmp_path: Path, version: int, said: str
) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE schema_version SET version = %s", [version])
    for command in (["jobs", "list"], ["jobs", "retry", "1"], ["stats"], ["enqueue", "k", "1"], ["jobs", "prune"], ["check"]):
        result = worker(*command, directory=tmp_path, DATABASE_URL=database_url)
        assert result.returncode == 78
        assert f"schema 'public' has version {version}, this program" in result.stderr
        assert said in result.stderr


@pytest.mark.parametrize("command", [["migrate"], ["jobs", "list"], ["stats", "--json"], ["check"], ["enqueue", "k", "1"]])
def test_an_unreachable_database_is_69_without_its_password(tmp_path: Path, command: list[str]) -> None:
    url = "postgresql://me:s3cret-word@127.0.0.1:1/db"
    result = worker(*command, directory=tmp_path, DATABASE_URL=url)
    assert result.returncode == 69
    assert "127.0.0.1:1" in result.stderr
    assert "s3cret" not in result.stderr + result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["jobs", "list"], ["stats"], ["check"], ["migrate"], ["health"]])
def test_bad_settings_are_78_with_a_line_each(tmp_path: Path, command: list[str]) -> None:
    result = worker(*command, directory=tmp_path, DATABASE_URL="postgresql://h/d", WORKERS="4x", WORKER_LEASE_SECONDS="inf")
    assert result.returncode == 78
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert "WORKERS='4x'" in lines[0]
    assert "WORKER_LEASE_SECONDS='inf'" in lines[1]


@pytest.mark.parametrize(
    "variable",
    ["DATABASE_URL", "WORKER_LISTEN_DATABASE_URL", "PGUSER", "WORKERS", "WORKER_QUEUES", "WORKER_SCHEMA", "WORKER_NAME"],
)
def test_bytes_that_are_no_text_are_refused_by_the_name_of_their_variable(tmp_path: Path, variable: str) -> None:
    """Whatever they are set to: nothing is tried with them, and nothing of them is shown where they may be a secret."""
    url = "postgresql:///?host=/nowhere"
    value = "postgresql://me:s3\udcffcret@h/db" if variable.endswith("URL") else "s3\udcffcret"
    for command in ("check", "run"):
        result = worker(command, directory=tmp_path, **{"DATABASE_URL": url, variable: value})
        said = result.stderr + result.stdout
        assert result.returncode == 78, said
        assert ("DATABASE_URL" if variable == "PGUSER" else variable) in said
        assert "Traceback" not in said
        assert "cret" not in said or not variable.endswith("URL")


@pytest.mark.parametrize("command", [["migrate"], ["jobs", "list"], ["stats"], ["check"], ["enqueue", "k", "1"], ["run"]])
def test_a_database_that_says_no_is_78_for_every_command(server: Server, tmp_path: Path, command: list[str]) -> None:
    parts = urlsplit(server.dsn)
    no_such_database = urlunsplit(parts._replace(path="/no_such_database"))
    for url in (no_such_database, url_as("nobody_there", server.dsn)):
        result = worker(*command, directory=tmp_path, DATABASE_URL=url)
        assert result.returncode == 78, result.stderr
        assert "no_such_database" in result.stderr + result.stdout or "nobody_there" in result.stderr + result.stdout


def test_handlers_that_cannot_be_imported_are_one_line_with_traceback_and_directory(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "broken_jobs.py").write_text("import no_such_thing\n")
    result = worker("run", directory=tmp_path, DATABASE_URL=database_url, WORKER_HANDLERS="broken_jobs:handlers")
    assert result.returncode == 78
    [event] = [json.loads(line) for line in result.stdout.splitlines() if '"level":"error"' in line.replace(" ", "")]
    assert event["event"] == "config_invalid"
    assert re.fullmatch(r".+-[0-9a-f]{8}", event["worker"])
    assert f"cannot import 'broken_jobs' (working directory {tmp_path}): " in event["error"]
    assert "Traceback" in event["exception"]
    assert "import no_such_thing" in event["exception"]


def test_the_daemon_says_bad_settings_as_json_on_standard_output(tmp_path: Path) -> None:
    for command in (["run"], ["generator", "run"], ["serve"]):
        result = worker(*command, directory=tmp_path, DATABASE_URL="postgresql://h/d", WORKERS="0", WORKER_NAME="mine")
        assert result.returncode == 78
        [event] = [json.loads(line) for line in result.stdout.splitlines()]
        assert event["event"] == "config_invalid"
        assert "WORKERS='0'" in event["error"]
        assert re.fullmatch(r"mine-[0-9a-f]{8}", event["worker"])
        assert event["version"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["jobs", "nonsense"],
        ["jobs", "list", "--limit", "0"],
        ["jobs", "list", "--state", "ended"],
        ["jobs", "show"],
        ["jobs", "show", "x"],
        ["jobs", "show", "9223372036854775808"],
        ["jobs", "retry"],
        ["jobs", "retry", "1", "--kind", "a"],
        ["jobs", "retry", "--state", "running"],
        ["jobs", "cancel", "--state", "dead"],
        ["jobs", "list", "--data-dir", "/tmp/x"],
        ["enqueue", "message"],
        ["enqueue", "message", "{bad"],
        ["enqueue", "message", '{"a": NaN}'],
        ["enqueue", "message", '"\\ud800"'],
        ["enqueue", "message", '{"a": "\\u0000"}'],
        ["enqueue", "message", "1", "--key", "auto:x"],
        ["enqueue", "message", "1", "--priority", "99999"],
        ["enqueue", "message", "1", "--delay", "nan"],
        ["enqueue", "message", "1", "--at", "2030-01-01T00:00:00"],
        ["enqueue", "message", "1", "--at", "tomorrow"],
        ["enqueue", "message", "1", "--at", "2030-01-01T00:00:00Z", "--delay", "1"],
        ["enqueue", "message", "@/nonexistent"],
        ["enqueue", "message", "@/dev/zero"],
        ["enqueue", "--file", "/dev/zero"],
        # Bytes that are not UTF-8.
        ["enqueue", "message\udcff", "1"],
        ["enqueue", "message", '"\udcff"'],
        ["enqueue", "message", "1", "--key", "\udcff"],
        ["jobs", "list", "--kind", "\udcff"],
        ["jobs", "list", "--queue", "\udcff"],
        ["jobs", "retry", "--key", "\udcff"],
        ["jobs", "cancel", "--kind", "\udcff"],
        ["jobs", "show", "\udcff"],
        ["enqueue", "--file", "/nonexistent"],
        ["enqueue", "message", "1", "--file", "x"],
        ["enqueue", "--file", "-", "--queue", "mail"],
        ["enqueue", "--file", "-", "--key", "k"],
        ["enqueue", "--file", "-", "--priority", "1"],
        ["enqueue", "--file", "-", "--delay", "1"],
        ["enqueue", "--file", "-", "--at", "2030-01-01T00:00:00Z"],
        ["enqueue", "--file", "-", "--max-attempts", "1"],
        # Not due, so not there.
        ["bench", "nonsense"],
    ],
)
def test_wrong_usage_is_2_and_changes_nothing(database_url: str, tmp_path: Path, arguments: list[str]) -> None:
    result = worker(*arguments, directory=tmp_path, DATABASE_URL=database_url)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Error: " in result.stderr
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)
