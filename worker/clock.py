"""The one local clock. It answers a single question: may this process still trust a lease?

The database judges leases with its own clock. This one is never compared with it; it only measures how long ago a request was
sent. It goes on while the host sleeps where the system has such a clock (CLOCK_BOOTTIME), so that a laptop or a frozen virtual
machine does not wake up trusting leases that have long passed on.
"""

from __future__ import annotations

import time

_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def local_seconds() -> float:
    """Seconds since some moment in the past; only differences mean anything."""
    if _BOOTTIME is None:
        return time.monotonic()
    return time.clock_gettime(_BOOTTIME)
