"""The way to the database: refused, closed, mute, full, or not for us. It is tried again without a flood, or said and left."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.commands import worker
from tests.processes import Daemon, cpu_seconds
from tests.roles import PASSWORD, role, url_as
from tests.servers import PrivateCluster, Server
from tests.waiting import wait_for, wait_while
from tests.workplace import Workplace


@contextlib.contextmanager
def closing_port() -> Iterator[tuple[int, list[float]]]:
    """A port that closes what it accepts; and when it was tried."""
    moments: list[float] = []
    ended = threading.Event()

    def accept() -> None:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                stream, _ = listener.accept()
                moments.append(time.monotonic())
                stream.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1], moments
        finally:
            ended.set()
            thread.join()


@contextlib.contextmanager
def refusing_server(code: str) -> Iterator[tuple[str, list[float]]]:
    """Its URL, and when it was asked: a server that answers every connection with this error."""
    fields = ("SFATAL", "VFATAL", f"C{code}", "Mnot now", "")
    body = "\0".join(fields).encode() + b"\0"
    answer = b"E" + (4 + len(body)).to_bytes(4, "big") + body
    moments: list[float] = []
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError, ConnectionError):
                stream, _ = listener.accept()
                with stream:
                    stream.settimeout(5)
                    if stream.recv(1024)[4:8] == (80877103).to_bytes(4, "big"):
                        stream.sendall(b"N")  # no TLS here
                        stream.recv(1024)
                    moments.append(time.monotonic())
                    stream.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"postgresql://me@127.0.0.1:{listener.getsockname()[1]}/db", moments
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("code", ["57P03", "57P01", "57P02", "53300", "53200", "53400", "58030", "08006", "XX000", "55000"])
def test_a_server_that_takes_nobody_for_now_is_waited_for(workplace: Workplace, code: str) -> None:
    """A7: starting up, shutting down, recovering, full, out of memory: each ends by itself."""
    with refusing_server(code) as (url, asked):
        daemon = workplace.daemon(DATABASE_URL=url, ready=False)
        assert "not now" in daemon.wait_for_event("database_lost", 20)["error"]
        wait_for(lambda: len(asked) >= 3)
        assert daemon.process.poll() is None
        assert daemon.find("daemon_ready") == []
        assert daemon.stop() == 0


@pytest.mark.parametrize("code", ["28P01", "28000", "3D000", "42501"])
def test_a_server_that_will_never_take_us_is_not_waited_for(workplace: Workplace, code: str) -> None:
    with refusing_server(code) as (url, _):
        daemon = workplace.daemon(DATABASE_URL=url, ready=False)
        assert daemon.wait() == 78
        assert "not now" in daemon.find("config_invalid")[0]["error"]


def quiet(daemon: Daemon, *, cpu_seconds_more: float, lines_more: int) -> Callable[[], bool]:
    """Whether from now on it needs and says no more than this."""
    used, lines = cpu_seconds(daemon.pid), len(daemon.events)

    def is_quiet() -> bool:
        assert cpu_seconds(daemon.pid) - used < cpu_seconds_more
        assert len(daemon.events) - lines <= lines_more, daemon.events[lines:]
        assert daemon.process.poll() is None
        return True

    return is_quiet


@pytest.mark.parametrize("accepts", [False, True], ids=["closed", "closing"])
def test_reconnecting_floods_neither_log_nor_network(workplace: Workplace, closed_port: int, accepts: bool) -> None:
    """A5: growing, jittered pauses."""
    with closing_port() as (port, moments):
        url = f"postgresql://127.0.0.1:{port if accepts else closed_port}/nowhere"
        daemon = workplace.daemon(DATABASE_URL=url, ready=False)
        daemon.wait_for_event("database_lost")
        wait_while(quiet(daemon, cpu_seconds_more=0.4, lines_more=3), 8)
        # Doubling from 0.1 s: seven tries, each perhaps with and without TLS.
        assert len(moments) <= 20

        def have_grown() -> bool:
            gaps = [after - before for before, after in itertools.pairwise(moments)]
            return max(gaps) > 4 * min(gap for gap in gaps if gap > 0.01)

        if accepts:
            wait_for(have_grown, 60)


def test_a_running_daemon_floods_neither_log_nor_server(workplace: Workplace) -> None:
    """A5, with all its loops: jobs in hand, the database away for 6 s."""
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="30")
    workplace.add("nap", {"seconds": 1})
    workplace.wait_for_notes("start")
    with workplace.outage():
        wait_while(quiet(daemon, cpu_seconds_more=0.6, lines_more=19), 6)
    workplace.healthy()


def test_a_daemon_waits_for_a_database_that_starts_after_it(private_workplace: Workplace) -> None:
    """A7: unready, never half started."""
    workplace = private_workplace
    id = workplace.add("nap")
    workplace.cluster.stop()
    daemon = workplace.daemon(ready=False)
    daemon.wait_for_event("database_lost")
    assert daemon.find("daemon_ready") == []
    assert daemon.process.poll() is None
    health = worker("health", directory=workplace.directory)
    assert health.returncode == 0, "a restart would not bring the database back"
    assert "database away" in health.stdout
    workplace.cluster.start()
    daemon.wait_for_event("daemon_ready", 20)
    workplace.reconnect()
    workplace.wait_for_state(id, "succeeded")
    assert daemon.stop() == 0


def test_a_daemon_waits_for_a_server_without_a_free_connection(
    private_cluster: Callable[..., PrivateCluster], daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    """A7, A8: 53300 is waited out."""
    cluster = private_cluster(max_connections="12", superuser_reserved_connections="1", max_wal_senders="0")
    with contextlib.closing(Workplace.on(cluster, tmp_path, daemon)) as workplace, contextlib.ExitStack() as others:
        workplace.db.execute("CREATE ROLE w LOGIN IN ROLE pg_read_all_stats; GRANT ALL ON ALL TABLES IN SCHEMA public TO w")
        workplace.db.execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO w")
        url = workplace.url.replace("postgres@", "w@")
        for _ in range(10):
            others.enter_context(psycopg.connect(url))
        process = workplace.daemon(DATABASE_URL=url, ready=False)
        process.wait_for_event("database_lost")
        id = workplace.add("nap")
        others.close()
        process.wait_for_event("daemon_ready", 30)
        workplace.wait_for_state(id, "succeeded")


@pytest.mark.parametrize("limit", [3, 4])
def test_a_role_with_too_few_connections_is_told_how_many_are_needed(workplace: Workplace, limit: int) -> None:
    """A8: rather than claiming what it could never complete."""
    role = f"few_{os.getpid()}_{limit}"
    name = sql.Identifier(role)
    workplace.db.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} CONNECTION LIMIT {}").format(name, PASSWORD, limit))
    try:
        workplace.db.execute(sql.SQL("GRANT ALL ON ALL TABLES IN SCHEMA public TO {}").format(name))
        workplace.db.execute(sql.SQL("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {}").format(name))
        daemon = workplace.daemon(DATABASE_URL=url_as(role, workplace.url), WORKERS="16", ready=False)
        assert daemon.wait(20) == 78
        (event,) = daemon.find("config_invalid")
        assert f"CONNECTION LIMIT {limit}" in event["error"]
    finally:
        workplace.db.execute(sql.SQL("DROP OWNED BY {}; DROP ROLE {}").format(name, name))


@contextlib.contextmanager
def ordinary_role(server: Server, workplace: Workplace) -> Iterator[str]:
    """One that limits hold for; it may do what a daemon and its handlers do."""
    with role(server, workplace.url) as name:
        for what in ("TABLES", "SEQUENCES"):
            grant = sql.SQL("GRANT ALL ON ALL {} IN SCHEMA public TO {}").format(sql.SQL(what), sql.Identifier(name))
            workplace.db.execute(grant)
        yield name


@pytest.mark.parametrize(
    ("refuse", "allow"),
    [
        ("ALTER ROLE {role} NOLOGIN", "ALTER ROLE {role} LOGIN"),
        ("ALTER ROLE {role} CONNECTION LIMIT 0", "ALTER ROLE {role} CONNECTION LIMIT -1"),
        ("ALTER ROLE {role} VALID UNTIL '2000-01-01'; ALTER ROLE {role} NOLOGIN", "ALTER ROLE {role} LOGIN VALID UNTIL 'infinity'"),
        ("REVOKE CONNECT ON DATABASE {db} FROM PUBLIC", "GRANT CONNECT ON DATABASE {db} TO PUBLIC"),
        ("ALTER DATABASE {db} CONNECTION LIMIT 0", "ALTER DATABASE {db} CONNECTION LIMIT -1"),
    ],
    ids=["no login", "no connections", "expired", "no right", "full"],
)
def test_whatever_keeps_a_running_daemon_out_is_waited_out(server: Server, workplace: Workplace, refuse: str, allow: str) -> None:
    """At a start these are faults of the configuration; once it has worked they are somebody's doing, and end."""
    with ordinary_role(server, workplace) as name:
        daemon = workplace.daemon(DATABASE_URL=url_as(name, workplace.url))
        running = workplace.add("nap", {"seconds": 60})
        workplace.wait_for_notes("start")
        wait_for(lambda: len(workplace.backends()) >= 4)
        names = {"role": sql.Identifier(name), "db": sql.Identifier(workplace.db.info.dbname)}
        workplace.db.execute(sql.SQL(refuse).format(**names))
        try:
            workplace.terminate()
            daemon.wait_for_event("database_lost")
            workplace.wait_for_notes("told:lease_untrusted")
        finally:
            workplace.db.execute(sql.SQL(allow).format(**names))
        daemon.wait_for_event("database_restored", 30)
        assert workplace.value("SELECT cancel_job(%s)", running) == "cancelled"
        workplace.healthy()
        assert daemon.stop() == 0


def test_a_loop_whose_place_was_taken_waits_for_one_and_costs_no_lease(server: Server, workplace: Workplace) -> None:
    """A8: the role has no connection to spare, and somebody took that of the claims; the others go on."""
    with ordinary_role(server, workplace) as name:
        url = url_as(name, workplace.url)
        daemon = workplace.daemon(DATABASE_URL=url, WORKER_LEASE_SECONDS="6")
        workplace.healthy()  # each loop has its connection
        running = workplace.add("nap", {"seconds": 8})
        workplace.wait_for_notes("start", count=2)
        own = sql.Identifier(name)
        workplace.db.execute(sql.SQL("ALTER ROLE {} CONNECTION LIMIT {}").format(own, sql.Literal(len(workplace.backends()))))
        assert workplace.terminate("claim") == 1

        def taken() -> psycopg.Connection[object] | None:
            with contextlib.suppress(psycopg.OperationalError):
                return psycopg.connect(url)
            return workplace.terminate("claim") and None

        with wait_for(taken):
            # One that was under way when its connection went has said so before; the next line comes within half a minute.
            wait_for(lambda: any("too many connections for role" in one["error"] for one in daemon.find("claim_failed")), 45)
            waiting = workplace.add("nap")
            assert workplace.wait_for_state(running, "succeeded").attempts == 1
            assert workplace.job(waiting).state == "ready"
        workplace.wait_for_state(waiting, "succeeded")
        workplace.db.execute(sql.SQL("ALTER ROLE {} CONNECTION LIMIT -1").format(own))
        assert daemon.find("job_abandoned") == []
        assert daemon.process.poll() is None
        assert daemon.stop() == 0
