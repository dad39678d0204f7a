"""The one local clock. It answers a single question: may this process still trust a lease?

The database judges leases with its own clock. This one is never compared with it; it only measures how long ago a request was
sent. It goes on while the host sleeps where the system has such a clock (CLOCK_BOOTTIME), so that a laptop or a frozen virtual
machine does not wake up trusting leases that have long passed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)
# Read several times a job.
_read: Callable[[], float] = time.monotonic if _BOOTTIME is None else partial(time.clock_gettime, _BOOTTIME)


def local_seconds() -> float:
    """Seconds since some moment in the past; only differences mean anything."""
    return _read()
