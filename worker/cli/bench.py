"""`worker bench`: figures about this version on this database, made with real daemons in schemas that are removed again."""

from __future__ import annotations

import asyncio
import json as json_text
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from worker.cli.printing import print_error, print_json, print_line, print_rows, progress_line
from worker.cli.reaching import DataDir, Embedded, Json, database_of, reach
from worker.settings import Settings
from worker.store.connection import Database

if TYPE_CHECKING:
    from worker.bench.results import Book
    from worker.bench.running import Bench, Plan

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HEAD = ("scenario", "case", "median", "min", "max", "unit")
_COST_HEAD = ("what a job used", "worker µs", "server µs", "WAL B", "dead", "stmts", "xacts")
_RATIO_HEAD = ("scenario", "ratio", "median", "min", "max")
_MOST_TASKS = 10_000
_ALL = "all"


def bench(
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCENARIO",
            help="drain latency enqueue history snapshot processes (these, if none is named), payloads faults contended shapes"
            " pruning aged ledger, or all.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs", min=100, max=10_000_000, help="Jobs a run; snapshot and pruning take ten times as many, processes twice."
        ),
    ] = 20_000,
    rows: Annotated[
        int,
        typer.Option(
            "--rows",
            min=100,
            max=100_000_000,
            help="history: finished rows, half as many wait; shapes: half for later; pruning: finished rows past retention.",
        ),
    ] = 1_000_000,
    ledger_rows: Annotated[
        int, typer.Option("--ledger-rows", min=100, max=1_000_000_000, help="ledger: rows of the long one.")
    ] = 10_000_000,
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, max=1_440, help="aged: how long it is under load.")] = 10.0,
    runs: Annotated[int, typer.Option("--runs", min=1, max=1_000, help="Runs of each case, interleaved; the median counts.")] = 3,
    tasks: Annotated[
        str, typer.Option("--tasks", metavar="NUMBERS", help="Worker tasks a daemon: drain takes each, the rest the first.")
    ] = "10,50",
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Measure this version on this database.

    drain: without and with effect, beside one job at a time and beside what PostgreSQL can do; latency: idle pick-up; enqueue:
    single commits with and without our trigger, bulk beside COPY; history: finished and waiting rows; snapshot: under an old one;
    processes: 1, 2 and 4; payloads: by size; faults: one failing effect among 101; contended: shared rows; shapes: jobs for later,
    queues, priorities; pruning: while old rows are removed; aged: a single INSERT after minutes of load; ledger: a long one.
    docs/benchmarks.md says how each counts.

    In schemas of its own (worker_bench_…), removed at the end. It takes the machine and the server for some minutes: not for a
    server that others need meanwhile.
    """
    from worker.bench.running import Plan

    plan = Plan(
        jobs=jobs,
        rows=rows,
        ledger_rows=ledger_rows,
        minutes=minutes,
        runs=runs,
        tasks=_tasks(tasks),
        scenarios=_scenarios(scenarios or []),
    )
    with (
        reach(embedded, data_dir) as settings,
        tempfile.TemporaryDirectory(prefix="reliable-worker-bench-") as directory,
        progress_line() as say,
    ):
        made, document, failures = _run(settings, plan, Path(directory), say)
    if json:
        print_json(document)
    else:
        _print_tables(made.book, document)
    for failure in failures:
        print_error(failure)
    if failures:
        raise typer.Exit(1)


def _run(settings: Settings, plan: Plan, directory: Path, say: Callable[[str], None]) -> tuple[Bench, dict[str, object], list[str]]:
    import uvloop

    from worker.bench import suite

    def in_schema(name: str) -> Database:
        return database_of(settings.model_copy(update={"schema_name": name}))

    async def interruptible() -> tuple[Bench, dict[str, object], list[str]]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            # Once: what follows is cleaning up, under time limits of its own.
            for number in STOP_SIGNALS:
                loop.add_signal_handler(number, lambda: None)
            task.cancel()

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, stop)
        return await suite.run(settings, plan, directory=directory, database_of=in_schema, say=say)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(interruptible())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def _scenarios(names: Sequence[str]) -> tuple[str, ...]:
    from worker.bench.suite import SCENARIOS, USUAL

    for name in names:
        if name not in (*SCENARIOS, _ALL):
            raise typer.BadParameter(f"{name!r} is none of {', '.join(SCENARIOS)}, {_ALL}", param_hint="SCENARIO")
    if _ALL in names:
        return tuple(SCENARIOS)
    return tuple(dict.fromkeys(names)) or USUAL


def _tasks(text: str) -> tuple[int, ...]:
    numbers = [int(part) if part.strip().isascii() and part.strip().isdigit() else 0 for part in text.split(",")]
    if not all(1 <= number <= _MOST_TASKS for number in numbers):
        raise typer.BadParameter(f"must be numbers from 1 to {_MOST_TASKS}, as in 10,50", param_hint="--tasks")
    return tuple(dict.fromkeys(numbers))


def _print_tables(book: Book, document: dict[str, object]) -> None:
    print_rows(_HEAD, book.figure_rows(), nothing="nothing was measured", folded=("case",))
    print_rows(_COST_HEAD, book.cost_rows(), nothing="", folded=("what a job used",))
    print_rows(_RATIO_HEAD, book.ratio_rows(), nothing="", folded=("ratio",))
    for name in ("machine", "database", "libraries", "daemon_settings", "plan", "not_measured"):
        value = document[name]
        if value:
            print_line(f"{name}: {json_text.dumps(value, ensure_ascii=False)}")
    print_line(f"time: {document['timing']}")
    print_line(
        "a job: medians; CPU of the worker's process and of the whole server (in ticks of the kernel), WAL, dead rows, statements"
        " (effects left out), transactions"
    )
