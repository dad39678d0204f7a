"""`worker lease run`: a command that runs only while its lease is held, and is gone before it can pass on."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.commands import worker
from tests.lease_rows import Db, is_live, row
from tests.ports import Proxy
from tests.processes import environment
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


def goes(db: Db, group: int) -> Callable[[], bool]:
    """Whether the group has gone. Asked again and again: it must never be there when its lease is over."""

    def has_gone() -> bool:
        # In this order: what is still there afterwards was there when the lease was over.
        is_over = not is_live(db, "nightly")
        if not is_alive(group):
            return True
        if is_over:
            pytest.fail("it goes on after its lease")
        return False

    return has_gone


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
    db.execute("SELECT acquire_lease('nightly', 'other', 600)")
    started = time.monotonic()
    result = worker("lease", "run", "nightly", "--wait", "0.5", "--", "touch", "ran", directory=tmp_path, DATABASE_URL=database_url)
    assert (result.returncode, (tmp_path / "ran").exists()) == (73, False)
    assert "held by other" in result.stderr
    assert time.monotonic() - started >= 0.5


def test_it_waits_for_the_lease(database_url: str, db: Db, runs: Runs) -> None:
    got = db.execute("SELECT * FROM acquire_lease('nightly', 'other', 600)").fetchone()
    process = runs("nightly", "--wait", "30", "--", "touch", "ran", url=database_url)
    wait_for(lambda: asks(db), 20)
    assert (process.poll(), (runs.directory / "ran").exists()) == (None, False)
    db.execute("SELECT release_lease('nightly', 'other', %s)", [got.fence])
    assert process.wait(30) == 0
    assert (runs.directory / "ran").exists()
    assert row(db, "nightly").fence > got.fence


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_it_waits_ends_the_wait(database_url: str, db: Db, runs: Runs, number: signal.Signals) -> None:
    db.execute("SELECT acquire_lease('nightly', 'other', 600)")
    process = runs("nightly", "--wait", "60", "--", "touch", "ran", url=database_url)
    wait_for(lambda: asks(db), 20)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert not (runs.directory / "ran").exists()


def test_signals_are_handed_on_to_the_whole_group_and_the_lease_is_held_until_it_ends(
    database_url: str, db: Db, runs: Runs
) -> None:
    at_term = "echo got TERM; touch told; until [ -e go ]; do sleep 0.05; done; exit 3"
    script = f'trap "{at_term}" TERM; echo $$ > pid.new; mv pid.new pid; while :; do sleep 0.05; done'
    process = runs("nightly", "--ttl", "6", "--", "sh", "-c", script, url=database_url)
    pid = runs.pid()
    assert os.getpgid(pid) == pid != os.getpgid(process.pid)
    process.send_signal(signal.SIGTERM)
    wait_for((runs.directory / "told").exists, 20)
    before = row(db, "nightly").renewed_at
    wait_for(lambda: row(db, "nightly").renewed_at != before)
    (runs.directory / "go").touch()
    unprotected: list[bool] = []

    def has_ended() -> bool:
        # In this order: what has ended is released after it.
        unprotected.append(not is_live(db, "nightly") and is_alive(pid))
        return process.poll() is not None

    wait_for(has_ended, 30)
    assert not any(unprotected)
    assert process.communicate()[0] == "got TERM\n"
    assert process.returncode == 3
    assert not is_live(db, "nightly")


@pytest.mark.parametrize("is_deaf", [False, True], ids=["hears TERM", "is deaf"])
def test_what_the_command_leaves_behind_is_ended_before_the_lease_is_released(
    database_url: str, db: Db, runs: Runs, is_deaf: bool
) -> None:
    trap = 'trap "" TERM; ' if is_deaf else ""
    script = f"echo $$ > pid.new; (trap : HUP; {trap}touch waits; while :; do sleep 0.05; done) & until [ -e waits ]; do :; done; "
    process = runs("nightly", "--ttl", "10", "--", "sh", "-c", script + "mv pid.new pid; exit 3", url=database_url)
    group = runs.pid()
    wait_for(lambda: row(db, "nightly").released_at is not None, 30)
    assert not is_alive(group)
    assert process.wait(30) == 3
    assert process.communicate() == ("", "")


def test_when_the_lease_is_lost_the_group_is_stopped_and_the_status_is_75(database_url: str, db: Db, runs: Runs) -> None:
    script = 'trap "echo told; exit 0" TERM; sh -c "trap : TERM; echo \\$\\$ > pid2; while :; do sleep 0.05; done" & '
    process = runs(
        "nightly", "--ttl", "6", "--", "sh", "-c", script + "echo $$ > pid; while :; do sleep 0.05; done", url=database_url
    )
    group, deaf = runs.pid(), runs.pid("pid2")
    assert os.getpgid(deaf) == group
    db.execute("UPDATE leases SET expires_at = clock_timestamp()")
    db.execute("SELECT acquire_lease('nightly', 'other', 60)")
    output, error = process.communicate(timeout=30)
    assert (process.returncode, output) == (75, "told\n")
    assert "lease_lost" in error
    wait_for(lambda: not is_alive(group), 30)


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "unguarded"])
async def test_when_nothing_is_heard_the_group_is_gone_before_the_lease_can_pass_on(
    database_url: str, db: Db, runs: Runs, is_guarded: bool
) -> None:
    async with Proxy(database_url) as proxy:
        script = 'trap "" TERM; echo $$ > pid.new; mv pid.new pid; while :; do sleep 0.05; done'
        process = runs("nightly", "--ttl", "10", "--", "sh", "-c", script, url=proxy.dsn)
        group = await await_for(lambda: (runs.directory / "pid").exists() and int((runs.directory / "pid").read_text()), 20)
        await await_for(lambda: row(db, "nightly").renewed_at is not None)
        if not is_guarded:
            [guardian] = [pid for pid in children_of(process.pid) if pid != group]
            os.kill(guardian, signal.SIGKILL)
        proxy.go_mute()
        await await_for(goes(db, group), 30)
        assert await await_for(lambda: process.poll() is not None, 30)
        assert process.returncode == 75
        assert "lease_untrusted" in process.communicate()[1]
        proxy.flow()


async def test_an_outage_shorter_than_the_trust_does_not_disturb_the_command(database_url: str, db: Db, runs: Runs) -> None:
    async with Proxy(database_url) as proxy:
        script = "touch pid; until [ -e go ]; do sleep 0.05; done; echo done"
        process = runs("nightly", "--ttl", "12", "--", "sh", "-c", script, url=proxy.dsn)
        await await_for((runs.directory / "pid").exists, 20)
        before, accepted = row(db, "nightly").renewed_at, proxy.accepted
        proxy.go_mute()
        proxy.cut()
        await await_for(lambda: proxy.accepted > accepted)  # it has noticed, and has tried again
        proxy.cut()
        proxy.flow()
        await await_for(lambda: row(db, "nightly").renewed_at != before, 20)
        (runs.directory / "go").touch()
        await await_for(lambda: process.poll() is not None, 20)
        assert (process.returncode, process.communicate()[0]) == (0, "done\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_frozen_its_command_is_gone_before_the_lease_can_pass_on(
    database_url: str, db: Db, runs: Runs, number: signal.Signals
) -> None:
    process = runs("nightly", "--ttl", "10", "--", "sh", "-c", f'trap "" TERM; {NOTE_AND_SLEEP}', url=database_url)
    group = runs.pid()
    wait_for(lambda: row(db, "nightly").renewed_at is not None)
    process.send_signal(number)
    wait_for(goes(db, group), 30)
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

    script = 'until [ -e go ]; do sleep 0.05; done; test -e "$1/postgresql/postmaster.pid" && echo "$WORKER_LEASE_FENCE"; exit 3'

    def is_renewed() -> bool:
        listed = lease("list", "--json")
        return listed.returncode == 0 and [one["renewed_at"] is not None for one in json.loads(listed.stdout)] == [True]

    with ThreadPoolExecutor(1) as thread:
        command = ("--", "sh", "-c", script, "sh", str(data_dir))
        running = thread.submit(lease, "run", "nightly", "--ttl", "6", "--holder", "me", command=command)
        wait_for(is_renewed, 50)
        (tmp_path / "go").touch()
        ran = running.result()
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
