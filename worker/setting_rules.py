"""The rules that a setting's value has to keep, each in the words of its refusal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from pydantic import BeforeValidator

if TYPE_CHECKING:
    from worker.settings import Settings

NEVER = "never"
# "-" and 8 hex digits make a name an identity, which has at most 128 bytes.
MAX_NAME_BYTES = 128 - 9
_MAX_QUEUE_BYTES = 128
_MAX_SCHEMA_BYTES = 63


@dataclass(frozen=True, slots=True)
class Number:
    """A number within bounds, both included, written plainly: no exponent, unit, sign or other alphabet."""

    least: float
    most: float
    whole: bool = False
    # The word for "no limit", which is None; None itself where there is no such thing.
    no_limit: str | None = None

    @property
    def rule(self) -> str:
        kind = "a whole number" if self.whole else "a plain number such as 5 or 0.5,"
        or_word = f", or {self.no_limit}" if self.no_limit else ""
        return f"must be {kind} from {self.least:g} to {plain(self.most)}{or_word}"

    def __call__(self, value: object) -> object:
        if self.no_limit is not None and (value is None or value == self.no_limit):
            return None
        number: float | None = None
        if isinstance(value, str):
            pattern = r"-?[0-9]{1,18}" if self.whole else r"-?[0-9]{1,18}(\.[0-9]{1,18})?"
            if re.fullmatch(pattern, value):
                number = int(value) if self.whole else float(value)
        elif isinstance(value, int if self.whole else int | float) and not isinstance(value, bool):
            number = value
        # NaN is within no bounds.
        if number is None or not self.least <= number <= self.most:
            raise ValueError(self.rule)
        return number if self.whole else float(number)


@dataclass(frozen=True, slots=True)
class Default:
    """How the documentation words a default that is derived."""

    text: str


def seconds(least: float, most: float) -> BeforeValidator:
    return BeforeValidator(Number(least, most))


def count(least: int, most: int) -> BeforeValidator:
    return BeforeValidator(Number(least, most, whole=True))


def probability() -> BeforeValidator:
    return BeforeValidator(Number(0, 1))


def word(*words: str) -> BeforeValidator:
    def check(value: object) -> object:
        text = value.lower() if isinstance(value, str) else value
        if text not in (*words, None):
            raise ValueError(f"must be {' or '.join(words)}")
        return text

    return BeforeValidator(check)


def check_handlers(value: object) -> object:
    if value is not None and not (
        isinstance(value, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", value)
    ):
        raise ValueError("must be module:object, as in app.jobs:handlers")
    return value


def check_queues(value: object) -> object:
    rule = f"must be names with commas between them, each 1 to {_MAX_QUEUE_BYTES} bytes of UTF-8 without NUL"
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise ValueError(rule)
    queues = [name.strip() if isinstance(name, str) else "" for name in names]
    if not all(1 <= _size(name) <= _MAX_QUEUE_BYTES and "\x00" not in name for name in queues):
        raise ValueError(rule)
    return tuple(dict.fromkeys(queues))


def check_schema(value: object) -> object:
    if not (
        isinstance(value, str)
        and 1 <= _size(value) <= _MAX_SCHEMA_BYTES
        and not set(value) & set("\x00'{}")  # our SQL names the sequence of fences inside a string
        and not value.startswith("pg_")
    ):
        raise ValueError(
            f"must be the name of a schema, at most {_MAX_SCHEMA_BYTES} bytes of UTF-8, without ' {{ }}, not beginning with pg_"
        )
    return value


def check_name(value: object) -> object:
    if not (isinstance(value, str) and re.fullmatch(rf"[A-Za-z0-9._-]{{1,{MAX_NAME_BYTES}}}", value)):
        raise ValueError(f"must be 1 to {MAX_NAME_BYTES} letters, digits or characters of . _ -")
    return value


def check_directory(value: object) -> object:
    if not _is_path(value):
        raise ValueError("must be the path of a directory")
    return Path(value).absolute()


def check_file(value: object) -> object:
    if value is None:
        return None
    if not _is_path(value):
        raise ValueError("must be the path of a file")
    return Path(value).absolute()


def _is_path(value: object) -> TypeGuard[str | Path]:
    # A URL in the wrong variable: as a path it would lose the // by which its password is known, and masked.
    return isinstance(value, str | Path) and not any(sign in str(value) for sign in ("\x00", "://"))


def broken_relations(settings: Settings) -> tuple[str, ...]:
    lease, renew, margin = settings.lease_seconds, settings.renew_seconds, settings.lease_margin_seconds
    query, claim = settings.query_timeout_seconds, settings.claim_timeout_seconds
    # What a person types in decimals may be off in the last binary digit.
    slack = lease * 1e-9
    in_lease = f"WORKER_LEASE_SECONDS={plain(lease)}"
    in_renew = f"WORKER_RENEW_SECONDS={plain(renew)}"
    in_margin = f"WORKER_LEASE_MARGIN_SECONDS={plain(margin)}"
    lines = []
    if renew > lease / 3 + slack:
        lines.append(f"{in_renew} must be at most a third of {in_lease}")
    if 2 * renew + min(query, renew / 2) > lease - margin + slack:
        lines.append(
            f"{in_renew}: two renewals and a time-out, 2R + min(WORKER_QUERY_TIMEOUT_SECONDS={plain(query)},"
            f" R/2), must fit into {in_lease} less {in_margin}"
        )
    if margin < lease / 20 - slack:
        lines.append(f"{in_margin} must be at least a twentieth of {in_lease}")
    if claim > lease / 2 + slack:
        lines.append(f"WORKER_CLAIM_TIMEOUT_SECONDS={plain(claim)} must be at most half of {in_lease}")
    if settings.http_tokens is not None and settings.http_tokens_file is not None:
        lines.append("WORKER_HTTP_TOKENS and WORKER_HTTP_TOKENS_FILE are both set: keep one of them")
    ledger, retention = settings.ledger_retention_seconds, settings.retention_seconds
    if ledger is not None and (retention is None or ledger < retention):
        lines.append(
            f"WORKER_LEDGER_RETENTION_SECONDS={plain(ledger)} must not be shorter than"
            f" WORKER_RETENTION_SECONDS={plain(retention)}: a job still there could apply its effect again"
        )
    return tuple(lines)


def plain(value: object) -> str:
    match value:
        case None:
            return NEVER
        case float():
            # Enough digits for ten years in seconds, few enough to read.
            return f"{value:.10g}"
        case tuple():
            return ",".join(map(str, value))
        case _:
            return str(value)


def _size(text: str) -> int:
    """Its bytes in UTF-8; 0 for what is no text: a byte in a variable that is not UTF-8 reads as an unpaired surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0
