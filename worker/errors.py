"""The exceptions of this package. One exists only where a caller does something different with it."""

from __future__ import annotations

from typing import Literal

_LONGEST_DELAY_SECONDS = 30 * 86_400


def _check_delay(name: str, seconds: object) -> None:
    """Raise ValueError (which then is the attempt's failure) for what is no delay."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST_DELAY_SECONDS:
        raise ValueError(f"{name} must be from 0 to {_LONGEST_DELAY_SECONDS}, not {seconds!r:.100}")


class LeaseLost(Exception):
    """This attempt or holder no longer owns its lease: nothing it does from here on may count.

    `reason`: `lease_lost`, the database says so; `lease_untrusted`, nobody knows, and it may have passed on.
    """

    def __init__(self, message: str, reason: Literal["lease_lost", "lease_untrusted"] = "lease_lost") -> None:
        super().__init__(message)
        self.reason = reason


class LeaseHeld(Exception):
    """Somebody else has the named lease. It is free in `retry_after_seconds` at the latest, unless it is renewed.

    `holder` is None where that acquisition could not be seen yet.
    """

    def __init__(self, message: str, *, holder: str | None, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.holder = holder
        self.retry_after_seconds = retry_after_seconds


class EffectAlreadyApplied(Exception):
    """The effect of this idempotency key has been committed before, by an earlier attempt or job."""


class Retry(Exception):
    """Raised by a handler: fail this attempt and run again after `after_seconds` (>= 0), or bury at the last attempt."""

    def __init__(self, after_seconds: float, reason: str = "") -> None:
        _check_delay("Retry: after_seconds", after_seconds)
        super().__init__(reason or f"retry after {after_seconds} s")
        self.after_seconds = after_seconds


class Snooze(Exception):
    """Raised by a handler: run again after `seconds` (>= 0); no attempt is used."""

    def __init__(self, seconds: float) -> None:
        _check_delay("Snooze: seconds", seconds)
        super().__init__(f"snooze for {seconds} s")
        self.seconds = seconds


class Discard(Exception):
    """Raised by a handler: this job is refused for good; it becomes `dead` at once with `reason` as its error."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConfigError(Exception):
    """The configuration cannot be used (exit status 78). `lines`: one a fault, naming variable, value and rule."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class DatabaseUnavailable(Exception):
    """The database could not be reached within the time allowed (exit status 69). The message holds no secret."""


class PortTaken(Exception):
    """Somebody listens already where the HTTP interface should (exit status 69): an old process may be about to leave."""


class SchemaError(ConfigError):
    """The database is reachable, but its schema or grants are not what this version needs (exit status 78)."""
