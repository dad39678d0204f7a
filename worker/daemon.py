"""The daemon: a Worker as a process. Signals, logs, systemd, exit status.

Signals reach the rights thread through a wake-up socket that the interpreter's C handler writes to, so that a handler which blocks
the main thread cannot keep a SIGTERM waiting. That thread then also enforces the last deadline of the stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import os
import secrets
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

import uvloop

from worker import ending, events, logs
from worker.clock import local_seconds
from worker.embedded import Worker
from worker.errors import ConfigError
from worker.handlers import Handlers
from worker.health import HealthFile
from worker.reaching import apply_schema, reach_database
from worker.settings import Settings, unknown_settings
from worker.stop_signals import Stopped, StopSignals
from worker.store.connection import Database, safe_text
from worker.systemd import Notifier
from worker.version import VERSION
from worker.watch import seen_alive

_SWITCH_SECONDS = 0.001
"""How long one thread may keep the interpreter while the other waits; five times that is the default, and shows in every commit."""
_COLLECT_EVERY = 20_000
_FROZEN_LEASES = 10
_FROZEN_AT_LEAST_SECONDS = 120.0
_HARD_EXIT_BEFORE_SECONDS = 0.2
_LAST_MINUTE_SECONDS = 1.0
"""So long before that, or a quarter of the budget, what waits behind a blocked loop is given back."""
_TURN_SECONDS = 0.1
_LET_GO_SECONDS = 0.1
_CLOSE_SECONDS = 0.3
"""For what handlers have left behind: tasks, threads, generators."""

_Beside: TypeAlias = Callable[[Worker], AbstractContextManager[None]]


def run(settings: Settings, *, burst: bool = False, migrate: bool = False, http: tuple[str, int] | None = None) -> int:
    """The daemon until it has stopped, and the HTTP interface at `http` beside it. Returns the exit status (0, 1, 69, 75, 78); does
    not return when it has to end itself with a thread still alive."""
    started_at = local_seconds()
    signals = _Signals()
    process_id = f"{settings.name}-{secrets.token_hex(4)}"
    logs.configure(level=settings.log_level, format=settings.log_format, worker=process_id, version=VERSION)
    sys.setswitchinterval(_SWITCH_SECONDS)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        handlers = load_handlers(settings.handlers)
        if signals.came_early:  # and the module has swallowed it
            raise Stopped(0)
        beside = _http_beside(settings, http)
        _settle_the_heap()
        serving = _serve(settings, handlers, signals, process_id=process_id, burst=burst, migrate=migrate, beside=beside)
        status = _run_to_the_end(runner.get_loop(), serving, signals)
    except Stopped:
        status = 0
    except Exception as error:
        status = ending.status_of(error, where="daemon")
    signals.ignore()
    ending.close_in_time(runner, status, limit_seconds=_CLOSE_SECONDS)
    logs.emit(events.SHUTDOWN_COMPLETE, status=status, uptime_ms=round((local_seconds() - started_at) * 1000))
    faulthandler.cancel_dump_traceback_later()
    logs.flush(1.0)
    return status


def _settle_the_heap() -> None:
    """What is there now stays: the collector need not look at it again, nor at every few hundred objects of jobs that are on their
    way, which leave no cycles behind. Measured: a tenth of a worker's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 20, 50)


def _run_to_the_end(loop: asyncio.AbstractEventLoop, work: Coroutine[object, object, int], signals: _Signals) -> int:
    """The result of `work`. SystemExit and KeyboardInterrupt in some task that a handler has made end the loop, not the process:
    the loop goes on, whoever awaits that task gets its exception."""
    task = loop.create_task(work)
    while True:
        try:
            return loop.run_until_complete(task)
        except Stopped:
            raise
        except (SystemExit, KeyboardInterrupt) as error:
            logs.emit(events.INTERNAL_ERROR, where="event loop", exception=error, error=f"a task raised {type(error).__name__}")
            if task.done():
                return 1
            loop.call_soon(signals.arm)


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
        if isinstance(error, KeyboardInterrupt | Stopped):
            raise
        line = f"WORKER_HANDLERS={name!r}: cannot import {module_name!r} (working directory {os.getcwd()}): {safe_text(error)}"
        raise ConfigError(line) from error
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Handlers):
        raise ConfigError(f"WORKER_HANDLERS={name!r}: {attribute!r} in {module_name!r} is not a worker.Handlers")
    return found


def _http_beside(settings: Settings, http: tuple[str, int] | None) -> _Beside:
    """What runs beside the Worker: the HTTP interface, or nothing. The extra is imported only for the former."""
    if http is None:
        return lambda _: contextlib.nullcontext()
    from worker.api.hosting import Hosting

    return Hosting(settings, host=http[0], port=http[1]).beside


async def _serve(
    settings: Settings,
    handlers: Handlers | None,
    signals: _Signals,
    *,
    process_id: str,
    burst: bool,
    migrate: bool,
    beside: _Beside,
) -> int:
    asyncio.get_running_loop().set_exception_handler(logs.loop_exception_handler)
    notifier = Notifier()
    frozen_seconds = max(_FROZEN_LEASES * settings.lease_seconds, _FROZEN_AT_LEAST_SECONDS)

    def beat() -> None:
        # The last resort against code that holds the interpreter lock: nothing else of ours can run then.
        faulthandler.dump_traceback_later(frozen_seconds, exit=True, file=2)

    worker = Worker(
        handlers,
        settings,
        process_id=process_id,
        burst=burst,
        health_file=lambda id: HealthFile(settings.runtime_dir, id),
        on_beat=beat,
        on_alive=notifier.alive,
        on_waiting=notifier.waiting,
    )
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
    with beside(worker):
        if migrate:
            health = HealthFile(settings.runtime_dir, process_id)
            try:
                async with seen_alive(health, process_id=process_id, version=VERSION):
                    if not await _migrate(settings, notifier, signals):
                        return 0
            finally:
                health.remove()
        await _work(worker, notifier, signals)
    return worker.status


async def _work(worker: Worker, notifier: Notifier, signals: _Signals) -> None:
    """Until the worker has stopped; does not return when something of it has not."""
    with signals.heard_by(worker, notifier):
        await worker.start()
        if not worker.is_stopping:
            notifier.ready()
        await worker.wait_stopped()
        if worker.has_deaf:  # the rest would only wait for it
            ending.end_now(worker.status)


async def _migrate(settings: Settings, notifier: Notifier, signals: _Signals) -> bool:
    """False: a stop signal came first."""
    database = Database(
        settings.database_url.get_secret_value() if settings.database_url else None,
        schema=settings.schema_name,
        connect_timeout_seconds=settings.connect_timeout_seconds,
        pooler=settings.pooler is not None,
    )
    reaching = reach_database(
        lambda: apply_schema(database), wait_seconds=settings.connect_wait_seconds, on_waiting=notifier.waiting
    )
    migrating = asyncio.create_task(reaching, name="migrate")
    with signals.noted() as stop:
        await asyncio.wait({migrating, stop}, return_when=asyncio.FIRST_COMPLETED)
        migrating.cancel()
        await asyncio.wait({migrating}, timeout=_LET_GO_SECONDS)
    if signals.came_early:
        migrating.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody asks for it any more
        return False
    await migrating
    return True


class _Signals(StopSignals):
    """The stop signals, once there is something to stop: requests to stop, which are heard however busy the main thread is."""

    def __init__(self) -> None:
        super().__init__()
        self._wakeup: socket.socket | None = None

    @contextlib.contextmanager
    def heard_by(self, worker: Worker, notifier: Notifier) -> Iterator[None]:
        """The first signal begins the drain, the second skips the grace; whatever happens, the budget of the stop is kept."""
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
                if number not in self.numbers:
                    with contextlib.suppress(OSError):
                        os.write(previous, bytes([number]))  # to the loop: somebody may have a handler there
                    continue
                count += 1
                if count > 2:
                    continue
                stop_seconds = worker.budget_seconds + (worker.settings.shutdown_grace_seconds if count == 1 else 0)
                notifier.stopping(stop_seconds)
                hard_exit_seconds = stop_seconds - _HARD_EXIT_BEFORE_SECONDS
                before_seconds = min(_LAST_MINUTE_SECONDS, worker.budget_seconds / 4)
                worker.rights.loop.call_later(hard_exit_seconds - before_seconds, _last_minute, worker)
                worker.rights.loop.call_later(hard_exit_seconds, _give_up, worker)
                worker.request_stop_soon("signal", local_seconds())

        worker.rights.call(lambda: worker.rights.loop.add_reader(ours, received))
        for number in self.numbers:
            signal.signal(number, lambda *_: None)
        self._wakeup = theirs
        previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous)
            self._wakeup = None
            self.ignore()
            ours.close()
            theirs.close()

    def arm(self) -> None:
        """Once more: a loop that begins to run takes the signals to itself."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)


def _last_minute(worker: Worker) -> None:
    """Soon the budget of the stop is used up. If the main thread does not come round to the drain, begin it from here."""
    turned = threading.Event()
    worker.call_soon(turned.set)

    def look() -> None:
        if not turned.is_set():
            worker.rights.spawn("release behind", worker.release_behind)

    worker.rights.loop.call_later(_TURN_SECONDS, look)


def _give_up(worker: Worker) -> None:
    """The budget of the stop is used up, and the main thread is not where it should be."""
    status = worker.name_what_is_left()
    if not status:
        stack = "".join(traceback.format_stack(sys._current_frames().get(threading.main_thread().ident or 0), limit=20))
        logs.emit(events.INTERNAL_ERROR, where="end of the process", error="held up by what it was told to end", stack=stack)
    ending.end_now(status or worker.status or 1)
