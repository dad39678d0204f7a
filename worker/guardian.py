"""The guardian of a command: a process that ends the command's group when the one that holds its lease cannot.

`worker lease run` stops its command itself when the lease is lost. Killed or frozen it stops nothing, and the command would go on
while another holds the lease. The guardian is forked before there is any thread; it waits at the end of a pipe, through which it
hears the local moment up to which the command may run, again and again. It kills the group when that moment has passed, and ends it
(TERM, then KILL at that moment) when the pipe breaks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
from typing import Self

from worker.clock import local_seconds

_MESSAGE = struct.Struct("=qd")
_LOOK_SECONDS = 0.02
_IDLE_SECONDS = 60.0
_END_SECONDS = 1.0
_NO_GROUP = 0


class Guardian:
    """The holder's end of the pipe. Call `start` before any thread is started."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe

    @classmethod
    def start(cls) -> Self:
        theirs, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(ours)
                _watch(theirs)
            finally:
                os._exit(0)
        os.close(theirs)
        os.set_blocking(ours, False)
        return cls(pid, ours)

    def allow(self, group: int, until: float) -> None:
        """This process group may run until that local moment."""
        with contextlib.suppress(OSError):  # it is gone, or so slow that the pipe is full: then it is only the second line
            os.write(self._pipe, _MESSAGE.pack(group, until))

    def end(self) -> None:
        """The group is gone; so is the guardian afterwards."""
        self.allow(_NO_GROUP, 0.0)
        os.close(self._pipe)
        give_up_at = local_seconds() + _END_SECONDS
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._pid, os.WNOHANG) == (0, 0) and local_seconds() < give_up_at:
                time.sleep(_LOOK_SECONDS / 10)


def _watch(pipe: int) -> None:
    """The life of the guardian."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # whoever reads the command's output must not wait for us
        os.dup2(nothing, descriptor)
    group, until = _NO_GROUP, 0.0
    while True:
        # The host may sleep, which this wait does not count: look again now and then.
        pause_seconds = min(max(until - local_seconds(), 0.0), 1.0) if group else _IDLE_SECONDS
        if select.select([pipe], [], [], pause_seconds)[0]:
            message = os.read(pipe, _MESSAGE.size)
            if len(message) < _MESSAGE.size:
                break
            group, until = _MESSAGE.unpack(message)
        elif group and local_seconds() >= until:
            signal_group(group, signal.SIGKILL)
            group = _NO_GROUP
    if group:
        signal_group(group, signal.SIGTERM)
        while is_alive(group) and local_seconds() < until:
            time.sleep(_LOOK_SECONDS)
        signal_group(group, signal.SIGKILL)


def signal_group(group: int, number: signal.Signals) -> None:
    """Send it to every process of the group; nothing happens when there is none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def is_alive(group: int) -> bool:
    """Whether there is a process in this group, or one that nobody has waited for."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
