"""`worker lease`: what it prints, how it exits, and a command that runs only while its lease is held."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import parse, worker, worker_at_a_terminal
from tests.lease_rows import Db, is_live, row
from tests.ports import Proxy
from tests.processes import ROOT, environment
from tests.waiting import await_for, wait_for


def is_alive(group: int) -> bool:
    """Whether a process of this group still runs; one that has ended and nobody has waited for does not."""
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(line.split()[0] == str(group) and not line.split()[1].startswith("Z") for line in listed.splitlines())


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "ppid=,pid="], capture_output=True, text=True, check=True).stdout
    return [int(child) for parent, child in map(str.split, listed.splitlines()) if parent == str(pid)]


class Runs:
    """`worker lease run` processes of one test; none outlives it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: str, url: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "worker", "lease", "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=environment(self.directory, DATABASE_URL=url, **variables),
            cwd=self.directory,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def pid(self, name: str = "pid") -> int:
        """What a command wrote of itself: `echo $$ > pid`."""
        return int(wait_for(lambda: (path := self.directory / name).exists() and path.read_text().strip(), 20))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path)
    yield runs
    groups = [process.pid for process in runs.started]
    # A command that should have been stopped and was not would hold our pipes.
    groups += [int(text) for path in tmp_path.glob("pid*") if (text := path.read_text().strip()).isdigit()]
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    for process in runs.started:
        process.communicate(timeout=30)


NOTE_AND_SLEEP = "echo $$ > pid.new; mv pid.new pid; exec sleep 60"


# --- acquire, renew, release, list


def test_a_lease_is_acquired_renewed_and_released_by_hand(database_url: str, tmp_path: Path) -> None:
    def lease(*arguments: str) -> tuple[int, dict[str, Any], str]:
        result = worker("lease", *arguments, "--json", directory=tmp_path, DATABASE_URL=database_url, WORKER_NAME="shop")
        return result.returncode, json.loads(result.stdout), result.stderr

    status, got, _ = lease("acquire", "nightly", "--ttl", "3600", "--request-id", "q", "--metadata", '{"why": "é"}')
    assert status == 0
    assert list(got) == [
        *("id", "resource", "holder", "fence", "ttl_seconds", "metadata", "state", "expires_in_ms"),
        *("created_at", "renewed_at", "released_at"),
    ]
    assert (got["holder"], got["state"], got["metadata"], got["renewed_at"]) == ("shop", "active", {"why": "é"}, None)
    assert got["created_at"].endswith("Z")
    fence = str(got["fence"])
    assert lease("acquire", "nightly", "--request-id", "q")[1]["fence"] == got["fence"]
    status, held, error = lease("acquire", "nightly", "--holder", "other")
    assert (status, held["error"], held["holder"]) == (1, "held", "shop")
    assert 3_000_000 < held["retry_after_ms"] <= 3_600_000
    assert "held by shop" in error
    assert lease("renew", "nightly", "--fence", fence, "--ttl", "900")[1]["ttl_seconds"] == 900
    for stale in (("--fence", fence, "--holder", "other"), ("--fence", str(got["fence"] + 1))):
        for verb in ("renew", "release"):
            status, said, error = lease(verb, "nightly", *stale)
            assert (status, said) == (1, {"error": "not_held"})
            assert "not held" in error
    for _ in range(2):
        status, released, _ = lease("release", "nightly", "--fence", fence)
        assert (status, released["state"]) == (0, "released")
    status, ended, _ = lease("acquire", "nightly", "--request-id", "q")
    assert (status, ended["error"], ended["fence"]) == (1, "ended", got["fence"])


def test_leases_are_listed_for_people_pipes_and_programs(database_url: str, db: Db, tmp_path: Path) -> None:
    got = db.execute("SELECT * FROM acquire_lease('gone', E'a\\tb\\x1b[31m')").fetchone()
    db.execute("SELECT release_lease('gone', %s, %s)", [got.holder, got.fence])
    db.execute("SELECT acquire_lease('nightly', 'me', 60)")
    plain = worker("lease", "list", directory=tmp_path, DATABASE_URL=database_url)
    lines = [line.split("\t") for line in plain.stdout.splitlines()]
    assert lines[0][:5] == ["id", "resource", "state", "holder", "fence"]
    assert [line[1:4] for line in lines[1:]] == [["gone", "released", r"a\tb\x1b[31m"], ["nightly", "active", "me"]]
    as_json = worker("lease", "list", "--state", "active", "--json", directory=tmp_path, DATABASE_URL=database_url)
    assert [lease["resource"] for lease in json.loads(as_json.stdout)] == ["nightly"]
    assert worker("lease", "list", "--limit", "1", directory=tmp_path, DATABASE_URL=database_url).stdout.count("\n") == 2
    status, shown = worker_at_a_terminal("lease", "list", "--state", "expired", directory=tmp_path, DATABASE_URL=database_url)
    assert (status, shown.strip()) == (0, "no leases")


@pytest.mark.parametrize(
    "arguments",
    [
        ("acquire", ""),
        ("acquire", "x" * 513),
        ("acquire", "nightly", "--ttl", "0"),
        ("acquire", "nightly", "--ttl", "nan"),
        ("acquire", "nightly", "--ttl", "5s"),
        ("acquire", "nightly", "--metadata", "[]"),
        ("acquire", "nightly", "--metadata", "x"),
        ("acquire", "nightly", "--metadata", json.dumps({"x": "y" * 10_000})),
        ("acquire", "nightly", "--holder", "x" * 129),
        ("acquire", "nightly", "--holder", ""),
        ("acquire", "nightly", "--request-id", ""),
        ("renew", "nightly", "--fence", "1", "--holder", ""),
        ("release", "nightly", "--fence", "1", "--holder", ""),
        ("run", "nightly", "--holder", "", "--", "true"),
        ("renew", "nightly"),
        ("renew", "nightly", "--fence", "0"),
        ("release", "nightly", "--fence", "x"),
        ("list", "--state", "held"),
        ("run", "nightly"),
        ("run", "nightly", "--ttl", "0.5", "--", "true"),
        ("run", "nightly", "--wait", "-1", "--", "true"),
        ("run", "", "--", "true"),
    ],
    ids=lambda arguments: "-".join(arguments)[:40],
)
def test_wrong_input_is_status_2(database_url: str, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = worker("lease", *arguments, directory=tmp_path, DATABASE_URL=database_url)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr


@pytest.mark.parametrize(
    ("full", "as_json", "request_id"),
    [("/dev/full", ("--json",), None), ("a pipe that nobody reads", (), None), ("/dev/full", (), "q")],
    ids=["full", "broken", "repeatable"],
)
def test_a_lease_whose_fence_nobody_could_be_told_is_given_back(
    database_url: str, db: Db, tmp_path: Path, full: str, as_json: tuple[str, ...], request_id: str | None
) -> None:
    """With a request id it stays: asked again, the same one comes."""
    reader, output = os.pipe()
    os.close(reader)
    if full == "/dev/full":
        os.close(output)
        output = os.open(full, os.O_WRONLY)
    wish = ("acquire", "nightly", *as_json, *(() if request_id is None else ("--request-id", request_id)))
    try:
        result = subprocess.run(
            [sys.executable, "-m", "worker", "lease", *wish],
            stdout=output,
            stderr=subprocess.PIPE,
            env=environment(tmp_path, DATABASE_URL=database_url),
            timeout=60,
            text=True,
        )
    finally:
        os.close(output)
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("worker: cannot write the output: ")
    lease = row(db, "nightly")
    if request_id is None:
        assert (lease.released_at is not None, "was given back" in line) == (True, True)
    else:
        assert (lease.live, "ask again" in line) == (True, True)
        again = worker("lease", *wish, directory=tmp_path, DATABASE_URL=database_url)
        assert (again.returncode, str(lease.fence) in again.stdout) == (0, True)


# --- run


def asks(db: Db) -> bool:
    """Whether somebody has a connection to ask for a lease with."""
    of_its_pool = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '% pool'"
    return db.execute(of_its_pool).fetchone() is not None


def test_the_commands_status_output_and_environment_are_its_own(database_url: str, db: Db, tmp_path: Path) -> None:
    script = 'echo "fence $WORKER_LEASE_FENCE"; echo oops >&2; cat; env > environment; exit 7'
    result = worker(
        *("lease", "run", "nightly", "--", "sh", "-c", script), stdin="in", directory=tmp_path, DATABASE_URL=database_url
    )
    lease = row(db, "nightly")
    assert (result.returncode, result.stdout, result.stderr) == (7, f"fence {lease.fence}\nin", "oops\n")
    assert lease.released_at is not None
    given = set(environment(tmp_path, DATABASE_URL=database_url)) | {"WORKER_LEASE_FENCE"}
    seen = {line.partition("=")[0] for line in (tmp_path / "environment").read_text().splitlines() if "=" in line}
    assert seen - {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"} == given


def test_no_password_gets_into_the_commands_environment(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(database_url)
    result = worker("lease", "run", "nightly", "--", "env", directory=tmp_path, DATABASE_URL_FILE=str(tmp_path / "url"))
    assert (result.returncode, database_url in result.stdout, "WORKER_LEASE_FENCE" in result.stdout) == (0, False, True)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("true",), 0),
        (("sh", "-c", "kill -KILL $$"), 128 + 9),
        (("sh", "-c", "kill -TERM $$"), 128 + 15),
        (("no-such-command",), 127),
        (("./plain",), 126),
        ((".",), 126),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_the_exit_status_is_what_a_shell_would_say(
    database_url: str, db: Db, tmp_path: Path, command: tuple[str, ...], status: int
) -> None:
    (tmp_path / "plain").write_text("not executable")
    result = worker("lease", "run", "nightly", "--", *command, directory=tmp_path, DATABASE_URL=database_url)
    assert result.returncode == status, result.stderr
    assert bool(result.stderr) == (status in (126, 127))
    assert not is_live(db, "nightly")


def test_a_lease_that_is_held_is_status_73_and_the_command_never_starts(database_url: str, db: Db, tmp_path: Path) -> None:
    db.execute("SELECT acquire_lease('nightly', 'other', 60)")
    started = time.monotonic()
    result = worker("lease", "run", "nightly", "--wait", "0.5", "--", "touch", "ran", directory=tmp_path, DATABASE_URL=database_url)
    assert (result.returncode, (tmp_path / "ran").exists()) == (73, False)
    assert "held by other" in result.stderr
    assert time.monotonic() - started >= 0.5


def test_it_waits_for_the_lease(database_url: str, db: Db, runs: Runs) -> None:
    got = db.execute("SELECT * FROM acquire_lease('nightly', 'other', 60)").fetchone()
    process = runs("nightly", "--wait", "30", "--", "touch", "ran", url=database_url)
    wait_for(lambda: asks(db), 20)
    assert (process.poll(), (runs.directory / "ran").exists()) == (None, False)
    db.execute("SELECT release_lease('nightly', 'other', %s)", [got.fence])
    assert process.wait(30) == 0
    assert (runs.directory / "ran").exists()
    assert row(db, "nightly").fence > got.fence


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_it_waits_ends_the_wait(database_url: str, db: Db, runs: Runs, number: signal.Signals) -> None:
    db.execute("SELECT acquire_lease('nightly', 'other', 60)")
    process = runs("nightly", "--wait", "60", "--", "touch", "ran", url=database_url)
    wait_for(lambda: asks(db), 20)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert not (runs.directory / "ran").exists()


def test_signals_are_handed_on_to_the_whole_group_and_the_lease_is_held_until_it_ends(
    database_url: str, db: Db, runs: Runs
) -> None:
    script = 'trap "echo got TERM; sleep 1.5; exit 3" TERM; echo $$ > pid.new; mv pid.new pid; while :; do sleep 0.05; done'
    process = runs("nightly", "--ttl", "1", "--", "sh", "-c", script, url=database_url)
    pid = runs.pid()
    assert os.getpgid(pid) == pid != os.getpgid(process.pid)
    process.send_signal(signal.SIGTERM)
    while process.poll() is None:
        assert is_live(db, "nightly") or process.poll() is not None or not is_alive(pid)
        time.sleep(0.05)
    assert process.communicate()[0] == "got TERM\n"
    assert process.returncode == 3
    assert not is_live(db, "nightly")


@pytest.mark.parametrize("is_deaf", [False, True], ids=["hears TERM", "is deaf"])
def test_what_the_command_leaves_behind_is_ended_before_the_lease_is_released(
    database_url: str, db: Db, runs: Runs, is_deaf: bool
) -> None:
    trap = 'trap "" TERM; ' if is_deaf else ""
    script = f"echo $$ > pid.new; (trap : HUP; {trap}touch waits; while :; do sleep 0.05; done) & until [ -e waits ]; do :; done; "
    process = runs("nightly", "--ttl", "5", "--", "sh", "-c", script + "mv pid.new pid; exit 3", url=database_url)
    group = runs.pid()
    wait_for(lambda: row(db, "nightly").released_at is not None)
    assert not is_alive(group)
    assert process.wait(30) == 3
    assert process.communicate() == ("", "")


def test_when_the_lease_is_lost_the_group_is_stopped_and_the_status_is_75(database_url: str, db: Db, runs: Runs) -> None:
    script = 'trap "echo told; exit 0" TERM; sh -c "trap : TERM; echo \\$\\$ > pid2; while :; do sleep 0.05; done" & '
    process = runs(
        "nightly", "--ttl", "2", "--", "sh", "-c", script + "echo $$ > pid; while :; do sleep 0.05; done", url=database_url
    )
    group, deaf = runs.pid(), runs.pid("pid2")
    assert os.getpgid(deaf) == group
    db.execute("UPDATE leases SET expires_at = clock_timestamp()")
    db.execute("SELECT acquire_lease('nightly', 'other', 60)")
    output, error = process.communicate(timeout=30)
    assert (process.returncode, output) == (75, "told\n")
    assert "lease_lost" in error
    wait_for(lambda: not is_alive(group))


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "unguarded"])
async def test_when_nothing_is_heard_the_group_is_gone_before_the_lease_can_pass_on(
    database_url: str, db: Db, runs: Runs, is_guarded: bool
) -> None:
    async with Proxy(database_url) as proxy:
        script = 'trap "" TERM; echo $$ > pid.new; mv pid.new pid; while :; do sleep 0.05; done'
        process = runs("nightly", "--ttl", "6", "--", "sh", "-c", script, url=proxy.dsn)
        group = await await_for(lambda: (runs.directory / "pid").exists() and int((runs.directory / "pid").read_text()), 20)
        await await_for(lambda: row(db, "nightly").renewed_at is not None)
        if not is_guarded:
            [guardian] = [pid for pid in children_of(process.pid) if pid != group]
            os.kill(guardian, signal.SIGKILL)
        proxy.go_mute()
        await await_for(lambda: not is_alive(group), 20)
        assert is_live(db, "nightly"), "killed too late"
        assert await await_for(lambda: process.poll() is not None, 10)
        assert process.returncode == 75
        assert "lease_untrusted" in process.communicate()[1]
        proxy.flow()


async def test_an_outage_shorter_than_the_trust_does_not_disturb_the_command(database_url: str, db: Db, runs: Runs) -> None:
    async with Proxy(database_url) as proxy:
        process = runs("nightly", "--ttl", "3", "--", "sh", "-c", "touch pid; sleep 4; echo done", url=proxy.dsn)
        await await_for((runs.directory / "pid").exists, 20)
        proxy.go_mute()
        proxy.cut()
        await asyncio.sleep(1.2)
        proxy.cut()
        proxy.flow()
        await await_for(lambda: process.poll() is not None, 20)
        assert (process.returncode, process.communicate()[0]) == (0, "done\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_frozen_its_command_is_gone_before_the_lease_can_pass_on(
    database_url: str, db: Db, runs: Runs, number: signal.Signals
) -> None:
    process = runs("nightly", "--ttl", "6", "--", "sh", "-c", f'trap "" TERM; {NOTE_AND_SLEEP}', url=database_url)
    group = runs.pid()
    wait_for(lambda: row(db, "nightly").renewed_at is not None)
    process.send_signal(number)
    wait_for(lambda: not is_alive(group), 30)
    assert is_live(db, "nightly"), "killed too late"
    process.send_signal(signal.SIGCONT)
    assert process.wait(30) == (75 if number is signal.SIGSTOP else -9)


def test_the_guardian_leaves_with_its_run(database_url: str, runs: Runs) -> None:
    process = runs("nightly", "--", "sh", "-c", "ps -o pid= --ppid $PPID > pid; true", url=database_url)
    assert process.wait(20) == 0
    children = [int(pid) for pid in (runs.directory / "pid").read_text().split()]
    assert len(children) == 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def test_the_terminal_is_the_commands(database_url: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "worker", "lease", "run", "nightly", "--", "cat"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(tmp_path, DATABASE_URL=database_url),
        cwd=tmp_path,
        preexec_fn=lambda: (os.setsid(), __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0)),
    ) as process:
        os.close(theirs)
        os.write(ours, b"hello\n")
        seen = b""
        while seen.count(b"hello") < 2:  # once typed, once said by cat
            assert select.select([ours], [], [], 20)[0], seen
            seen += os.read(ours, 1000)
        os.write(ours, b"\x03")
        assert process.wait(30) == 128 + signal.SIGINT
    os.close(ours)


def test_a_command_runs_under_a_lease_of_the_private_server(data_dir: Path, tmp_path: Path) -> None:
    """It is started, gets the schema, serves the renewals meanwhile, and is stopped with the last command that uses it."""

    def lease(*arguments: str, command: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        here = ("--embedded", "--data-dir", str(data_dir))
        return worker("lease", *arguments, *here, *command, directory=tmp_path)

    script = 'test -e "$1/postgresql/postmaster.pid" && sleep 1.6 && echo "$WORKER_LEASE_FENCE"; exit 3'
    ran = lease("run", "nightly", "--ttl", "3", "--holder", "me", command=("--", "sh", "-c", script, "sh", str(data_dir)))
    assert ran.returncode == 3, ran.stderr
    assert not (data_dir / "postgresql" / "postmaster.pid").exists()
    [seen] = json.loads(lease("list", "--json").stdout)
    assert (seen["state"], seen["holder"], str(seen["fence"])) == ("released", "me", ran.stdout.strip())
    assert seen["renewed_at"] is not None
    assert lease("acquire", "nightly", "--holder", "other", "--ttl", "600").returncode == 0
    refused = lease("run", "nightly", command=("--", "touch", "ran"))
    assert (refused.returncode, (tmp_path / "ran").exists()) == (73, False)
    assert "held by other" in refused.stderr


def test_without_a_database_it_is_69_and_without_the_schema_78(empty_database_url: str, tmp_path: Path) -> None:
    result = worker("lease", "run", "nightly", "--", "true", directory=tmp_path, DATABASE_URL=empty_database_url)
    assert (result.returncode, "worker migrate" in result.stderr) == (78, True)
    result = worker("lease", "run", "nightly", "--", "true", directory=tmp_path, DATABASE_URL="postgresql://127.0.0.1:1/x")
    assert (result.returncode, "127.0.0.1" in result.stderr) == (69, True)


def test_what_the_page_about_leases_shows_can_be_typed_in() -> None:
    page = (ROOT / "docs" / "leases.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for language, text in blocks:
        if language == "python":
            compile(text, "docs/leases.md", "exec")
        for line in text.splitlines() if language == "sh" else ():
            parse(shlex.split(line, comments=True)[1:])
    assert {language for language, _ in blocks} == {"python", "sh", "sql"}
