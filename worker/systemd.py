"""sd_notify: what systemd's service manager is told, over the datagram socket it names in NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Sends states to the service manager; does nothing where there is none. Never raises, never waits."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if self._address and hasattr(socket, "AF_UNIX"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        watched_pid = environ.get("WATCHDOG_PID", "")
        microseconds = environ.get("WATCHDOG_USEC", "")
        self._watched = microseconds.isdecimal() and watched_pid in ("", str(os.getpid()))

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            pass  # the manager is gone or busy: it will judge by what it sees

    def ready(self, doing: str = "claiming jobs") -> None:
        self._send("READY=1", f"STATUS={doing}")

    def stopping(self, budget_seconds: float) -> None:
        """`budget_seconds`: how long the orderly stop may take; asks for that much time."""
        self._send("STOPPING=1", "STATUS=draining", f"EXTEND_TIMEOUT_USEC={int((budget_seconds + 1) * 1_000_000)}")

    def waiting(self, what: str) -> None:
        self._send(f"STATUS={what}")

    def alive(self) -> None:
        """Feed the watchdog, if there is one."""
        if self._watched:
            self._send("WATCHDOG=1")
