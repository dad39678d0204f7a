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
BEFORE_SECONDS: Final = 3.0
"""So long before a fault nothing else is done, and its completions are what has to come back."""
_US: Final = 1_000_000


class Killed(NamedTuple):
    """A process that was killed with SIGKILL."""

    process: str
    at: int
    """Microseconds by the database's clock."""
    alone: bool
    """No other fault was in force until its jobs should have been back."""


class Ended(NamedTuple):
    """A fault that was in force by itself, from when to when (microseconds, the database's clock)."""

    fault: str
    began: int
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


def recovered(reaps: Sequence[Reap], killed: Sequence[Killed]) -> Sequence[Reap]:
    """What was taken from processes that were killed with nothing else around; not what was taken from them while they lived."""
    alone = {kill.process: kill.at for kill in killed if kill.alone}
    return [reap for reap in reaps if reap.process in alone and reap.at >= alone[reap.process]]


def after_expiry(reaps: Sequence[Reap], *, reap_seconds: float) -> Times:
    """From the end of the lease to the reaper; its limit is the interval at which the reaper looks."""
    return times_of(sorted((reap.at - reap.expired) / _US for reap in reaps), reap_seconds)


def recovery(reaps: Sequence[Reap], killed: Sequence[Killed], findings: Findings, *, lease_seconds: float) -> Times:
    """From the kill to the job being ready again (or buried), for the jobs that the killed process held."""
    limit = lease_seconds + SLACK_SECONDS
    alone = {kill.process: kill.at for kill in killed}
    reaps = recovered(reaps, killed)
    seconds = sorted((reap.at - alone[reap.process]) / _US for reap in reaps)
    times = times_of(seconds, limit)
    if times.p99 is not None:
        late = [reap for reap in reaps if (reap.at - alone[reap.process]) / _US > limit]
        findings.expect(times.p99 <= limit, "recovery", f"p99 {times.p99:.2f} s, limit {limit:g} s", *late[:20])
    return times


class Returns(NamedTuple):
    """How the throughput came back after the single faults of one kind; seconds from a fault's end."""

    times: int
    median: float | None
    worst: float | None
    """None, as the median: it was not back while it was watched."""
    before_per_second: float
    """Jobs before the fault; where they were fewest."""


class Usual(NamedTuple):
    """Jobs a second."""

    least: float
    """Completed before anything was done to anybody: no fault is measured by what an earlier one has left."""
    most: float
    """Enqueued: whoever completes more is catching up."""

    def of(self, completed_per_second: float) -> float:
        """What has to come back, if so many were completed right before a fault."""
        return min(max(completed_per_second, self.least), self.most)


def returns(completed_at: Sequence[int], ended: Sequence[Ended], findings: Findings, *, usual: Usual) -> Mapping[str, Returns]:
    """For each single fault, how long after its end the first second was over in which nine tenths as many jobs were completed as
    in a second before it."""
    moments = sorted(completed_at)
    found: dict[str, list[tuple[float, float]]] = {}
    for fault in ended:
        before = usual.of(_count(moments, fault.began - round(BEFORE_SECONDS * _US), fault.began) / BEFORE_SECONDS)
        enough = max(math.floor(before * WINDOW_SECONDS * NINE_TENTHS), 1)
        seconds = _first_full_window(moments, fault.at, enough)
        if seconds is None and (fault.watched_until - fault.at) / _US < RETURN_SECONDS:
            continue  # the run was over before it could be seen
        found.setdefault(fault.fault, []).append((math.inf if seconds is None else seconds, before))
        text = f"{fault.fault}: nine tenths of {before:.0f} jobs/s after {'more' if seconds is None else f'{seconds:.1f} s'}"
        findings.expect(seconds is not None and seconds <= RETURN_SECONDS, "return", text, fault)
    return {fault: _returns_of(sorted(times)) for fault, times in found.items()}


def _returns_of(ordered: Sequence[tuple[float, float]]) -> Returns:
    seconds = [one if math.isfinite(one) else None for one, _ in ordered]
    return Returns(len(ordered), seconds[(len(seconds) - 1) // 2], seconds[-1], min(before for _, before in ordered))


def _count(moments: Sequence[int], since: int, until: int) -> int:
    return bisect.bisect_left(moments, until) - bisect.bisect_left(moments, since)


def _first_full_window(moments: Sequence[int], since: int, enough: int) -> float | None:
    """Seconds from `since` to the end of the first window behind it with so many of the moments in it."""
    first = bisect.bisect_left(moments, since)
    for position in range(first + enough - 1, len(moments)):
        end = max(moments[position], since + round(WINDOW_SECONDS * _US))
        if end - moments[position - enough + 1] < WINDOW_SECONDS * _US:
            return (end - since) / _US
    return None


def times_of(ordered: Sequence[float], limit: float) -> Times:
    if not ordered:
        return Times(0, None, None, None, limit)
    return Times(len(ordered), _quantile(ordered, 0.5), _quantile(ordered, 0.99), ordered[-1], limit)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(math.ceil(len(ordered) * share) - 1, 0)]
