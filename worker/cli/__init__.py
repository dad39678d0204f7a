"""The commands: they parse, print, and turn what went wrong into an exit status.

0 done · 1 the answer is no, or something broke · 2 wrong usage or input · 69 the database cannot be reached ·
78 the configuration, the schema or a grant has to be changed first. `worker run` has 75 besides: stopped, but
something was left to lease expiry. `worker lease run` ends as its command does; 73 when the lease was not to be had, 75 when it
was lost.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from worker import ending
from worker.cli import bench, demo, enqueue, generator, jobs, lease, printing, process, serve, stats, torture
from worker.errors import ConfigError, DatabaseUnavailable
from worker.masking import safe_text
from worker.server_programs import ClusterError
from worker.store.connection import DATABASE_ERRORS, ConnectFailed, is_unavailable, sqlstate
from worker.version import VERSION

EX_UNAVAILABLE = 69
EX_CONFIG = 78
_INSUFFICIENT_PRIVILEGE = "42501"
_IN_THE_WAY = ("40P01", "55P03")


class Commands(TyperGroup):
    """All commands; the one place where exceptions become exit statuses."""

    def invoke(self, ctx: Any) -> object:  # typer brings its own copy of click's Context, or click's
        with exit_statuses():
            return super().invoke(ctx)


@contextlib.contextmanager
def exit_statuses() -> Iterator[None]:
    """Says on standard error what went wrong, without traceback, and leaves with the status that means it."""
    try:
        yield
        printing.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`). What is still buffered must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except printing.OutputFailed as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _failure(1, f"cannot write the output: {error}") from None
    except ConfigError as error:
        raise _failure(EX_CONFIG, "\n".join(error.lines)) from None
    except (DatabaseUnavailable, ClusterError) as error:
        raise _failure(EX_UNAVAILABLE, str(error)) from None
    except TimeoutError:
        raise _failure(EX_UNAVAILABLE, "the database did not answer in time") from None
    except DATABASE_ERRORS as error:
        code = sqlstate(error)
        if isinstance(error, ConnectFailed) and error.refused:
            raise _failure(EX_CONFIG, safe_text(error)) from None
        if is_unavailable(error):
            raise _failure(EX_UNAVAILABLE, safe_text(error)) from None
        if code == _INSUFFICIENT_PRIVILEGE:
            raise _failure(EX_CONFIG, f"{safe_text(error)}: see deploy/grants.sql") from None
        if code in _IN_THE_WAY:
            raise _failure(1, f"{safe_text(error)}: another transaction is in the way, try again when it has ended") from None
        raise _failure(1, safe_text(error) + (f" (SQLSTATE {code})" if code else "")) from None


def _failure(status: int, text: str) -> typer.Exit:
    printing.print_error(text)
    return typer.Exit(status)


app = typer.Typer(
    name="worker",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    # Rich stays away: the daemon loads nothing that only serves a person.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        printing.print_line(f"reliable-worker {VERSION}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Background jobs in PostgreSQL: leases, fencing, and effects that are committed once."""


app.command("run")(process.run)
app.command("demo")(demo.demo)
app.command("migrate")(process.migrate)
app.command("enqueue")(enqueue.enqueue)
app.command("check")(process.check)
app.command("health")(process.health)
app.add_typer(jobs.app, name="jobs")
app.add_typer(lease.app, name="lease")
app.command("stats")(stats.stats)
app.add_typer(generator.app, name="generator")
app.command("serve")(serve.serve)
app.command("bench")(bench.bench)
app.command("torture")(torture.torture)


def _open_standard_descriptors() -> None:
    """Let 0, 1 and 2 lead nowhere where they are closed: else the next file or socket gets that number, and what is meant for a
    person goes into it."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def main() -> None:
    """The entry point of the command line."""
    _open_standard_descriptors()
    for stream in (sys.stdout, sys.stderr):
        # Whatever the locale can hold: an escape is better than a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="worker")
    except SystemExit as error:
        ending.wait_for_threads(error.code if isinstance(error.code, int) else 0 if error.code is None else 1)
        raise
