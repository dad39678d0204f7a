"""A private PostgreSQL for a data directory: started when none runs, found again, stopped by its last user.

It listens on a Unix socket only, in a directory that only the server's user (and root) can enter, and keeps
its normal durability. Whoever calls `start_or_adopt` is a user of the server until `stop`, or until the
process ends in whatever way; the kernel keeps that count (shared file locks), so a user killed with SIGKILL
is not counted for ever. A server whose users were all killed goes on running, and the next caller adopts it.

    DIR/postgresql   the data      DIR/server.log   what the server says, since its last start
    DIR/lock         held while somebody starts or stops it      DIR/users   share-locked by each user

The code is synchronous and waits; call it before an event loop starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from worker.server_process import PORT, PidFile, answers, is_server, read_pid_file, remove_socket_dir, socket_dir_for
from worker.server_programs import ENVIRON, Account, ClusterError, programs_for, require_same_version, server_account

__all__ = ["Cluster", "ClusterError", "default_data_dir", "start_or_adopt", "temporary_cluster"]

LOCK_SECONDS: Final = 90.0
INITDB_SECONDS: Final = 60.0
START_SECONDS: Final = 60.0  # recovery after a crash included
LOOK_AGAIN_SECONDS: Final = 0.03
# Fast shutdown, then immediate (the next start recovers from the log), then what cannot be refused.
STOPPING: Final = ((signal.SIGINT, 20.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))

OUR_NAMES: Final = frozenset({"lock", "users", "server.log", "postgresql", "postgresql.new"})

NO_SETTINGS: Final[Mapping[str, str]] = {}


@dataclass(slots=True, kw_only=True)
class Cluster:
    """A running private server. `owned` says whether this call started it; `stop` lets go of it."""

    data_dir: Path
    socket_dir: Path
    pid: int
    owned: bool
    _process: subprocess.Popen[bytes] | None
    _users: int | None

    @property
    def dsn(self) -> str:
        """A URL for the database `postgres` as superuser; it needs quotes in a shell."""
        return f"postgresql://postgres@/postgres?host={quote(str(self.socket_dir))}&port={PORT}"

    @property
    def pgdata(self) -> Path:
        return self.data_dir / "postgresql"

    def stop(self) -> None:
        """Stop the server, unless somebody else uses it: then it goes on, and the last of them stops it."""
        if self._users is None:
            return
        users, self._users = self._users, None
        try:
            with _locked(self.data_dir):
                if _lock_now(users, fcntl.LOCK_EX):
                    self._shut_down()
        except OSError as error:
            raise _unusable(self.data_dir, error) from error
        finally:
            os.close(users)

    def _shut_down(self) -> None:
        for number, limit_seconds in STOPPING:
            if self._is_gone():
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            deadline = time.monotonic() + limit_seconds
            while not self._is_gone() and time.monotonic() < deadline:
                time.sleep(LOOK_AGAIN_SECONDS)
        remove_socket_dir(self.socket_dir, self.pgdata)
        if not self._is_gone():
            raise ClusterError(f"the PostgreSQL server of {self.data_dir} (pid {self.pid}) cannot be stopped")

    def _is_gone(self) -> bool:
        if self._process is not None:
            return self._process.poll() is not None
        return not is_server(self.pid, self.pgdata)


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/reliable-worker`; /var/lib for root, whose home the server's user cannot enter."""
    state = environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    default = home / "reliable-worker"
    if os.geteuid() == 0:
        existing = next(path for path in (default, *default.parents) if path.exists())
        if not server_account(default / "postgresql").can_enter(existing):
            return Path("/var/lib/reliable-worker")
    return default


def start_or_adopt(data_dir: Path, *, settings: Mapping[str, str] = NO_SETTINGS, die_with_parent: bool = False) -> Cluster:
    """A server for `data_dir` that answers: the one that runs, else a new one, with new data if need be.

    `settings` are server settings for a start; a server that runs already keeps its own. With
    `die_with_parent` the server is told to stop when the calling thread ends in whatever way (Linux;
    elsewhere it lives on). Raises ClusterError.
    """
    data_dir = Path(os.path.abspath(data_dir.expanduser()))
    account = server_account(data_dir / "postgresql")
    try:
        _prepare(data_dir, account)
        with _locked(data_dir):
            users = _open(data_dir / "users", os.O_RDWR)
            try:
                # Never waits long: only `stop` takes it alone, and does so under the lock that we hold.
                fcntl.flock(users, fcntl.LOCK_SH)
                programs = programs_for(account)
                if running := _await_answer(data_dir, programs, None):
                    process = None
                else:
                    process, running = _start(data_dir, account, programs, settings, die_with_parent)
            except BaseException:
                os.close(users)
                raise
    except OSError as error:
        raise _unusable(data_dir, error) from error
    return Cluster(
        data_dir=data_dir,
        socket_dir=running.socket_dir,
        pid=running.pid,
        owned=process is not None,
        _process=process,
        _users=users,
    )


@contextlib.contextmanager
def temporary_cluster(*, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[Cluster]:
    """A server of the block's own; it ends with the block, or with the process, and its data are removed."""
    data_dir = server_account(Path("/nonexistent")).temporary_directory("rw-data-")
    try:
        cluster = start_or_adopt(data_dir, settings=settings, die_with_parent=True)
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(data_dir, ignore_errors=True)


def _prepare(data_dir: Path, account: Account) -> None:
    """Make the directory ours if it is empty or was before; never take over one that holds other things."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = set(os.listdir(data_dir))
    if "postgresql" not in names and not names <= OUR_NAMES:
        raise ClusterError(f"{data_dir} holds other files: choose an empty or new directory for the data")
    if account.user is not None and "postgresql" not in names:
        data_dir.chmod(0o711)
    if blocked := account.blocked_at(data_dir):
        raise ClusterError(
            f"{blocked} is closed to {account.name}, who runs PostgreSQL because root may not: "
            f"choose another directory for the data, or chmod o+x {blocked}"
        )


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """One process at a time decides about the server of a directory."""
    lock = _open(data_dir / "lock", os.O_RDWR)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _lock_now(lock, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ClusterError(f"another process has kept {data_dir}/lock for {LOCK_SECONDS:g} s")
            time.sleep(LOOK_AGAIN_SECONDS)
        yield
    finally:
        os.close(lock)


def _open(path: Path, flags: int) -> int:
    """Open a file, made when missing; root must not be led elsewhere by a link in a user's directory."""
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _lock_now(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _await_answer(data_dir: Path, programs: Path, started: subprocess.Popen[bytes] | None) -> PidFile | None:
    """The server once it takes connections; None when no server runs and none was `started`.

    One that is starting, recovering or stopping is waited for.
    """
    pgdata = data_dir / "postgresql"
    deadline = time.monotonic() + START_SECONDS
    while True:
        running = read_pid_file(pgdata)
        if running is not None and is_server(running.pid, pgdata):
            if answers(running.socket_dir, programs):
                return running
        elif started is None:
            return None
        if started is not None and started.poll() is not None:
            raise ClusterError(f"PostgreSQL did not start in {data_dir}: {_complaint(data_dir)}")
        if time.monotonic() > deadline:
            pid = running.pid if running else "unknown"
            raise ClusterError(f"the PostgreSQL server of {data_dir} (pid {pid}) does not answer: stop that process")
        time.sleep(LOOK_AGAIN_SECONDS)


def _start(
    data_dir: Path, account: Account, programs: Path, settings: Mapping[str, str], die_with_parent: bool
) -> tuple[subprocess.Popen[bytes], PidFile]:
    """Start a server, with new data on the first call, and wait until it answers."""
    pgdata = data_dir / "postgresql"
    if pgdata.exists():
        require_same_version(pgdata, account, programs)
    else:
        _initdb(data_dir, account, programs)
    socket_dir = socket_dir_for(data_dir, account)
    quiet = {"unix_socket_permissions": "0700", "log_checkpoints": "off"}
    fixed = {"listen_addresses": "", "unix_socket_directories": str(socket_dir), "port": str(PORT)}
    command: list[str | Path] = [programs / "postgres", "-D", pgdata]
    for name, value in {**quiet, **settings, **fixed}.items():
        command += ["-c", f"{name}={value}"]
    setpriv = shutil.which("setpriv") if die_with_parent and sys.platform == "linux" else None
    if setpriv:
        command = [setpriv, "--pdeathsig", "INT", *command]
    environ = ENVIRON
    if stale := read_pid_file(pgdata):
        # This process is no server on these data, as we have seen. But while any process of its user has that
        # number, as is common when a container starts again, PostgreSQL refuses to start. One of its own
        # ancestors it does not mind, and it still looks for surviving children of the dead server.
        environ = {**ENVIRON, "PG_GRANDPARENT_PID": str(stale.pid)}
    log = _open(data_dir / "server.log", os.O_WRONLY | os.O_TRUNC)
    try:
        process = account.popen(command, log, environ)
    finally:
        os.close(log)
    try:
        running = _await_answer(data_dir, programs, process)
        assert running is not None
    except BaseException:
        process.send_signal(signal.SIGQUIT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        process.kill()
        remove_socket_dir(socket_dir, pgdata)
        raise
    return process, running


def _initdb(data_dir: Path, account: Account, programs: Path) -> None:
    """Make the data aside and move them into place whole: a killed initdb leaves nothing to trip over."""
    unfinished = data_dir / "postgresql.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    account.own(unfinished)
    options = ("--no-locale", "-E", "UTF8", "-A", "trust", "-U", "postgres", "-D", unfinished)
    status, output = account.run(programs / "initdb", *options, timeout_seconds=INITDB_SECONDS)
    if status != 0:
        error = next((line for line in output.splitlines() if "error" in line), output.strip())
        raise ClusterError(f"cannot make a PostgreSQL data directory in {data_dir}: {error}")
    unfinished.rename(data_dir / "postgresql")


def _complaint(data_dir: Path) -> str:
    """The server's own reason for not starting, from its log."""
    lines = (data_dir / "server.log").read_text(errors="replace").splitlines()
    fatal = [line.strip() for line in lines if any(sign in line for sign in ("FATAL:", "PANIC:", "DETAIL:"))]
    return " ".join(fatal[-2:]) or (lines[-1] if lines else "it said nothing")


def _unusable(data_dir: Path, error: OSError) -> ClusterError:
    return ClusterError(f"cannot use {error.filename or data_dir}: {error.strerror or error}")
