"""`worker torture`: faults on purpose, and a check of what the database wrote down meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from worker.cli.printing import print_error, print_json, print_line, print_rows, progress_line, safe
from worker.cli.reaching import DataDir, Embedded, Json, database_of
from worker.settings import Settings, load_settings

if TYPE_CHECKING:
    from worker.torture.breaches import Findings
    from worker.torture.running import Wish
    from worker.torture.server import OwnServer

SCHEMA_PREFIX = "worker_torture_"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def torture(
    database_url: Annotated[
        str | None,
        typer.Argument(
            metavar="[DATABASE_URL]",
            help="The database, which `ps` then shows; left out, the variable DATABASE_URL is used.",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=0.05, max=10_000, help="How long faults are injected.")] = 2.0,
    processes: Annotated[int, typer.Option("--processes", min=2, max=100, help="Daemons.")] = 4,
    faults: Annotated[
        str | None,
        typer.Option("--faults", metavar="NAMES", help="Faults, with commas between them.", show_default="all there can be"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of the plan; the same seed, the same faults.", show_default="random")
    ] = None,
    lease: Annotated[float, typer.Option("--lease", metavar="SECONDS", min=2, max=60, help="The daemons' lease.")] = 5.0,
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Inject faults into daemons under load, then check that no promise was broken.

    In a schema of its own (worker_torture_…), removed at the end. Exit status 1 and the offending rows on any breach. With
    --embedded on a PostgreSQL of its own, which is gone afterwards, so that the server may be crashed as well; so is the empty or
    new directory that --data-dir names for it.
    """
    from worker.torture.running import Wish

    if embedded and database_url is not None:
        raise typer.BadParameter("a URL and --embedded exclude each other", param_hint="DATABASE_URL")
    if data_dir is not None and not embedded:
        raise typer.BadParameter("it needs --embedded", param_hint="--data-dir")
    wish = Wish(
        seconds=minutes * 60,
        processes=processes,
        faults=_faults(faults),
        seed=random.SystemRandom().getrandbits(31) if seed is None else seed,
        lease_seconds=lease,
    )
    with (
        _reached(embedded, data_dir, database_url) as (settings, own_server),
        tempfile.TemporaryDirectory(prefix="reliable-worker-torture-") as directory,
        progress_line() as say,
    ):
        findings, document, left_behind = _run(wish, settings, own_server, Path(directory), say, chosen=faults is not None)
    for text in left_behind:
        print_error(text)
    if json:
        print_json(document)
    else:
        _print_report(document)
    if findings.breaches:
        print_error(f"{len(findings.breaches)} breaches, seed {wish.seed}")
    if findings.breaches or left_behind:
        raise typer.Exit(1)
    if not json:
        print_line(f"no breach, seed {wish.seed}")


@contextlib.contextmanager
def _reached(embedded: bool, data_dir: Path | None, database_url: str | None) -> Iterator[tuple[Settings, OwnServer | None]]:
    if not embedded:
        yield (load_settings() if database_url is None else load_settings(database_url=database_url)), None
        return
    from worker.torture.server import own_server

    with own_server(data_dir) as server:
        yield load_settings(database_url=server.dsn), server


def _faults(text: str | None) -> tuple[str, ...]:
    from worker.torture.plan import FAULTS

    if text is None:
        return tuple(FAULTS)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FAULTS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(FAULTS)}", param_hint="--faults")
    return tuple(dict.fromkeys(names))


def _run(
    wish: Wish,
    settings: Settings,
    own_server: OwnServer | None,
    directory: Path,
    say: Callable[[str], None],
    *,
    chosen: bool,
) -> tuple[Findings, dict[str, object], list[str]]:
    import uvloop

    from worker.torture import suite
    from worker.torture.running import TortureFailed

    database = database_of(settings.model_copy(update={"schema_name": f"{SCHEMA_PREFIX}{secrets.token_hex(4)}"}))

    async def interruptible() -> tuple[Findings, dict[str, object], list[str]]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            # Once: what follows is cleaning up, under time limits of its own.
            for number in _STOP_SIGNALS:
                loop.add_signal_handler(number, lambda: None)
            task.cancel()

        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, stop)
        return await suite.run(wish, database, own_server=own_server, directory=directory, say=say, all_or_nothing=chosen)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(interruptible())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        except TortureFailed as error:
            print_error(str(error))
            raise typer.Exit(1) from None


def _print_report(document: dict[str, Any]) -> None:
    faults, unseen, returns = document["faults"], document["faults_without_effect"], document["return_seconds"]
    print_rows(
        ("fault", "times", "without effect", "alone", "nine tenths back after s (median)", "(worst)"),
        [
            (name, faults.get(name, 0), unseen.get(name, 0), *_returned(returns.get(name)))
            for name in sorted(faults.keys() | unseen.keys())
        ],
        nothing="no fault was injected",
    )
    print_rows(("what", "count"), [*document["counts"].items()], nothing="")
    recovery = document["recovery_seconds"]
    for name in ("version", "server_version", "where", "seed", "seconds", "processes", "lease_seconds", "acknowledged"):
        print_line(f"{name}: {document[name]}")
    print_line(f"stale attempts refused: {document['stale_attempts_refused']}")
    print_line(
        f"recovery after SIGKILL: {recovery['jobs']} jobs, p50 {_seconds(recovery['p50'])}, p99 {_seconds(recovery['p99'])},"
        f" limit {_seconds(recovery['limit'])}"
    )
    late = document["reaped_after_expiry_seconds"]
    print_line(
        f"reaped after their leases were over: p50 {_seconds(late['p50'])}, p99 {_seconds(late['p99'])},"
        f" looked for every {_seconds(late['limit'])}"
    )
    for name, why in document["skipped"].items():
        print_line(f"skipped {name}: {why}")
    print_rows(
        ("rule", "tried", "breaches", "promise"),
        [(name, rule["tried"], rule["breaches"], rule["promise"]) for name, rule in document["rules"].items()],
        nothing="",
        folded=("promise",),
    )
    if untried := [name for name, rule in document["rules"].items() if not rule["tried"]]:
        print_line(f"nothing to try these rules on has happened, so nothing is proved of them: {', '.join(untried)}")
    for breach in document["breaches"]:
        print_line(f"BREACH {breach['rule']}: {breach['text']}")
        for row in breach["rows"]:
            print_line(f"    {safe(str(row))}")


def _returned(times: dict[str, Any] | None) -> tuple[object, object, object]:
    if times is None:
        return 0, None, None
    return times["times"], *(f"{times[name]:.1f}" if times[name] is not None else "not" for name in ("median", "worst"))


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
