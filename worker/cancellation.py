"""Whose CancelledError it is."""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether somebody has told the running task to end. If nobody has, code of the user's has raised its CancelledError by itself:
    an error like any other."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
