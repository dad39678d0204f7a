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
    if run_at is not None and delay_seconds is not None:
        raise ValueError("run_at, delay_seconds: give one of them, not both")
    if key is not None:
        _check_text("key", key, KEY_BYTES)
        if key.startswith(RESERVED_KEY_PREFIX):
            raise ValueError(f'key: "{RESERVED_KEY_PREFIX}" is reserved for generated keys')
    _check_text("kind", kind, NAME_BYTES)
    _check_text("queue", queue, NAME_BYTES)
    _check_integer("priority", priority, -32_768, 32_767)
    _check_integer("max_attempts", max_attempts, 1, 2_147_483_647)
    return NewJob(
        kind,
        encode_json(payload, "payload"),
        key,
        queue,
        priority,
        None if run_at is None else _utc_text(run_at),
        0.0 if delay_seconds is None else _delay(delay_seconds),
        max_attempts,
    )


def new_job_from(fields: Mapping[str, object]) -> NewJob:
    """The checked job of a mapping with keys out of `FIELDS`: `payload` is required, None means left out."""
    has_none = False
    for name, value in fields.items():
        if name not in FIELDS:
            raise ValueError(f"unknown key {name!r}: the keys are {', '.join(FIELDS)}")
        has_none = has_none or value is None
    if "payload" not in fields:
        raise ValueError("payload: is required")
    given = {name: value for name, value in fields.items() if value is not None} if has_none else dict(fields)
    given.setdefault("kind", DEFAULT_KIND)
    given["payload"] = fields["payload"]
    return new_job(**given)  # type: ignore[arg-type]  # it looks at every type itself


def _check_text(name: str, text: object, most_bytes: int) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name}: a string is needed, not {type(text).__name__}")
    if 1 <= len(text) <= most_bytes and text.isascii() and "\x00" not in text:
        return
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name}: contains an unpaired surrogate, which is not Unicode text") from None
    if not 1 <= size <= most_bytes:
        raise ValueError(f"{name}: 1 to {most_bytes} bytes are allowed, this has {size:,}")
    if "\x00" in text:
        raise ValueError(f"{name}: contains a NUL character, which PostgreSQL cannot store")


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: an integer is needed, not {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name}: {least} to {most} is allowed, not {value}")


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
