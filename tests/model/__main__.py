"""Run every model, sound and broken on purpose: `python -m tests.model`, with `--deep` far beyond what CI has time for."""

from __future__ import annotations

import argparse

from tests.model.checker import explore
from tests.model.runs import DEEP, MUTANTS, SOUND


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description="Visit every state of the protocol's models.")
    parser.add_argument("--deep", action="store_true", help="larger bounds: a few minutes and gigabytes")
    status = 0
    for name, protocol in (DEEP if parser.parse_args().deep else SOUND).items():
        found = explore(protocol)
        print(f"{name}: {found.states:,} states, {found.steps:,} steps, {found.seconds:.1f} s")
        if found.breach is not None:
            print(f"BROKEN: {found.breach.promise}", *found.breach.trace, sep="\n    ")
            status = 1
    for mutant in MUTANTS:
        found = explore(mutant.protocol)
        if found.breach is None:
            print(f"{mutant.name} → NOT FOUND")
            status = 1
        else:
            print(f"{mutant.name} → {found.breach.promise}", *found.breach.trace, sep="\n    ")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
