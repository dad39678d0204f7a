"""The Python that the README shows runs as it stands there, and what it says of it comes true."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.rows import dict_row

import worker
from tests.documents import BLOCKS, FLOWING, SENT, block
from tests.processes import ROOT, Daemon
from tests.waiting import await_for
from worker import Settings, Worker
from worker.job import Job
from worker.testing import run_job


async def run_python(text: str, names: Mapping[str, object]) -> dict[str, Any]:
    """Run a block, which may await at its top level; the names it leaves."""
    space = dict(names)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    result = eval(compile(text, "README.md", "exec", flags=flags), space)
    if inspect.iscoroutine(result):
        await result
    return space


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


class FastAPI:
    """As much of it as takes a lifespan."""

    def __init__(self, *, lifespan: Callable[[object], Any]) -> None:
        self.lifespan = lifespan


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

        await await_for(lambda: keys("succeeded") == [f"hello-{n}" for n in range(1002, 1009)], 30)
        assert keys("ready") == ["hello-1001"]
        [delayed] = db.execute("SELECT available_at - created_at AS delay FROM jobs WHERE state = 'ready'").fetchall()
        assert 29 < delayed["delay"].total_seconds() < 60
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
            await await_for(lambda: db.execute("SELECT slots FROM processes").fetchall() == [(4,)])
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
