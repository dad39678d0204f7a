"""Logs: one JSON object a line on stdout, whoever speaks in this process, and never at the cost of a job.

The daemon calls `configure` first of all, so that even an import error is such a line. Elsewhere (a
`Worker` inside an application) nothing is touched: `emit` speaks through structlog if the application has
set that up, else through the logger "worker". In the daemon, structlog and logging of handlers and
libraries end in the same renderer; only `emit` goes there directly, since it is called once for every job.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from worker import events, log_capture, log_lines
from worker.events import Event
from worker.log_lines import Identity, traceback_text
from worker.log_sink import Sink
from worker.masking import masked, safe_text

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    JobLogger: TypeAlias = FilteringBoundLogger

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_RENDERERS: dict[str, log_lines.Renderer] = {"json": log_lines.json_line, "console": log_lines.console_line}
# Names that a LogRecord keeps for itself: logging refuses them as extra fields.
_RECORD_NAMES = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime"))


class _Output:
    """Where the daemon's lines go, and how they look. There is one in a process, or none."""

    def __init__(self, fd: int) -> None:
        self.threshold = _LEVELS["info"]
        self.identity = Identity("", "")
        self.render: log_lines.Renderer = log_lines.json_line
        self.sink = Sink(fd, dropped_line=self._dropped_line)
        self.streams = log_capture.install(self.write)

    def write(self, level: str, event: Event, fields: Mapping[str, object]) -> None:
        if _LEVELS[level] >= self.threshold:
            self.sink.put(self.render(self.identity, level, event.name, fields))

    def _dropped_line(self, lines: int) -> bytes:
        event = events.LOG_LINES_DROPPED
        return self.render(self.identity, event.level, event.name, {"lines": lines})


_output: _Output | None = None


def configure(*, level: str = "info", format: str = "json", worker: str = "", version: str = "") -> None:
    """Take over stdout, and whoever writes there, for this process's log.

    Called again, it changes only how lines look.
    """
    global _output
    if _output is None:
        _output = _Output(_own_stdout())
        # Short: the budget of a shutdown is spent by then, and the stream may be one that nobody reads.
        atexit.register(flush, 0.2)
    _output.threshold = _LEVELS[level]
    _output.identity = Identity(worker, version)
    _output.render = _RENDERERS[format]
    logging.getLogger().setLevel(_LEVELS[level])
    structlog = _structlog()
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, _render],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=_SinkLogger,
        # A logger used before the second call would keep the first level.
        cache_logger_on_first_use=False,
    )


def _own_stdout() -> int:
    """A copy of stdout for us alone. Number 1 becomes stderr, since C code and children print no JSON."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    try:
        fd = os.dup(1)
    except OSError:
        # Started without a stdout.
        return os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    return fd


def _structlog() -> Any:
    """structlog, without the rich that its console renderer would load for nothing: a daemon has no use for it."""
    if "structlog" in sys.modules or "rich" in sys.modules:
        import structlog
    else:
        sys.modules["rich"] = None  # type: ignore[assignment]  # says to `import` that there is none
        try:
            import structlog
        finally:
            del sys.modules["rich"]
    return structlog


def is_on(event: Event) -> bool:
    """Whether the daemon would log it: for events of every job, whose fields are worth not making."""
    return _output is None or _LEVELS[event.level] >= _output.threshold


def emit(event: Event, /, **fields: object) -> None:
    """Log one event: never raises, never waits.

    An exception given as `exception=` becomes one string with its traceback, given as `error=` its message. Neither these nor a
    `stack` show a secret.
    """
    output = _output
    if output is not None and _LEVELS[event.level] < output.threshold:
        return
    if "exception" in fields or "error" in fields or "stack" in fields:
        _describe_trouble(fields)
    if output is not None:
        output.sink.put(output.render(output.identity, event.level, event.name, fields))
    elif (structlog := sys.modules.get("structlog")) is not None and structlog.is_configured():
        getattr(structlog.get_logger("worker"), event.level)(event.name, **fields)
    else:
        _emit_to_logging(_LEVELS[event.level], event.name, fields)


def emit_each(event: Event, many: Sequence[dict[str, object]]) -> None:
    """Log the same event of several, without trouble among their fields: never raises, never waits."""
    output = _output
    if output is None or output.render is not log_lines.json_line:
        for fields in many:
            emit(event, **fields)
    elif _LEVELS[event.level] >= output.threshold:
        output.sink.put(log_lines.json_lines(output.identity, event.level, event.name, many), len(many))


def job_logger(**fields: object) -> JobLogger:
    """A logger for a handler's own words; `fields` are on each of its lines."""
    import structlog

    if _output is not None or structlog.is_configured():
        logger = structlog.get_logger("worker.job")
    else:
        logger = structlog.wrap_logger(
            logging.getLogger("worker.job"),
            processors=[_for_logging],
            wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        )
    bound: JobLogger = logger.bind(**fields)
    return bound


def flush(timeout_seconds: float) -> None:
    """Wait until what was said so far is written, at most this long."""
    if _output is not None:
        for stream in _output.streams:
            stream.finish()
        _output.sink.flush(timeout_seconds)


def loop_exception_handler(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For `loop.set_exception_handler`: what no task ever saw is an internal error."""
    task = context.get("task") or context.get("future")
    name = task.get_name() if isinstance(task, asyncio.Task) else "event loop"
    error = context.get("exception")
    if error is None:
        emit(events.INTERNAL_ERROR, where=name, error=masked(str(context.get("message"))))
    else:
        emit(
            events.INTERNAL_ERROR,
            where=masked(f"{name}: {context.get('message')}"),  # it may show the arguments of a call
            error=error,
            error_type=type(error).__name__,
            exception=error,
        )


def _describe_trouble(fields: dict[str, object]) -> None:
    for name, describe in (("exception", traceback_text), ("error", safe_text), ("stack", safe_text)):
        value = fields.get(name)
        if isinstance(value, BaseException):
            fields[name] = describe(value)
        elif isinstance(value, str):
            fields[name] = masked(value)


class _SinkLogger:
    """What structlog hands finished lines to, under any method name."""

    def __init__(self, *_names: object) -> None:
        pass

    def msg(self, line: bytes) -> None:
        if _output is not None:
            _output.sink.put(line)

    debug = info = warning = error = critical = log = msg


def _render(_logger: object, method: str, event_dict: MutableMapping[str, Any]) -> bytes:
    event = log_lines.safe_text(event_dict.pop("event", ""))
    _show_exception(event_dict)
    # What others say may hold a secret at any depth.
    fields = {log_lines.safe_text(name): log_lines.safe_value(value) for name, value in event_dict.items()}
    assert _output is not None  # structlog was given this processor by `configure`
    level = method if method in _LEVELS else "info"
    return _output.render(_output.identity, level, event, fields)


def _show_exception(event_dict: MutableMapping[str, Any]) -> None:
    """structlog's `exc_info` (True, an exception, or the triple) → `exception`, a string."""
    given = event_dict.pop("exc_info", None)
    if isinstance(given, BaseException):
        event_dict["exception"] = traceback_text(given)
    elif given:
        kind, error, trace = given if isinstance(given, tuple) else sys.exc_info()
        if kind is not None:
            event_dict["exception"] = traceback_text(error, kind, trace)


def _emit_to_logging(level: int, event: str, fields: Mapping[str, object]) -> None:
    logger = logging.getLogger("worker")
    if logger.isEnabledFor(level):
        logger.log(level, "%s", log_lines.plain_text(event, fields), extra=_extra(event, fields))


def _for_logging(_logger: object, _method: str, event_dict: MutableMapping[str, Any]) -> Any:
    """structlog's last step before a logger of the standard library: its arguments and keywords."""
    _show_exception(event_dict)
    event = log_lines.safe_text(event_dict.pop("event", ""))
    return ("%s", log_lines.plain_text(event, event_dict)), {"extra": _extra(event, event_dict)}


def _extra(event: str, fields: Mapping[str, object]) -> dict[str, object]:
    renamed = {f"{name}_" if name in _RECORD_NAMES else name: value for name, value in fields.items()}
    return {"event": event, **renamed}
