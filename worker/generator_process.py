"""The generator as a process: what starts, what stops it, signals, logs, systemd, exit status. The loop is in generator.py.

Exit status: 0, or 75 when the lease could not be released and is left to expire; 1, 69 and 78 as for the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading

import uvloop

from worker import ending, events, logs
from worker.clock import local_seconds
from worker.errors import ConfigError
from worker.generation import Wish
from worker.generator import ROLE, Generator
from worker.health import HealthFile, Heartbeat, process_started
from worker.lease_transport import DatabaseTransport
from worker.leases import Leases
from worker.reaching import apply_schema, reach_database
from worker.settings import Settings, unknown_settings
from worker.stop_signals import LoopSignals, Stopped
from worker.store import generating, schema, waiting
from worker.store.connection import Database, Lane, SessionLimits
from worker.systemd import Notifier
from worker.version import VERSION

_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 15.0
"""To acquire and to release may take that long while the database says nothing."""
_CLOSE_SECONDS = 0.2
_END_SECONDS = 2.0
_LEFT_TO_EXPIRE = 75


def run(settings: Settings, wish: Wish, *, migrate: bool = False) -> int:
    """One instance until it is told to stop; the exit status. Ends the process itself when the budget of the stop is used up."""
    started_at = local_seconds()
    signals = LoopSignals()
    process_id = f"{settings.name}-{secrets.token_hex(4)}"
    logs.configure(level=settings.log_level, format=settings.log_format, worker=process_id, version=VERSION)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        status = runner.run(_live(_Instance(settings, wish, process_id, migrate=migrate), signals))
    except Stopped:
        status = 0
    except Exception as error:
        status = ending.status_of(error, where="generator")
    signals.ignore()
    ending.close_in_time(runner, status, limit_seconds=_END_SECONDS)
    logs.emit(events.SHUTDOWN_COMPLETE, status=status, uptime_ms=round((local_seconds() - started_at) * 1000))
    logs.flush(1.0)
    return status


async def _live(instance: _Instance, signals: LoopSignals) -> int:
    asyncio.get_running_loop().set_exception_handler(logs.loop_exception_handler)
    with signals.heard_by(instance.stop, instance.hurry, at_once=instance.limit_stop):
        return await instance.live()


class _Instance:
    """One process's generator with what it stands on."""

    def __init__(self, settings: Settings, wish: Wish, process_id: str, *, migrate: bool) -> None:
        self._settings = settings
        self._wish = wish
        self._id = process_id
        self._migrates = migrate
        self._notifier = Notifier()
        self._stopping = False
        self._budget_seconds = settings.lease_margin_seconds + 2 * settings.query_timeout_seconds
        """What a stop may take."""
        self._living: asyncio.Task[None] | None = None
        limits = SessionLimits.of(lease_seconds=settings.lease_seconds, query_timeout_seconds=settings.query_timeout_seconds)
        self._database = Database(
            settings.database_url.get_secret_value() if settings.database_url else None,
            schema=settings.schema_name,
            connect_timeout_seconds=settings.connect_timeout_seconds,
            limits=limits,
            pooler=settings.pooler is not None,
        )
        self._statement_seconds = limits.statement_timeout_seconds + 0.5
        self._generator: Generator | None = None

    async def live(self) -> int:
        """Reach the database, produce or stand by until `stop`, let go. Returns the exit status."""
        of = self._settings
        for name, nearest in unknown_settings():
            logs.emit(events.SETTING_UNKNOWN, setting=name, nearest=nearest)
        logs.emit(events.GENERATOR_STARTED, name=of.name, schema=of.schema_name, lease_seconds=of.lease_seconds)
        health = HealthFile(of.runtime_dir, self._id)
        beating = asyncio.create_task(self._beat(health), name="heartbeat")
        self._living = asyncio.create_task(self._produce(), name="generator")
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._living
        finally:
            beating.cancel()
            health.remove()
        return 0 if self._generator is None or self._generator.fence is None else _LEFT_TO_EXPIRE

    def limit_stop(self) -> None:
        """From now on a thread keeps the budget of the stop; what is held then expires."""
        limit = threading.Timer(self._budget_seconds, ending.end_now, [_LEFT_TO_EXPIRE])
        limit.daemon = True
        limit.start()

    def stop(self) -> None:
        """Produce nothing more, release the lease, end."""
        logs.emit(events.SHUTDOWN_STARTED, reason="signal")
        self._notifier.stopping(self._budget_seconds)
        self._stopping = True
        if self._generator is not None:
            self._generator.stop()
        elif self._living is not None:
            self._living.cancel()

    def hurry(self) -> None:
        """End without waiting for a production in flight."""
        if self._generator is not None:
            self._generator.hurry()

    async def _produce(self) -> None:
        of = self._settings
        await self._reach_database()
        lane = Lane(self._database, ROLE)
        try:
            async with Leases(transport=lambda: DatabaseTransport(self._database), holder=self._id) as leases:
                self._generator = Generator(
                    self._database,
                    lane,
                    holder=self._id,
                    hold=lambda: leases.hold(generating.NAME, ttl_seconds=of.lease_seconds),
                    lease_seconds=of.lease_seconds,
                    poll_seconds=of.poll_seconds,
                    statement_seconds=self._statement_seconds,
                )
                self._notifier.ready("producing, or standing by")
                await self._generator.run()
        finally:
            await lane.close(_CLOSE_SECONDS)

    async def _reach_database(self) -> None:
        """Until the database answers and fits, and the wish has been put in."""
        limit_seconds = self._settings.connect_wait_seconds
        await reach_database(self._prepare, wait_seconds=limit_seconds, on_waiting=self._notifier.waiting)

    async def _prepare(self) -> None:
        if self._migrates:
            await apply_schema(self._database)
        connection = await self._database.connect("start")
        try:
            async with asyncio.timeout(self._settings.query_timeout_seconds * 2):
                await schema.verify(connection, self._database.schema)
                await waiting.verify_session(connection, self._database)
                try:
                    await generating.prepare(connection, self._database, self._wish)
                except ValueError as error:
                    raise ConfigError(str(error)) from None
        finally:
            connection.terminate()

    async def _beat(self, health: HealthFile) -> None:
        """Say once a second that the process is well, to `worker health` and to systemd."""
        of = self._settings
        started_at = local_seconds()
        pid_started = process_started(os.getpid()) or ""
        allowed_seconds = 2 * (self._statement_seconds + of.connect_timeout_seconds) + _SILENT_SECONDS
        while True:
            now = local_seconds()
            generator = self._generator
            age_seconds = now - (started_at if generator is None else generator.passed_at)
            database_up = generator is not None and generator.database_up
            health.write_soon(
                Heartbeat(
                    id=self._id,
                    pid=os.getpid(),
                    pid_started=pid_started,
                    version=VERSION,
                    written_at_seconds=now,
                    beat_seconds=_BEAT_SECONDS,
                    loop_lag_seconds=0.0,
                    loop_allowed=False,
                    claim_age_seconds=age_seconds,
                    claim_allowed_seconds=allowed_seconds,
                    database_up=database_up,
                    stopping=self._stopping,
                )
            )
            if age_seconds < allowed_seconds or not database_up or self._stopping:
                self._notifier.alive()
            await asyncio.sleep(_BEAT_SECONDS)
