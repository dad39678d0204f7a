"""What a PostgreSQL server tells about itself from outside: its pid file, its process, its socket."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker.server_programs import ENVIRON, Account

PORT: Final = 5432  # only a part of the socket's name
ASK_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PidFile:
    pid: int
    socket_dir: Path


def read_pid_file(pgdata: Path) -> PidFile | None:
    """What the server has written about itself; None while there is none, or only its beginning."""
    try:
        lines = (pgdata / "postmaster.pid").read_text().splitlines()
        return PidFile(pid=int(lines[0]), socket_dir=Path(lines[4]))
    except (FileNotFoundError, IndexError, ValueError):
        return None


def is_server(pid: int, pgdata: Path) -> bool:
    """Whether this process is a PostgreSQL server on these data, and not another that got the same number."""
    if sys.platform == "linux":
        try:
            # A server's working directory is its data directory. A dead one that nobody waited for has none.
            return os.readlink(f"/proc/{pid}/cwd") == os.path.realpath(pgdata)
        except OSError:
            return False
    answer = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, timeout=10, check=False)
    return b"postgres" in answer.stdout


def answers(socket_dir: Path, programs: Path) -> bool:
    command = (programs / "pg_isready", "-q", "-h", socket_dir, "-p", str(PORT), "-t", "1", "-d", "postgres")
    try:
        done = subprocess.run(command, env=ENVIRON, timeout=ASK_SECONDS, check=False, capture_output=True)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def socket_dir_for(data_dir: Path, account: Account) -> Path:
    """A directory for the socket that only this account can enter; where possible the same for the same data.

    So a URL stays good when the server is started anew, and a program that uses it finds the server again.
    """
    fresh = account.temporary_directory("rw-")
    account.own(fresh)
    usual = fresh.with_name(f"rw-{hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]}")
    try:
        found = usual.lstat()
    except FileNotFoundError:
        return fresh.rename(usual)
    # Anybody can have made that name before us; a killed server of ours leaves it, too.
    if stat.S_ISDIR(found.st_mode) and found.st_uid == account.uid and not found.st_mode & 0o077:
        fresh.rmdir()
        return usual
    return fresh


def remove_socket_dir(directory: Path, pgdata: Path) -> None:
    """Remove what a server left there, and the directory. Only one that is its user's alone, and only those names: where it is was
    read from a file that the server's user may write, perhaps by root."""
    with contextlib.suppress(OSError):
        owner = os.stat(pgdata).st_uid
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            found = os.fstat(opened)
            if found.st_uid == owner and not found.st_mode & 0o077:
                for name in (f".s.PGSQL.{PORT}", f".s.PGSQL.{PORT}.lock"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=opened)
                directory.rmdir()
        finally:
            os.close(opened)
