"""`worker serve` as a process: settings, sockets, the way to the database, signals, exit status.

It listens before the database is there, and answers 503 until it is. SIGTERM: nothing new is accepted, what is under way is
answered within the grace, then the connections are closed. A second signal skips the grace.
"""

from __future__ import annotations

import asyncio
import secrets
import socket

import uvloop

from worker import ending, events, logs
from worker.api.auth import read_tokens
from worker.api.hosts import NoPool
from worker.api.listening import Server, bind
from worker.api.state import LANES, Api, make_api
from worker.clock import local_seconds
from worker.drain import LEFT_TO_EXPIRY
from worker.reaching import apply_schema, reach_database
from worker.settings import Settings, unknown_settings
from worker.stop_signals import LoopSignals, Stopped
from worker.store import schema, waiting
from worker.systemd import Notifier
from worker.version import VERSION

_BEAT_SECONDS = 1.0
_SPARE_SECONDS = 2.0
_END_SECONDS = 2.0


def run(settings: Settings, *, host: str, port: int, migrate: bool = False) -> int:
    """The server until it has stopped; `migrate` applies the schema first. Returns the exit status: 0, 1, 69, 75, 78."""
    started_at = local_seconds()
    signals = LoopSignals()
    name = f"{settings.name}-{secrets.token_hex(4)}"
    logs.configure(level=settings.log_level, format=settings.log_format, worker=name, version=VERSION)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        for setting, nearest in unknown_settings():
            logs.emit(events.SETTING_UNKNOWN, setting=setting, nearest=nearest)
        tokens = read_tokens(settings)
        sockets = bind(host, port, tokens)
        process = _Process(make_api(settings, tokens, NoPool()), sockets, migrate=migrate)
        runner.run(process.live(signals))
        status = process.status
    except Stopped:
        status = 0
    except Exception as error:
        status = ending.status_of(error, where="serve")
    signals.ignore()
    ending.close_in_time(runner, status, limit_seconds=_END_SECONDS)
    logs.emit(events.SHUTDOWN_COMPLETE, status=status, uptime_ms=round((local_seconds() - started_at) * 1000))
    logs.flush(1.0)
    return status


class _Process:
    """One `worker serve` in its event loop."""

    def __init__(self, api: Api, sockets: list[socket.socket], *, migrate: bool) -> None:
        self._api = api
        self._migrates = migrate
        self._settings = api.settings
        self._server = Server(api, sockets, stop_seconds=api.settings.shutdown_grace_seconds)
        self._notifier = Notifier()
        self._stop = asyncio.Event()
        self._trouble: Exception | None = None
        self.status = 0

    async def live(self, signals: LoopSignals) -> None:
        asyncio.get_running_loop().set_exception_handler(logs.loop_exception_handler)
        with signals.heard_by(self._ask_to_stop, self._insist):
            listening = asyncio.create_task(self._server.listen(), name="http server")
            helpers = [
                asyncio.create_task(self._guard(self._api.run()), name="http loops"),
                asyncio.create_task(self._guard(self._reach_database()), name="reach the database"),
                asyncio.create_task(self._beat(), name="beat"),
            ]
            self._notifier.ready("waiting for the database")
            stopping = asyncio.create_task(self._stop.wait(), name="stop")
            try:
                await asyncio.wait({listening, stopping}, return_when=asyncio.FIRST_COMPLETED)
                self._server.should_exit = True
                await listening
                if not await self._api.finish(_SPARE_SECONDS):
                    self.status = LEFT_TO_EXPIRY
            finally:
                for helper in (stopping, *helpers):
                    helper.cancel()
                await asyncio.wait(helpers, timeout=_SPARE_SECONDS)
                await self._api.close()
        if self._trouble is not None:
            raise self._trouble

    def _ask_to_stop(self) -> None:
        grace_seconds = self._settings.shutdown_grace_seconds
        logs.emit(
            events.SHUTDOWN_STARTED, reason="signal", running=len(self._server.server_state.tasks), grace_seconds=grace_seconds
        )
        self._notifier.stopping(grace_seconds + _SPARE_SECONDS + _END_SECONDS)
        assert isinstance(self._api.host, NoPool)
        self._api.host.is_stopping = True
        self._stop.set()

    def _insist(self) -> None:
        self._server.force_exit = True

    async def _guard(self, work: object) -> None:
        """What ends the process when it fails: kept, and raised once everything has been closed."""
        try:
            await work  # type: ignore[misc]
        except Exception as error:
            self._trouble = error
            self._stop.set()

    async def _reach_database(self) -> None:
        """Until the database answers and fits; unready meanwhile."""
        limit_seconds = self._settings.connect_wait_seconds
        await reach_database(self._verify_database, wait_seconds=limit_seconds, on_waiting=self._notifier.waiting)
        self._api.is_verified = True
        self._notifier.waiting("serving")
        logs.emit(events.HTTP_READY)

    async def _verify_database(self) -> None:
        database = self._api.database
        if self._migrates:
            await apply_schema(database)
        connection = await database.connect("start")
        try:
            async with asyncio.timeout(self._settings.query_timeout_seconds * 2):
                await schema.verify(connection, self._settings.schema_name)
                await waiting.verify_session(connection, database)
                await waiting.verify_room(connection, database, pool_size=self._settings.pool_size, lanes=LANES)
        finally:
            connection.terminate()

    async def _beat(self) -> None:
        while True:
            self._notifier.alive()
            await asyncio.sleep(_BEAT_SECONDS)
