"""The daemon: a Worker as a process. Signals, logs, systemd, exit status.

Signals reach the rights thread through a wake-up socket that the interpreter's C handler writes to, so that a handler which blocks
the main thread cannot keep a SIGTERM waiting. That thread then also enforces the last deadline of the stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import uvloop

from worker import events, logs
from worker.clock import local_seconds
from worker.embedded import Worker
from worker.errors import ConfigError, DatabaseUnavailable
from worker.handlers import Handlers
from worker.health import HealthFile
from worker.settings import Settings, unknown_settings
from worker.store import schema
from worker.store.connection import DATABASE_ERRORS, Database, safe_text
from worker.systemd import Notifier
from worker.version import VERSION

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SWITCH_SECONDS = 0.001
"""How long one thread may keep the interpreter while the other waits; five times that is the default, and shows in every commit."""
_FROZEN_LEASES = 10
_FROZEN_AT_LEAST_SECONDS = 120.0
_HARD_EXIT_BEFORE_SECONDS = 0.2


def run(settings: Settings, *, burst: bool = False, migrate: bool = False) -> int:
    """The daemon until it has stopped. Returns the exit status (0, 1, 69, 75, 78); does not return when it has to end itself with a
    thread still alive."""
    started_at = local_seconds()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))  # nothing is held yet; as process 1 it would not even hear it
    logs.configure(level=settings.log_level, format=settings.log_format, worker=settings.name, version=VERSION)
    sys.setswitchinterval(_SWITCH_SECONDS)
    notifier = Notifier()
    try:
        handlers = load_handlers(settings.handlers)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(_serve(settings, handlers, notifier, burst=burst, migrate=migrate))
    except ConfigError as error:
        for line in error.lines:
            logs.emit(events.CONFIG_INVALID, error=line)
        status = 78
    except DatabaseUnavailable as error:
        logs.emit(events.DATABASE_LOST, error=error, error_type="DatabaseUnavailable")
        status = 69
    except Exception as error:
        logs.emit(events.INTERNAL_ERROR, where="daemon", exception=error)
        status = 1
    logs.emit(events.SHUTDOWN_COMPLETE, status=status, duration_ms=round((local_seconds() - started_at) * 1000))
    return _exit(status)


def _exit(status: int) -> int:
    """Return the status, unless a handler's thread is still alive: the interpreter would wait for it for ever."""
    logs.flush(1.0)
    faulthandler.cancel_dump_traceback_later()
    if any(thread.name.startswith("handler") for thread in threading.enumerate()):
        os._exit(status or 75)
    return status


def load_handlers(name: str | None) -> Handlers | None:
    """The object named `module:object`. Raises ConfigError for what cannot be imported or is not a Handlers."""
    if name is None:
        return None
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        logs.emit(events.INTERNAL_ERROR, where="import of the handlers", exception=error)
        raise ConfigError(f"WORKER_HANDLERS={name!r}: cannot import {module_name!r}: {safe_text(error)}") from None
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Handlers):
        raise ConfigError(f"WORKER_HANDLERS={name!r}: {attribute!r} in {module_name!r} is not a worker.Handlers")
    return found


async def _serve(settings: Settings, handlers: Handlers | None, notifier: Notifier, *, burst: bool, migrate: bool) -> int:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(logs.loop_exception_handler)
    frozen_seconds = max(_FROZEN_LEASES * settings.lease_seconds, _FROZEN_AT_LEAST_SECONDS)

    def beat() -> None:
        # The last resort against code that holds the interpreter lock: nothing else of ours can run then.
        faulthandler.dump_traceback_later(frozen_seconds, exit=True, file=2)

    worker = Worker(
        handlers,
        settings,
        burst=burst,
        health_file=lambda id: HealthFile(settings.runtime_dir, id),
        on_beat=beat,
        on_alive=notifier.alive,
        on_waiting=notifier.waiting,
    )
    logs.configure(level=settings.log_level, format=settings.log_format, worker=worker.id, version=VERSION)
    for name, nearest in unknown_settings():
        logs.emit(events.SETTING_UNKNOWN, setting=name, nearest=nearest)
    logs.emit(
        events.DAEMON_STARTED,
        name=settings.name,
        queues=list(settings.queues),
        workers=settings.workers,
        lease_seconds=settings.lease_seconds,
        schema=settings.schema_name,
    )
    if migrate:
        await _migrate(settings)
    with _signals(worker, notifier):
        await worker.start()
        if not worker.is_stopping:
            notifier.ready()
        await worker.wait_stopped()
        if worker.has_deaf:  # closing the loop would wait for it for ever
            _end_now(worker.status)
    return worker.status


async def _migrate(settings: Settings) -> None:
    database = Database(
        settings.database_url.get_secret_value() if settings.database_url else None,
        schema=settings.schema_name,
        connect_timeout_seconds=settings.connect_timeout_seconds,
    )
    try:
        connection = await database.connect("migrate", statement_timeout_seconds=60.0)
    except DATABASE_ERRORS as error:
        raise DatabaseUnavailable(safe_text(error)) from None
    try:
        await schema.migrate(connection, settings.schema_name)
    finally:
        connection.terminate()


@contextlib.contextmanager
def _signals(worker: Worker, notifier: Notifier) -> Iterator[None]:
    """Turn stop signals into requests to stop, however busy the main thread is."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    count = 0

    def received() -> None:
        nonlocal count
        try:
            numbers = ours.recv(64)
        except BlockingIOError:
            return
        for number in numbers:
            if number not in {int(stop) for stop in STOP_SIGNALS}:
                continue
            count += 1
            if count > 2:
                continue
            budget_seconds = worker.budget_seconds + (worker.settings.shutdown_grace_seconds if count == 1 else 0)
            notifier.stopping(budget_seconds)
            worker.rights.loop.call_later(budget_seconds - _HARD_EXIT_BEFORE_SECONDS, _give_up, worker)
            loop.call_soon_threadsafe(worker.request_stop, "signal", local_seconds())

    worker.rights.call(lambda: worker.rights.loop.add_reader(ours, received))
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        for number in STOP_SIGNALS:
            # To the end: one more signal must not change the exit status (the interpreter, as it ends, gives a signal with a
            # handler its default back).
            signal.signal(number, signal.SIG_IGN)
        ours.close()
        theirs.close()


def _give_up(worker: Worker) -> None:
    """The budget of the stop is used up, and the main thread is not where it should be: a handler blocks it."""
    for attempt in worker.pool.running() if worker.pool is not None else []:
        job = attempt.held.job
        logs.emit(
            events.JOB_ABANDONED,
            **job.log_fields(),
            reason="deaf_handler",
        )
    _end_now(75)


def _end_now(status: int) -> None:
    logs.emit(events.SHUTDOWN_COMPLETE, status=status)
    logs.flush(0.5)
    os._exit(status)
