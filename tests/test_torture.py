"""`worker torture`: real daemons under real faults keep every promise, and daemons that are broken on purpose are found out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.commands import worker_under_way
from tests.processes import ROOT
from tests.roles import role, url_as
from tests.servers import Server, execute, schemas_like
from tests.waiting import await_for, wait_for
from worker.torture.plan import FAULTS, plan
from worker.torture.proxy import Loss, Proxy

SHORT = ("--minutes", "0.05", "--processes", "2", "--lease", "5")
"""One step: warm up, one fault or mixture, quiet, check. No lease is lost because the machine stood still for a while: the checker
would have to take it for a breach."""

of_real_daemons = pytest.mark.timeout(300)


def schemas(url: str) -> list[str]:
    return schemas_like(url, "worker_torture_")


def started(directory: Path, *arguments: str, **variables: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """`worker torture --json` under way."""
    return worker_under_way("torture", "--json", *arguments, directory=directory, **variables)


def torture(directory: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, document, and what was said on standard error."""
    with started(directory, *arguments, **variables) as process:
        output, errors = process.communicate(timeout=280)
    return process.returncode, json.loads(output or "{}"), errors


# --- the product


@pytest.mark.slow
@of_real_daemons
def test_an_ordinary_role_tortures_its_own_database_and_nothing_is_left_behind(
    server: Server, empty_database_url: str, tmp_path: Path
) -> None:
    with role(server, empty_database_url) as name:
        with psycopg.connect(empty_database_url, autocommit=True) as connection:
            execute(empty_database_url, "GRANT CREATE ON DATABASE {} TO {}", connection.info.dbname, name)
        url = url_as(name, empty_database_url)
        # A configuration of the user's own has no say.
        status, document, errors = torture(
            tmp_path, *SHORT, "--seed", "5", url, WORKER_HANDLERS="no.such:thing", WORKER_LEASE_SECONDS="20", WORKERS="1"
        )
    assert (status, errors) == (0, "")
    assert document["breaches"] == []
    assert {"restart", "crash", "standby", "readonly", "limit"} <= set(document["skipped"])
    assert "--embedded" in document["skipped"]["restart"]
    assert sum(document["faults"].values()) >= 1
    assert document["acknowledged"] > 50
    assert document["counts"]["succeeded"] > 50
    for name in ("one_live_lease", "effect_once", "effect_with_completion", "not_lost", "started_once", "slot_once", "guarded"):
        assert document["rules"][name]["tried"] > 0, name
    assert schemas(empty_database_url) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@of_real_daemons
def test_a_server_of_its_own_may_be_crashed(tmp_path: Path) -> None:
    status, document, errors = torture(tmp_path, *SHORT, "--seed", "1", "--embedded", "--faults", "crash")
    assert (status, errors) == (0, "")
    assert document["breaches"] == []
    assert {name for name, times in document["faults"].items() if times} == {"crash"}


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--faults", "restart"), 78, "--faults restart: it breaks a whole server, so it needs one of its own: --embedded"),
        (("--faults", "kill,eartquake"), 2, "'eartquake' is none of kill, freeze,"),
        (("--embedded", "postgresql://nobody@nowhere/nothing"), 2, "exclude each other"),
        (("--processes", "1"), 2, "processes"),
    ],
)
def test_what_cannot_be_done_is_refused_in_clear_words(
    empty_database_url: str, tmp_path: Path, arguments: Sequence[str], status: int, said: str
) -> None:
    with started(tmp_path, *arguments, DATABASE_URL=empty_database_url) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (status, "")
    assert said in " ".join(errors.split())
    assert schemas(empty_database_url) == []


@pytest.mark.slow
@of_real_daemons
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_torture_removes_its_schema_and_ends_its_processes(
    empty_database_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    def processes() -> list[int]:
        for schema in schemas(empty_database_url):
            with (
                psycopg.connect(empty_database_url) as connection,
                contextlib.suppress(psycopg.errors.UndefinedTable),
            ):
                return [row[0] for row in connection.execute(f'SELECT pid FROM "{schema}".processes')]
        return []

    with started(tmp_path, "--processes", "2", "--faults", "reset", DATABASE_URL=empty_database_url) as process:
        wait_for(lambda: len(processes()) == 2, 60)
        pids = processes()
        process.send_signal(number)
        process.communicate(timeout=120)
    assert process.returncode != 0
    assert schemas(empty_database_url) == []
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


# --- the plan


def test_the_plan_is_a_function_of_the_seed_and_has_every_fault_alone_and_mixed() -> None:
    names = tuple(FAULTS)
    steps = list(islice(plan(7, names), 100))
    assert steps == list(islice(plan(7, names), 100))
    assert steps != list(islice(plan(8, names), 100))
    first_round = steps[: len(names) + len(names) // 3]
    assert sorted(step.faults[0] for step in first_round if len(step.faults) == 1) == sorted(names)
    steps = list(islice(plan(7, names), 400))
    assert {name for step in steps if len(step.faults) > 1 for name in step.faults} == set(names)
    assert [step.faults for step in islice(plan(7, ("kill",)), 3)] == [("kill",)] * 3


# --- a product that is broken on purpose

COMMITTED_APART = (
    "        if has_effects:\n            to_apply = ",
    "        if has_effects:\n            await connection.execute('COMMIT')\n            await connection.execute('BEGIN')\n"
    "            to_apply = ",
)


@pytest.mark.slow
@of_real_daemons
def test_daemons_that_are_broken_on_purpose_are_found_out(server: Server, tmp_path: Path) -> None:
    """Real ones, whose effects are committed apart from the completion. What else can be broken: test_torture_breaks.py."""
    place = tmp_path / "broken"
    shutil.copytree(ROOT / "worker", place / "worker", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "schema.sql", place)
    text, instead = COMMITTED_APART
    found = [path for path in (place / "worker").glob("*.py") if text in path.read_text()]
    assert len(found) == 1, "there is no such text any more: break it otherwise"
    found[0].write_text(found[0].read_text().replace(text, instead))
    with server.database() as url:
        status, document, errors = torture(tmp_path, *SHORT, "--seed", "1", "--faults", "reset", url, PYTHONPATH=str(place))
    assert status == 1
    assert errors.endswith("breaches, seed 1\n")
    breach = next(breach for breach in document["breaches"] if breach["rule"] == "effect_with_completion")
    assert breach["rows"][0]["job_id"] in {change["job_id"] for change in document["histories"]}
    assert document["rules"]["effect_with_completion"]["breaches"] > 0


# --- the proxy


@contextlib.asynccontextmanager
async def echo_behind_a_proxy() -> AsyncIterator[tuple[Proxy, list[bytes]]]:
    """A server that answers each piece with itself, and keeps what it got."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            heard.append(data)
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Proxy(lambda: asyncio.open_connection("127.0.0.1", port)).listening() as proxy:
        yield proxy, heard
    server.close()


async def ask(proxy: Proxy, data: bytes, *, wait_seconds: float = 20) -> bytes | None:
    """What comes back; empty when the connection breaks, None when nothing comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.write(data)
        async with asyncio.timeout(wait_seconds):
            return await reader.read(1000)
    except TimeoutError:
        return None
    except OSError:
        return b""
    finally:
        writer.close()


COMMIT = b"Q\0\0\0\x0bCOMMIT\0"


async def test_the_proxy_carries_and_delays() -> None:
    async with echo_behind_a_proxy() as (proxy, _):
        assert await ask(proxy, b"hello") == b"hello"
        assert await ask(proxy, COMMIT) == COMMIT
        proxy.delay_seconds = 0.3
        assert await ask(proxy, b"hello", wait_seconds=0.2) is None
        assert await ask(proxy, b"hello") == b"hello"
        assert proxy.slowed > 0
        assert proxy.kept == 0


async def test_a_black_hole_delivers_everything_in_the_end() -> None:
    async with echo_behind_a_proxy() as (proxy, heard):
        proxy.network.close()
        assert await ask(proxy, b"late", wait_seconds=0.2) is None
        await await_for(lambda: proxy.kept == 1)
        assert heard == []
        proxy.network.open()
        await await_for(lambda: heard == [b"late"])


async def test_a_half_open_connection_delivers_when_its_sender_has_given_up() -> None:
    async with echo_behind_a_proxy() as (proxy, heard):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"first")
        assert await reader.read(1000) == b"first"
        links = proxy.delay_requests()
        writer.write(b"late")
        await await_for(lambda: proxy.kept == 1)
        writer.transport.abort()
        assert await ask(proxy, b"other") == b"other"
        assert heard == [b"first", b"other"]
        for link in links:
            link.late.open()
        await await_for(lambda: heard == [b"first", b"other", b"late"])


@pytest.mark.parametrize(("loss", "applied"), [("applied", True), ("undone", False), ("in_flight", True)])
async def test_the_answer_to_a_commit_gets_lost_with_it_applied_or_not(loss: Loss, applied: bool) -> None:
    async with echo_behind_a_proxy() as (proxy, heard):
        proxy.lose_commits([loss])
        assert await ask(proxy, b"SELECT") == b"SELECT"
        assert await ask(proxy, COMMIT) == b""
        if applied:
            await await_for(lambda: COMMIT in heard)
        assert (COMMIT in heard) == applied
        assert proxy.lost_commits == {loss: 1}
        assert await ask(proxy, COMMIT) == COMMIT


async def test_connections_that_are_broken_off_are_reset() -> None:
    async with echo_behind_a_proxy() as (proxy, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"hello")
        assert await reader.read(1000) == b"hello"
        assert proxy.break_off() == 1
        with pytest.raises(ConnectionResetError):
            await reader.read(1000)
        writer.close()
