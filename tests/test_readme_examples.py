"""What the README shows is run as it stands there: its Python, its SQL, and what it says will come of them."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.rows import dict_row

import worker
from tests.commands import worker as run_worker
from tests.documents import BLOCKS, FLOWING, README, block
from tests.inprocess import running, seen
from tests.processes import ROOT, Daemon
from tests.psql import psql
from tests.waiting import await_for, wait_for
from worker import Settings, Worker
from worker.events import EFFECT_ALREADY_APPLIED
from worker.job import Job
from worker.new_job import new_job_from
from worker.settings import load_settings
from worker.store.connection import SessionLimits
from worker.testing import run_job

SENT = "CREATE TABLE sent (key text PRIMARY KEY, body text NOT NULL)"

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
            query = (
                "SELECT application_name FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'reliable-worker %' ORDER BY 1"
            )
            return [row[0].partition(" ")[2] for row in db.execute(query).fetchall()]

        own = ["claim", "commit", "leases", "listen", "reaper"]
        most = 0

        def all_done() -> bool:
            nonlocal most
            most = max(most, len([role for role in roles() if role not in own]))
            return db.execute("SELECT count(*) FROM jobs WHERE state <> 'succeeded'").fetchone() == (0,)

        wait_for(all_done)
        wait_for(lambda: [role for role in roles() if role in own] == own)
        assert most <= 2
    assert listening_sockets(process.pid) == set()


def listening_sockets(pid: int) -> set[str]:
    """The sockets of a process that wait for connections."""
    if not Path("/proc/net/tcp").exists():
        pytest.skip("which sockets wait for connections is read from /proc/net/tcp, and there is none")
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
    shown = run_worker("stats", "--json", directory=tmp_path, DATABASE_URL=database_url)
    assert json.loads(shown.stdout)["unknown_kinds"] == {"nobody_knows": 1}
