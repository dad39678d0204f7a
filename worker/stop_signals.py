"""The stop signals of a process: from its first moment on they are heard, and at its end one more of them changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


class Stopped(SystemExit):
    """A stop signal while there is nothing to stop, raised wherever the main thread is."""


class StopSignals:
    """SIGTERM, SIGINT and SIGHUP, raised in the main thread as `Stopped` for as long as nobody hears them in another way."""

    def __init__(self) -> None:
        # Under nohup the end of the terminal is to be survived.
        self.numbers = [
            number
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ]
        self.came_early = False
        for number in self.numbers:
            signal.signal(number, self._stop_early)  # as process 1 it would not hear one that has no handler

    def _stop_early(self, *_: object) -> None:
        self.came_early = True
        raise Stopped(0)

    @contextlib.contextmanager
    def noted(self) -> Iterator[asyncio.Future[None]]:
        """During the block a stop signal ends this future, and raises nothing: what runs beside is to be left in order."""
        loop = asyncio.get_running_loop()
        stop = loop.create_future()

        def end() -> None:
            if not stop.done():
                stop.set_result(None)

        def received(*_: object) -> None:
            self.came_early = True
            loop.call_soon_threadsafe(end)

        for number in self.numbers:
            signal.signal(number, received)
        try:
            yield stop
        finally:
            if self.came_early:
                self.ignore()  # it stops already: what is left in order must not be broken off
            else:
                for number in self.numbers:
                    signal.signal(number, self._stop_early)

    def ignore(self) -> None:
        """To the end: one more signal must not change the exit status (the interpreter, as it ends, gives a signal with a handler
        its default back)."""
        for number in self.numbers:
            signal.signal(number, signal.SIG_IGN)


class LoopSignals(StopSignals):
    """Stop signals of a process whose loop nothing blocks for long: the first one asks, the second insists."""

    @contextlib.contextmanager
    def heard_by(
        self, ask: Callable[[], None], insist: Callable[[], None], *, at_once: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Call `ask` and `insist` in the running loop; `at_once` before the former, wherever the main thread is."""
        loop = asyncio.get_running_loop()
        count = 0

        def received(*_: object) -> None:
            nonlocal count
            count += 1
            if count == 1:
                at_once()
                loop.call_soon_threadsafe(ask)
            elif count == 2:
                loop.call_soon_threadsafe(insist)

        for number in self.numbers:
            signal.signal(number, received)
        try:
            yield
        finally:
            self.ignore()
