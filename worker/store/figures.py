"""The figures of a queue: what `worker stats` and the metrics show. How they are come by: statistics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Backlog:
    """The unfinished jobs of one queue or kind, and what became of others in the last hour."""

    ready: int = 0
    scheduled: int = 0
    running: int = 0
    expired: int = 0
    oldest_ready_seconds: float | None = None
    throughput: float = 0.0
    """Succeeded jobs a second."""
    failures: int = 0
    """Failed attempts in the last hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSummary:
    """One process, as it last said of itself. `live`: its presence has not lapsed."""

    id: str
    name: str
    hostname: str
    pid: int
    version: str
    queues: list[str]
    slots: int
    busy: int
    started_at: str
    seen_at: str
    live: bool
    hungry: bool


@dataclass(slots=True, kw_only=True)
class Statistics:
    """All numbers. `ready` are due, `scheduled` are not; `expired` are among the running."""

    ready: int = 0
    scheduled: int = 0
    running: int = 0
    expired: int = 0
    succeeded: int = 0
    dead: int = 0
    cancelled: int = 0
    oldest_ready_seconds: float | None = None
    retry_rate: float = 0.0
    """Of the attempts that ended in the last hour, the share that failed."""
    lost_leases: int = 0
    """In the last hour, crashes included."""
    throughput: float = 0.0
    """Succeeded jobs a second, over the last hour or as much of it as the sample covers."""
    duration_seconds: dict[str, float | None] = field(default_factory=lambda: {"p50": None, "p95": None})
    unknown_kinds: dict[str, int] = field(default_factory=dict)
    """Ready jobs of kinds that no live process knows."""
    oldest_transaction_seconds: float | None = None
    """None: there is none. Of this role's own sessions only, and named in `estimated`, where those of others do not show."""
    queues: dict[str, Backlog] = field(default_factory=dict)
    kinds: dict[str, Backlog] = field(default_factory=dict)
    processes: list[ProcessSummary] = field(default_factory=list)
    estimated: list[str] = field(default_factory=list)
    """Names of the fields that are no exact counts."""

    @property
    def sees_all_transactions(self) -> bool:
        return "oldest_transaction_seconds" not in self.estimated
