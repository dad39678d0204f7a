"""Beside the daemon, all else works through a pooler, too: the HTTP API, leases, and each command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import worker
from tests.pooled_workplace import PooledWorkplace
from tests.pooling import FEW_CONNECTIONS, needs_pgbouncer, pgbouncer
from tests.servers import Server
from tests.serving import Served
from tests.waiting import await_for, until_cancelled
from tests.workplace import VARIABLES
from worker import LeaseLost, Leases

pytestmark = needs_pgbouncer


def test_the_http_api_serves_through_it(pooled: PooledWorkplace, serve: Callable[..., Served]) -> None:
    served = serve(pooled.url, DATABASE_URL=pooled.pooled_url, WORKER_POOLER="transaction")
    for _ in range(20):
        task = served.http.post("/api/tasks", json={"kind": "remote", "payload": {}}).json()
        claimed = served.http.post("/api/tasks/next", json={"processor": "p", "kinds": ["remote"]})
        assert claimed.status_code == 200, claimed.text
        assert claimed.json()["id"] == task["id"]
        word = {"processor": "p", "fence": claimed.json()["fence"]}
        assert served.http.put(f"/api/tasks/{task['id']}/heartbeat", json=word).status_code == 202
        assert served.http.put(f"/api/tasks/{task['id']}/complete", json=word | {"output": 1}).status_code == 202
        lease = served.http.post("/api/leases", json={"resource": "one", "holder": "h"})
        assert lease.status_code == 201, lease.text
        body = {"resource": "one", "holder": "h", "fence": lease.json()["fence"]}
        assert served.http.put("/api/leases/renew", json=body).status_code == 200
        assert served.http.request("DELETE", "/api/leases/release", json=body).status_code == 200


async def test_leases_are_held_and_lost_through_it(pooled: PooledWorkplace) -> None:
    """More names than sessions, renewed together; and one that is stolen."""
    started = asyncio.Event()
    most = 0

    async def hold(leases: Leases, name: str) -> None:
        async with leases.hold(name, ttl_seconds=6):
            await started.wait()

    def renewed() -> int:
        nonlocal most
        most = max(most, len(pooled.ask("SELECT pid FROM pg_stat_activity WHERE usename = %s", pooled.role)))
        return int(pooled.value("SELECT count(*) FROM leases WHERE renewed_at IS NOT NULL AND expires_at > clock_timestamp()"))

    async with Leases(pooled.pooled_url, pooler="transaction") as leases:
        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(hold(leases, f"name-{number}"))
            await await_for(lambda: renewed() == 40, 30)
            started.set()
        assert 0 < most <= FEW_CONNECTIONS
        assert pooled.value("SELECT count(*) FROM leases WHERE released_at IS NULL") == 0
        with pytest.raises(LeaseLost):
            await hold_while_it_is_stolen(leases, pooled)


async def hold_while_it_is_stolen(leases: Leases, pooled: PooledWorkplace) -> None:
    async with leases.hold("stolen", ttl_seconds=2):
        pooled.db.execute("UPDATE leases SET expires_at = clock_timestamp() WHERE resource = 'stolen'")
        assert pooled.value("SELECT outcome FROM acquire_lease('stolen', 'other')") == "acquired"
        await until_cancelled()


@pytest.mark.parametrize(
    "arguments",
    [
        ("check",),
        ("migrate",),
        ("migrate", "--check"),
        ("enqueue", "nap", "{}"),
        ("jobs", "list", "--json"),
        ("stats", "--json"),
        ("run", "--burst"),
        ("run", "--migrate", "--burst"),
        ("lease", "run", "nightly", "--", "true"),
        ("lease", "acquire", "by-hand", "--request-id", "q"),
        ("lease", "list"),
    ],
    ids=" ".join,
)
def test_each_command_works_through_it(pooled: PooledWorkplace, arguments: tuple[str, ...]) -> None:
    through = VARIABLES | {"DATABASE_URL": pooled.pooled_url, "WORKER_POOLER": "transaction"}
    for _ in range(2):
        result = worker(*arguments, directory=pooled.directory, **through)
        assert result.returncode == 0, (result.stdout, result.stderr)


def test_migrate_gives_an_empty_database_its_schema_through_it(server: Server, empty_database_url: str, tmp_path: Path) -> None:
    with pgbouncer(empty_database_url) as bouncer:
        result = worker("migrate", directory=tmp_path, DATABASE_URL=bouncer.dsn(), WORKER_POOLER="transaction")
    assert result.returncode == 0, result.stderr
    assert worker("migrate", "--check", directory=tmp_path, DATABASE_URL=empty_database_url).returncode == 0
