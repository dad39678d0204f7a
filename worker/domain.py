"""What is true of a job: its states, its lease, what an outcome does to it, when it runs again.

    ready ──claim──▶ running ──succeeded──▶ succeeded
      ▲                 │ failed, attempts left · snoozed · released · lease expired (reaper)
      └─────────────────┤
                        ├─ failed or expired on the last attempt · discarded ──▶ dead ──retry──▶ ready
    ready, running ─────┴─ cancelled by somebody ──▶ cancelled ──retry──▶ ready

No I/O, no clock, no asyncio: every rule here is tested in milliseconds.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass
from typing import Literal, NamedTuple

from worker.masking import masked, without_rows

State = Literal["ready", "running", "succeeded", "dead", "cancelled"]
ReleaseReason = Literal["shutdown", "not_started", "unknown_kind", "suspect_waits", "claim_lost", "requested"]
CancelReason = Literal["lease_lost", "lease_untrusted", "timeout", "shutdown", "cancelled"]

LAST_ERROR_CHARACTERS = 1_000
FAILURE_BYTES = 8_192
UNKNOWN_KIND_DELAY_SECONDS = 5.0


class ClaimedJob(NamedTuple):
    """One claimed row: this process owns it under `fence` until it settles it or the lease ends."""

    id: int
    fence: int
    key: str
    kind: str
    queue: str
    priority: int
    payload: str
    """JSON text; decoded where an error is the job's own."""
    attempt: int
    """1 at the first claim."""
    max_attempts: int
    crashes: int
    available_at: int
    """Microseconds since 2000-01-01 UTC, as PostgreSQL sends it: exact, and no date is out of range."""

    @property
    def has_generated_key(self) -> bool:
        """Nobody chose it, and it leaves no row in the ledger."""
        return self.key.startswith("auto:")

    def log_fields(self) -> dict[str, object]:
        """What every event about this job carries."""
        return {"job_id": self.id, "kind": self.kind, "queue": self.queue, "attempt": self.attempt, "fence": self.fence}


class Lease(NamedTuple):
    """How long a claim or a renewal is believed (SPEC of time: R <= T/3, 2R + min(Q, R/2) <= T - M, M >= T/20)."""

    seconds: float
    margin_seconds: float

    def trusted_until(self, sent_at: float, remaining_seconds: float = math.inf) -> float:
        """Local moment up to which the lease is trusted: from before the request was sent, less the margin.

        `remaining_seconds`: what the answer says is left of it, where it says so.
        """
        return sent_at + min(self.seconds, remaining_seconds) - self.margin_seconds


class Backoff(NamedTuple):
    """Delay before attempt n+1: d x uniform(0.5, 1), d = min(base x 2^(n-1), longest)."""

    base_seconds: float
    max_seconds: float

    def delay_seconds(self, attempt: int, uniform: float) -> float:
        """`uniform` is a random number from 0.5 to 1. Any `attempt` gives a finite delay from 0 to `max_seconds`."""
        doublings = min(max(attempt - 1, 0), 64)  # 2^64 seconds is past every cap; more would overflow a float one day
        return min(self.base_seconds * 2.0**doublings, self.max_seconds) * uniform


# --- outcomes: what an attempt came to, as values -------------------------------------------------------------------------


class CodePlace(NamedTuple):
    """Where a call stands, for an error message."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


# Tuples, since one or two of these are made for every job: a frozen dataclass takes three times as long.


class Effect(NamedTuple):
    """One statement that a handler wants committed together with the completion."""

    sql: str
    arguments: tuple[object, ...]
    alone: bool
    """It may look at or change more than rows (SELECT, set_config): its job shares no transaction."""
    number: int
    called_from: CodePlace


class Succeeded(NamedTuple):
    """The handler returned. `result` is JSON text or None."""

    result: str | None
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The attempt failed. `final`: refused for good, whatever attempts are left."""

    error: str
    error_type: str
    detail: str
    outcome: Literal["error", "timeout"] = "error"
    after_seconds: float | None = None
    final: bool = False
    exception: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snoozed:
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Given back unfinished: attempt refunded, place kept unless `delay_seconds` says otherwise."""

    reason: ReleaseReason
    delay_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The handler's own fenced transaction has committed the effect and the completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyApplied:
    """The ledger knew the key: nothing to apply, the job ends as succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """The lease is gone or no longer trusted: nothing may be written about this attempt."""

    reason: CancelReason


Outcome = Succeeded | Failed | Snoozed | Released | Committed | AlreadyApplied | Abandoned


class Verdict(NamedTuple):
    """What the settling statement does to a row that is not finished."""

    verb: Literal["retry", "bury", "give_back"]
    """retry: ready, or dead on the last attempt · bury: dead · give_back: ready with the attempt refunded."""
    delay_seconds: float | None
    """None keeps `available_at`, and with it the place in the queue."""
    outcome: Literal["error", "timeout"] | None
    error: str | None
    detail: str | None


def verdict(outcome: Failed | Snoozed | Released, attempt: int, backoff: Backoff, uniform: float) -> Verdict:
    """What becomes of a job whose attempt did not finish it."""
    match outcome:
        case Failed(final=True):
            return Verdict("bury", None, outcome.outcome, outcome.error, outcome.detail)
        case Failed(after_seconds=None):
            delay = backoff.delay_seconds(attempt, uniform)
            return Verdict("retry", delay, outcome.outcome, outcome.error, outcome.detail)
        case Failed():
            return Verdict("retry", outcome.after_seconds, outcome.outcome, outcome.error, outcome.detail)
        case Snoozed():
            return Verdict("give_back", outcome.seconds, None, None, None)
        case Released():
            return Verdict("give_back", outcome.delay_seconds, None, None, None)


# --- text of errors --------------------------------------------------------------------------------------------------------


def is_storable(text: str) -> bool:
    """Whether PostgreSQL stores this text as it is: no NUL, no unpaired surrogate (as which a byte that is no UTF-8 is read)."""
    return not any(character == "\x00" or "\ud800" <= character <= "\udfff" for character in text)


def clean_text(text: str, characters: int) -> str:
    """Text that PostgreSQL stores and JSON carries: no NUL, no unpaired surrogate, cut at a character."""
    cut = text if len(text) <= characters else text[: characters - 1] + "…"
    return cut.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")


def cut_bytes(text: str, size: int) -> str:
    """`text` (already clean) cut at a character so that it has at most `size` bytes of UTF-8; keeps the end, where a
    traceback says what happened."""
    encoded = text.encode("utf-8")
    if len(encoded) <= size:
        return text
    return "…" + encoded[-(size - 3) :].decode("utf-8", "ignore")


def describe(error: BaseException) -> str:
    """The message of an exception, also of one whose `__str__` raises."""
    try:
        return str(error)
    except BaseException:  # the user's code: SystemExit in there is that job's failure, too
        return "(its message cannot be printed)"


def failure(
    error: BaseException,
    *,
    outcome: Literal["error", "timeout"] = "error",
    message: str | None = None,
    with_traceback: bool = True,
    after_seconds: float | None = None,
    final: bool = False,
) -> Failed:
    """The failed outcome that `error` means; its texts are cleaned, without secrets, and cut to what the tables take."""
    name = clean_text(type(error).__qualname__, 128)
    # Cut before it is masked, since it may be huge, and again behind: what was cut through the first time is gone then.
    said = masked(without_rows(describe(error) if message is None else message, error)[: 4 * LAST_ERROR_CHARACTERS])
    text = clean_text(f"{name}: {said}" if said else name, LAST_ERROR_CHARACTERS)
    detail = text
    if with_traceback:
        try:
            detail = without_rows("".join(traceback.format_exception(error, limit=-20)), error)
        except BaseException:  # one of its parts cannot be printed
            detail = text
    return Failed(
        error=text,
        error_type=name,
        detail=cut_bytes(clean_text(masked(detail[-4 * FAILURE_BYTES :]), 5 * FAILURE_BYTES), FAILURE_BYTES),
        outcome=outcome,
        after_seconds=after_seconds,
        final=final,
        exception=error,
    )
