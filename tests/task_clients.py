"""Clients of `worker serve` in Python, and a task as one of them holds it."""

from __future__ import annotations

from typing import Any

from tests.serving import TOKEN, Served
from worker import TaskClient

HELD: dict[str, Any] = {"id": 1, "key": "k", "kind": "k", "queue": "q", "payload": 1, "fence": 1, "attempt": 1, "processor": "p"}


def client(served: Served, **fields: object) -> TaskClient:
    return TaskClient(served.url, bearer=TOKEN, processor="python-1", **fields)  # type: ignore[arg-type]
