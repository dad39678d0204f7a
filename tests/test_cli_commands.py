"""The command line: exit statuses, clear refusals, output for people and for programs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from tests.commands import worker, worker_at_a_terminal
from tests.processes import environment
from tests.roles import role, url_as
from tests.servers import Server

LIST_KEYS = [
    "id", "key", "kind", "queue", "priority", "state", "attempts", "max_attempts", "fence", "worker", "available_at",
    "lease_until", "created_at", "started_at", "completed_at", "last_error",
]  # fmt: skip
STATS_KEYS = {
    "ready", "scheduled", "running", "expired", "succeeded", "dead", "cancelled", "oldest_ready_seconds", "retry_rate",
    "lost_leases", "throughput", "duration_seconds", "unknown_kinds", "oldest_transaction_seconds", "queues", "kinds",
    "processes", "estimated",
}  # fmt: skip


def test_migrate_says_what_it_did_and_check_what_is_missing(empty_database_url: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = worker("migrate", *arguments, directory=tmp_path, DATABASE_URL=empty_database_url, WORKER_SCHEMA="Odd-Name")
        assert result.stderr == ""
        return result.returncode, result.stdout

    assert run("--check") == (1, "schema 'Odd-Name': not applied, this program has version 1\n")
    assert run() == (0, "schema 'Odd-Name': version 1 applied\n")
    assert run() == (0, "schema 'Odd-Name': version 1 is current\n")
    assert run("--check") == (0, "schema 'Odd-Name': version 1 is current\n")


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


CLOSED = "exec 0<&-; exec 1>&-; exec 2>&-; exec {python} -m worker {arguments}"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("stats", 0), ("jobs list --json", 0), ("enqueue k 1", 0), ("enqueue k -", 2), ("run --burst", 0), ("--version", 0), ("x", 2)],
)
def test_closed_standard_descriptors_lead_nowhere(database_url: str, tmp_path: Path, arguments: str, status: int) -> None:
    text = CLOSED.format(python=shlex.quote(sys.executable), arguments=arguments)
    environ = environment(tmp_path, DATABASE_URL=database_url)
    assert subprocess.run(["sh", "-c", text], env=environ, cwd=tmp_path, timeout=60).returncode == status


def test_a_closed_standard_output_alone_is_no_traceback(database_url: str, tmp_path: Path) -> None:
    result = subprocess.run(
        ["sh", "-c", f"exec {shlex.quote(sys.executable)} -m worker stats >&-"],
        env=environment(tmp_path, DATABASE_URL=database_url),
        capture_output=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, b"")


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
        ["stats", "--watch"],
    ],
)
def test_wrong_usage_is_2_and_changes_nothing(database_url: str, tmp_path: Path, arguments: list[str]) -> None:
    result = worker(*arguments, directory=tmp_path, DATABASE_URL=database_url)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Error: " in result.stderr
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)


def test_list_and_show_print_the_documented_json(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE jobs ALTER COLUMN id RESTART WITH 9007199254740993")
        connection.execute("INSERT INTO jobs (payload, idempotency_key) VALUES ('{\"n\": 12345678901234567890123}', 'k')")
        connection.execute(
            "INSERT INTO job_failures (job_id, fence, attempt, worker, outcome, error)"
            " VALUES (9007199254740993, 4, 1, 'w', 'error', E'line 1\\nline 2')"
        )
    listed = worker("jobs", "list", "--json", directory=tmp_path, DATABASE_URL=database_url)
    [job] = json.loads(listed.stdout)
    assert list(job) == LIST_KEYS
    assert (job["id"], job["key"], job["state"]) == (9007199254740993, "k", "ready")
    assert datetime.fromisoformat(job["available_at"]).utcoffset() is not None
    shown = worker("jobs", "show", "9007199254740993", "--json", directory=tmp_path, DATABASE_URL=database_url)
    details = json.loads(shown.stdout)
    assert list(details) == [*LIST_KEYS, "payload", "result", "failures"]
    assert details["payload"] == {"n": 12345678901234567890123}
    [failure] = details["failures"]
    assert (failure["attempt"], failure["outcome"], failure["error"]) == (1, "error", "line 1\nline 2")
    missing = worker("jobs", "show", "1", directory=tmp_path, DATABASE_URL=database_url)
    assert (missing.returncode, missing.stdout, missing.stderr) == (1, "", "worker: there is no job 1\n")


def test_stats_prints_the_documented_json_and_a_readable_page(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload, queue) VALUES ('1', 'mail'), ('1', 'default')")
    document = json.loads(worker("stats", "--json", directory=tmp_path, DATABASE_URL=database_url).stdout)
    assert set(document) == STATS_KEYS
    assert (document["ready"], document["queues"]["mail"]["ready"]) == (2, 1)
    assert set(document["duration_seconds"]) == {"p50", "p95"}
    lines = worker("stats", directory=tmp_path, DATABASE_URL=database_url).stdout.splitlines()
    assert "ready\t2" in lines
    assert any(line.startswith("queue mail\t1\t") for line in lines)


def test_retry_and_cancel_by_id_say_each_state_and_fail_for_what_was_not_done(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload) VALUES ('1'), ('2')")
        connection.execute("INSERT INTO jobs (payload, state, completed_at) VALUES ('1', 'succeeded', now())")
    done = worker("jobs", "cancel", "2", "1", directory=tmp_path, DATABASE_URL=database_url)
    assert (done.returncode, done.stdout) == (0, "1 cancelled\n2 cancelled\n")
    done = worker("jobs", "retry", "1", "--json", directory=tmp_path, DATABASE_URL=database_url)
    assert (done.returncode, json.loads(done.stdout)) == (0, [{"id": 1, "state": "ready"}])
    failed = worker("jobs", "cancel", "3", "99", directory=tmp_path, DATABASE_URL=database_url)
    assert failed.returncode == 1
    assert failed.stdout == "3 succeeded\n"
    assert failed.stderr == "worker: job 3: is succeeded and stays so\nworker: job 99: there is no such job\n"


def test_bulk_retry_and_cancel_take_what_matches_and_a_dry_run_takes_nothing(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jobs (payload, kind, state, completed_at)"
            " SELECT '1', 'k' || n % 2, 'dead', now() FROM generate_series(1, 500) n"
        )
        connection.execute("INSERT INTO jobs (payload, kind, state, completed_at) VALUES ('1', 'k0', 'cancelled', now())")

        def states() -> dict[str, int]:
            return dict(connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())

        dry = worker("jobs", "retry", "--kind", "k0", "--dry-run", directory=tmp_path, DATABASE_URL=database_url)
        assert (dry.returncode, dry.stdout) == (0, "would retry 250 jobs\n")
        dry = worker("jobs", "retry", "1", "--dry-run", directory=tmp_path, DATABASE_URL=database_url)
        assert (dry.returncode, dry.stdout) == (0, "would retry 1 job\n")
        assert states() == {"dead": 500, "cancelled": 1}
        real = worker("jobs", "retry", "--kind", "k0", directory=tmp_path, DATABASE_URL=database_url)
        assert (real.returncode, real.stdout) == (0, "retried 250 jobs\n")
        assert states() == {"dead": 250, "cancelled": 1, "ready": 250}
        real = worker("jobs", "cancel", "--queue", "default", directory=tmp_path, DATABASE_URL=database_url)
        assert (real.returncode, real.stdout) == (0, "cancelled 250 jobs\n")
        assert states() == {"dead": 250, "cancelled": 251}


def test_prune_deletes_by_the_settings(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jobs (payload, state, created_at, completed_at)"
            " SELECT '1', 'succeeded', t, t FROM (VALUES (now() - interval '1 day'), (now())) AS v (t)"
        )
    result = worker("jobs", "prune", directory=tmp_path, DATABASE_URL=database_url, WORKER_RETENTION_SECONDS="3600")
    assert (result.returncode, result.stdout.split(",")[0]) == (0, "pruned 1 job")


def test_every_command_works_on_ids_beyond_32_bits(database_url: str, tmp_path: Path) -> None:
    """G2."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "ALTER TABLE jobs ALTER COLUMN id RESTART WITH 3000000000; ALTER SEQUENCE fence_seq RESTART WITH 3000000000"
        )
    enqueued = json.loads(worker("enqueue", "message", "1", directory=tmp_path, DATABASE_URL=database_url).stdout)
    assert enqueued["id"] == 3000000000
    for command in (["show"], ["cancel"], ["retry"]):
        assert worker("jobs", *command, "3000000000", directory=tmp_path, DATABASE_URL=database_url).returncode == 0


def test_head_ends_a_list_in_silence(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload, last_error) SELECT '1', repeat('x', 900) FROM generate_series(1, 2000)")
    process = subprocess.Popen(
        [sys.executable, "-m", "worker", "jobs", "list", "--limit", "2000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path, DATABASE_URL=database_url),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=30) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", [["jobs", "list"], ["jobs", "list", "--json"], ["stats"], ["migrate"]])
def test_a_full_disk_is_a_clear_error(database_url: str, tmp_path: Path, command: list[str]) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload) VALUES ('1')")
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "worker", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(tmp_path, DATABASE_URL=database_url),
            timeout=30,
        )
    assert result.returncode == 1
    assert result.stderr == b"worker: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "status"), [(["jobs", "show", "1"], 1), (["jobs", "list"], 78), (["enqueue", "--file", "-"], 0)]
)
def test_a_standard_error_that_nobody_reads_leaves_the_exit_status_as_it_is(
    database_url: str, tmp_path: Path, arguments: list[str], status: int
) -> None:
    workers = "none" if status == 78 else "1"
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment(tmp_path, DATABASE_URL=database_url, WORKERS=workers),
            timeout=30,
        )
    finally:
        os.close(theirs)
    assert (result.returncode, result.stdout) == (status, b"")


ODD = "é\x1b[31mred\x07\u202eevil\nnew [bold]line"


def test_data_can_neither_steer_a_terminal_nor_break_a_line(database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload, kind, last_error) VALUES (%s, 'odd', %s)", [json.dumps(ODD), ODD])
    piped = worker("jobs", "list", directory=tmp_path, DATABASE_URL=database_url).stdout
    assert len(piped.splitlines()) == 2
    assert "é\\x1b[31mred\\x07\\u202eevil\\nnew [bold]line" in piped
    for command in (["jobs", "list"], ["jobs", "show", "1"]):
        status, shown = worker_at_a_terminal(*command, directory=tmp_path, DATABASE_URL=database_url)
        assert status == 0
        assert "\x1b[31mred" not in shown
        assert "\u202e" not in shown
        assert "\x07" not in shown
        assert "[bold]" in shown.replace("\n", "").replace(" ", "")


@pytest.mark.parametrize("locale", [{"LANG": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_a_poor_locale_prints_escapes_and_no_traceback(database_url: str, tmp_path: Path, locale: dict[str, str]) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload, kind) VALUES ('1', 'grüße')")
    for command in (["jobs", "list"], ["jobs", "list", "--json"], ["stats"]):
        result = worker(*command, directory=tmp_path, DATABASE_URL=database_url, **locale)
        assert (result.returncode, result.stderr) == (0, "")
        assert "gr" in result.stdout


def test_a_person_sees_a_table_and_a_pipe_gets_lines_with_tabs(database_url: str, tmp_path: Path) -> None:
    status, shown = worker_at_a_terminal("jobs", "list", directory=tmp_path, DATABASE_URL=database_url)
    assert (status, shown) == (0, "no jobs\n")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO jobs (payload) VALUES ('1')")
    status, shown = worker_at_a_terminal("jobs", "list", directory=tmp_path, DATABASE_URL=database_url)
    assert status == 0
    assert "attempts" in shown
    assert "─" in shown
    piped = worker("jobs", "list", directory=tmp_path, DATABASE_URL=database_url).stdout
    names, job = piped.splitlines()
    assert names.split("\t") == ["id", "state", "kind", "queue", "attempts", "available_at", "worker", "key", "last_error"]
    assert job.startswith("1\tready\tmessage\tdefault\t0/5\t")


def test_a_list_stays_readable_on_80_columns(database_url: str, tmp_path: Path) -> None:
    error = "ValueError: the address of customer 1234 is not known here"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jobs (payload, kind, idempotency_key, state, attempts, completed_at, last_error)"
            " VALUES ('1', 'send_welcome_mail', 'welcome-mail-of-customer-1234', 'dead', 5, now(), %s)",
            [error],
        )
    _, wide = worker_at_a_terminal("jobs", "list", directory=tmp_path, DATABASE_URL=database_url, COLUMNS="200")
    assert "available_at" in wide
    assert error in wide
    _, narrow = worker_at_a_terminal("jobs", "list", directory=tmp_path, DATABASE_URL=database_url, COLUMNS="80")
    narrow = re.sub("\x1b\\[[\\d;]*m", "", narrow)
    head, _, *lines = [line for line in narrow.splitlines() if line.strip()]
    assert head.split() == ["id", "state", "kind", "attempts", "key", "last_error"]
    assert lines[0].split()[:4] == ["1", "dead", "send_welcome_mail", "5/5"]
    assert all(word in narrow for word in error.split())
    assert len(lines) <= 4
    assert max(map(len, narrow.splitlines())) <= 80


def test_neither_the_daemon_nor_a_piped_command_loads_what_serves_a_person_only(database_url: str, tmp_path: Path) -> None:
    program = """
import sys
from worker.cli import main
sys.argv = ["worker", *sys.argv[1:]]
try:
    main()
finally:
    friends = {"rich", "pygments", "markdown_it"}
    print(sorted(friends & {name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""
    for arguments in (["run", "--burst"], ["jobs", "list"], ["run", "--help"]):
        result = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            env=environment(tmp_path, DATABASE_URL=database_url),
            timeout=60,
        )
        assert result.returncode == 0, result.stderr
        shown = result.stderr + result.stdout
        assert "[]" in shown, shown


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


def test_health_is_1_where_no_daemon_is(tmp_path: Path) -> None:
    result = worker("health", directory=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"worker: no daemon has left a heartbeat in {tmp_path}\n"
    assert worker_at_a_terminal("health", directory=tmp_path)[1].count("no daemon has left") == 1


def test_python_dash_m_and_help_name_the_due_commands_only(tmp_path: Path) -> None:
    result = worker("--help", directory=tmp_path)
    assert result.returncode == 0
    names = [
        line.split()[0] for line in result.stdout.split("Commands:")[1].splitlines() if line.startswith("  ") and line[2] != " "
    ]
    assert names == [
        *("run", "demo", "migrate", "enqueue", "check", "health", "stats", "serve", "bench", "torture"),
        *("jobs", "lease", "generator"),
    ]
