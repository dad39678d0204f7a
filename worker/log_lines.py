"""Turns an event and its fields into one bounded line, whatever the fields are. Nothing here raises."""

from __future__ import annotations

import datetime
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import orjson

from worker.masking import masked, without_rows

# A message longer than this helps nobody, and costs everybody downstream.
MAX_TEXT_CHARACTERS = 32 * 1024
_MAX_LINE_BYTES = 128 * 1024
_MAX_TRACEBACK_CHARACTERS = 16 * 1024
_MAX_DEPTH = 6
_MAX_ITEMS = 100
_CUT = "… (cut)"

Fields = Mapping[str, object]
RESERVED = frozenset({"timestamp", "level", "event", "worker", "pid", "version"})


class Identity:
    """What every line of this process begins with."""

    def __init__(self, worker: str, version: str) -> None:
        self.worker = worker
        self.version = version
        self.pid = os.getpid()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.pid = os.getpid()


def json_line(identity: Identity, level: str, event: str, fields: Fields) -> bytes:
    """One JSON object and a newline."""
    if not RESERVED.isdisjoint(fields):
        fields = {f"{name}_" if name in RESERVED else name: value for name, value in fields.items()}
    head = {
        "timestamp": timestamp(),
        "level": level,
        "event": event,
        "worker": identity.worker,
        "pid": identity.pid,
        "version": identity.version,
    }
    try:
        line = orjson.dumps({**head, **fields}, default=safe_value, option=_OPTIONS)
    except Exception:
        # Lone surrogates, numbers beyond 64 bits, keys that are no strings, cycles.
        line = b""
    if not 0 < len(line) <= _MAX_LINE_BYTES:
        line = orjson.dumps(safe_value({**head, **fields}), option=_OPTIONS)
        if len(line) > _MAX_LINE_BYTES:
            names = ", ".join(safe_text(name) for name in list(fields)[:_MAX_ITEMS])
            line = orjson.dumps(safe_value({**head, "cut": f"too much to log: {names}"}), option=_OPTIONS)
    return line


def json_lines(identity: Identity, level: str, event: str, many: Sequence[Fields]) -> bytes:
    """The same event of several, told at one moment, as one piece."""
    head = {
        "timestamp": timestamp(),
        "level": level,
        "event": event,
        "worker": identity.worker,
        "pid": identity.pid,
        "version": identity.version,
    }
    try:
        start = orjson.dumps(head, option=_OPTIONS)[:-2] + b","  # without its brace and newline
        return b"".join([start + orjson.dumps(fields, option=_OPTIONS)[1:] for fields in many])
    except Exception:
        return b"".join(json_line(identity, level, event, fields) for fields in many)


def console_line(identity: Identity, level: str, event: str, fields: Fields) -> bytes:
    """The same for a person at a terminal."""
    text = plain_text(f"{event:<24}" if fields else event, fields)
    return f"{timestamp()[11:23]} {level:<7} {text}\n".encode("utf-8", "replace")


def plain_text(event: str, fields: Fields) -> str:
    """The event and its fields as name=value, a traceback on lines of its own."""
    shown = [event]
    for name, value in fields.items():
        if value is None or name == "exception":
            continue
        text = safe_text(value)
        if not text or not text.isprintable() or " " in text or "=" in text:
            text = repr(text)
        shown.append(f"{name}={text}")
    line = " ".join(shown)
    if fields.get("exception"):
        # Only line ends may act on a terminal.
        trace = "".join(c if c.isprintable() or c == "\n" else "?" for c in safe_text(fields["exception"]))
        line += "\n    " + trace.replace("\n", "\n    ")
    return line


_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z | orjson.OPT_NAIVE_UTC | orjson.OPT_PASSTHROUGH_DATACLASS
_second: tuple[int, str] = (-1, "")


def timestamp() -> str:
    """This host's wall clock in UTC, ISO 8601. It stamps lines and decides nothing."""
    global _second
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    known, text = _second
    if seconds != known:
        text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        _second = (seconds, text)
    return f"{text}.{nanoseconds // 1000:06d}Z"


def traceback_text(error: BaseException | None, kind: type[BaseException] | None = None, trace: TracebackType | None = None) -> str:
    """The traceback as one string: no locals, no secrets, its middle left out when it is long."""
    if error is None:
        return "" if kind is None else kind.__name__
    try:
        text = "".join(
            traceback.TracebackException(
                kind or type(error), error, trace or error.__traceback__, limit=-200, compact=True
            ).format()
        )
    except BaseException:  # its __str__ is the user's code, whatever that raises
        text = f"{type(error).__name__} (its traceback cannot be shown)"
    text = masked(without_rows(text, error)).rstrip()
    if len(text) > _MAX_TRACEBACK_CHARACTERS:
        half = _MAX_TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n{_CUT}\n{text[-half:]}"
    return text


def safe_text(value: object) -> str:
    """Text of any value: bounded, encodable, without secrets, and there even when its own __str__ raises."""
    try:
        text = value if isinstance(value, str) else str(value)
    except BaseException:
        text = f"<{type(value).__name__} that cannot be shown>"
    if not isinstance(value, int | float):
        text = masked(text)  # before it is cut: half a secret would not be recognised
    if len(text) > MAX_TEXT_CHARACTERS:
        text = text[:MAX_TEXT_CHARACTERS] + _CUT
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def safe_value(value: object, depth: int = 0) -> object:
    """Something JSON can hold that says the same without secrets, cut where it is too deep, too wide or too long."""
    match value:
        case None | bool():
            return value
        case int():
            return int(value) if -(2**63) <= value < 2**64 else safe_text(_short_number(value))
        case float():
            return value if math.isfinite(value) else None
        case str():
            return safe_text(value)
        case bytes() | bytearray() | memoryview():
            return safe_text(bytes(value[:MAX_TEXT_CHARACTERS]).decode("utf-8", "backslashreplace"))
        case datetime.date() | datetime.time():
            return value.isoformat()
        case BaseException():
            return f"{type(value).__name__}: {safe_text(value)}"
        case dict() | list() | tuple() | set() | frozenset() if depth >= _MAX_DEPTH:
            return _CUT
        case dict():
            items = list(value.items())[:_MAX_ITEMS]
            return {safe_text(key): safe_value(item, depth + 1) for key, item in items}
        case list() | tuple() | set() | frozenset():
            return [safe_value(item, depth + 1) for item in list(value)[:_MAX_ITEMS]]
        case _:
            return safe_text(value)


def _short_number(value: int) -> str:
    # str() of a number with more digits than Python's limit raises.
    digits = sys.get_int_max_str_digits() or MAX_TEXT_CHARACTERS
    return str(value) if value.bit_length() < digits * 3 else f"<a number of {value.bit_length()} bits>"


Renderer = Callable[[Identity, str, str, Fields], bytes]
