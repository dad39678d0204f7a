"""`worker serve` as a process: settings, sockets, the way to the database, signals, exit status.

It listens before the database is there, and answers 503 until it is. SIGTERM: nothing new is accepted, what is under way is
answered within the grace, then the connections are closed. A second signal skips the grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import signal
import socket
from collections.abc import Callable, Iterator

import uvloop

from worker import ending, events, logs
from worker.api.auth import read_tokens
from worker.api.hosts import NoPool
from worker.api.listening import Server, bind
from worker.api.state import LANES, Api, make_api
from worker.clock import local_seconds
from worker.errors import ConfigError, DatabaseUnavailable, PortTaken
from worker.patience import Patience
from worker.settings import Settings, unknown_settings
from worker.store import schema, waiting
from worker.store.connection import DATABASE_ERRORS, ConnectFailed
from worker.systemd import Notifier
from worker.version import VERSION

_BEAT_SECONDS = 1.0
_SPARE_SECONDS = 1.0
_END_SECONDS = 2.0
_NOT_NOW: tuple[type[Exception], ...] = (*DATABASE_ERRORS, DatabaseUnavailable)


class _Stopped(SystemExit):
    """A stop signal while there is nothing to stop."""


def run(settings: Settings, *, host: str, port: int) -> int:
    """The server until it has stopped. Returns the exit status: 0, 1, 69, 78."""
    started_at = local_seconds()
    signals = _Signals()
    name = f"{settings.name}-{secrets.token_hex(4)}"
    logs.configure(level=settings.log_level, format=settings.log_format, worker=name, version=VERSION)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        for setting, nearest in unknown_settings():
            logs.emit(events.SETTING_UNKNOWN, setting=setting, nearest=nearest)
        tokens = read_tokens(settings)
        sockets = bind(host, port, tokens)
        process = _Process(make_api(settings, tokens, NoPool()), sockets)
        runner.run(process.live(signals))
        status = 0
    except _Stopped:
        status = 0
    except ConfigError as error:
        for line in error.lines:
            logs.emit(events.CONFIG_INVALID, error=line)
        status = 78
    except DatabaseUnavailable as error:
        logs.emit(events.DATABASE_LOST, error=error, error_type="DatabaseUnavailable")
        status = 69
    except PortTaken as error:
        logs.emit(events.HTTP_PORT_TAKEN, error=error)
        status = 69
    except Exception as error:
        logs.emit(events.INTERNAL_ERROR, where="serve", exception=error)
        status = 1
    signals.ignore()
    ending.close_in_time(runner, status, limit_seconds=_END_SECONDS)
    logs.emit(events.SHUTDOWN_COMPLETE, status=status, duration_ms=round((local_seconds() - started_at) * 1000))
    logs.flush(1.0)
    return status


class _Process:
    """One `worker serve` in its event loop."""

    def __init__(self, api: Api, sockets: list[socket.socket]) -> None:
        self._api = api
        self._settings = api.settings
        self._server = Server(api, sockets, stop_seconds=api.settings.shutdown_grace_seconds)
        self._notifier = Notifier()
        self._stop = asyncio.Event()
        self._trouble: Exception | None = None

    async def live(self, signals: _Signals) -> None:
        asyncio.get_running_loop().set_exception_handler(logs.loop_exception_handler)
        with signals.heard_by(self._ask_to_stop, self._insist):
            listening = asyncio.create_task(self._server.listen(), name="http server")
            helpers = [
                asyncio.create_task(self._guard(self._api.run()), name="http loops"),
                asyncio.create_task(self._guard(self._reach_database()), name="reach the database"),
                asyncio.create_task(self._beat(), name="beat"),
            ]
            self._notifier.ready()
            stopping = asyncio.create_task(self._stop.wait(), name="stop")
            try:
                await asyncio.wait({listening, stopping}, return_when=asyncio.FIRST_COMPLETED)
                self._server.should_exit = True
                await listening
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
        self._notifier.stopping(grace_seconds + _SPARE_SECONDS)
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
        """Wait until the database answers and fits: for CONNECT_WAIT_SECONDS, or for ever, unready."""
        limit_seconds = self._settings.connect_wait_seconds
        until = math.inf if limit_seconds is None else local_seconds() + limit_seconds
        patience = Patience(events.DATABASE_LOST)
        while True:
            try:
                await self._verify_database()
            except _NOT_NOW as error:
                if isinstance(error, ConnectFailed) and error.refused:
                    raise ConfigError(str(error)) from None
                self._notifier.waiting("waiting for the database")
                delay_seconds = patience.delay_seconds(error)
                if local_seconds() + delay_seconds >= until:
                    raise DatabaseUnavailable(f"no database within {limit_seconds:g} s: {error}") from None
                await asyncio.sleep(delay_seconds)
            else:
                self._api.is_verified = True
                self._notifier.waiting("serving")
                logs.emit(events.HTTP_READY)
                return

    async def _verify_database(self) -> None:
        database = self._api.database
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


class _Signals:
    """The first stop signal asks, the second insists."""

    def __init__(self) -> None:
        self._count = 0
        # Under nohup the end of the terminal is to be survived.
        self._numbers = [
            number
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ]
        for number in self._numbers:
            signal.signal(number, self._stop_early)  # as process 1 it would not hear one that has no handler

    def _stop_early(self, *_: object) -> None:
        raise _Stopped(0)

    @contextlib.contextmanager
    def heard_by(self, ask: Callable[[], None], insist: Callable[[], None]) -> Iterator[None]:
        """Call these in the running loop."""
        loop = asyncio.get_running_loop()

        def received(*_: object) -> None:
            self._count += 1
            if self._count <= 2:
                loop.call_soon_threadsafe(ask if self._count == 1 else insist)

        for number in self._numbers:
            signal.signal(number, received)
        try:
            yield
        finally:
            self.ignore()

    def ignore(self) -> None:
        """To the end: one more signal must not change the exit status."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)
