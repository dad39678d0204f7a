"""The README says what is true: its commands run, its code works, its tables are the program's own."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

import worker
from tests.commands import parse
from tests.commands import worker as run_worker
from tests.documents import BLOCKS, FLOWING, README, block, code, table
from tests.processes import ROOT, Daemon, environment
from tests.psql import psql
from worker.cli import app as cli
from worker.cluster import start_or_adopt
from worker.events import ALL
from worker.setting_rules import plain
from worker.settings import documented_settings, load_settings

# --- commands


def shown_commands() -> list[list[str]]:
    """The words after `worker` of every command line in a shell block."""
    commands = []
    for each in BLOCKS:
        if each.language != "sh":
            continue
        for line in each.text.replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            while words and "=" in words[0]:
                words = words[1:]
            if words and words[0] == "worker":
                commands.append(words[1:])
    return commands


def test_every_command_line_in_a_block_parses() -> None:
    commands = shown_commands()
    assert len(commands) >= 12
    for arguments in commands:
        parse(arguments)


def test_a_command_line_that_does_not_exist_would_be_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["jobs", "list", "--everything"])
    with pytest.raises(Exception, match="No such command"):
        parse(["schedule", "list"])


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands below one, with their names."""
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from walk(below, (*path, name))
    else:
        yield path, command


def test_the_table_of_commands_is_complete_and_its_options_exist() -> None:
    commands = dict(walk(typer.main.get_command(cli)))
    documented = set()
    for first, rest in table("| command | does |"):
        words = code(first).split()[1:]
        path = tuple(word for word in words if word.isalpha() and word.islower())
        documented.add(path)
        options = {option for parameter in commands[path].params for option in parameter.opts}
        for option in re.findall(r"--[a-z-]+", first + rest):
            assert option in options, (path, option)
    assert documented == set(commands)


def test_commands_in_the_prose_exist() -> None:
    commands = dict(walk(typer.main.get_command(cli)))
    named = re.findall(r"`worker ([^`]+)`", FLOWING)
    assert len(named) >= 15
    for text in named:
        words = text.split()
        path = next(words_of for words_of in (tuple(words[:2]), tuple(words[:1])) if words_of in commands)
        options = {option for parameter in commands[path].params for option in parameter.opts}
        assert {word for word in words if re.match("--[a-z]", word)} <= options, text


def test_make_and_its_script_know_the_commands_that_are_named() -> None:
    targets = set(re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())
    named = re.findall(r"(?:`|^)make (\w+)", README, re.MULTILINE)
    assert {"run", "test", "lint"} <= set(named) <= targets
    script = (ROOT / "make.py").read_text()
    for name in re.findall(r"`python3 make\.py (\w+)`", FLOWING):
        assert f'"{name}":' in script


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory in which the README's shell blocks run as printed: with a .venv to activate."""
    bin_directory = tmp_path / ".venv" / "bin"
    bin_directory.mkdir(parents=True)
    program = bin_directory / "worker"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m worker "$@"\n')
    program.chmod(0o755)
    (bin_directory / "activate").write_text(f"PATH={shlex.quote(str(bin_directory))}:$PATH\n")
    return tmp_path


def shell(text: str, directory: Path, environ: Mapping[str, str]) -> str:
    """What a fresh shell prints that runs these lines as they stand."""
    done = subprocess.run(
        ["bash", "-eu", "-c", text], cwd=directory, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_three_commands_work_when_pasted_into_a_fresh_shell(checkout: Path, data_dir: Path) -> None:
    state = data_dir.parent / "state"
    environ = environment(checkout, XDG_STATE_HOME=str(state))
    state.mkdir()
    state.chmod(0o755)
    first = Daemon(["bash", "-eu", "-c", block("sh", "worker run --embedded")], environ, checkout, "first")
    try:
        first.wait_for_event("daemon_ready", 60)
        (enqueued, *jobs) = shell(block("sh", "worker enqueue --embedded"), checkout, environ).splitlines()
        assert json.loads(enqueued) == {"id": 1, "created": True, "state": "ready"}
        assert jobs[1].startswith("1\t")
        first.wait_for_event("job_succeeded", job_id=1)

        printed = first.stderr.splitlines()[0]
        assert printed.startswith("DATABASE_URL=")
        again = shell(f". .venv/bin/activate\nexport {printed}\nworker jobs list", checkout, environ)
        assert again.splitlines()[1].split("\t")[:3] == ["1", "succeeded", "message"]
        url = shlex.split(printed)[0].partition("=")[2]
        assert psql(url, "-At", "-c", "SELECT message FROM processed_messages").stdout == "hello\n"
        # Ctrl-C goes to all that the terminal runs.
        os.killpg(first.pid, signal.SIGINT)
        assert first.wait() == 0
    finally:
        first.kill()
        start_or_adopt(state / "reliable-worker").stop()


# --- tables


def test_the_table_of_settings_is_the_programs_own() -> None:
    documented = [
        [
            f"`{setting.variable}`",
            setting.default,
            "" if setting.least is None or setting.most is None else f"{setting.least:g} – {plain(setting.most)}",
        ]
        for setting in documented_settings()
    ]
    rows = table("| setting | default | from – to | what it is |")
    assert [row[:3] for row in rows] == documented
    assert all(row[3] for row in rows)


def test_the_table_of_events_is_the_programs_own() -> None:
    rows = table("| event | level | means |")
    assert sorted((code(row[0]), row[1]) for row in rows) == sorted((event.name, event.level) for event in ALL)


def test_an_event_has_the_fields_that_its_line_names() -> None:
    fields = {event.name: event.fields for event in ALL}
    for first, _, means in table("| event | level | means |"):
        for name in re.findall(r"`(\w+)`", means):
            assert name in fields[code(first)], (first, name)


def test_a_default_stop_takes_at_most_what_it_says() -> None:
    settings = load_settings({"DATABASE_URL": "postgresql://localhost/app"})
    budget = settings.shutdown_grace_seconds + settings.lease_margin_seconds + 2 * settings.query_timeout_seconds
    assert f"within grace + margin + 2 × query time-out, {budget:g} s by default" in FLOWING
    assert f"for the grace ({settings.shutdown_grace_seconds:g} s)" in FLOWING


def status_of(*arguments: str, directory: Path, **variables: str) -> int:
    return run_worker(*arguments, directory=directory, **variables).returncode


def test_the_exit_statuses_mean_what_their_table_says(database_url: str, empty_database_url: str, tmp_path: Path) -> None:
    seen = {
        status_of("migrate", "--check", directory=tmp_path, DATABASE_URL=database_url),
        status_of("migrate", "--check", directory=tmp_path, DATABASE_URL=empty_database_url),
        status_of("jobs", "list", "--everything", directory=tmp_path, DATABASE_URL=database_url),
        status_of("stats", directory=tmp_path, DATABASE_URL="postgresql://nobody@127.0.0.1:1/none"),
        # A handler that refuses to end is for the tests of the stop: 75.
        status_of("run", directory=tmp_path, DATABASE_URL=database_url, WORKERS="many"),
        status_of("run", directory=tmp_path, DATABASE_URL=database_url, WORKER_HANDLERS="no.such:handlers"),
        status_of("lease", "acquire", "nightly", directory=tmp_path, DATABASE_URL=database_url),
        status_of("lease", "run", "nightly", "--", "true", directory=tmp_path, DATABASE_URL=database_url),
    }
    assert seen == {0, 1, 2, 69, 73, 78}
    assert [int(row[0]) for row in table("| exit status | means |")] == sorted(seen | {75})


# --- the rest


def test_the_derived_image_has_four_lines_that_hadolint_accepts() -> None:
    text = block("dockerfile", "FROM reliable-worker")
    lines = text.splitlines()
    assert len(lines) == 4
    environ = dict(line.removeprefix("ENV ").split("=", 1) for line in lines if line.startswith("ENV "))
    assert load_settings(environ | {"DATABASE_URL": "postgresql://localhost/app"}).handlers == "app.jobs:handlers"
    assert "WORKDIR /app\n" in (ROOT / "Dockerfile").read_text(), "the directory that is importable"
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not in this environment; it has no wheel for this platform")
    done = subprocess.run([hadolint, "--no-color", "-"], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


FLOORS = (
    "clock domain domain_json effect_sql errors events generation holding lease_terms masking measures new_job"
    " setting_rules settings version",
    "cancellation log_capture log_lines log_sink logs patience store",
    "attempt builtin handlers job lifespans owntransaction",
    "claimer committer committing demand ending generator group_transaction health hunger job_renewals keeper last_word lease_desk"
    " lease_transport listener lost_claims name_renewals"
    " places pool reaching reaper retention rights stop_signals watch writer",
    "api assembly bench cluster daemon databases drain embedded generator_process guardian http_calls lease_http task_calls"
    " task_client"
    " lease_command leases server_process server_programs systemd testing torture",
    "__main__ cli",
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}


def test_the_floors_are_as_shown() -> None:
    lines = block("text", "0  domain").splitlines()
    assert [line[0] for line in lines] == ["5", "4", "3", "2", "1", "0"]
    for line in lines:
        names = re.findall(r"(\w+)(?:/| \(\w+\))?(?: ·|$)", line[3:66].strip())
        assert names
        for name in names:
            assert FLOOR_OF[name] == int(line[0]), name


def imports(path: Path) -> Iterator[str]:
    """What a module imports when it runs, as dotted names; not what only type checkers read."""
    tree = ast.parse(path.read_text())
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    left_out = {id(below) for node in for_types for below in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ([f"worker.{name.name}" for name in node.names] if node.module == "worker" else [node.module])


def test_imports_point_down_only_and_each_driver_has_one_home() -> None:
    for path in sorted((ROOT / "worker").rglob("*.py")):
        name = path.relative_to(ROOT / "worker").parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        assert name in FLOOR_OF, f"{name} has no floor"
        for module in imports(path):
            first, _, rest = module.partition(".")
            if first == "worker":
                assert FLOOR_OF[rest.partition(".")[0]] <= FLOOR_OF[name], f"{path.name} imports {module}"
            assert first != "asyncpg" or name == "store", path
            assert first != "structlog" or name == "logs", path
            assert first != "asyncio" or FLOOR_OF[name] > 0, path


def test_nothing_that_it_does_not_have_yet_is_there_already() -> None:
    missing = README.partition("## What it does not have yet")[2].partition("## ")[0]
    assert "schedules" in missing.lower()
    commands = {path[0] for path, _ in walk(typer.main.get_command(cli))}
    assert not commands & {"schedule", "cron"}


def test_it_names_the_public_names_only_and_stays_readable() -> None:
    imported = re.findall(r"^from worker import (.+)$", README, re.MULTILINE)
    assert imported
    for line in imported:
        assert {name.strip() for name in line.split(",")} <= set(worker.__all__)
    assert max(map(len, README.splitlines())) <= 200
    assert len(README.splitlines()) <= 640
