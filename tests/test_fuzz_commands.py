"""The command line, given anything: an exit status that is documented, never a traceback, what went wrong on standard error, and
standard output that a program can read.

In this process, which makes hundreds of commands a matter of seconds. What would run for long (a daemon, a server, a benchmark) is
left out behind its options.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer.main
from hypothesis import event, given, note
from hypothesis import strategies as st

from tests.commands import Ended, worker_in_this_process
from tests.fuzzing import EDGES, GIVEN, tries
from tests.servers import Server
from worker import cli

STATUSES = {0, 1, 2, 73}
"""Of a command whose settings are right and whose database is there; 73 is `lease run`'s. 69, 75 and 78 have other causes."""

# fmt: off
TEXTS = st.sampled_from(["a", "k", "default"]) | EDGES | st.text(GIVEN, max_size=12) | st.sampled_from([
    "a", "1", "7", "message", "ready", "dead", "running", "auto:x", "x" * 600, "@/dev/null", "@/", "@/none", "-", "--", "\udcff",
])
JSONS = st.sampled_from(["{}", "1", '{"a": 1}']) | st.sampled_from([
    "[]", "null", '{"message": "m"}', "{", "NaN", "1e999", '"\\u0000"', '"\\ud800"', "[" * 2000, "9" * 5000, "-", "@/",
])
NUMBERS = st.integers(1, 9).map(str) | st.integers(-3, 12).map(str) | st.sampled_from([
    "nan", "inf", "-inf", "1e400", "1e-400", "0.5", "99999999999999999999", "9223372036854775807", "١", "1_0",
])
MOMENTS = st.sampled_from([
    "2030-01-31T08:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2030-01-31", "now", "2030-W01-1T00:00Z",
])
LINES = st.lists(JSONS | st.sampled_from([
    '{"payload": 1}', '{"payload": 1, "key": "k"}', '{"payload": 1, "run_at": 5}', '{"payload": 1, "run_at": "x"}', "", " ",
    '{"payload": 1, "priority": 1e5}', '{"payload": 1, "x\\u001b": 1}', '{"payload": 1, "key": "\\ud800"}',
]), max_size=5).map(lambda lines: "\n".join(lines).encode())
# fmt: on
VALUES = TEXTS | JSONS | NUMBERS | MOMENTS
STDIN = LINES | st.binary(max_size=30) | st.sampled_from([b"", b"{}", b"\xff\xfe", b"\xef\xbb\xbf1"])


@dataclass(frozen=True, slots=True)
class Parameter:
    words: st.SearchStrategy[list[str]]
    is_argument: bool


@dataclass(frozen=True, slots=True)
class Command:
    path: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    def lines(self) -> st.SearchStrategy[list[str]]:
        """Its arguments and some of its options in any order, with values that may or may not be what is meant; `--embedded` among
        them. Now and then an argument is missing, or there are words too many."""
        options = [one.words for one in self.parameters if not one.is_argument]
        some = (
            st.lists(st.sampled_from(options), max_size=4, unique_by=id).flatmap(lambda chosen: st.tuples(*chosen))
            if options
            else NONE
        )
        arguments = st.tuples(*(one.words for one in self.parameters if one.is_argument))
        more = st.sampled_from([False] * 15 + [True]).flatmap(
            lambda is_more: st.lists(VALUES.map(lambda word: [word]), max_size=2) if is_more else NONE
        )
        parts = st.tuples(some, arguments, more).flatmap(lambda parts: st.permutations([part for group in parts for part in group]))
        return parts.map(lambda parts: [*self.path, *(word for part in parts for word in part)])


NONE: st.SearchStrategy[Any] = st.just(())
USUAL = {
    **dict.fromkeys(("id", "ids", "fence", "limit", "priority", "max_attempts", "delay", "ttl", "wait", "port", "seed"), NUMBERS),
    **dict.fromkeys(
        ("rate", "every", "least", "most", "jobs", "rows", "ledger_rows", "minutes", "runs", "processes", "lease"), NUMBERS
    ),
    **dict.fromkeys(("payload", "metadata"), JSONS),
    "at": MOMENTS,
    "state": st.sampled_from(["ready", "dead", "active", "released"]),
    "scenarios": st.sampled_from(["drain", "all", "shapes"]),
    "faults": st.sampled_from(["kill", "kill,freeze", ""]),
}
"""What is meant by a parameter, or near to it."""


def parameter(one: Any) -> Parameter:
    if getattr(one, "is_flag", False):
        return Parameter(st.sampled_from(one.opts).map(lambda name: [name]), False)
    usual = USUAL.get(one.name, TEXTS)
    values = st.one_of(usual, usual, usual, VALUES)
    if one.param_type_name == "option":
        return Parameter(st.tuples(st.sampled_from(one.opts), values).map(list), False)
    most = 3 if one.nargs == -1 else 1
    return Parameter(st.lists(values, min_size=1, max_size=most) | st.lists(values, max_size=most), True)


def commands() -> list[Command]:
    found = []

    def visit(command: Any, path: tuple[str, ...]) -> None:
        for name, inner in sorted(getattr(command, "commands", {}).items()):
            visit(inner, (*path, name))
        found.append(Command(path, tuple(map(parameter, command.params))))

    visit(typer.main.get_command(cli.app), ())
    return found


COMMANDS = {" ".join(command.path): command for command in commands()}

HOSTILE_ROWS = """
SELECT enqueue_job(
    'k' || chr(27) || '[2J', '{"a": [1e300, 1e-300]}', E'a\\nb\\tc' || chr(8238) || chr(1564),
    E'q\\r\\n', 5, 'infinity');
SELECT enqueue_job('k', 'null', '-infinity', run_at => '-infinity');
SELECT enqueue_job('k', '"\\ufffd"', 'far', run_at => '294276-12-31');
SELECT enqueue_job('k', '1e2000', 'big', run_at => '4713-01-01 BC', max_attempts => 2147483647);
SELECT cancel_job(id) FROM jobs WHERE idempotency_key = 'big';
UPDATE jobs SET state = 'succeeded', completed_at = 'infinity', started_at = '-infinity', result = '1e2000'
WHERE idempotency_key = 'far';
INSERT INTO jobs (kind, payload, state, lease_owner, lease_until, started_at, attempts)
VALUES ('k', '[]', 'running', E'o\\n', 'infinity', 'infinity', 1), ('k', '[]', 'running', 'o', '-infinity', '-infinity', 1);
INSERT INTO job_failures SELECT id, 1, 1, E'w\\n', 'infinity', 'error', chr(27) FROM jobs;
INSERT INTO processes VALUES (E'p\\n', chr(27), '', 1, '', '{"q,r"}', 1, 1, '-infinity', 'infinity', 'infinity');
SELECT acquire_lease('a', E'h\\n', 3600, metadata => '{"n": 1e2000}');
SELECT acquire_lease('b', 'h');
UPDATE leases SET expires_at = 'infinity' WHERE resource = 'b';
"""


@pytest.fixture(scope="module")
def directory(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the commands run, on a database with rows that nobody would expect; nothing here lasts."""
    directory = tmp_path_factory.mktemp("commands")
    with server.database(template=server.template) as url, pytest.MonkeyPatch.context() as patch:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(HOSTILE_ROWS)
        patch.chdir(directory)
        patch.setenv("DATABASE_URL", url)
        patch.setenv("WORKER_RUNTIME_DIR", str(directory))
        patch.setenv("COLUMNS", "100")
        leave_out_what_lasts(patch, url)
        yield directory


def leave_out_what_lasts(patch: pytest.MonkeyPatch, url: str) -> None:
    class Cluster:
        dsn = url

        def stop(self) -> None:
            """Nothing has been started."""

    class Guardian:
        start = classmethod(lambda cls: cls())

        def end(self) -> None:
            """Nor forked."""

    async def no_command(*arguments: object, **more: object) -> int:
        return 0

    def nothing(*arguments: object, **more: object) -> int:
        return 0

    def stopped(*arguments: object, **more: object) -> None:
        raise typer.Exit(1) from None

    patch.setattr("worker.cli.reaching.start_cluster", lambda data_dir: Cluster())
    patch.setattr("worker.daemon.run", nothing)
    patch.setattr("worker.generator_process.run", nothing)
    patch.setattr("worker.api.server.run", nothing)
    patch.setattr("worker.cli.watching.watch", nothing)
    patch.setattr("worker.guardian.Guardian", Guardian)
    patch.setattr("worker.cli.lease._run", no_command)
    patch.setattr("worker.cluster.temporary_cluster", stopped)
    patch.setattr("worker.torture.server.own_server", stopped)
    patch.setattr("worker.cli.bench._run", stopped)
    patch.setattr("worker.cli.torture._run", stopped)


def assert_ended_well(ended: Ended, arguments: list[str]) -> None:
    note(f"{arguments} -> {ended}"[:2000])
    event(f"status {ended.status}")
    assert ended.status in STATUSES
    assert "Traceback" not in ended.err
    if ended.status == 2:
        assert ended.err.startswith("Usage: worker")
        assert ended.out == ""
    if "--json" in arguments and ended.status in (0, 1) and not {"-h", "--help"} & {*arguments}:
        for line in ended.out.splitlines():
            json.loads(line, parse_constant=pytest.fail)
    own = "\n\t" + ("".join(arguments) if ended.status == 2 else "")  # a usage error repeats what was given
    assert not [one for one in ended.out + ended.err if steers(one) and one not in own], "nothing steers a terminal"


def steers(character: str) -> bool:
    """It moves the cursor, ends a line, or turns the direction of text."""
    return (
        unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        or character in "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    )


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_any_arguments_end_with_a_documented_status_and_no_traceback(directory: Path, name: str) -> None:
    @tries(15)
    @given(arguments=COMMANDS[name].lines(), stdin=STDIN)
    def check(arguments: list[str], stdin: bytes) -> None:
        assert_ended_well(worker_in_this_process(*arguments, stdin=stdin), arguments)

    check()
