"""A bench that does not get to its end, or not to its start: interrupted, failing in one scenario, refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import psycopg
import pytest

from tests.commands import worker, worker_under_way
from tests.roles import role, url_as
from tests.servers import Server
from tests.small_bench import SMALL, samples, schemas
from tests.waiting import wait_for


def daemons(url: str) -> list[int]:
    """The process ids of the daemons that now work in a schema of a bench."""
    for schema in schemas(url):
        with psycopg.connect(url) as connection, contextlib.suppress(psycopg.errors.UndefinedTable):
            if found := connection.execute(f'SELECT pid FROM "{schema}".processes').fetchall():
                return [row[0] for row in found]
    return []


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def bench(url: str, directory: Path, *arguments: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """`worker bench --json` under way."""
    return worker_under_way("bench", "--json", *arguments, directory=directory, DATABASE_URL=url)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_removes_its_schema_and_ends_its_daemons(
    empty_database_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    with bench(empty_database_url, tmp_path, "drain", "--jobs", "100000") as process:
        pids = wait_for(lambda: daemons(empty_database_url), 60)
        assert all(map(lives, pids))
        process.send_signal(number)
        printed, complaint = process.communicate(timeout=60)
        assert (process.returncode, printed, complaint) == (130, "", "")
    assert schemas(empty_database_url) == []
    assert not any(map(lives, pids))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_scenario_that_fails_is_named_and_the_others_go_on(empty_database_url: str, tmp_path: Path) -> None:
    with bench(empty_database_url, tmp_path, "processes", "latency", *SMALL, "--jobs", "9000") as process:
        os.kill(wait_for(lambda: daemons(empty_database_url), 60)[0], signal.SIGKILL)
        printed, complaint = process.communicate(timeout=200)
    document = json.loads(printed)
    assert process.returncode == 1
    assert len(document["failures"]) == 1
    assert document["failures"][0].startswith("processes: a daemon ended with status -9")
    assert document["failures"][0] in complaint
    assert "pick-up p50" in samples(document, "latency")
    assert schemas(empty_database_url) == []


def test_a_role_that_may_not_create_a_schema_is_told_so(server: Server, empty_database_url: str, tmp_path: Path) -> None:
    with role(server, empty_database_url) as name:
        result = worker("bench", *SMALL, directory=tmp_path, DATABASE_URL=url_as(name, empty_database_url))
    assert (result.returncode, result.stdout) == (78, "")
    assert f"the role '{name}' may not create it: CREATE on the database is missing" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("drain", "speed"), "'speed' is none of drain, latency, enqueue, history, snapshot, processes, payloads, faults,"),
        (("--minutes", "0"), "--minutes"),
        (("--tasks", "10,x"), "numbers from 1 to 10000"),
        (("--tasks", "0"), "numbers from 1 to 10000"),
        (("--jobs", "10"), "--jobs"),
        (("--runs", "0"), "--runs"),
        (("--data-dir", "x"), "--embedded"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_touched(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    result = worker("bench", *arguments, directory=tmp_path, DATABASE_URL="postgresql://nobody@127.0.0.1:1/none")
    assert result.returncode == 2
    assert said in " ".join(result.stderr.split())
