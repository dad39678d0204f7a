"""`worker lease acquire`, `renew`, `release`, `list`: what they print, and how they exit."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import namedtuple_row

from tests.commands import parse, worker, worker_at_a_terminal
from tests.lease_rows import Db, row, take
from tests.processes import ROOT, environment
from tests.waiting import wait_for

PATIENT = {"WORKER_QUERY_TIMEOUT_SECONDS": "60", "WORKER_CONNECT_TIMEOUT_SECONDS": "60", "WORKER_LEASE_SECONDS": "120"}


def test_a_lease_is_acquired_renewed_and_released_by_hand(database_url: str, tmp_path: Path) -> None:
    def lease(*arguments: str) -> tuple[int, dict[str, Any], str]:
        result = worker("lease", *arguments, "--json", directory=tmp_path, DATABASE_URL=database_url, WORKER_NAME="shop", **PATIENT)
        return result.returncode, json.loads(result.stdout), result.stderr

    status, got, _ = lease("acquire", "nightly", "--ttl", "3600", "--request-id", "q", "--metadata", '{"why": "é"}')
    assert status == 0
    assert list(got) == [
        *("id", "resource", "holder", "fence", "ttl_seconds", "metadata", "state", "expires_in_ms"),
        *("created_at", "renewed_at", "released_at"),
    ]
    assert (got["holder"], got["state"], got["metadata"], got["renewed_at"]) == ("shop", "active", {"why": "é"}, None)
    assert got["created_at"].endswith("Z")
    fence = str(got["fence"])
    assert lease("acquire", "nightly", "--request-id", "q")[1]["fence"] == got["fence"]
    status, held, error = lease("acquire", "nightly", "--holder", "other")
    assert (status, held["error"], held["holder"]) == (1, "held", "shop")
    assert 3_000_000 < held["retry_after_ms"] <= 3_600_000
    assert "held by shop" in error
    assert lease("renew", "nightly", "--fence", fence, "--ttl", "900")[1]["ttl_seconds"] == 900
    for stale in (("--fence", fence, "--holder", "other"), ("--fence", str(got["fence"] + 1))):
        for verb in ("renew", "release"):
            status, said, error = lease(verb, "nightly", *stale)
            assert (status, said) == (1, {"error": "not_held"})
            assert "not held" in error
    for _ in range(2):
        status, released, _ = lease("release", "nightly", "--fence", fence)
        assert (status, released["state"]) == (0, "released")
    status, ended, _ = lease("acquire", "nightly", "--request-id", "q")
    assert (status, ended["error"], ended["fence"]) == (1, "ended", got["fence"])


def test_leases_are_listed_for_people_pipes_and_programs(database_url: str, db: Db, tmp_path: Path) -> None:
    got = db.execute("SELECT * FROM acquire_lease('gone', E'a\\tb\\x1b[31m')").fetchone()
    db.execute("SELECT release_lease('gone', %s, %s)", [got.holder, got.fence])
    db.execute("SELECT acquire_lease('nightly', 'me', 600)")
    plain = worker("lease", "list", directory=tmp_path, DATABASE_URL=database_url)
    lines = [line.split("\t") for line in plain.stdout.splitlines()]
    assert lines[0][:5] == ["id", "resource", "state", "holder", "fence"]
    assert [line[1:4] for line in lines[1:]] == [["gone", "released", r"a\tb\x1b[31m"], ["nightly", "active", "me"]]
    as_json = worker("lease", "list", "--state", "active", "--json", directory=tmp_path, DATABASE_URL=database_url)
    assert [lease["resource"] for lease in json.loads(as_json.stdout)] == ["nightly"]
    assert worker("lease", "list", "--limit", "1", directory=tmp_path, DATABASE_URL=database_url).stdout.count("\n") == 2
    status, shown = worker_at_a_terminal("lease", "list", "--state", "expired", directory=tmp_path, DATABASE_URL=database_url)
    assert (status, shown.strip()) == (0, "no leases")


@pytest.mark.parametrize(
    "arguments",
    [
        ("acquire", ""),
        ("acquire", "x" * 513),
        ("acquire", "nightly", "--ttl", "0"),
        ("acquire", "nightly", "--ttl", "nan"),
        ("acquire", "nightly", "--ttl", "5s"),
        ("acquire", "nightly", "--metadata", "[]"),
        ("acquire", "nightly", "--metadata", "x"),
        ("acquire", "nightly", "--metadata", json.dumps({"x": "y" * 10_000})),
        ("acquire", "nightly", "--holder", "x" * 129),
        ("acquire", "nightly", "--holder", ""),
        ("acquire", "nightly", "--request-id", ""),
        ("renew", "nightly", "--fence", "1", "--holder", ""),
        ("release", "nightly", "--fence", "1", "--holder", ""),
        ("run", "nightly", "--holder", "", "--", "true"),
        ("renew", "nightly"),
        ("renew", "nightly", "--fence", "0"),
        ("release", "nightly", "--fence", "x"),
        ("list", "--state", "held"),
        ("run", "nightly"),
        ("run", "nightly", "--ttl", "0.5", "--", "true"),
        ("run", "nightly", "--wait", "-1", "--", "true"),
        ("run", "", "--", "true"),
    ],
    ids=lambda arguments: "-".join(arguments)[:40],
)
def test_wrong_input_is_status_2(database_url: str, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = worker("lease", *arguments, directory=tmp_path, DATABASE_URL=database_url)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr


@pytest.mark.parametrize(
    ("full", "as_json", "request_id"),
    [("/dev/full", ("--json",), None), ("a pipe that nobody reads", (), None), ("/dev/full", (), "q")],
    ids=["full", "broken", "repeatable"],
)
def test_a_lease_whose_fence_nobody_could_be_told_is_given_back(
    database_url: str, db: Db, tmp_path: Path, full: str, as_json: tuple[str, ...], request_id: str | None
) -> None:
    """With a request id it stays: asked again, the same one comes."""
    reader, output = os.pipe()
    os.close(reader)
    if full == "/dev/full":
        os.close(output)
        output = os.open(full, os.O_WRONLY)
    wish = ("acquire", "nightly", *as_json, *(() if request_id is None else ("--request-id", request_id)))
    try:
        result = subprocess.run(
            [sys.executable, "-m", "worker", "lease", *wish],
            stdout=output,
            stderr=subprocess.PIPE,
            env=environment(tmp_path, DATABASE_URL=database_url),
            timeout=60,
            text=True,
        )
    finally:
        os.close(output)
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("worker: cannot write the output: ")
    lease = row(db, "nightly")
    if request_id is None:
        assert (lease.released_at is not None, "was given back" in line) == (True, True)
    else:
        assert (lease.live, "ask again" in line) == (True, True)
        again = worker("lease", *wish, directory=tmp_path, DATABASE_URL=database_url)
        assert (again.returncode, str(lease.fence) in again.stdout) == (0, True)


def test_a_lease_that_a_rival_takes_right_behind_its_release_was_released(database_url: str, db: Db, tmp_path: Path) -> None:
    """The rival waits for the table, and has it from the end of the command's transaction on."""
    mine = take(db, "nightly", "me", 600)
    db.execute("""
        CREATE FUNCTION wait_for_the_rival() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0
            AS $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$;
        CREATE TRIGGER wait_for_the_rival AFTER UPDATE ON leases
            FOR EACH ROW WHEN (NEW.released_at IS NOT NULL) EXECUTE FUNCTION wait_for_the_rival();
        SELECT pg_advisory_lock(7);
    """)

    def waits(what: str) -> bool:
        sql = "SELECT FROM pg_stat_activity WHERE wait_event = %s AND datname = current_database()"
        return db.execute(sql, [what]).fetchone() is not None

    def be_the_rival() -> int:
        with psycopg.connect(database_url, row_factory=namedtuple_row) as rival:
            rival.execute("LOCK TABLE leases")
            return int(take(rival, "nightly").fence)

    release = ("lease", "release", "nightly", "--holder", "me", "--fence", str(mine.fence), "--json")
    with ThreadPoolExecutor() as threads:
        try:
            releasing = threads.submit(worker, *release, directory=tmp_path, DATABASE_URL=database_url, **PATIENT)
            wait_for(lambda: waits("advisory"), 30)
            rivalling = threads.submit(be_the_rival)
            wait_for(lambda: waits("relation"), 30)
        finally:
            db.execute("SELECT pg_advisory_unlock(7)")
        result = releasing.result()
        fence = rivalling.result()
    assert (result.returncode, json.loads(result.stdout)["state"]) == (0, "released"), result.stderr
    assert row(db, "nightly").fence == fence > mine.fence


def test_what_the_page_about_leases_shows_can_be_typed_in() -> None:
    page = (ROOT / "docs" / "leases.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for language, text in blocks:
        if language == "python":
            compile(text, "docs/leases.md", "exec")
        for line in text.splitlines() if language == "sh" else ():
            parse(shlex.split(line, comments=True)[1:])
    assert {language for language, _ in blocks} == {"python", "sh", "sql"}
