"""What commands print: tables for a person at a terminal, tab-separated lines for a pipe, one document for `--json`.

Rich is imported only when a person looks. Data is made safe first: a job's text can neither steer a terminal
nor break a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table as RichTable

# Control characters of both sorts, line separators, what turns the direction of text, and what is no text at
# all.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_NONE = "-"
_FOLDED_CELLS = 24
"""What a column that may take several lines needs at least."""


class OutputFailed(Exception):
    """Standard output takes nothing more: a full disk, for example."""


def is_terminal() -> bool:
    """A person looks at what is printed."""
    return sys.stdout.isatty()


def print_line(text: str) -> None:
    """One line on standard output. BrokenPipeError when nobody reads any more."""
    try:
        sys.stdout.write(text + "\n")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(error.strerror) from None


def print_error(text: str) -> None:
    """One or more lines on standard error, each with the program's name."""
    for line in text.splitlines():
        _tell(f"worker: {safe(line)}")


def print_note(text: str) -> None:
    """What a person likes to know and no program reads: on standard error."""
    _tell(safe(text))


def _tell(line: str) -> None:
    """On standard error; where nobody reads that any more, the exit status has to say it all."""
    try:
        print(line, file=sys.stderr)
    except OSError:
        # What is still buffered must not be tried again at exit, which would change the status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def flush() -> None:
    """Hand over what is still buffered; the same errors as `print_line`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(error.strerror) from None


def print_json(document: object) -> None:
    """One JSON document on one line."""
    print_json_text(json.dumps(document, ensure_ascii=False))


def print_json_text(text: str) -> None:
    """The same for one that is text already; what could steer a terminal stands in it as an escape, which means the same."""
    print_line(_UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", text))


def counted(number: int, what: str) -> str:
    """`1 job`, `2 jobs`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class Table(NamedTuple):
    """What `print_rows` prints: a name a column, and rows."""

    names: Sequence[str]
    rows: Sequence[Sequence[object]]


def print_rows(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    nothing: str,
    folded: Collection[str] = (),
    spared: Sequence[str] = (),
) -> None:
    """A table for a person, `nothing` where it is empty; in a pipe tab-separated lines with all columns.

    `folded` columns take several lines where the terminal is too narrow; before that `spared` ones are left out, the first first.
    Columns without any value are left out in any case.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    if not is_terminal():
        # Names first, whatever follows: whoever pages through it or picks columns needs them.
        for row in (names, *cells):
            print_line("\t".join(row))
        return
    if not cells:
        print_line(nothing)
        return
    from rich.console import Console

    console = Console()
    console.print(_table(names, cells, width=console.width, folded=folded, spared=spared))


def _table(
    names: Sequence[str],
    cells: Sequence[Sequence[str]],
    *,
    width: int,
    folded: Collection[str] = (),
    spared: Sequence[str] = (),
) -> RichTable:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = [
        (name, column)
        for name, column in zip(names, zip(*cells, strict=True), strict=True)
        if any(cell != _NONE for cell in column)
    ]
    for unneeded in spared:
        if sum(_needed_cells(name, column, name in folded) for name, column in columns) > width:
            columns = [(name, column) for name, column in columns if name != unneeded]
    for name, column in columns:
        is_number = all(re.fullmatch(r"~?[-\d.,/]+", cell) for cell in column)
        table.add_column(
            name,
            justify="right" if is_number else "left",
            overflow="fold" if name in folded else "ellipsis",
            no_wrap=name not in folded,
        )
    for shown in zip(*(column for _, column in columns), strict=True):
        # Text, not str: square brackets in data are no markup.
        table.add_row(*(Text(cell) for cell in shown))
    return table


def _needed_cells(name: str, column: Sequence[str], is_folded: bool) -> int:
    """How wide a column has to be to be readable, the gap to the next one included."""
    from rich.cells import cell_len

    width = max(map(cell_len, (name, *column)))
    return 3 + (min(width, _FOLDED_CELLS) if is_folded else width)


def safe(text: str) -> str:
    """`text` with everything visible: control characters and their like as escapes."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape", "surrogatepass").decode(), text)


def safe_lines(text: str) -> str:
    """The same for text of several lines, whose line ends stay."""
    return "\n".join(safe(line) for line in text.split("\n"))


def _cell(value: object) -> str:
    if value is None:
        return _NONE
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return safe(str(value))


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """One line that says what is being done, for a person at a terminal; standard output stays as it is."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def say(text: str) -> None:
        print(f"\r\x1b[K{safe(text)} …", end="", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


Repaint = Callable[[Sequence[Table], str], None]


def can_repaint() -> bool:
    """A person looks, at a terminal whose lines can be replaced."""
    if not is_terminal():
        return False
    from rich.console import Console

    console = Console()
    return console.is_terminal and console.is_interactive and not console.is_dumb_terminal


@contextlib.contextmanager
def repainted() -> Iterator[Repaint]:
    """Tables below a line of text, in place of those that were shown before. The last ones stay, whole, also where the terminal
    is too low for them."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:

        def repaint(tables: Sequence[Table], line: str) -> None:
            cells = [[[_cell(value) for value in row] for row in table.rows] for table in tables]
            shown = [_table(table.names, rows, width=console.width) for table, rows in zip(tables, cells, strict=True)]
            try:
                live.update(Group(Text(safe(line)), *shown), refresh=True)
            except OSError as error:
                raise OutputFailed(error.strerror) from None

        yield repaint
