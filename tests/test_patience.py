"""Patience: whatever is waited for, and however long, the tries grow rare, stay apart, and are told of in a few lines."""

from __future__ import annotations

import pytest

from tests.inprocess import listening
from worker import events, patience
from worker.patience import Patience


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The local clock, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(patience, "local_seconds", lambda: now[0])
    return now


def test_delays_double_up_to_their_cap_and_are_spread(clock: list[float]) -> None:
    """A2, A5: and after any number of failures the next try is not further away than the cap."""
    waiting = Patience(events.CLAIM_FAILED, first_seconds=0.1, longest_seconds=5)
    with listening():
        delays = [waiting.delay_seconds(OSError("away")) for _ in range(5_000)]
        for number, delay in enumerate(delays):
            full = min(0.1 * 2.0 ** min(number, 20), 5)
            assert full / 2 <= delay <= full
        assert len(set(delays[-1_000:])) > 900
        waiting.reset()
        assert waiting.delay_seconds(OSError("away")) <= 0.1


def test_a_long_outage_is_one_line_in_half_a_minute(clock: list[float]) -> None:
    waiting = Patience(events.CLAIM_FAILED)
    with listening() as log:
        for _ in range(6_000):
            waiting.delay_seconds(OSError("away"))
            clock[0] += 0.1
        assert 20 <= len(log.find(events.CLAIM_FAILED)) <= 21


def test_one_that_comes_and_goes_is_one_line_a_second_at_most(clock: list[float]) -> None:
    waiting = Patience(events.CLAIM_FAILED)
    with listening() as log:
        for _ in range(600):
            waiting.delay_seconds(OSError("away"))
            waiting.reset()
            clock[0] += 0.1
        assert 55 <= len(log.find(events.CLAIM_FAILED)) <= 61
