"""What this process measures of itself while it works: counters and histograms in plain integers, read by `/metrics`.

One set for each thread that writes, so that no two threads write the same number. Loops call these once a statement, never once a
job: that costs them less than a microsecond a batch.
"""

from __future__ import annotations

from bisect import bisect_left

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of a round trip."""
TRUST_SECONDS = (0.0, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 300.0)
"""Upper bounds for the trust that is left: below 0 it had run out."""


class Histogram:
    """How often a value fell into each bucket; the last one has no upper bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Measures:
    """One writer's numbers since the start of the process."""

    __slots__ = (
        "claim_seconds",
        "claimed",
        "commit_seconds",
        "completed",
        "failed",
        "lost_leases",
        "renew_seconds",
        "stale_refused",
        "trust_left_seconds",
    )

    def __init__(self) -> None:
        self.claim_seconds = Histogram(SECONDS)
        self.renew_seconds = Histogram(SECONDS)
        self.commit_seconds = Histogram(SECONDS)
        self.trust_left_seconds = Histogram(TRUST_SECONDS)
        """Of each group of completions, the least: how near the process came to writing without a right to."""
        self.claimed = 0
        self.completed = 0
        self.failed = 0
        """Attempts whose failure was written; those with attempts left are the retries."""
        self.lost_leases = 0
        """Renewals that found the lease gone."""
        self.stale_refused = 0
        """Outcomes that the fence has refused."""


POOL_CLAIMS = Measures()
"""Written in the loop of the handlers (the claimer)."""
POOL_RIGHTS = Measures()
"""Written in the rights thread (keeper, committer, writer)."""
REMOTE = Measures()
"""Written in the loop of the HTTP server, for tasks and named leases over HTTP."""
