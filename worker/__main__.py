"""The commands `worker` and `reliable-worker`, and `python -m worker`."""

from __future__ import annotations

import os
import signal
import sys

_STOPPABLE = ("run", "serve", "generator")


def main() -> None:
    """Run the command of this process's arguments; does not return."""
    if os.getpid() == 1:
        # The kernel keeps from process 1 every signal that has no handler, and the rest takes a third of a second to import.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _end)
    from worker.cli import main as run_command

    run_command()


def _end(number: int, _frame: object) -> None:
    """Nothing is held yet: a clean stop for what runs until it is stopped, for anything else what a signal without handler does."""
    os._exit(0 if sys.argv[1:2] and sys.argv[1] in _STOPPABLE else 128 + number)


if __name__ == "__main__":
    main()
