"""PgBouncer in transaction mode, the real program: with WORKER_POOLER it costs nothing but notifications, without it is refused."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.commands import worker
from tests.pooling import FEW_CONNECTIONS, LACKING, PgBouncer, pgbouncer
from tests.processes import Daemon
from tests.psql import grant
from tests.roles import PASSWORD, role, url_as
from tests.servers import PrivateCluster, Server
from tests.serving import Served
from tests.waiting import await_for, until_cancelled, wait_for
from tests.workplace import VARIABLES, Workplace, both_shapes
from worker import LeaseLost, Leases
from worker.errors import ConfigError

pytestmark = pytest.mark.skipif(LACKING is not None, reason=LACKING or "")

LIMITS = {"statement_timeout": "1s", "lock_timeout": "300ms", "idle_in_transaction_session_timeout": "600ms"}
"""What the role carries, for the lease of these tests."""
EVERYTHING_OF_OURS = (
    "statement_timeout,lock_timeout,idle_in_transaction_session_timeout,idle_session_timeout,jit,options,plan_cache_mode,"
    "default_transaction_isolation,default_transaction_deferrable,enable_seqscan,enable_hashjoin,enable_mergejoin,enable_sort"
)
TROUBLE = {"warning", "error"}


class PooledWorkplace(Workplace):
    """A workplace whose daemons go through the pooler, as a role with the grants and the limits; the test itself goes straight."""

    def join(self, bouncer: PgBouncer, name: str) -> None:
        self.bouncer = bouncer
        self.role = name
        self.pooled_url = bouncer.dsn(user=name, dbname=self.db.info.dbname)
        self.direct_url = url_as(name, self.url)

    def daemon(self, *arguments: str, ready: bool = True, **variables: str) -> Daemon:
        return super().daemon(
            *arguments, ready=ready, **{"DATABASE_URL": self.pooled_url, "WORKER_POOLER": "transaction"} | variables
        )

    def listening(self) -> dict[str, str]:
        """The setting for a direct route."""
        return {"WORKER_LISTEN_DATABASE_URL": self.direct_url}


@contextlib.contextmanager
def daemons_role(server_dsn: str, url: str, limits: dict[str, str]) -> Iterator[str]:
    """A role with the grants of deploy/grants.sql, and these limits."""
    with role(Server(dsn=server_dsn, template="", origin="", version=""), url) as name:
        with psycopg.connect(url, autocommit=True) as db:
            for setting, value in limits.items():
                db.execute(sql.SQL("ALTER ROLE {} SET {} = {}").format(*map(sql.Identifier, (name, setting)), sql.Literal(value)))
            db.execute(sql.SQL("GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA public TO {}").format(sql.Identifier(name)))
        grant(url, "daemon", name)
        yield name


@contextlib.contextmanager
def pooled_by(place: PooledWorkplace, server_dsn: str) -> Iterator[None]:
    with daemons_role(server_dsn, place.url, LIMITS) as name, pgbouncer(place.url, roles=[(name, PASSWORD)]) as bouncer:
        place.join(bouncer, name)
        yield


@pytest.fixture
def pooled(server: Server, database_url: str, daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[PooledWorkplace]:
    place = PooledWorkplace(database_url, tmp_path, daemon)
    with contextlib.closing(place), pooled_by(place, server.dsn):
        yield place


@pytest.fixture
def pooled_server(
    private_cluster: Callable[..., PrivateCluster], daemon: Callable[..., Daemon], tmp_path: Path
) -> Iterator[PooledWorkplace]:
    """The same on a server of its own, which may be stopped."""
    cluster = private_cluster()
    place = PooledWorkplace.on(cluster, tmp_path, daemon)
    with contextlib.closing(place), pooled_by(place, cluster.dsn):
        yield place


def troubles(*processes: Daemon) -> list[dict[str, object]]:
    return [event for process in processes for event in process.events if event["level"] in TROUBLE]


# --- it works ------------------------------------------------------------------------------------------------------------------


@both_shapes
@pytest.mark.parametrize("has_direct_route", [True, False], ids=["direct", "polling"])
def test_two_daemons_do_five_hundred_jobs_without_one_error(
    pooled: PooledWorkplace, shape: dict[str, str], has_direct_route: bool
) -> None:
    """A10: no statement that "already exists" or "does not exist", though sessions change hands with every transaction."""
    route = pooled.listening() if has_direct_route else {}
    processes = [pooled.daemon(**shape, **route, WORKER_LEASE_SECONDS="30") for _ in range(2)]
    seen: set[int] = set()
    most = 0
    ids = pooled.add_many(350, "nap") + pooled.add_many(100, "own") + pooled.add_many(50, "reading", {"seconds": 0.01})

    def all_done() -> bool:
        nonlocal most
        rows = pooled.ask("SELECT pid FROM pg_stat_activity WHERE usename = %s AND application_name !~ 'listen'", pooled.role)
        seen.update(row.pid for row in rows)
        most = max(most, len(rows))
        return pooled.states() == {"succeeded": 500}

    wait_for(all_done, 60)
    assert 0 < most <= FEW_CONNECTIONS
    assert pooled.ledger() == dict.fromkeys(ids, 1)
    assert pooled.ask("SELECT id FROM jobs WHERE attempts <> 1") == []
    # All of it through the pooler, whose sessions are fewer than those of one daemon; it may have replaced one.
    assert seen
    expected = [] if has_direct_route else ["listener_lost"] * 2
    assert [event["event"] for event in troubles(*processes)] == expected, troubles(*processes)
    assert [process.stop() for process in processes] == [0, 0]


def test_with_a_direct_route_a_job_and_a_cancellation_wake_at_once(pooled: PooledWorkplace) -> None:
    """B4: the poll interval is half a minute here, that of renewals ten seconds, so whatever is quicker was told."""
    process = pooled.daemon(**pooled.listening(), WORKER_POLL_SECONDS="30", WORKER_LEASE_SECONDS="30")
    assert wait_for(lambda: pooled.backends("listen"))
    for number in range(5):
        key = f"wake-{number}"
        wait_for(lambda: pooled.value("SELECT bool_or(hungry) FROM processes"))
        added = time.monotonic()
        pooled.add("nap", key=key)
        assert pooled.wait_for_notes("start", key)[0].at_seconds - added < 9
    id = pooled.add("gated", {"gate": "never"}, key="cancelled")
    pooled.wait_for_notes("start", "cancelled")
    cancelled = time.monotonic()
    assert pooled.value("SELECT cancel_job(%s)", id) == "cancelled"
    assert pooled.wait_for_notes("told:cancelled", "cancelled")[0].at_seconds - cancelled < 9
    assert process.find("listener_lost") == []


def test_without_a_direct_route_it_polls_and_says_so_once(pooled: PooledWorkplace) -> None:
    process = pooled.daemon(WORKER_POLL_SECONDS="0.3")
    for number in range(5):
        pooled.add("nap", key=f"poll-{number}")
        pooled.wait_for_notes("start", f"poll-{number}")
    id = pooled.add("gated", {"gate": "never"}, key="cancelled")
    pooled.wait_for_notes("start", "cancelled")
    assert pooled.value("SELECT cancel_job(%s)", id) == "cancelled"
    # The next renewal finds it out.
    pooled.wait_for_notes("told:cancelled", "cancelled")
    lost, cancelled = troubles(process)
    assert (lost["event"], cancelled["event"]) == ("listener_lost", "job_abandoned")
    assert "WORKER_LISTEN_DATABASE_URL" in str(lost["error"])


def test_a_stop_gives_back_what_it_does_not_finish(pooled: PooledWorkplace) -> None:
    process = pooled.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="1")
    short, long = pooled.add("nap", {"seconds": 0.5}), pooled.add("nap", {"seconds": 60})
    pooled.wait_for_notes("start", count=2)
    assert process.stop() == 0
    assert pooled.job(short).state == "succeeded"
    assert (pooled.job(long).state, pooled.job(long).attempts) == ("ready", 0)
    assert [event["job_id"] for event in process.find("job_released")] == [long]


def test_sessions_that_handlers_get_keep_nothing_for_the_next(pooled: PooledWorkplace) -> None:
    """The role's limits hold there, and a transaction that one of them has ended is not met by somebody else."""
    pooled.daemon(WORKERS="2")
    for _ in range(6):
        pooled.add("own", {"seconds": 1}, max_attempts=1)
    wait_for(lambda: pooled.states() == {"dead": 6})
    id = pooled.add("limits")
    assert pooled.wait_for_state(id, "succeeded").result == {
        "statement_timeout": 1000,
        "lock_timeout": 300,
        "idle_in_transaction_session_timeout": 600,
    }
    assert pooled.ledger() == {}
    pooled.healthy()


# --- outages -------------------------------------------------------------------------------------------------------------------


def work_under_load(place: PooledWorkplace) -> list[int]:
    """Jobs whose effects are under way when this returns."""
    ids = place.add_many(200, "nap", {"seconds": 0.02}) + place.add_many(50, "own")
    place.wait_for_notes("end", count=20)
    return ids


def all_were_done_once(place: PooledWorkplace, ids: list[int], *processes: Daemon) -> None:
    place.wait_until_all("succeeded", 30)
    assert place.ledger() == dict.fromkeys(ids, 1)
    assert [process.process.poll() for process in processes] == [None] * len(processes)
    assert not {"internal_error", "job_dead", "config_invalid"} & {str(event["event"]) for event in troubles(*processes)}


def test_a_restart_of_the_pooler_under_load_loses_and_doubles_nothing(pooled: PooledWorkplace) -> None:
    processes = [pooled.daemon(**pooled.listening()), pooled.daemon()]
    ids = work_under_load(pooled)
    pooled.bouncer.stop()
    for process in processes:
        process.wait_for_event("database_lost")
    pooled.bouncer.start()
    all_were_done_once(pooled, ids, *processes)


def test_a_pause_of_the_pooler_under_load_loses_and_doubles_nothing(pooled: PooledWorkplace) -> None:
    """As operators do before a switch-over: it takes everything and answers nothing, for longer than a lease."""
    processes = [pooled.daemon(**pooled.listening()), pooled.daemon()]
    ids = work_under_load(pooled)
    pooled.bouncer.ask("PAUSE")
    for process in processes:
        process.wait_for_event("database_lost")
    pooled.wait_until_leases_are_over()
    pooled.bouncer.ask("RESUME")
    all_were_done_once(pooled, ids, *processes)


def test_a_restart_of_the_server_behind_the_pooler_loses_and_doubles_nothing(pooled_server: PooledWorkplace) -> None:
    place = pooled_server
    processes = [place.daemon(**place.listening()), place.daemon()]
    ids = work_under_load(place)
    place.cluster.stop()
    for process in processes:
        process.wait_for_event("database_lost")
    place.cluster.start()
    place.reconnect()
    all_were_done_once(place, ids, *processes)


# --- other processes, and commands ---------------------------------------------------------------------------------------------


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


async def test_leases_name_a_pooler_that_nobody_mentioned(pooled: PooledWorkplace) -> None:
    async with Leases(pooled.pooled_url) as leases:
        with pytest.raises(ConfigError, match="give Leases pooler='transaction'"):
            async with leases.hold("nightly"):
                pytest.fail("not held")


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


# --- what cannot work is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignores", [False, True], ids=["strict", "ignoring"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("run",),
        ("run", "--migrate"),
        ("check",),
        ("enqueue", "nap", "{}"),
        ("lease", "run", "x", "--", "true"),
        ("serve", "--port", "0"),
    ],
    ids=" ".join,
)
def test_a_pooler_that_nobody_mentioned_is_refused_in_one_line(
    pooled: PooledWorkplace, arguments: tuple[str, ...], ignores: bool
) -> None:
    """A11: whether it refuses our session settings, or was told to drop them silently; also when the role carries the same ones."""
    settings = {"ignore_startup_parameters": EVERYTHING_OF_OURS} if ignores else {}
    with pgbouncer(pooled.url, roles=[(pooled.role, PASSWORD)], **settings) as bouncer:
        url = bouncer.dsn(user=pooled.role, dbname=pooled.db.info.dbname)
        result = worker(*arguments, directory=pooled.directory, **(VARIABLES | {"DATABASE_URL": url}))
    assert result.returncode == 78, (result.stdout, result.stderr)
    (line,) = (text for text in (result.stdout + result.stderr).splitlines() if "a connection pooler" in text)
    assert "set WORKER_POOLER=transaction" in line


@pytest.mark.parametrize("missing", LIMITS)
def test_a_role_without_the_limits_is_refused(pooled: PooledWorkplace, missing: str) -> None:
    alter = sql.SQL("ALTER ROLE {} RESET {}").format(sql.Identifier(pooled.role), sql.Identifier(missing))
    pooled.db.execute(alter)
    process = pooled.daemon(ready=False)
    assert process.wait(10) == 78
    (refused,) = process.find("config_invalid")
    assert f"ALTER ROLE … SET {missing} = '" in refused["error"]


def test_a_pooler_on_the_route_for_listen_is_named(pooled: PooledWorkplace) -> None:
    """Polling serves the jobs; `worker check` refuses it."""
    process = pooled.daemon(WORKER_LISTEN_DATABASE_URL=pooled.pooled_url)
    lost = process.wait_for_event("listener_lost")
    assert "WORKER_LISTEN_DATABASE_URL has to name a direct route" in lost["error"]
    pooled.healthy()
    through = VARIABLES | {"DATABASE_URL": pooled.pooled_url, "WORKER_POOLER": "transaction"}
    result = worker("check", directory=pooled.directory, **through, WORKER_LISTEN_DATABASE_URL=pooled.pooled_url)
    assert result.returncode == 78
    assert "WORKER_LISTEN_DATABASE_URL has to name a direct route" in result.stderr


def test_options_in_the_url_are_refused_with_what_to_do(pooled: PooledWorkplace) -> None:
    process = pooled.daemon(ready=False, DATABASE_URL=pooled.pooled_url + "&options=-cwork_mem%3D8MB")
    assert process.wait(10) == 78
    (refused,) = process.find("config_invalid")
    assert "leave options out of the URL" in refused["error"]


def test_a_pooler_in_session_mode_works_under_the_same_setting(pooled: PooledWorkplace) -> None:
    """It is what a refused user sets. Only LISTEN would work there, too; it is not tried."""
    with pgbouncer(pooled.url, roles=[(pooled.role, PASSWORD)], pool_mode="session", default_pool_size="20") as bouncer:
        process = pooled.daemon(DATABASE_URL=bouncer.dsn(user=pooled.role, dbname=pooled.db.info.dbname))
        ids = pooled.add_many(50, "nap")
        pooled.wait_until_all("succeeded")
        assert pooled.ledger() == dict.fromkeys(ids, 1)
        assert process.stop() == 0
