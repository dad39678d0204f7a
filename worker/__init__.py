"""reliable-worker: a worker pool over PostgreSQL whose effects and completions commit together. These names are the API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.embedded import Worker
from worker.errors import Discard, EffectAlreadyApplied, LeaseHeld, LeaseLost, Retry, Snooze
from worker.handlers import Handlers, Kind
from worker.job import Job
from worker.leases import Leases
from worker.settings import Settings
from worker.store.bulk import enqueue_many
from worker.store.enqueueing import Enqueued, enqueue
from worker.store.finished import wait

if TYPE_CHECKING:
    from worker.task_client import RemoteTask, TaskClient

__all__ = [
    "Discard",
    "EffectAlreadyApplied",
    "Enqueued",
    "Handlers",
    "Job",
    "Kind",
    "LeaseHeld",
    "LeaseLost",
    "Leases",
    "RemoteTask",
    "Retry",
    "Settings",
    "Snooze",
    "TaskClient",
    "Worker",
    "enqueue",
    "enqueue_many",
    "wait",
]


def __getattr__(name: str) -> object:
    """The names that need the extra `http` are imported when somebody asks for them."""
    if name not in ("RemoteTask", "TaskClient"):
        raise AttributeError(f"module 'worker' has no attribute {name!r}")
    try:
        from worker import task_client
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("worker"):
            raise
        raise ImportError(f"worker.{name} needs the extra http: pip install 'reliable-worker[http]'") from None
    return getattr(task_client, name)
