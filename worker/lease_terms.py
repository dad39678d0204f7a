"""What may be said about a named lease: the limits of its names, its length and its metadata, the same as in schema.sql."""

from __future__ import annotations

import math
from collections.abc import Mapping

from worker.domain_json import encode_json

MIN_TTL_SECONDS = 1.0
MAX_TTL_SECONDS = 86_400.0
DEFAULT_TTL_SECONDS = 30.0
MAX_WAIT_SECONDS = 30 * 86_400.0
MAX_RESOURCE_BYTES = 512
MAX_HOLDER_BYTES = 128
MAX_REQUEST_ID_BYTES = 128
MAX_METADATA_BYTES = 8_192
HOST_CHARACTERS = 64
"""Of a host's name in the name of a holder. The kernel lets it be any bytes, so it has to be cleaned."""


def check_name(what: str, text: object, max_bytes: int) -> str:
    """The text itself; ValueError for what is no text of 1 to `max_bytes` bytes. Names are compared code point by code point."""
    if not isinstance(text, str):
        raise ValueError(f"{what}: text is needed, not {type(text).__name__}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{what}: contains an unpaired surrogate, which is not Unicode text") from None
    if not 1 <= size <= max_bytes:
        raise ValueError(f"{what}: {size} bytes, not 1 to {max_bytes}")
    if "\0" in text:
        raise ValueError(f"{what}: contains a NUL character, which PostgreSQL cannot store")
    return text


def check_ttl(seconds: object) -> float:
    """`seconds` as a float; ValueError for what is no number from 1 to 86,400."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise ValueError(f"ttl_seconds: {seconds!r:.100} is not a number of seconds")
    if not MIN_TTL_SECONDS <= seconds <= MAX_TTL_SECONDS:
        raise ValueError(f"ttl_seconds: {seconds!r:.100} is not from {MIN_TTL_SECONDS:g} to {MAX_TTL_SECONDS:g}")
    return float(seconds)


def check_wait(seconds: object) -> float:
    """`seconds` as a float; ValueError for what is no number from 0 to 30 days."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise ValueError(f"wait_seconds: {seconds!r:.100} is not a number of seconds from 0 to {MAX_WAIT_SECONDS:g}")
    return float(seconds)


def metadata_text(metadata: Mapping[str, object] | None) -> str:
    """JSON text of the metadata; ValueError for what is no JSON object or is hopelessly long (the database measures exactly)."""
    try:
        text = encode_json({} if metadata is None else metadata, "metadata")
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not text.startswith("{"):
        raise ValueError("metadata: a JSON object is needed")
    # As jsonb it can take less than its text, but hardly by half.
    if len(text.encode()) > 2 * MAX_METADATA_BYTES:
        raise ValueError(f"metadata: {len(text.encode())} bytes of JSON, more than {MAX_METADATA_BYTES}")
    return text
