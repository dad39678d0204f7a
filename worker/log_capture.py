"""Turns what others say in this process into events: prints, warnings, logging, uncaught exceptions."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from worker import events
from worker.events import Event
from worker.log_lines import MAX_TEXT_CHARACTERS, safe_text, traceback_text
from worker.masking import masked

_UNFINISHED_LINES = 1_000
"""That may wait for their end at a time: threads come and go, and not every one ends its last line."""

Write = Callable[[str, Event, Mapping[str, object]], None]
"""Takes (level, event, fields); never raises."""


def install(write: Write) -> tuple[LineStream, LineStream]:
    """Take over all ways of speaking in this process; returns the new stdout and stderr."""
    streams = LineStream(write, "stdout", 1), LineStream(write, "stderr", 2)
    sys.stdout, sys.stderr = streams

    def uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        text = traceback_text(error, kind, trace)
        write("error", events.INTERNAL_ERROR, _trouble("main thread", error, text))

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            where = args.thread.name if args.thread is not None else "a thread"
            trace = traceback_text(args.exc_value, args.exc_type, args.exc_traceback)
            write("error", events.INTERNAL_ERROR, _trouble(f"thread {where}", args.exc_value, trace))

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        trace = traceback_text(args.exc_value, args.exc_type, args.exc_traceback)
        where = f"{args.err_msg or 'ignored in'} {_short_repr(args.object)}"
        write("error", events.INTERNAL_ERROR, _trouble(where, args.exc_value, trace))

    def warned(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        fields = {
            "message": safe_text(message),
            "category": category.__name__,
            "where": f"{filename}:{lineno}",
        }
        write("warning", events.WARNING, fields)

    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread
    sys.unraisablehook = unraisable
    warnings.showwarning = warned
    logging.getLogger().handlers[:] = [_LoggingHandler(write)]
    return streams


def _trouble(where: str, error: BaseException | None, trace: str) -> dict[str, object]:
    return {
        "where": safe_text(where),
        "error": safe_text(error),
        "error_type": type(error).__name__,
        "exception": trace,
    }


def _short_repr(value: object) -> str:
    try:
        return masked(repr(value))[:200]
    except Exception:
        return f"<{type(value).__name__}>"


class _LoggingHandler(logging.Handler):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:
            # Arguments that do not fit the format are a bug of the caller; the message is worth having
            # anyway.
            message = safe_text(record.msg)
        fields: dict[str, object] = {"message": safe_text(message), "logger": record.name}
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = traceback_text(record.exc_info[1], record.exc_info[0], record.exc_info[2])
        if record.stack_info:
            fields["stack"] = safe_text(record.stack_info)
        self._write(_level_of(record.levelno), events.LOG, fields)


def _level_of(number: int) -> str:
    for least, level in ((50, "critical"), (40, "error"), (30, "warning"), (20, "info")):
        if number >= least:
            return level
    return "debug"


class LineStream(io.TextIOBase):
    """A text stream whose lines become `print` events; a line that is not finished waits for its end."""

    def __init__(self, write: Write, name: str, fd: int) -> None:
        super().__init__()
        self._write_event = write
        self._name = name
        self._fd = fd
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        self.buffer = _ByteStream(self)

    def _reset(self) -> None:
        # In a forked child the lock may belong to a thread that is not there, and the rests are the parent's to say.
        self._lock = threading.RLock()
        self._rests: dict[int, str] = {}
        """By thread, the oldest first: `print` writes a line in several pieces, and another thread may come in between."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "replace"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        with self._lock:
            *lines, rest = (self._rests.pop(thread, "") + text).split("\n")
            if len(rest) > MAX_TEXT_CHARACTERS:
                lines.append(rest)
            elif rest:
                if len(self._rests) >= _UNFINISHED_LINES:
                    lines.append(self._rests.pop(next(iter(self._rests))))
                self._rests[thread] = rest
        for line in lines:
            self._say(line)
        return len(text)

    def finish(self) -> None:
        """Say what waits for the end of its line: there will be none."""
        with self._lock:
            rests, self._rests = self._rests, {}
        for rest in rests.values():
            self._say(rest)

    def close(self) -> None:
        """Others must not be able to close the stream for everybody."""

    def _say(self, line: str) -> None:
        if line.strip():
            fields = {"message": masked(line.rstrip("\r")), "stream": self._name}
            self._write_event("info", events.PRINT, fields)


class _ByteStream(io.RawIOBase):
    """`sys.stdout.buffer`, which some write bytes to."""

    def __init__(self, stream: LineStream) -> None:
        super().__init__()
        self._stream = stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def close(self) -> None:
        pass
