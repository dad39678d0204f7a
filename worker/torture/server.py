"""A PostgreSQL of the torture's own: one that may be stopped, crashed and misconfigured, and is gone afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from worker.cluster import Cluster, start_or_adopt
from worker.server_programs import ClusterError, server_account

# Enough for many daemons, and little enough to be started in no time.
_SETTINGS: Final = {"max_connections": "200"}


class OwnServer:
    """The server of one data directory, whichever process it is at the moment."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._cluster = self._start()
        self.dsn = self._cluster.dsn
        """A superuser's; it stays the same."""

    def _start(self) -> Cluster:
        return start_or_adopt(self._data_dir, settings=_SETTINGS, die_with_parent=True)

    def _restart(self) -> None:
        self._cluster.stop()
        self._cluster = self._start()

    async def restart(self) -> None:
        """A fast shutdown and a new start."""
        await asyncio.to_thread(self._restart)

    def kill_backend(self, pid: int) -> None:
        """SIGKILL to one of its processes: the server ends all others and recovers."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        self._cluster.stop()


@contextlib.contextmanager
def own_server(data_dir: Path | None = None) -> Iterator[OwnServer]:
    """A server for the block, with new data in this directory, empty or not there yet, or in a temporary one. It ends with the
    block, or with the process; the directory goes with the block. Raises ClusterError."""
    if data_dir is None:
        data_dir = server_account(Path("/nonexistent")).temporary_directory("rw-data-")
    else:
        data_dir = Path(os.path.abspath(data_dir.expanduser()))
        if data_dir.is_dir() and os.listdir(data_dir):
            raise ClusterError(f"{data_dir} is not empty, and would be removed at the end: choose an empty or new directory")
    try:
        server = OwnServer(data_dir)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(data_dir, ignore_errors=True)
