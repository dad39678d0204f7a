"""How fast work came back after a fault of `worker torture`, and what is said when it did not come back in time."""

from __future__ import annotations

from tests.torture_histories import SECOND, broken
from worker.torture import timing
from worker.torture.breaches import Findings
from worker.torture.job_rules import Reap
from worker.torture.timing import Ended, Killed, Usual


def test_a_recovery_beyond_the_lease_and_two_seconds_is_found() -> None:
    killed = [Killed("t0-1", 10 * SECOND, True), Killed("t1-1", 10 * SECOND, False)]
    findings = Findings()
    in_time = [
        Reap("t0-1", 13 * SECOND, 0),
        Reap("t0-1", 5 * SECOND, 0),
        Reap("t1-1", 90 * SECOND, 0),
        Reap("t2-1", 90 * SECOND, 0),
    ]
    assert timing.recovery(in_time, killed, findings, lease_seconds=3) == (1, 3.0, 3.0, 3.0, 5.0)
    assert broken(findings) == set()
    expired = [reap._replace(expired=12 * SECOND) for reap in timing.recovered(in_time, killed)]
    assert timing.after_expiry(expired, reap_seconds=0.5) == (1, 1.0, 1.0, 1.0, 0.5)
    timing.recovery([Reap("t0-1", 16 * SECOND, 0)], killed, findings, lease_seconds=3)
    assert broken(findings) == {"recovery"}


TEN = Usual(10, 10)


def jobs(begin: float, seconds: float, *, per_second: float = 10) -> list[int]:
    """Moments of completions, evenly; the first one after its share of time."""
    return [round((begin + number / per_second) * SECOND) for number in range(1, int(seconds * per_second) + 1)]


def returned(completed: list[int], *faults: Ended, usual: Usual = TEN) -> tuple[dict[str, timing.Returns], list[str]]:
    findings = Findings()
    found = timing.returns(completed, faults, findings, usual=usual)
    return dict(found), [breach.text for breach in findings.breaches]


def a_reset(began: float, ended: float, *, watched_seconds: float = 11) -> Ended:
    return Ended("reset", round(began * SECOND), round(ended * SECOND), round((ended + watched_seconds) * SECOND))


def test_the_return_is_the_end_of_the_first_full_second_after_the_fault() -> None:
    before = jobs(90, 10)
    assert returned(before + jobs(105, 20), a_reset(100, 105)) == ({"reset": (1, 1.0, 1.0, 10.0)}, [])
    assert returned(before + jobs(109, 20), a_reset(100, 105)) == ({"reset": (1, 4.9, 4.9, 10.0)}, [])
    # What was completed while the fault was in force does not count, nor does a rate below nine tenths.
    assert returned(before + jobs(100, 5) + jobs(105, 3, per_second=1) + jobs(108, 9), a_reset(100, 105))[0]["reset"].worst == 3.8


def test_a_throughput_that_does_not_come_back_in_time_is_found() -> None:
    before = jobs(90, 10)
    found, texts = returned(before + jobs(116, 20), a_reset(100, 105, watched_seconds=20))
    assert found == {"reset": (1, 11.9, 11.9, 10.0)}
    assert texts == ["reset: nine tenths of 10 jobs/s after 11.9 s"]
    found, texts = returned(before + jobs(105, 60, per_second=8), a_reset(100, 105))
    assert found == {"reset": (1, None, None, 10.0)}
    assert texts == ["reset: nine tenths of 10 jobs/s after more"]
    assert returned(before, a_reset(100, 105, watched_seconds=4)) == ({}, [])


def test_a_fault_is_measured_by_the_seconds_before_it() -> None:
    wide = Usual(10, 40)
    twice = [*jobs(90, 10, per_second=20), *jobs(105, 60)]
    assert returned(twice, a_reset(100, 105), usual=wide) == (
        {"reset": (1, None, None, 20.0)},
        ["reset: nine tenths of 20 jobs/s after more"],
    )
    # Not by a backlog that was caught up with, nor by what an earlier fault has left.
    assert returned([*jobs(90, 10, per_second=90), *jobs(105, 60)], a_reset(100, 105)) == ({"reset": (1, 1.0, 1.0, 10.0)}, [])
    assert returned([*jobs(90, 10, per_second=1), *jobs(105, 60, per_second=1)], a_reset(100, 105))[1] != []


def test_the_returns_of_a_kind_have_a_median_and_a_worst() -> None:
    ends = (105, 205, 305, 405)
    completed = [moment for end, gap in zip(ends, (0, 2, 4, 9), strict=True) for moment in jobs(end - 15, 10) + jobs(end + gap, 20)]
    faults = [a_reset(end - 5, end) for end in ends]
    other = faults[0]._replace(fault="kill")
    found, texts = returned(completed, *faults, other)
    assert found == {"reset": (4, 2.9, 9.9, 10.0), "kill": (1, 1.0, 1.0, 10.0)}
    assert texts == []
