"""What the README says of keys, connections and unknown kinds is so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

import worker
from tests.commands import worker as run_worker
from tests.documents import README, SENT
from tests.inprocess import running, seen
from tests.processes import Daemon, open_sockets
from tests.waiting import wait_for
from worker.events import EFFECT_ALREADY_APPLIED
from worker.testing import run_job


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

        wait_for(all_done, 30)
        wait_for(lambda: [role for role in roles() if role in own] == own)
        assert most <= 2
    assert listening_sockets(process.pid) == set()


def listening_sockets(pid: int) -> set[str]:
    """The sockets of a process that wait for connections."""
    if not Path("/proc/net/tcp").exists():
        pytest.skip("which sockets wait for connections is read from /proc/net/tcp, and there is none")
    ours = {link[len("socket:[") : -1] for link in open_sockets(pid)}
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

    def shown() -> bool:
        """Once the daemon has put the job back."""
        statistics = run_worker("stats", "--json", directory=tmp_path, DATABASE_URL=database_url)
        return bool(json.loads(statistics.stdout)["unknown_kinds"] == {"nobody_knows": 1})

    wait_for(shown, 30)
