"""The README says what is true: its commands run, its code works, its tables are the program's own, its links lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import asyncpg
import psycopg
import pytest
import typer
from psycopg.rows import dict_row

import worker
from tests.inprocess import running, seen
from tests.processes import Daemon, await_for, environment, wait_for
from tests.psql import psql
from worker import Settings, Worker
from worker.cli import app as cli
from worker.cluster import start_or_adopt
from worker.events import ALL, EFFECT_ALREADY_APPLIED
from worker.job import Job
from worker.new_job import new_job_from
from worker.setting_rules import plain
from worker.settings import documented_settings, load_settings
from worker.store.connection import SessionLimits
from worker.testing import run_job

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SENT = "CREATE TABLE sent (key text PRIMARY KEY, body text NOT NULL)"


class Block(NamedTuple):
    """A fenced block. `marker` is the comment on the line before it, if there is one."""

    language: str
    marker: str
    text: str


def read_blocks() -> list[Block]:
    pattern = r"(?:^<!-- (?P<marker>.+?) -->\n)?^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^ *```$"
    return [
        Block(found["language"], found["marker"] or "", re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE))
        for found in re.finditer(pattern, README, re.MULTILINE | re.DOTALL)
    ]


BLOCKS = read_blocks()
PROSE = re.sub(r"^ *```\w+\n.*?^ *```$", "", README, flags=re.MULTILINE | re.DOTALL)
FLOWING = " ".join(PROSE.split())


def block(language: str, containing: str) -> str:
    """The one block of this language with this text in it."""
    (text,) = [each.text for each in BLOCKS if each.language == language and containing in each.text]
    return text


def table(head: str) -> list[list[str]]:
    """The cells of the table whose first line is `head`."""
    start = README.index(f"\n{head}\n") + 1
    lines = README[start:].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines[2:]]


def code(text: str) -> str:
    return text.strip("`")


# --- links


def anchor(heading: str) -> str:
    """How a heading is linked to."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_link_leads_to_a_file_or_a_heading() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) >= 10
    for link in links:
        path, _, fragment = link.partition("#")
        assert (ROOT / path).is_file() or not path, link
        if fragment:
            prose = (ROOT / path).read_text("utf-8") if path else PROSE
            assert fragment in {anchor(heading) for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}, link


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`((?:worker|deploy|examples|app)/[\w/.@-]+)`", PROSE)
    assert named
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "examples" / name).exists(), name


# --- commands


def parse(arguments: Sequence[str]) -> None:
    """Parse a `worker` command line without running it; usage errors rise."""
    command: Any = typer.main.get_command(cli)
    context = command.make_context("worker", list(arguments))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, list(rest), parent=context)


def shown_commands() -> list[list[str]]:
    """The words after `worker` of every command line in a shell block."""
    commands = []
    for each in BLOCKS:
        if each.language != "sh":
            continue
        for line in each.text.splitlines():
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


# --- code


async def run_python(text: str, names: Mapping[str, object]) -> dict[str, Any]:
    """Run a block, which may await at its top level; the names it leaves."""
    space = dict(names)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    result = eval(compile(text, "README.md", "exec", flags=flags), space)
    if inspect.iscoroutine(result):
        await result
    return space


def test_every_python_block_compiles() -> None:
    blocks = [each.text for each in BLOCKS if each.language == "python"]
    assert len(blocks) == 7
    for text in blocks:
        compile(text, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_handler_example_is_the_file_of_that_name() -> None:
    (shown,) = [each.text for each in BLOCKS if each.marker == "examples/app/jobs.py"]
    file = (ROOT / "examples" / "app" / "jobs.py").read_text()
    assert file.partition('"""\n\n')[2] == shown
    assert f"`{SENT}`" in FLOWING


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of examples/ as if one stood in that directory."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield importlib.import_module
    for name in list(sys.modules):
        if name in ("app", "monolith") or name.startswith("app."):
            del sys.modules[name]


class TextClause(str):
    """SQLAlchemy's `text`: `:name` becomes the driver's `%(name)s`."""

    @property
    def compiled(self) -> str:
        return re.sub(r"(?<![:\w\\]):(\w+)(?!:)", r"%(\1)s", self)


class Session:
    """As much of SQLAlchemy's session as sends one statement through psycopg."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def execute(self, statement: TextClause, parameters: Mapping[str, object]) -> psycopg.Cursor[Any]:
        return self._connection.execute(statement.compiled, parameters)


async def test_the_example_runs_in_a_daemon_and_takes_jobs_from_every_caller_shown(
    database_url: str, daemon: Callable[..., Daemon], examples: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as db:
        db.execute(SENT)
        # As in the README: the working directory is importable, no PYTHONPATH leads there.
        (tmp_path / "app").symlink_to(ROOT / "examples" / "app")
        process = daemon(DATABASE_URL=database_url, WORKER_HANDLERS="app.jobs:handlers", PYTHONPATH=str(ROOT))
        process.wait_for_event("daemon_ready", 20)
        jobs = examples("app.jobs")

        connection = await asyncpg.connect(database_url)
        try:
            names = {"connection": connection, "welcome": jobs.welcome, "Welcome": jobs.Welcome}
            await run_python(block("python", "await welcome.enqueue("), names)
            left = await run_python(block("python", "await wait("), names)
        finally:
            await connection.close()
        finished = left["finished"]
        assert (finished.state, finished.result, finished.error) == ("succeeded", {"length": len("Welcome! hi")}, None)

        # Django's default is a cursor that binds on the client's side; binding on the server's is an option of it.
        callers = {"psycopg": [db], "SQLAlchemy": [Session(db)], "Django": [psycopg.ClientCursor(db), db.cursor()]}
        key = 1005
        for line in block("python", "session.execute(").splitlines():
            variable = line.partition(".")[0]
            for caller in callers[line.rpartition("# ")[2]]:
                names = {variable: caller, "text": TextClause, "payload": '{"message": "hi"}', "key": f"hello-{key}"}
                answer = (await run_python(f"answer = {line}", names))["answer"] or caller
                assert answer.fetchone().keys() == {"id", "created", "state"}
                key += 1

        def keys(state: str) -> list[str]:
            rows = db.execute("SELECT idempotency_key AS key FROM jobs WHERE state = %s ORDER BY 1", [state]).fetchall()
            return [row["key"] for row in rows]

        await await_for(lambda: keys("succeeded") == [f"hello-{n}" for n in range(1002, 1009)])
        assert keys("ready") == ["hello-1001"]
        [delayed] = db.execute("SELECT available_at - created_at AS delay FROM jobs WHERE state = 'ready'").fetchall()
        assert 29 < delayed["delay"].total_seconds() < 31
        bodies = db.execute("SELECT key, body FROM sent ORDER BY key").fetchall()
        assert bodies == [{"key": f"hello-{n}", "body": "Welcome! hi"} for n in range(1002, 1009)]


async def test_a_job_is_never_there_when_its_caller_rolls_back(database_url: str, examples: Callable[[str], ModuleType]) -> None:
    jobs = examples("app.jobs")
    connection = await asyncpg.connect(database_url)
    try:
        with contextlib.suppress(ZeroDivisionError):
            async with connection.transaction():
                await jobs.welcome.enqueue(connection, jobs.Welcome(message="hi"), key="welcome-1001")
                raise ZeroDivisionError
        assert await connection.fetchval("SELECT count(*) FROM jobs") == 0
    finally:
        await connection.close()


async def test_the_lines_about_testing_your_handlers_work(database_url: str, examples: Callable[[str], ModuleType]) -> None:
    jobs = examples("app.jobs")
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(SENT)
        await worker.enqueue(connection, "welcome", {"message": "in the queue"}, key="before")
        await run_python(block("python", "from worker.testing import"), {"handlers": jobs.handlers, "dsn": database_url})
        assert await connection.fetchval("SELECT count(*) FROM sent") == 2
    finally:
        await connection.close()


class FastAPI:
    """As much of it as takes a lifespan."""

    def __init__(self, *, lifespan: Callable[[object], Any]) -> None:
        self.lifespan = lifespan


async def test_the_pool_lives_in_the_lifespan_of_a_web_application(
    database_url: str, examples: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    names = {
        "asynccontextmanager": asynccontextmanager,
        "AsyncIterator": AsyncIterator,
        "Worker": Worker,
        "Settings": Settings,
        "handlers": examples("app.jobs").handlers,
        "FastAPI": FastAPI,
    }
    left = await run_python(block("python", "FastAPI(lifespan="), names)
    with psycopg.connect(database_url, autocommit=True) as db:
        db.execute(SENT)
        async with left["app"].lifespan(left["app"]):
            db.execute("SELECT FROM enqueue_job('welcome', '{\"message\": \"hi\"}')")
            await await_for(lambda: db.execute("SELECT body FROM sent").fetchall() == [("Welcome! hi",)])
            assert db.execute("SELECT slots FROM processes").fetchall() == [(4,)]
        assert db.execute("SELECT FROM processes").fetchall() == []


async def test_the_monolith_example_serves_runs_its_jobs_and_drains(
    database_url: str, examples: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monolith = examples("monolith")
    state: dict[str, Any] = {}
    to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    from_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    with psycopg.connect(database_url, autocommit=True) as db:
        db.execute(SENT)
        serving = asyncio.create_task(monolith.app({"type": "lifespan", "state": state}, to_app.get, from_app.put))
        await to_app.put({"type": "lifespan.startup"})
        assert (await asyncio.wait_for(from_app.get(), 20))["type"] == "lifespan.startup.complete"

        scope = {"type": "http", "method": "POST", "path": "/welcome", "query_string": b"name=Ada", "state": state}
        await monolith.app(scope, to_app.get, from_app.put)
        assert (await from_app.get())["status"] == 202
        answer = json.loads((await from_app.get())["body"])
        assert answer == {"id": answer["id"], "created": True, "state": "ready"}
        await await_for(lambda: db.execute("SELECT key, body FROM sent").fetchall() == [("welcome-Ada", "Welcome! hello Ada")])

        await to_app.put({"type": "lifespan.shutdown"})
        assert (await asyncio.wait_for(from_app.get(), 20))["type"] == "lifespan.shutdown.complete"
        await serving
        assert db.execute("SELECT FROM processes").fetchall() == []


async def test_a_job_has_every_name_that_the_readme_mentions(database_url: str) -> None:
    listed = re.search(r"\*\*Read\*\* `job\.([\w ]+)`", FLOWING)
    assert listed
    names = {*listed[1].split(), *re.findall(r"`(?:async with )?job\.(\w+)", FLOWING)}
    assert {"effect", "enqueue", "transaction", "connection", "resources", "log", "fence"} <= names
    handlers = worker.Handlers()

    @handlers.job("names")
    async def missing(job: Job[object]) -> list[str]:
        return sorted(name for name in names if not hasattr(job, name))

    assert (await run_job(handlers, "names", {}, dsn=database_url)).result == []


# --- SQL


@pytest.mark.slow
def test_the_walk_through_ends_as_it_says(database_url: str, daemon: Callable[..., Daemon]) -> None:
    (text,) = [each.text for each in BLOCKS if each.marker == "walk-through"]
    assert psql(database_url, "-c", text).returncode == 0
    daemon(DATABASE_URL=database_url).wait_for_event("daemon_ready", 20)
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as db:
        query = "SELECT * FROM jobs WHERE state IN ('succeeded', 'dead') ORDER BY idempotency_key"
        invalid, valid = wait_for(lambda: len(rows := db.execute(query).fetchall()) == 2 and rows, 30)
        assert (valid["idempotency_key"], valid["state"], valid["attempts"]) == ("welcome-1001", "succeeded", 1)
        assert (valid["completed_at"] - valid["started_at"]).total_seconds() >= 8
        assert (invalid["idempotency_key"], invalid["state"], invalid["attempts"]) == ("invalid-1002", "dead", 3)
        assert "message" in invalid["last_error"]
        assert {row["lease_owner"] for row in (valid, invalid)} == {row["lease_until"] for row in (valid, invalid)} == {None}
        effects = db.execute("SELECT idempotency_key, message FROM processed_messages").fetchall()
        assert effects == [{"idempotency_key": "welcome-1001", "message": "welcome"}]


def test_the_statements_for_three_in_the_morning_find_what_they_are_for(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as db, psycopg.connect(database_url) as open_one:
        open_one.execute("SELECT 1")
        db.execute(
            """
            INSERT INTO jobs (idempotency_key, payload, available_at) VALUES ('waits', '{}', now() - interval '1 hour');
            INSERT INTO jobs (idempotency_key, payload, state, lease_owner, lease_until, crashes)
            VALUES ('stuck', '{}', 'running', 'gone-00000000', now() - interval '1 minute', 1);
            INSERT INTO job_failures (job_id, fence, attempt, worker, outcome, error)
            SELECT id, 1, 1, 'gone-00000000', 'crashed', 'worker lost' FROM jobs WHERE idempotency_key = 'stuck';
            """
        )
        answers = [db.execute(text).fetchall() for text in block("sql", "-- stuck").split(";\n") if text.strip()]
        waiting, stuck, suspects, failures, transactions = answers
        [oldest] = waiting
        assert (oldest["queue"], oldest["count"]) == ("default", 1)
        assert oldest["oldest"].total_seconds() >= 3600
        assert [row["lease_owner"] for row in stuck] == ["gone-00000000"]
        assert [row["crashes"] for row in suspects] == [1]
        assert [(row["outcome"], row["count"]) for row in failures] == [("crashed", 1)]
        assert open_one.info.backend_pid in {row["pid"] for row in transactions}


def test_fences_jump_ahead_and_a_stale_one_is_refused_as_it_says(database_url: str) -> None:
    (jump,) = re.findall(r"`(SELECT setval[^`]+)`", FLOWING)
    (check,) = re.findall(r"`(SELECT check_fence[^`]+)`", FLOWING)
    with psycopg.connect(database_url, autocommit=True) as db:
        before = db.execute("SELECT nextval('fence_seq')").fetchone()
        db.execute(jump)
        after = db.execute("SELECT nextval('fence_seq')").fetchone()
        assert before is not None
        assert after is not None
        assert after[0] > before[0] + 1_000_000
        assert db.execute(check).fetchone() == (True,)
        with pytest.raises(psycopg.Error) as refused:
            db.execute(check.replace("1234", "1233"))
        assert refused.value.sqlstate == "RW001"


def test_the_limits_for_a_pooler_are_those_of_the_default_settings() -> None:
    settings = load_settings({"DATABASE_URL": "postgresql://localhost/app"})
    limits = SessionLimits.of(lease_seconds=settings.lease_seconds, query_timeout_seconds=settings.query_timeout_seconds)
    shown = dict(re.findall(r"SET (\w+) = '(\d+)s'", block("sql", "ALTER ROLE")))
    assert {name: float(seconds) for name, seconds in shown.items()} == {
        "statement_timeout": limits.statement_timeout_seconds,
        "lock_timeout": limits.lock_timeout_seconds,
        "idle_in_transaction_session_timeout": limits.idle_in_transaction_seconds,
    }


def test_the_line_of_json_is_one_that_the_command_takes() -> None:
    (line,) = re.findall(r"A line of `jobs\.jsonl` is `([^`]+)`", FLOWING)
    assert new_job_from(json.loads(line)).key == "hello-1001"


# --- what it says of keys, connections and kinds


async def test_a_key_enqueued_again_after_its_row_was_pruned_runs_but_applies_nothing(
    database_url: str, examples: Callable[[str], ModuleType]
) -> None:
    handlers = examples("app.jobs").handlers
    async with seen(database_url) as run:
        await run.connection.execute(SENT)
        assert (await run_job(handlers, "welcome", {"message": "first"}, dsn=database_url, key="once")).state == "succeeded"
        ignored = await worker.enqueue(run.connection, "welcome", {"message": "second"}, key="once")
        assert (ignored.created, ignored.state) == (False, "succeeded")
        assert json.loads(await run.value("SELECT payload FROM jobs")) == {"message": "first"}

        await run.connection.execute("DELETE FROM jobs")
        again = await run_job(handlers, "welcome", {"message": "third"}, dsn=database_url, key="once")
        assert (again.state, again.result) == ("succeeded", {"length": len("Welcome! third")})
        assert await run.column("SELECT body FROM sent") == ["Welcome! first"]
        await run.said(EFFECT_ALREADY_APPLIED)


async def test_a_retention_of_0_leaves_no_row_and_the_ledger_keeps_the_key(
    database_url: str, examples: Callable[[str], ModuleType]
) -> None:
    async with running(database_url, examples("app.jobs").handlers, retention_seconds=0) as run:
        await run.connection.execute(SENT)
        id = await run.enqueue("welcome", {"message": "hi"}, key="gone")
        with pytest.raises(LookupError):
            await worker.wait(run.connection, id, timeout_seconds=10)
        assert await run.column("SELECT idempotency_key FROM job_effects") == ["gone"]


def test_a_daemon_has_five_connections_beside_its_pool_and_opens_no_port(database_url: str, daemon: Callable[..., Daemon]) -> None:
    assert "five more serve claims, commits, leases, the reaper and LISTEN" in README
    process = daemon(DATABASE_URL=database_url, WORKER_POOL_SIZE="2")
    process.wait_for_event("daemon_ready", 20)
    with psycopg.connect(database_url, autocommit=True) as db:
        db.execute('INSERT INTO jobs (payload) SELECT \'{"message": "hi"}\' FROM generate_series(1, 50)')

        def roles() -> list[str]:
            query = "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'reliable-worker %' ORDER BY 1"
            return [row[0].partition(" ")[2] for row in db.execute(query).fetchall()]

        own = ["claim", "commit", "leases", "listen", "reaper"]

        def as_promised() -> bool:
            now = roles()
            assert [role for role in now if role in own] == own, now
            assert len(now) - len(own) <= 2, now
            return True

        wait_for(as_promised)
    assert listening_sockets(process.pid) == set()


def listening_sockets(pid: int) -> set[str]:
    """The sockets of a process that wait for connections."""
    if not Path("/proc/net/tcp").exists():
        pytest.skip("this system does not tell")
    links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
    ours = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    waiting = set()
    for table_of in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table_of}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                waiting.add(fields[9])
    return ours & waiting


def test_a_kind_that_nobody_knows_shows_up_in_the_statistics(
    database_url: str, daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    process = daemon(DATABASE_URL=database_url)
    process.wait_for_event("daemon_ready", 20)
    with psycopg.connect(database_url, autocommit=True) as db:
        db.execute("SELECT FROM enqueue_job('nobody_knows', '{}')")
    process.wait_for_event("unknown_kind", kind="nobody_knows")
    shown = output_of("stats", "--json", directory=tmp_path, DATABASE_URL=database_url)
    assert json.loads(shown)["unknown_kinds"] == {"nobody_knows": 1}


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


def run_worker(*arguments: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "worker", *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment(directory, **variables), capture_output=True, timeout=30, check=False
    )


def status_of(*arguments: str, directory: Path, **variables: str) -> int:
    return run_worker(*arguments, directory=directory, **variables).returncode


def output_of(*arguments: str, directory: Path, **variables: str) -> bytes:
    done = run_worker(*arguments, directory=directory, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    "log_capture log_lines log_sink logs patience store",
    "attempt builtin handlers job owntransaction",
    "claimer committer committing ending generator health job_renewals keeper last_word lease_desk lease_transport listener"
    " lost_claims name_renewals"
    " places pool reaper retention rights watch writer",
    "api assembly bench cluster daemon drain embedded generator_process guardian http_calls lease_http task_client"
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
