"""Finds a password in a `.pgpass` file by libpq's rules, escapes included (asyncpg leaves those in)."""

from __future__ import annotations

import re
import stat
import warnings
from pathlib import Path

_FIELD = re.compile(r"((?:[^:\\]|\\.)*):")


def password_from(path: Path, host: str, port: int, dbname: str, user: str) -> str | None:
    """The password of the first line that matches, or None; a file that others may read is ignored."""
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            warnings.warn(f"password file {path} is ignored: others may read it (chmod 600)", stacklevel=2)
            return None
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    hosts = {host, "localhost"} if host.startswith("/") else {host}
    for line in lines:
        if line.startswith("#"):
            continue
        fields: list[str] = []
        position = 0
        while len(fields) < 4 and (matched := _FIELD.match(line, position)):
            fields.append(matched[1])
            position = matched.end()
        if len(fields) == 4 and all(
            pattern == "*" or _unescaped(pattern) in wanted
            for pattern, wanted in zip(fields, (hosts, {str(port)}, {dbname}, {user}), strict=True)
        ):
            return _unescaped(line[position:])
    return None


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)
