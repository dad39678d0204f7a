"""A password is seen by nobody who reads what a process writes: its log, its files, its rows, its command line, its answers."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.commands import worker
from tests.workplace import VARIABLES, Workplace

PASSWORD = "k9-s3cret/@word"
PIECES = ("s3cret", "%2F%40word", "/@word", "0ther")

HANDLERS = """
import logging, os, warnings
import asyncpg
from worker import Handlers

handlers = Handlers()
OTHER = "postgresql://other:0ther-word@127.0.0.1:1/nowhere"

@handlers.job("say")
async def say(job):
    url = os.environ["DATABASE_URL"]
    print("print", url)
    warnings.warn(f"warning {url}")
    logging.error("logging %s", url)
    job.log.warning("log", url=url, nested={"url": [url]})

@handlers.job("fail")
async def fail(job):
    password = "a local with 0ther-word"
    raise ConnectionError(f"cannot connect to {os.environ['DATABASE_URL']}")

@handlers.job("connect")
async def connect(job):
    try:
        await asyncpg.connect(OTHER)
    except OSError as error:
        raise RuntimeError(f"no {OTHER}, nor host=h password=0ther-word") from error

@handlers.job("return")
async def give(job):
    job.effect("SELECT no_such_function($1)", os.environ["DATABASE_URL"])
"""


@pytest.fixture
def url(workplace: Workplace) -> str:
    """The database by a URL with a password, which the server does not ask for."""
    (workplace.directory / "telling.py").write_text(HANDLERS)
    return workplace.url.replace("@", f":{quote(PASSWORD, safe='')}@", 1)


def assert_unseen(text: str) -> None:
    for piece in PIECES:
        assert piece not in text, text[max(text.index(piece) - 500, 0) : text.index(piece) + 100]


def test_a_daemon_shows_no_password_whatever_its_handlers_do(workplace: Workplace, url: str) -> None:
    """I4."""
    daemon = workplace.daemon(DATABASE_URL=url, WORKER_HANDLERS="telling:handlers", WORKER_LOG_LEVEL="debug")
    workplace.wait_for_state(workplace.add("say"), "succeeded")
    for kind in ("fail", "connect", "return"):
        id = workplace.add(kind, max_attempts=1)
        row = workplace.wait_for_state(id, "dead")
        (failure,) = workplace.failures(id)
        assert_unseen(row.last_error + failure.error)
        assert_unseen(worker("jobs", "show", str(id), directory=workplace.directory, DATABASE_URL=url).stdout)
    with workplace.outage():
        daemon.wait_for_event("database_lost")
    daemon.wait_for_event("database_restored")
    assert_unseen(json.dumps(workplace.ask("SELECT to_jsonb(p) FROM processes AS p"), default=str))
    assert_unseen(str(workplace.ask("SELECT application_name, query FROM pg_stat_activity WHERE datname = current_database()")))
    assert_unseen(Path(f"/proc/{daemon.pid}/cmdline").read_text())
    assert_unseen("".join(path.read_text() for path in workplace.directory.glob("*.health")))
    assert daemon.stop() == 0
    said = daemon.stdout_path.read_text() + daemon.stderr
    for words in ("print postgresql://", "warning postgresql://", "logging postgresql://", "cannot connect to postgresql://"):
        assert words in said or words.replace("postgresql://", "***") in said
    assert_unseen(said)


@pytest.mark.parametrize("trouble", ["", "host", "port", "database", "lease", "handlers", "file"])
def test_a_refusal_shows_no_password(workplace: Workplace, url: str, trouble: str, tmp_path: Path) -> None:
    variables = VARIABLES | {"WORKER_HANDLERS": "telling:handlers", "DATABASE_URL": url}
    match trouble:
        case "host" | "port":
            where = "nowhere.invalid" if trouble == "host" else "127.0.0.1:1"
            variables |= {
                "DATABASE_URL": f"postgresql://me:{quote(PASSWORD, safe='')}@{where}/db",
                "WORKER_CONNECT_WAIT_SECONDS": "0",
            }
        case "database":
            variables["DATABASE_URL"] = url.replace("/test_", "/no_test_", 1)
        case "lease":
            variables["WORKER_LEASE_SECONDS"] = url
        case "handlers":
            (tmp_path / "broken.py").write_text("import os\nraise RuntimeError(os.environ['DATABASE_URL'])\n")
            variables["WORKER_HANDLERS"] = "broken:handlers"
        case "file":
            # In the place of the file's name.
            del variables["DATABASE_URL"]
            variables["DATABASE_URL_FILE"] = url
    for command in (["check"], ["run", "--burst"], ["jobs", "list"]):
        result = worker(*command, directory=tmp_path, **variables)
        assert_unseen(result.stdout + result.stderr)
        assert "Traceback" not in result.stderr
        if trouble in ("", "handlers") and command[0] == "jobs":
            assert result.returncode == 0
