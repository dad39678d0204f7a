"""reliable-worker: a worker pool over PostgreSQL whose effects and completions commit together. These names are the API."""

from __future__ import annotations

from worker.embedded import Worker
from worker.errors import Discard, EffectAlreadyApplied, LeaseLost, Retry, Snooze
from worker.handlers import Handlers, Kind
from worker.job import Job
from worker.settings import Settings
from worker.store.enqueueing import Enqueued, enqueue, enqueue_many, wait

__all__ = [
    "Discard",
    "EffectAlreadyApplied",
    "Enqueued",
    "Handlers",
    "Job",
    "Kind",
    "LeaseLost",
    "Retry",
    "Settings",
    "Snooze",
    "Worker",
    "enqueue",
    "enqueue_many",
    "wait",
]
