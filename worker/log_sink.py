"""Carries finished log lines to a file descriptor without ever making the caller wait.

Lines go into a bounded queue; one thread writes many of them with one call. When nobody reads, the thread
waits, new lines are dropped and counted, and the count is logged as soon as the stream flows again.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from worker.clock import local_seconds

MAX_QUEUED_LINES = 50_000
MAX_QUEUED_BYTES = 16 * 1024 * 1024
_WRITE_BYTES = 64 * 1024
_RETRY_SECONDS = 0.5
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Characters that JSON leaves alone but at which many readers split lines.
_LINE_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


class Sink:
    """Writes whole lines to `fd`, in order, from a thread of its own; for any thread, also after a fork."""

    def __init__(self, fd: int, *, dropped_line: Callable[[int], bytes]) -> None:
        self._fd = fd
        self._dropped_line = dropped_line
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # Re-entrant, since a garbage collection inside the block may log through __del__.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._lines: deque[tuple[bytes, int]] = deque()
        self._waiting = 0
        self._bytes = 0
        self._dropped = 0
        self._writing = False
        self._asleep = False
        self._unread = False
        """The last line could not be written: saying so would only fail again."""
        self._thread: threading.Thread | None = None

    def put(self, text: bytes, lines: int = 1) -> None:
        """Queue so many lines, their newlines included, or count them as dropped."""
        with self._lock:
            if self._waiting + lines > MAX_QUEUED_LINES or self._bytes + len(text) > MAX_QUEUED_BYTES:
                self._dropped += lines
            else:
                self._append(text, lines)
            if self._asleep:
                self._asleep = False
                self._changed.notify_all()
            elif self._thread is None:
                self._start()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything queued so far and meanwhile is written; False when the limit came first."""
        with self._lock:
            if self._thread is None:
                return self._write_here(local_seconds() + timeout_seconds)
            return self._changed.wait_for(lambda: not self._lines and not self._writing, timeout_seconds)

    def _write_here(self, until: float) -> bool:
        """As Python 3.12 and later go down they start no thread any more: write what the reader takes until then."""
        while self._lines:
            batch, _ = self._take()
            rest = memoryview(batch)
            try:
                while rest and select.select([], [self._fd], [], max(until - local_seconds(), 0.0))[1]:
                    rest = rest[os.write(self._fd, rest[: select.PIPE_BUF]) :]  # so much of it does not block
            except OSError:
                pass
            self._writing = False
            if rest:
                return False
        return True

    def _start(self) -> None:
        # A daemon thread: a reader that never reads must not keep the process alive.
        self._thread = threading.Thread(target=self._write_forever, name="log writer", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            # The interpreter is going down or the system has no thread left; the next line tries again.
            self._thread = None

    def _write_forever(self) -> None:
        while True:
            batch, lines = self._take()
            written = self._write(batch)
            with self._lock:
                self._writing = False
                self._unread = not written
                if not written:
                    self._dropped += lines
                elif self._dropped and not self._lines:
                    self._tell_dropped()
                self._changed.notify_all()

    def _tell_dropped(self) -> None:
        line = self._dropped_line(self._dropped)
        self._dropped = 0
        self._append(line, 1)

    def _append(self, text: bytes, lines: int) -> None:
        self._lines.append((text, lines))
        self._waiting += lines
        self._bytes += len(text)

    def _take(self) -> tuple[bytes, int]:
        """The next lines, at least one, as one piece, and how many they are."""
        with self._lock:
            while not self._lines:
                if self._dropped and not self._unread:  # one line too long for an empty queue
                    self._tell_dropped()
                    break
                self._asleep = True
                self._changed.wait()
            self._asleep = False
            taken: list[bytes] = []
            size = count = 0
            while self._lines and (not taken or size + len(self._lines[0][0]) <= _WRITE_BYTES):
                text, lines = self._lines.popleft()
                taken.append(text)
                size += len(text)
                count += lines
            self._bytes -= size
            self._waiting -= count
            self._writing = True
        batch = b"".join(taken)
        for character, escaped in _LINE_BREAKS:
            batch = batch.replace(character, escaped)
        return batch, count

    def _write(self, batch: bytes) -> bool:
        """Write all, however long the reader pauses or the disk is full; False when nobody will ever read."""
        rest = memoryview(batch)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                # Somebody who shares the pipe made it non-blocking.
                select.select([], [self._fd], [], _RETRY_SECONDS)
            except OSError as error:
                if error.errno not in _DISK_FULL:
                    return False
                time.sleep(_RETRY_SECONDS)
        return True
