"""A stop before the daemon has begun to claim: during imports, a migration, or the wait for a database."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import psycopg
import pytest

from tests.stopping import SLACK_SECONDS, stopped
from tests.waiting import wait_for
from tests.workplace import Workplace

SLOW_TO_IMPORT = """
import pathlib
from tests.waiting import block_loop
pathlib.Path("importing").touch()
block_loop(60)
"""

SLOW_TO_OPEN = """
import asyncio, contextlib, pathlib
from tests.handlers_for_tests import handlers as others
from worker import Handlers

@contextlib.asynccontextmanager
async def lifespan():
    pathlib.Path("opening").touch()
    try:
        await asyncio.Event().wait()
        yield
    finally:
        pathlib.Path("tidied").touch()

handlers = Handlers(lifespan=lifespan)
handlers.include(others)
"""

CATCHES_EVERYTHING = """
try:
    import slow_to_import
except BaseException:
    pass
from tests.handlers_for_tests import handlers
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_while_the_handlers_are_imported_is_clean(workplace: Workplace, number: signal.Signals) -> None:
    """Nothing is held yet."""
    (workplace.directory / "slow_to_import.py").write_text(SLOW_TO_IMPORT)
    daemon = workplace.daemon(WORKER_HANDLERS="slow_to_import:handlers", ready=False)
    wait_for((workplace.directory / "importing").exists, 20)
    assert stopped(daemon, number) == (0, pytest.approx(0, abs=SLACK_SECONDS))
    assert daemon.stderr == ""
    assert daemon.find("shutdown_complete", status=0)


def test_a_stop_while_the_handlers_are_imported_stops_the_private_server(workplace: Workplace, data_dir: Path) -> None:
    """And a module that catches everything does not outlive it."""
    (workplace.directory / "slow_to_import.py").write_text(SLOW_TO_IMPORT)
    (workplace.directory / "catches_everything.py").write_text(CATCHES_EVERYTHING)
    arguments = ("--embedded", "--data-dir", str(data_dir))
    daemon = workplace.daemon(*arguments, WORKER_HANDLERS="catches_everything:handlers", ready=False)
    wait_for((workplace.directory / "importing").exists, 60)
    assert daemon.stop() == 0
    assert daemon.find("daemon_started") == []
    assert not (data_dir / "postgresql" / "postmaster.pid").exists()


def test_a_stop_while_the_schema_waits_for_a_lock_is_clean(workplace: Workplace) -> None:
    """`--migrate` runs before the first claim: nothing is held."""
    with psycopg.connect(workplace.url) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('reliable-worker schema public', 0))")
        daemon = workplace.daemon("--migrate", ready=False)
        wait_for(lambda: workplace.backends("migrate", "active"), 20)
        status, seconds = stopped(daemon)
        other.rollback()
    assert status == 0
    assert seconds < SLACK_SECONDS / 2, "it would wait 10 s for the lock"
    assert daemon.find("shutdown_complete", status=0)


def test_a_stop_before_the_database_was_reached_is_clean(workplace: Workplace) -> None:
    daemon = workplace.daemon(DATABASE_URL="postgresql://127.0.0.1:1/nowhere", ready=False)
    daemon.wait_for_event("database_lost", 20)
    status, seconds = stopped(daemon)
    assert status == 0
    assert seconds < SLACK_SECONDS


def test_a_stop_while_a_host_does_not_answer_is_clean(workplace: Workplace) -> None:
    """A connection that is being made is let go, whatever time it has."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"postgresql://127.0.0.1:{mute.getsockname()[1]}/nowhere"
        daemon = workplace.daemon(DATABASE_URL=url, WORKER_CONNECT_TIMEOUT_SECONDS="60", ready=False)
        mute.settimeout(20)
        with mute.accept()[0]:
            status, seconds = stopped(daemon)
    assert status == 0
    assert seconds < SLACK_SECONDS


def test_a_stop_while_the_handlers_open_what_they_need_is_clean(workplace: Workplace) -> None:
    """A broker that is away, a model that is large: nothing is held yet, so nothing is waited for."""
    (workplace.directory / "slow_to_open.py").write_text(SLOW_TO_OPEN)
    daemon = workplace.daemon(WORKER_HANDLERS="slow_to_open:handlers", ready=False)
    wait_for((workplace.directory / "opening").exists, 20)
    status, seconds = stopped(daemon)
    assert status == 0
    assert seconds < SLACK_SECONDS
    assert (workplace.directory / "tidied").exists()
    assert daemon.find("internal_error") == []
