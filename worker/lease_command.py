"""`worker lease run`: a command that runs only while its lease is held.

    trusted_until ──TERM──▶ half of the margin ──KILL──▶ the other half ──▶ the lease can pass on

The command is a process group of its own. Signals that end a program are handed on to it, and its status is ours. It is stopped
when the lease is lost or no longer trusted; should this process be killed or frozen, its guardian does that. What is left of the
group when the command has exited is ended, too, before the lease is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Iterator, Sequence

from worker.clock import local_seconds
from worker.errors import LeaseLost
from worker.guardian import Guardian, is_alive, signal_group
from worker.leases import HeldLease, Hold
from worker.name_renewals import terms_of

FENCE_VARIABLE = "WORKER_LEASE_FENCE"
EX_NOT_EXECUTABLE = 126
EX_NOT_FOUND = 127
_SIGNALLED = 128
_LOOK_SECONDS = 0.02
_KILLED_SECONDS = 5.0
_LEFT_SECONDS = 0.2
"""So long what the command has left behind may take to end by itself: the reader of its output, say."""
_WORDS_A_LEASE = 20
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class CannotStart(Exception):
    """There is no such command, or it is none; `status` as a shell would say it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class LeasedCommand:
    """One command under one lease."""

    def __init__(self, command: Sequence[str], guardian: Guardian, *, ttl_seconds: float) -> None:
        self._command = command
        self._guardian = guardian
        self._word_seconds = ttl_seconds / _WORDS_A_LEASE
        self._kill_after_seconds = terms_of(ttl_seconds).margin_seconds / 2
        self._allowed_until = math.inf
        """What the guardian was told last."""
        self._group: int | None = None
        self._is_held = False
        self._signals: list[signal.Signals] = []

    async def run(self, hold: Hold) -> int:
        """Wait for the lease, run the command under it, return its status as a shell would.

        Raises LeaseLost after the command was stopped, CannotStart, and whatever entering `hold` raises. A signal while it waits
        for the lease ends the wait.
        """
        with self._handled_signals():
            try:
                async with hold as held:
                    self._is_held = True
                    process = await self._start(held)
                    try:
                        with _terminal_of(process.pid):
                            async with asyncio.TaskGroup() as group:
                                telling = group.create_task(self._tell_guardian(process.pid, held), name="tell the guardian")
                                status = await process.wait()
                                await self._end_what_is_left(process)
                                telling.cancel()
                    except asyncio.CancelledError:
                        await self._stop(process)
                        raise
                    if status == -signal.SIGKILL and local_seconds() >= self._allowed_until:
                        raise LeaseLost(f"lease {held.name!r}: this process was frozen for too long", "lease_untrusted")
            except asyncio.CancelledError:
                if self._is_held or not self._signals:
                    raise
                return _SIGNALLED + self._signals[0]
        return status if status >= 0 else _SIGNALLED - status

    async def _start(self, held: HeldLease) -> asyncio.subprocess.Process:
        environment = os.environ | {FENCE_VARIABLE: str(held.fence)}
        try:
            process = await asyncio.create_subprocess_exec(*self._command, env=environment, process_group=0)
        except FileNotFoundError:
            raise CannotStart(f"{self._command[0]}: command not found", EX_NOT_FOUND) from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
            raise CannotStart(f"{self._command[0]}: {getattr(error, 'strerror', None) or error}", EX_NOT_EXECUTABLE) from None
        self._group = process.pid
        for number in self._signals:
            signal_group(process.pid, number)
        return process

    async def _tell_guardian(self, group: int, held: HeldLease) -> None:
        while local_seconds() < self._allowed_until:  # else this process was frozen, and the guardian has acted
            self._allowed_until = local_seconds() + held.remaining_seconds() + self._kill_after_seconds
            self._guardian.allow(group, self._allowed_until)
            await asyncio.sleep(self._word_seconds)

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        """End the whole group before the lease can pass on."""
        kill_at = local_seconds() + self._kill_after_seconds
        for number in (signal.SIGTERM, signal.SIGCONT):  # what is stopped hears nothing else
            signal_group(process.pid, number)
        await self._await_end(process.pid, kill_at)
        signal_group(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_SECONDS):
                await process.wait()

    async def _end_what_is_left(self, process: asyncio.subprocess.Process) -> None:
        """The command has exited: so does its group, while the lease is held. In the same bounded time as when it is lost."""
        await self._await_end(process.pid, local_seconds() + min(_LEFT_SECONDS, self._kill_after_seconds))
        if is_alive(process.pid):
            await self._stop(process)
            await self._await_end(process.pid, local_seconds() + self._kill_after_seconds)

    async def _await_end(self, group: int, until: float) -> None:
        while is_alive(group) and local_seconds() < until:  # noqa: ASYNC110  (the kernel sets no event)
            await asyncio.sleep(min(_LOOK_SECONDS, self._kill_after_seconds / 4))

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        """Before there is a command the first signal ends the wait for the lease; afterwards each is handed on."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        # What was ignored by whoever started us (nohup) stays so, for the command as well.
        numbers = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]

        def handle(number: signal.Signals) -> None:
            self._signals.append(number)
            if self._group is not None:
                signal_group(self._group, number)
            elif not self._is_held:
                task.cancel()

        for number in numbers:
            loop.add_signal_handler(number, handle, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


@contextlib.contextmanager
def _terminal_of(group: int) -> Iterator[None]:
    """Where there is a terminal and it is ours: the command may read from it, and its keys (^C) go to the command."""
    try:
        ours = os.tcgetpgrp(0)
    except OSError:
        ours = -1
    if ours != os.getpgrp():
        yield
        return
    ignored = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(0, group)
        signal_group(group, signal.SIGCONT)  # it may have asked for the terminal before it had it
        yield
    finally:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(0, ours)
        signal.signal(signal.SIGTTOU, ignored)
