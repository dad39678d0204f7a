"""`worker stats --watch`: the same again and again, on one connection, until a stop signal.

What goes wrong at first ends it, as without --watch. Later a database that is away is said to be, and asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from worker.cli.printing import OutputFailed, Repaint, Table, can_repaint, flush, print_error, print_line, repainted
from worker.cli.reaching import COMMAND_SECONDS, STATEMENT_SECONDS, database_of, reach
from worker.cli.stats import print_statistics, tables_of
from worker.clock import local_seconds
from worker.domain import Backoff
from worker.errors import ConfigError
from worker.masking import safe_text
from worker.settings import Settings
from worker.stop_signals import LoopSignals
from worker.store import schema
from worker.store.connection import DATABASE_ERRORS, Connection
from worker.store.figures import Statistics
from worker.store.statistics import statistics

INTERVAL_SECONDS = 2.0
_SLOW_SECONDS = 5.0
_TROUBLE: tuple[type[Exception], ...] = (ConfigError, *DATABASE_ERRORS)
_PAUSES = Backoff(base_seconds=0.5, max_seconds=5.0)


class _Display(Protocol):
    def show(self, numbers: Statistics) -> None:
        """These are the latest."""

    def say(self, trouble: str) -> None:
        """Why there are no later ones."""


def watch(embedded: bool, data_dir: Path | None, *, json: bool) -> None:
    """Show them until a stop signal comes, or nobody reads any more."""
    signals = LoopSignals()
    with reach(embedded, data_dir) as settings:
        asyncio.run(_run(settings, signals, migrate=embedded, json=json))


async def _run(settings: Settings, signals: LoopSignals, *, migrate: bool, json: bool) -> None:
    watch = _Watch(settings, migrate=migrate)
    watching = asyncio.create_task(watch.run(json), name="watch")

    def stop() -> None:
        watching.cancel()

    with signals.heard_by(stop, stop, at_once=watch.abandon_output), contextlib.suppress(asyncio.CancelledError):
        await watching


class _Watch:
    """The loop: look, show, wait."""

    def __init__(self, settings: Settings, *, migrate: bool) -> None:
        self._database = database_of(settings)
        self._migrate = migrate
        self._connection: Connection | None = None
        self._is_writing = False

    def abandon_output(self) -> None:
        """For a signal handler: a write that a reader does not take goes on into nothing, rather than for ever."""
        if self._is_writing and not sys.stdout.isatty():  # at a terminal the last frame and the cursor are worth the wait
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    async def run(self, json: bool) -> None:
        """Until cancelled. Raises what the first look raises, BrokenPipeError, OutputFailed."""
        try:
            numbers = await self._look()
            with _display(json) as display:
                while True:
                    with self._writing():
                        display.show(numbers)
                    await asyncio.sleep(INTERVAL_SECONDS)
                    numbers = await self._look_again(display)
        finally:
            self._drop()

    async def _look_again(self, display: _Display) -> Statistics:
        """The next numbers, however long that takes."""

        def say(trouble: str) -> None:
            with self._writing():
                display.say(trouble)

        failures = 0
        while True:
            slow = asyncio.get_running_loop().call_later(_SLOW_SECONDS, say, f"no answer for {_SLOW_SECONDS:g} s yet")
            try:
                return await self._look()
            except _TROUBLE as error:
                trouble = "the database did not answer in time" if isinstance(error, TimeoutError) else safe_text(error)
            finally:
                slow.cancel()
            self._drop()
            failures += 1
            say(f"{trouble}; it is asked again")
            await asyncio.sleep(_PAUSES.delay_seconds(failures, random.uniform(0.5, 1)))

    async def _look(self) -> Statistics:
        async with asyncio.timeout(COMMAND_SECONDS):
            if self._connection is None:
                self._connection = await self._database.connect("command", statement_timeout_seconds=STATEMENT_SECONDS)
                if self._migrate:
                    await schema.migrate(self._connection, self._database.schema)
                else:
                    await schema.require_version(self._connection, self._database.schema)
            return await statistics(self._connection, self._database)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None


@contextlib.contextmanager
def _display(json: bool) -> Iterator[_Display]:
    if json or not can_repaint():
        yield _Lines(json)
        return
    with repainted() as repaint:
        yield _Screen(repaint)


class _Screen:
    """In place, at a terminal."""

    def __init__(self, repaint: Repaint) -> None:
        self._repaint = repaint
        self._tables: list[Table] = []
        self._shown_at = 0.0

    def show(self, numbers: Statistics) -> None:
        self._tables, self._shown_at = list(tables_of(numbers)), local_seconds()
        self._repaint(self._tables, f"every {INTERVAL_SECONDS:g} s, until Ctrl-C")

    def say(self, trouble: str) -> None:
        age_seconds = local_seconds() - self._shown_at
        # A timer calls this too, and nobody hears of it then that the terminal is gone: the next `show` tells.
        with contextlib.suppress(OutputFailed):
            self._repaint(self._tables, f"of {age_seconds:.0f} s ago: {trouble}")


class _Lines:
    """One below the other: a document a line, or blocks with an empty line between them. Trouble goes to standard error, once."""

    def __init__(self, json: bool) -> None:
        self._json = json
        self._has_shown = False
        self._said: str | None = None

    def show(self, numbers: Statistics) -> None:
        if self._said is not None:
            print_error("the database answers again")
            self._said = None
        if self._has_shown and not self._json:
            print_line("")
        self._has_shown = True
        print_statistics(numbers, self._json)
        flush()

    def say(self, trouble: str) -> None:
        if trouble != self._said:
            print_error(trouble)
            self._said = trouble
