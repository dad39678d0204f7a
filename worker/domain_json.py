"""Strict JSON: what `encode_json` lets through, jsonb stores, and `decode_json` gives back unchanged.

The standard library's json decides: integers stay exact, and nothing is silently turned into null. Values in which the faster
orjson cannot differ from it, which are nearly all, are written by that.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import NoReturn

import orjson
from pydantic import BaseModel

# The schema allows 1 MiB and measures what is stored, as jsonb. Text can be several times as long (a control
# character takes six bytes), so this bound only keeps what is hopeless from travelling to the server.
MAX_TEXT_CHARACTERS = 8 * 1024 * 1024

# What pydantic reads; without a bound the sender's recursion limit would decide, and the handler's could be a lower one.
MAX_DEPTH = 200

_MAX_PLAIN_PARTS = 100_000

# A string, whose brackets do not count, or one bracket.
_NESTING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)

# An escaped NUL: an odd number of backslashes before "u0000". An even number is literal text, and harmless.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def encode_json(value: object, what: str) -> str:
    """JSON text that jsonb stores and gives back unchanged; `what` names the field in a refusal.

    Pydantic models are dumped, also inside of lists and dicts; tuples become lists. Raises TypeError for what
    JSON has no word for (dates, sets, bytes, keys that are no strings), ValueError for NaN, infinities, NUL,
    unpaired surrogates, circular values, more than 200 levels of lists and dicts, and texts beyond 8 MiB.
    """
    if _is_plain(value):
        try:
            text = orjson.dumps(value).decode()
        except (TypeError, ValueError):  # numbers beyond 64 bits, surrogates, depth: said in our words below
            pass
        else:
            if "\\u0000" not in text and len(text) <= MAX_TEXT_CHARACTERS:
                return text
    try:
        text = _encoder.encode(value)
        _check_keys(value)
    except RecursionError:
        raise ValueError(f"{what}: {_TOO_DEEP}") from None
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{what}: {_reason(error)}") from None
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{what}: contains an unpaired surrogate, which is not Unicode text") from None
    if "\\u0000" in text and _NUL.search(text):
        raise ValueError(f"{what}: contains a NUL character, which PostgreSQL cannot store")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"{what}: {len(text):,} characters of JSON, more than 1 MiB can hold")
    if _is_too_deep(text):
        raise ValueError(f"{what}: {_TOO_DEEP}")
    return text


def decode_json(text: str | bytes) -> object:
    """The value of a JSON text. Raises ValueError for what is none (NaN among it) or is nested too deeply.

    Integers are exact up to Python's own limit of 4,300 digits. A number with a fraction becomes a float; one
    beyond its range becomes an infinity, which `encode_json` then refuses.
    """
    try:
        return _decoder.decode(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
_PLAIN = frozenset({str, int, bool, type(None)})


def _is_plain(value: object) -> bool:
    """Whether it is made of nothing but JSON's own types, finite numbers and string keys, and surely not too deep; no subclasses,
    which may mean more."""
    waiting = [value]
    depth = end_of_level = 0
    for place, here in enumerate(waiting):  # grows while it is walked
        if place == end_of_level:
            depth, end_of_level = depth + 1, len(waiting)
            if depth > MAX_DEPTH:
                return False
        kind = type(here)
        if kind is dict:
            for key, inner in here.items():  # type: ignore[attr-defined]
                if type(key) is not str:
                    return False
                if type(inner) not in _PLAIN:
                    waiting.append(inner)
            if len(waiting) > _MAX_PLAIN_PARTS:  # large, or circular
                return False
        elif kind is list or kind is tuple:
            waiting.extend([inner for inner in here if type(inner) not in _PLAIN])  # type: ignore[attr-defined]
            if len(waiting) > _MAX_PLAIN_PARTS:  # large, or circular
                return False
        elif kind is float:
            if not isfinite(here):  # type: ignore[arg-type]
                return False
        elif kind not in _PLAIN:
            return False
    return True


def _is_too_deep(text: str) -> bool:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for token in _NESTING.findall(text):
        if token in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif token in "]}":
            depth -= 1
    return False


def _dump_model(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _check_keys(value: object) -> None:
    """Raise TypeError at a key that is no string: the encoder would silently make one of it."""
    if not isinstance(value, (dict, list, tuple)):
        return
    # A list instead of recursion: nothing circular gets here, but what is here may be deep.
    waiting: list[object] = [value]
    while waiting:
        here = waiting.pop()
        if isinstance(here, dict):
            for key, inner in here.items():
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is not a string")
                if isinstance(inner, (dict, list, tuple)):
                    waiting.append(inner)
        elif isinstance(here, (list, tuple)):
            waiting.extend(inner for inner in here if isinstance(inner, (dict, list, tuple)))


def _reason(error: ValueError) -> str:
    text = str(error)
    if text.startswith("Out of range float"):
        return "NaN and infinities are not JSON"
    return text[:1].lower() + text[1:]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_encoder = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_dump_model)
_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
