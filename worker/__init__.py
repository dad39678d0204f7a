"""reliable-worker: a worker pool over PostgreSQL whose effects and completions commit together. These names are the API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.embedded import Worker
    from worker.errors import Discard, EffectAlreadyApplied, LeaseHeld, LeaseLost, Retry, Snooze
    from worker.handlers import Handlers, Kind
    from worker.job import Job
    from worker.leases import Leases
    from worker.settings import Settings
    from worker.store.bulk import enqueue_many
    from worker.store.enqueueing import Enqueued, enqueue
    from worker.store.finished import wait
    from worker.task_client import TaskClient

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
    "Retry",
    "Settings",
    "Snooze",
    "TaskClient",
    "Worker",
    "enqueue",
    "enqueue_many",
    "wait",
]

_HOMES = {
    "Discard": "worker.errors",
    "EffectAlreadyApplied": "worker.errors",
    "Enqueued": "worker.store.enqueueing",
    "Handlers": "worker.handlers",
    "Job": "worker.job",
    "Kind": "worker.handlers",
    "LeaseHeld": "worker.errors",
    "LeaseLost": "worker.errors",
    "Leases": "worker.leases",
    "Retry": "worker.errors",
    "Settings": "worker.settings",
    "Snooze": "worker.errors",
    "TaskClient": "worker.task_client",
    "Worker": "worker.embedded",
    "enqueue": "worker.store.enqueueing",
    "enqueue_many": "worker.store.bulk",
    "wait": "worker.store.finished",
}


def __getattr__(name: str) -> object:
    """A name is imported when somebody asks for it: one needs an extra, and the daemon has to hear signals before all of them
    are there (see `__main__`)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'worker' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if name != "TaskClient" or error.name is None or error.name.startswith("worker"):
            raise
        raise ImportError(f"worker.{name} needs the extra http: pip install 'reliable-worker[http]'") from None
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
