"""A commit whose wait for a synchronous standby was cut short: the server answers as always, but whoever asked hears nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import httpx
import pytest

from tests.commands import worker
from tests.servers import commits_wait_for_a_standby, private_clusters
from tests.serving import Served, error_of, serving
from tests.waiting import await_for, wait_for
from worker import Leases
from worker.store import claiming, generating, leasing
from worker.store.connection import Database, read_moments_as_microseconds

LONG = {"WORKER_LEASE_SECONDS": "60", "WORKER_QUERY_TIMEOUT_SECONDS": "30", "WORKER_CLAIM_TIMEOUT_SECONDS": "30"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """On a database server of its own, and as patient as a test may have to be."""
    with private_clusters() as make, serving(tmp_path_factory.mktemp("served")) as start:
        one = start(make().dsn, **LONG)
        one.http.timeout = 100
        one.db.execute("SET synchronous_commit = local")  # what tests do waits for no standby
        yield one


def waiting(served: Served, role: str) -> list[int]:
    """The server processes of this role whose commit waits for the standby."""
    rows = served.ask("SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s AND wait_event = 'SyncRep'", f"% {role}")
    return [row.pid for row in rows]


def cut_short(served: Served, role: str) -> None:
    """Somebody cancels the wait, as soon as there is one."""
    for pid in wait_for(lambda: waiting(served, role)):
        served.ask("SELECT pg_cancel_backend(%s)", pid)


def asked_twice(served: Served, role: str, ask: Callable[[], httpx.Response]) -> httpx.Response:
    """Ask; the wait is cut short, and nothing is believed. Ask again: the answer comes with the standby, and not before."""
    with ThreadPoolExecutor(1) as thread:
        with commits_wait_for_a_standby(served.database_url):
            first = thread.submit(ask)
            cut_short(served, role)
            assert error_of(first.result(60)) == (503, "database_unavailable")
            again = thread.submit(ask)
            wait_for(lambda: waiting(served, role) or again.done())
            assert not again.done()
        return again.result(60)


@pytest.mark.parametrize("verb", ["complete", "fail", "release"])
def test_an_outcome_over_http_is_told_when_the_standby_has_it(served: Served, queue: str, verb: str) -> None:
    id = served.add(queue=queue)
    task = served.claimed(queue=queue)
    assert asked_twice(served, "http commit", lambda: served.tell(verb, task)).status_code == 202
    assert served.job(id).state == ("succeeded" if verb == "complete" else "ready")


def test_a_claim_over_http_is_given_when_the_standby_has_it(served: Served, queue: str) -> None:
    id = served.add(queue=queue)
    wish = {"processor": "p1", "queue": queue, "request_id": "mine"}
    answer = asked_twice(served, "http claim", lambda: served.http.post("/api/tasks/next", json=wish))
    assert (answer.status_code, answer.json()["id"]) == (200, id)
    assert served.job(id).attempts == 1


def test_a_heartbeat_is_answered_when_the_standby_has_it(served: Served, queue: str) -> None:
    served.add(queue=queue)
    task = served.claimed(queue=queue)
    assert asked_twice(served, "http leases", lambda: served.tell("heartbeat", task)).status_code == 202


def test_a_task_is_there_when_the_standby_has_it(served: Served, queue: str) -> None:
    wish = {"kind": "remote", "payload": 1, "queue": queue, "key": queue}
    assert asked_twice(served, "pool", lambda: served.http.post("/api/tasks", json=wish)).status_code == 200
    assert len(served.ask("SELECT FROM jobs WHERE queue = %s", queue)) == 1


def test_a_named_lease_over_http_is_held_when_the_standby_has_it(served: Served, queue: str) -> None:
    wish = {"resource": queue, "holder": "a", "ttl_seconds": 3600, "request_id": "mine"}
    answer = asked_twice(served, "pool", lambda: served.http.post("/api/leases", json=wish))
    assert answer.status_code == 201
    mine = {"resource": queue, "holder": "a", "fence": answer.json()["fence"]}
    renewed = asked_twice(served, "http names", lambda: served.http.put("/api/leases/renew", json=mine))
    assert (renewed.status_code, renewed.json()["fence"]) == (200, mine["fence"])


@pytest.mark.parametrize("verb", ["start", "stop"])
def test_a_wish_about_the_generator_is_told_when_the_standby_has_it(served: Served, verb: str) -> None:
    assert asked_twice(served, "pool", lambda: served.http.post(f"/api/generator/{verb}")).status_code == 200
    [row] = served.ask("SELECT state FROM generators WHERE name = %s", generating.NAME)
    assert row.state == ("STARTED" if verb == "start" else "STOPPED")


async def test_a_block_is_not_entered_before_the_standby_has_its_lease(served: Served, queue: str) -> None:
    entered = asyncio.Event()

    async def hold(leases: Leases) -> int:
        async with leases.hold(queue, ttl_seconds=3600, wait_seconds=600) as held:
            entered.set()
            return held.fence

    async with Leases(served.database_url) as leases:
        with commits_wait_for_a_standby(served.database_url):
            holding = asyncio.create_task(hold(leases))
            await asyncio.to_thread(cut_short, served, "pool")
            [row] = await await_for(lambda: served.ask("SELECT fence FROM leases WHERE resource = %s AND fence > 0", queue))
            await await_for(lambda: waiting(served, "pool") or entered.is_set())  # it asks again
            assert not entered.is_set()
        assert await holding == row.fence


@pytest.mark.parametrize("what", ["claim", "renewal"])
async def test_a_daemon_trusts_what_the_standby_has(served: Served, queue: str, what: str) -> None:
    """Who is promoted without it may hand the job on, and draw the same fence again."""
    id = served.add(queue=queue)
    database = Database(served.database_url, environ={})
    connection = await database.connect(what, settings=claiming.CLAIM_SETTINGS)
    await read_moments_as_microseconds(connection)

    async def claim() -> bool:
        place = {"queue": queue, "priority": 0, "limit": 1, "owner": "d", "lease_seconds": 600, "payload_bytes": 1_000}
        return [job.id for job in await claiming.claim(connection, database, **place)] == [id]  # type: ignore[arg-type]

    async def renewal() -> bool:
        held = [(id, served.job(id).fence)]
        return await leasing.renew(connection, database, held=held, owner="d", lease_seconds=600) == set(held)

    try:
        if what == "renewal":
            assert await claim()
        with commits_wait_for_a_standby(served.database_url):
            asked = asyncio.create_task(claim() if what == "claim" else renewal())
            await asyncio.to_thread(cut_short, served, what)
            with pytest.raises(ConnectionError, match="cut short"):
                await asked
        assert await renewal()  # it is there, and a later one counts
    finally:
        connection.terminate()


@pytest.mark.parametrize("command", ["enqueue", "enqueue --file", "jobs cancel", "jobs retry"])
def test_a_command_says_done_when_the_standby_has_it(served: Served, queue: str, tmp_path: Path, command: str) -> None:
    """Who reads the answer may rely on it after a failover. What was done stands here all the same, and can be done again."""
    id = served.add(queue=queue)
    if command == "jobs retry":
        served.ask("SELECT cancel_job(%s)", id)
    arguments = {
        "enqueue": ("enqueue", "remote", "1", "--key", f"{queue}-2", "--queue", queue),
        "enqueue --file": ("enqueue", "--file", "-"),
    }.get(command, (*command.split(), str(id)))
    line = f'{{"kind": "remote", "payload": 1, "key": "{queue}-2", "queue": "{queue}"}}'
    with ThreadPoolExecutor(1) as thread:

        def ask() -> Future[CompletedProcess[str]]:
            return thread.submit(worker, *arguments, stdin=line, directory=tmp_path, DATABASE_URL=served.database_url)

        with commits_wait_for_a_standby(served.database_url):
            asked = ask()
            cut_short(served, "command")
            result = asked.result(60)
            assert (result.returncode, result.stdout) == (69, "")
            assert "standby" in result.stderr
            asked = ask()
            wait_for(lambda: waiting(served, "command") or asked.done())
            assert not asked.done()
        assert asked.result(60).returncode == 0
    states = [row.state for row in served.ask("SELECT state FROM jobs WHERE queue = %s ORDER BY id", queue)]
    assert states == {"jobs cancel": ["cancelled"], "jobs retry": ["ready"]}.get(command, ["ready", "ready"])
