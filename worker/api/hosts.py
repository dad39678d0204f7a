"""What the HTTP server knows of the process it lives in: whether it runs a pool, and whether that one claims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from worker.clock import local_seconds

if TYPE_CHECKING:
    from worker.embedded import Worker


class Host(Protocol):
    """The process around the server; asked from the server's thread."""

    @property
    def runs_pool(self) -> bool: ...

    @property
    def is_stopping(self) -> bool: ...

    def why_not_ready(self) -> str | None:
        """None, or in a few words what keeps it from claiming."""

    def gauges(self) -> Mapping[str, float]:
        """Numbers of now, for `/metrics`."""


class NoPool:
    """`worker serve`: a server and nothing else."""

    runs_pool = False

    def __init__(self) -> None:
        self.is_stopping = False

    def why_not_ready(self) -> str | None:
        return None

    def gauges(self) -> Mapping[str, float]:
        return {}


class PoolHost:
    """`worker run --serve`: the pool of this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        of = worker.settings
        # As the heartbeat file is judged: a pass of the claim loop, with all that may hold it up.
        self._claim_allowed_seconds = of.poll_seconds * 1.2 + of.claim_timeout_seconds * 3 + of.connect_timeout_seconds + 3

    @property
    def runs_pool(self) -> bool:
        return self._worker.is_ready and not self._worker.is_stopping

    @property
    def is_stopping(self) -> bool:
        return self._worker.is_stopping

    def why_not_ready(self) -> str | None:
        parts = self._worker.parts
        if self._worker.is_stopping:
            return "stopping"
        if parts is None or not self._worker.is_ready:
            return "starting"
        if not parts.keeper.database_up:
            return "database"
        if local_seconds() - parts.claimer.passed_at > self._claim_allowed_seconds:
            return "claim loop"
        return None

    def gauges(self) -> Mapping[str, float]:
        parts = self._worker.parts
        if parts is None:
            return {}
        return {
            "slots": self._worker.settings.workers,
            "busy": parts.pool.busy(),
            "held_leases": len(parts.holdings),
            "unwritten_outcomes": parts.committer.waiting,
            "hungry": parts.claimer.is_hungry,
            "loop_lag_seconds": parts.watch.lag_seconds,
            "claim_age_seconds": local_seconds() - parts.claimer.passed_at,
        }
