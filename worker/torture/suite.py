"""`worker torture` as a whole: what can be had here, the torture, the check, the report."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from worker.errors import ConfigError
from worker.store import sabotage
from worker.store.connection import Database
from worker.torture.breaches import Findings
from worker.torture.checking import check, head
from worker.torture.reach import checks_host
from worker.torture.running import Wish, skipped, tortured
from worker.torture.server import OwnServer

FAKETIME_LIBRARY: Final = "FAKETIME_LIBRARY"
"""The variable that says where libfaketime is, if it is none of the usual places."""
_USUAL_PLACES: Final = (
    "/usr/lib/*/faketime/libfaketime.so.1",
    "/usr/lib*/faketime/libfaketime.so.1",
    "/usr/local/lib/faketime/libfaketime.so.1",
)


async def run(
    wish: Wish,
    database: Database,
    *,
    own_server: OwnServer | None,
    directory: Path,
    say: Callable[[str], None],
    all_or_nothing: bool,
) -> tuple[Findings, dict[str, object], list[str]]:
    """Torture and check. Returns what was found, the report's document, and what was left behind, a line each.

    `all_or_nothing`: the faults were asked for by name, so one that cannot be had here is refused (ConfigError) and not left out.
    """
    connection = await database.connect("torture")
    try:
        session = await sabotage.describe(connection)
    finally:
        connection.terminate()
    faketime = _faketime()
    missing = skipped(
        wish.faults,
        own=own_server is not None,
        checks_host=checks_host(database),
        encrypted=session.encrypted,
        faketime=faketime,
    )
    if missing and all_or_nothing:
        raise ConfigError(*(f"--faults {name}: {why}" for name, why in missing.items()))
    wish = replace(wish, faults=tuple(name for name in wish.faults if name not in missing))
    left_behind: list[str] = []
    async with tortured(
        wish,
        database,
        directory=directory,
        own_server=own_server,
        faketime=faketime,
        say=say,
        on_left_behind=left_behind.append,
    ) as passed:
        findings, document = await check(passed, wish, database)
    where = "a server of its own" if own_server is not None else "schema of its own in the given database"
    return findings, head(wish, where=where, server_version=session.server_version, skipped=missing) | document, left_behind


def _faketime() -> Path | None:
    given = os.environ.get(FAKETIME_LIBRARY)
    found = [given] if given else [path for pattern in _USUAL_PLACES for path in glob.glob(pattern)]
    return next((Path(path) for path in found if os.path.exists(path)), None)
