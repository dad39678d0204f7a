"""How fast things came back: jobs of a killed process, and the throughput after a fault. From the recorded history, no I/O."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from worker.torture.breaches import Findings
from worker.torture.job_rules import Reap

SLACK_SECONDS: Final = 2.0
"""What a recovery may take beyond the lease: the reap interval, and the statement."""
RETURN_SECONDS: Final = 10.0
NINE_TENTHS: Final = 0.9
WINDOW_SECONDS: Final = 1.0
_US: Final = 1_000_000


class Killed(NamedTuple):
    """A process that was killed with SIGKILL."""

    process: str
    at: int
    """Microseconds by the database's clock."""
    alone: bool
    """No other fault was in force until its jobs should have been back."""


class Ended(NamedTuple):
    """A fault that was in force by itself, and when it ended (microseconds, the database's clock)."""

    fault: str
    at: int
    watched_until: int


class Done(NamedTuple):
    """One step of the plan as it was carried out; microseconds by the database's clock."""

    faults: tuple[str, ...]
    began: int
    ended: int


class Times(NamedTuple):
    """Seconds; `limit` is what was promised. None: there is nothing to tell."""

    jobs: int
    p50: float | None
    p99: float | None
    most: float | None
    limit: float


def recovery(reaps: Sequence[Reap], killed: Sequence[Killed], findings: Findings, *, lease_seconds: float) -> Times:
    """From the kill to the job being ready again (or buried), for the jobs that the killed process held."""
    limit = lease_seconds + SLACK_SECONDS
    alone = {kill.process: kill.at for kill in killed if kill.alone}
    # What was taken from it while it lived is no recovery.
    reaps = [reap for reap in reaps if reap.process in alone and reap.at >= alone[reap.process]]
    seconds = sorted((reap.at - alone[reap.process]) / _US for reap in reaps)
    times = times_of(seconds, limit)
    if times.p99 is not None:
        late = [reap for reap in reaps if (reap.at - alone[reap.process]) / _US > limit]
        findings.expect(times.p99 <= limit, "recovery", f"p99 {times.p99:.2f} s, limit {limit:g} s", *late[:20])
    return times


def returns(
    completed_at: Sequence[int], ended: Sequence[Ended], findings: Findings, *, usual_per_second: float
) -> Mapping[str, list[float | None]]:
    """For each single fault, how long after its end the first second with nine tenths of the usual completions was over."""
    moments = sorted(completed_at)
    enough = max(math.floor(usual_per_second * WINDOW_SECONDS * NINE_TENTHS), 1)
    found: dict[str, list[float | None]] = {}
    for fault in ended:
        seconds = _first_full_window(moments, fault.at, enough)
        in_time = seconds is not None and seconds <= RETURN_SECONDS
        if seconds is None and (fault.watched_until - fault.at) / _US < RETURN_SECONDS:
            continue  # the run was over before it could be seen
        found.setdefault(fault.fault, []).append(seconds)
        text = f"{fault.fault}: nine tenths of {usual_per_second:.0f} jobs/s"
        findings.expect(in_time, "return", f"{text} after {'more' if seconds is None else f'{seconds:.1f} s'}", fault)
    return found


def _first_full_window(moments: Sequence[int], since: int, enough: int) -> float | None:
    """Seconds from `since` to the end of the first window behind it with so many of the moments in it."""
    first = bisect.bisect_left(moments, since)
    for position in range(first + enough - 1, len(moments)):
        if moments[position] - moments[position - enough + 1] <= WINDOW_SECONDS * _US:
            return (moments[position] - since) / _US
    return None


def times_of(ordered: Sequence[float], limit: float) -> Times:
    if not ordered:
        return Times(0, None, None, None, limit)
    return Times(len(ordered), _quantile(ordered, 0.5), _quantile(ordered, 0.99), ordered[-1], limit)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(math.ceil(len(ordered) * share) - 1, 0)]
