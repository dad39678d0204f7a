"""What an outcome does to a job, when it runs again, how long a lease is trusted, what error text becomes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.domain import (
    FAILURE_BYTES,
    LAST_ERROR_CHARACTERS,
    Backoff,
    ClaimedJob,
    Failed,
    Lease,
    Released,
    Snoozed,
    clean_text,
    cut_bytes,
    failure,
    verdict,
)
from worker.holding import Held

BACKOFF = Backoff(1.0, 64.0)


# --- the lease


def test_losing_a_lease_survives_an_attempt_that_ends_meanwhile() -> None:
    """Two threads: the attempt takes back `on_lost` after the keeper has seen it."""
    told: list[str] = []

    class Ending(Held):
        __slots__ = ("looks",)

        @property  # type: ignore[override]
        def on_lost(self) -> Callable[[str], None] | None:
            self.looks += 1
            return told.append if self.looks == 1 else None

        @on_lost.setter
        def on_lost(self, _: object) -> None:
            self.looks = 0

    Ending(ClaimedJob(1, 2, "key", "kind", "queue", 0, "{}", 1, 5, 0, 0), 0.0).lose("cancelled")
    assert told == ["cancelled"]


def test_a_lease_is_trusted_from_before_the_request_less_the_margin() -> None:
    assert Lease(30.0, 3.0).trusted_until(100.0) == 127.0


# --- the delay before the next attempt


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 1), (2, 2), (3, 4), (7, 64), (8, 64), (20, 64)])
def test_the_delay_doubles_up_to_its_cap(attempt: int, seconds: float) -> None:
    assert BACKOFF.delay_seconds(attempt, 1.0) == seconds
    assert BACKOFF.delay_seconds(attempt, 0.5) == seconds / 2


@pytest.mark.parametrize("attempt", [31, 38, 64, 65, 1_100, 32_767, 2**31 - 1, 10**30, 0, -5])
def test_no_number_of_attempts_overflows_the_delay(attempt: int) -> None:
    assert 0 < BACKOFF.delay_seconds(attempt, 0.5) <= 64
    assert 0 < Backoff(0.5, 30 * 86_400.0).delay_seconds(attempt, 1.0) <= 30 * 86_400


@given(
    base=st.floats(0, 30 * 86_400),
    most=st.floats(0, 30 * 86_400),
    attempt=st.integers(1, 2**31 - 1),
    uniform=st.floats(0.5, 1),
)
def test_every_delay_is_finite_and_within_the_cap(base: float, most: float, attempt: int, uniform: float) -> None:
    delay_seconds = Backoff(base, most).delay_seconds(attempt, uniform)
    assert math.isfinite(delay_seconds)
    assert 0 <= delay_seconds <= most


# --- what an outcome does


def _failed(**fields: object) -> Failed:
    return Failed(**{"error": "E: e", "error_type": "E", "detail": "d", **fields})  # type: ignore[arg-type]


def test_a_failure_is_retried_after_the_backoff() -> None:
    assert verdict(_failed(), 3, BACKOFF, 0.5) == ("retry", 2.0, "error", "E: e", "d")


def test_a_failure_with_its_own_delay_waits_that_long_even_when_it_is_zero() -> None:
    assert verdict(_failed(after_seconds=0.0), 3, BACKOFF, 0.5).delay_seconds == 0.0
    assert verdict(_failed(after_seconds=500.0), 3, BACKOFF, 0.5)[:2] == ("retry", 500.0)


def test_a_final_failure_buries_the_job_whatever_attempts_are_left() -> None:
    assert verdict(_failed(final=True, after_seconds=5.0), 1, BACKOFF, 1)[:2] == ("bury", None)


def test_a_time_out_is_recorded_as_one() -> None:
    assert verdict(_failed(outcome="timeout"), 1, BACKOFF, 1).outcome == "timeout"


def test_snoozed_and_released_jobs_get_their_attempt_back_and_record_no_failure() -> None:
    assert verdict(Snoozed(seconds=7.0), 1, BACKOFF, 1) == ("give_back", 7.0, None, None, None)
    assert verdict(Released(reason="shutdown"), 1, BACKOFF, 1) == ("give_back", None, None, None, None)
    assert verdict(Released(reason="unknown_kind", delay_seconds=5.0), 1, BACKOFF, 1).delay_seconds == 5.0


# --- error text


def test_error_text_has_no_nul_and_no_unpaired_surrogate() -> None:
    assert clean_text("a\x00b\ud800c", 100) == "a\N{REPLACEMENT CHARACTER}b?c"


@given(st.text(st.characters(exclude_categories=()), max_size=300), st.integers(2, 50), st.integers(4, 200))
def test_cleaned_text_fits_and_can_be_stored(text: str, characters: int, size: int) -> None:
    cleaned = clean_text(text, characters)
    assert len(cleaned) <= characters
    assert "\x00" not in cleaned
    assert len(cut_bytes(cleaned, size).encode()) <= size  # encodes: no surrogate is left, no character cut in two


def test_text_is_cut_at_a_character_and_keeps_the_end_of_a_traceback() -> None:
    text = "é" * 10_000 + "the end"
    cut = cut_bytes(text, 8_192)
    assert cut.startswith("…é")
    assert cut.endswith("the end")
    assert 8_190 <= len(cut.encode()) <= 8_192


def test_a_failure_says_type_and_message_and_keeps_the_traceback() -> None:
    try:
        raise ValueError("no such shop")
    except ValueError as error:
        failed = failure(error)
    assert failed.error == "ValueError: no such shop"
    assert failed.error_type == "ValueError"
    assert "test_domain.py" in failed.detail
    assert failed.detail.rstrip().endswith("ValueError: no such shop")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Demanding(Exception):
    def __init__(self, first: object, second: object) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (Unprintable(), "Unprintable"),
        (Demanding(1, 2), "Demanding"),
        (ExceptionGroup("several", [ValueError("one"), Unprintable()]), "ExceptionGroup"),
        (BaseExceptionGroup("worse", [KeyboardInterrupt()]), "BaseExceptionGroup"),
        (type("Ünïcode" * 50, (Exception,), {})("x"), "Ünïcode"),
        (SystemExit(3), "SystemExit"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_exception_that_cannot_be_printed_is_recorded_by_its_type(error: BaseException, name: str) -> None:
    failed = failure(error)
    assert failed.error.startswith(name)
    assert failed.error_type.startswith(name)
    assert len(failed.error_type) <= 128


def test_huge_error_text_is_cut_to_what_the_tables_take() -> None:
    failed = failure(ValueError("x\x00\ud800é" * 1_000_000))
    assert len(failed.error) == LAST_ERROR_CHARACTERS
    assert len(failed.detail.encode()) <= FAILURE_BYTES
    assert "\x00" not in failed.error + failed.detail


def test_an_endless_chain_of_causes_is_recorded_all_the_same() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert failure(first).error == "ValueError: first"


def test_a_secret_in_an_error_is_masked_where_people_will_read_it() -> None:
    failed = failure(OSError("cannot reach postgresql://app:hunter2secret@db/shop"))
    assert "hunter2secret" not in failed.error + failed.detail
    assert "db/shop" in failed.error


def _row_error() -> Exception:
    """As asyncpg raises it, from a server of another language."""
    error = asyncpg.CheckViolationError("new row violates check constraint")
    error.detail = "Fehlgeschlagene Zeile enth\u00e4lt (1, two\n lines, row4secret)."
    return error


def _raised(error: BaseException) -> BaseException:
    with contextlib.suppress(BaseException):
        raise error
    return error


@pytest.mark.parametrize(
    "error",
    [
        _row_error(),
        ExceptionGroup("several", [ValueError("one"), _row_error()]),
        _raised(ValueError("as a driver of another kind says\nDETAIL:  Failing row contains (1, a).b, row4secret).\nCONTEXT: x")),
        ValueError("cut: Failing row contains (1, row4secret"),
    ],
    ids=["alone", "in a group", "text", "cut"],
)
@pytest.mark.parametrize("chained", [False, True])
def test_the_row_that_failed_is_in_no_error_text(error: Exception, chained: bool) -> None:
    shown: BaseException = error
    if chained:
        shown = RuntimeError("wrapped")
        shown.__cause__ = error
    failed = failure(_raised(shown))
    assert "row4secret" not in failed.error + failed.detail
    assert "(row not shown)" in failed.detail
    assert chained or "row4secret" in str(error) or isinstance(error, ExceptionGroup)
