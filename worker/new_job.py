"""What may be enqueued: every field checked by name before anything travels to the server, so that no
transaction is aborted by a value that could have been refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from worker.domain_json import encode_json

DEFAULT_KIND = "message"
DEFAULT_QUEUE = "default"
DEFAULT_MAX_ATTEMPTS = 5

KEY_BYTES = 512
NAME_BYTES = 128
RESERVED_KEY_PREFIX = "auto:"
MAX_DELAY_SECONDS = 100 * 366 * 86_400.0

# A dict for its order and its look-up.
FIELDS = dict.fromkeys(("kind", "payload", "key", "queue", "priority", "run_at", "delay_seconds", "max_attempts"))


class NewJob(NamedTuple):
    """One job to be written, all of it checked."""

    kind: str
    payload: str
    """JSON text."""
    key: str | None
    queue: str
    priority: int
    run_at: str | None
    """ISO 8601 in UTC, or None: `delay_seconds` from the moment the server writes it."""
    delay_seconds: float
    max_attempts: int


def new_job(
    kind: str,
    payload: object,
    *,
    key: str | None = None,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    run_at: datetime | None = None,
    delay_seconds: float | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
) -> NewJob:
    """The checked job. Raises TypeError or ValueError whose message begins with the name of the field."""
    return _checked(kind, payload, key, queue, priority, run_at, delay_seconds, max_attempts)


def new_job_from(fields: Mapping[str, object]) -> NewJob:
    """The checked job of a mapping with keys out of `FIELDS`: `payload` is required, None means left out."""
    if type(fields) is not dict and not isinstance(fields, Mapping):
        raise TypeError(f"a mapping is needed, not {type(fields).__name__}")
    for name in fields:
        if name not in FIELDS:
            raise ValueError(f"unknown key {name!r}: the keys are {', '.join(FIELDS)}")
    if "payload" not in fields:
        raise ValueError("payload: is required")
    get = fields.get
    kind, queue, priority, max_attempts = get("kind"), get("queue"), get("priority"), get("max_attempts")
    return _checked(
        DEFAULT_KIND if kind is None else kind,
        fields["payload"],
        get("key"),
        DEFAULT_QUEUE if queue is None else queue,
        0 if priority is None else priority,
        get("run_at"),
        get("delay_seconds"),
        DEFAULT_MAX_ATTEMPTS if max_attempts is None else max_attempts,
    )


def _checked(
    kind: object,
    payload: object,
    key: object,
    queue: object,
    priority: object,
    run_at: object,
    delay_seconds: object,
    max_attempts: object,
) -> NewJob:
    if run_at is not None and delay_seconds is not None:
        raise ValueError("run_at, delay_seconds: give one of them, not both")
    if key is not None:
        key = _text("key", key, KEY_BYTES)
        if key.startswith(RESERVED_KEY_PREFIX):
            raise ValueError(f'key: "{RESERVED_KEY_PREFIX}" is reserved for generated keys')
    return NewJob(
        _text("kind", kind, NAME_BYTES),
        encode_json(payload, "payload"),
        key,
        _text("queue", queue, NAME_BYTES),
        _integer("priority", priority, -32_768, 32_767),
        None if run_at is None else _utc_text(run_at),
        0.0 if delay_seconds is None else _delay(delay_seconds),
        _integer("max_attempts", max_attempts, 1, 2_147_483_647),
    )


def _text(name: str, text: object, most_bytes: int) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name}: a string is needed, not {type(text).__name__}")
    if 1 <= len(text) <= most_bytes and text.isascii() and "\x00" not in text:
        return text
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name}: contains an unpaired surrogate, which is not Unicode text") from None
    if not 1 <= size <= most_bytes:
        raise ValueError(f"{name}: 1 to {most_bytes} bytes are allowed, this has {size:,}")
    if "\x00" in text:
        raise ValueError(f"{name}: contains a NUL character, which PostgreSQL cannot store")
    return text


def _integer(name: str, value: object, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: an integer is needed, not {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name}: {least} to {most} is allowed, not {value}")
    return value


def _delay(seconds: object) -> float:
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise TypeError(f"delay_seconds: a number is needed, not {type(seconds).__name__}")
    # NaN fails this comparison as well.
    if not 0 <= seconds <= MAX_DELAY_SECONDS:
        raise ValueError(f"delay_seconds: 0 to {MAX_DELAY_SECONDS:.0f} is allowed, not {seconds}")
    return float(seconds)


def _utc_text(moment: object) -> str:
    if not isinstance(moment, datetime):
        raise TypeError(f"run_at: a datetime is needed, not {type(moment).__name__}")
    if moment.utcoffset() is None:
        raise ValueError(f"run_at: {moment.isoformat()} has no time zone: add one, for example UTC")
    try:
        return moment.astimezone(UTC).isoformat()
    except OverflowError:
        raise ValueError(f"run_at: {moment.isoformat()} is out of range in UTC") from None
