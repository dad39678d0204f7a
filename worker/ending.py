"""The end of a process: the exit status that its trouble means, and how it ends when something in it does not.

Nothing can cancel the look-up of a host's name. Closing an event loop waits for those that it has begun, and so does the end of the
process, for as long as the resolver takes: seconds or minutes when no name server answers. A thread that is still closing its loop
while the interpreter is torn down crashes the process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from typing import Final, NoReturn

from worker import events, logs
from worker.clock import local_seconds
from worker.errors import ConfigError, DatabaseUnavailable, PortTaken

_JOIN_SECONDS: Final = 0.3
_LOOK_UP_SECONDS: Final = 60.0

_closing: set[threading.Thread] = set()


def status_of(error: Exception, *, where: str) -> int:
    """Log what ends this process, and return its exit status: 78 bad configuration, 69 something is not to be had, 1 a bug."""
    match error:
        case ConfigError():
            cause = {} if error.__cause__ is None else {"exception": error.__cause__}
            for line in error.lines:
                logs.emit(events.CONFIG_INVALID, error=line, **cause)
            return 78
        case DatabaseUnavailable():
            logs.emit(events.DATABASE_LOST, error=error, error_type="DatabaseUnavailable")
            return 69
        case PortTaken():
            logs.emit(events.HTTP_PORT_TAKEN, error=error)
            return 69
    logs.emit(events.INTERNAL_ERROR, where=where, exception=error)
    return 1


def join_loop(thread: threading.Thread, timeout_seconds: float) -> None:
    """Wait for a daemon thread that ends its event loop. If it takes longer, the interpreter waits for it once more at its end."""
    thread.join(timeout_seconds)
    for one in (*_closing, thread):
        if one.is_alive():
            _closing.add(one)
        else:
            _closing.discard(one)


@atexit.register
def _wait_for_loops() -> None:
    for thread in _closing:
        thread.join(_LOOK_UP_SECONDS)


def close_in_time(runner: asyncio.Runner, status: int, *, limit_seconds: float) -> None:
    """Close the loop of a process that ends with this status; end the process here when that takes longer, as it may for ever."""
    limit = threading.Timer(limit_seconds, end_now, [status])
    limit.daemon = True
    limit.start()
    with contextlib.suppress(SystemExit, KeyboardInterrupt):
        runner.close()
    limit.cancel()


def end_now(status: int) -> NoReturn:
    """End the process, whatever its threads are doing."""
    logs.emit(events.SHUTDOWN_COMPLETE, status=status)
    logs.flush(0.5)
    os._exit(status)


def wait_for_threads(status: int) -> None:
    """The process has said its last word: wait a moment for its threads, and end it here when one would hold up the interpreter."""
    until = local_seconds() + _JOIN_SECONDS
    for thread in threading.enumerate():
        # Of the other daemon threads the interpreter waits for none.
        if thread is not threading.main_thread() and (thread in _closing or not thread.daemon):
            thread.join(max(until - local_seconds(), 0))
            if thread.is_alive():
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                os._exit(status)
