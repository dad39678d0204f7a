"""The database goes away, comes back, answers late, loses answers, or has no room. It costs time, never a job."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.processes import Daemon, wait_for
from tests.roles import PASSWORD, role, url_as
from tests.servers import PrivateCluster, Server
from tests.workplace import LEASE_SECONDS, TEXTBOOK, Workplace, frozen

SHAPES = pytest.mark.parametrize("shape", [{}, TEXTBOOK], ids=["batches", "textbook"])


@SHAPES
def test_a_daemon_outlives_an_outage(workplace: Workplace, shape: dict[str, str]) -> None:
    """A2, longer than a lease: it stops what it runs in time, and works again when the database is back."""
    daemon = workplace.daemon(**shape)
    running = [workplace.add("nap", {"seconds": 3}) for _ in range(4)]
    workplace.wait_for_notes("start", count=4)
    waiting = workplace.add_many(20, "nap")
    began = time.monotonic()
    with workplace.outage():
        # Guarantee 5: the handlers are stopped before their leases can be taken.
        told = workplace.wait_for_notes("told:lease_untrusted", count=4)
        assert max(note.at_seconds for note in told) - began < LEASE_SECONDS
        time.sleep(LEASE_SECONDS)
    back = time.monotonic()
    workplace.wait_until_all("succeeded")
    assert time.monotonic() - back < 10
    assert workplace.ledger() == dict.fromkeys([*running, *waiting], 1)
    assert {workplace.job(id).attempts for id in running} == {2}
    lost, restored = daemon.find("database_lost"), daemon.find("database_restored")
    assert (len(lost), len(restored)) == (1, 1)
    # A few lines for each loop, not one for each try.
    assert sum(event["level"] == "warning" for event in daemon.events) < 25
    assert daemon.process.poll() is None
    workplace.healthy()


def test_an_outage_shorter_than_the_trust_costs_nothing(workplace: Workplace) -> None:
    """Guarantee 12: what has finished meanwhile is kept, renewed and written afterwards."""
    workplace.daemon(WORKER_LEASE_SECONDS="6")
    running = workplace.add("nap", {"seconds": 4})
    finishing = [workplace.add("gated", {"gate": "gate"}) for _ in range(3)]
    workplace.wait_for_notes("start", count=4)
    with workplace.outage():
        workplace.open_gate()
        workplace.wait_for_notes("end", count=3)
        time.sleep(1)
    workplace.wait_until_all("succeeded")
    ids = [running, *finishing]
    assert workplace.ledger() == dict.fromkeys(ids, 1)
    assert {workplace.job(id).attempts for id in ids} == {1}


@SHAPES
def test_a_crash_of_the_server_loses_no_job(private_workplace: Workplace, shape: dict[str, str]) -> None:
    """K9: all its processes end at once, and it recovers from its log."""
    workplace = private_workplace
    daemon = workplace.daemon(**shape)
    workplace.add_many(200, "nap", {"seconds": 0.02})
    workplace.wait_for_notes("end", count=40)
    os.kill(workplace.backends("claim")[0], signal.SIGKILL)
    workplace.reconnect()
    workplace.wait_until_all("succeeded", 30)
    assert set(workplace.ledger().values()) == {1}
    assert len(workplace.ledger()) == 200
    assert daemon.process.poll() is None


@pytest.mark.parametrize("role", ["claim", "commit", "leases", "reaper", "listen"])
def test_each_loop_replaces_its_own_dead_connection(workplace: Workplace, role: str) -> None:
    """A3, guarantee 11: the others keep theirs."""
    workplace.daemon()
    workplace.healthy()
    wait_for(lambda: len(workplace.backends()) == 5)
    others = {name: workplace.backends(name) for name in ("claim", "commit", "leases", "reaper", "listen") if name != role}
    (dead,) = workplace.backends(role)
    assert workplace.terminate(role) == 1
    workplace.healthy()
    (new,) = wait_for(lambda: workplace.backends(role), 5)
    assert new != dead
    assert {name: workplace.backends(name) for name in others} == others
    # It works, and not only is there: a job whose process died is reaped, a long one is renewed.
    workplace.db.execute("""
        INSERT INTO jobs (kind, payload, state, attempts, lease_owner, lease_until)
        VALUES ('nap', '{}', 'running', 1, 'nobody', now() + interval '100 milliseconds')
    """)
    long = workplace.add("nap", {"seconds": 1.2 * LEASE_SECONDS})
    assert workplace.wait_for_state(long, "succeeded").attempts == 1
    workplace.wait_until_all("succeeded")


# --- lost answers of COMMIT ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def commits_wait_for_a_standby(url: str) -> Iterator[None]:
    """K1: every COMMIT is applied, and answered to nobody."""

    def name_standby(name: str) -> None:
        with psycopg.connect(url, autocommit=True, options="-c synchronous_commit=local") as other:
            other.execute(sql.SQL("ALTER SYSTEM SET synchronous_standby_names = {}").format(sql.Literal(name)))
            other.execute("SELECT pg_reload_conf()")

    name_standby("ghost")
    try:
        yield
    finally:
        name_standby("")


def lose_answer(workplace: Workplace, role: str, wait_event: str, *, by: str = "pg_terminate_backend") -> None:
    """End the session of this role, or its wait, in the middle of its COMMIT."""
    waiting = """
        SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s AND wait_event = %s
        AND (query ~ '^COMMIT' OR query ~ '(done|settled) AS')
    """
    (row,) = wait_for(lambda: workplace.ask(waiting, f"% {role}", wait_event))
    workplace.ask(f"SELECT {by}(%s)", row.pid)


def test_a_claim_that_was_committed_but_not_answered_is_given_back(private_workplace: Workplace) -> None:
    """Guarantee 9: as soon as it is over, long before its leases expire, attempt refunded."""
    workplace = private_workplace
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="30", WORKER_CLAIM_TIMEOUT_SECONDS="1")
    waiting = "SELECT pid FROM pg_stat_activity WHERE application_name ~ 'claim$' AND wait_event = 'SyncRep' AND query ~ 'due AS'"
    with commits_wait_for_a_standby(workplace.url):
        ids = workplace.add_many(3, "nap")
        wait_for(lambda: workplace.ask(waiting))
        daemon.wait_for_event("claim_failed")
    released = wait_for(lambda: daemon.find("job_released", reason="claim_lost"))
    assert {event["job_id"] for event in released} <= set(ids)
    for id in ids:
        assert workplace.wait_for_state(id, "succeeded", timeout_seconds=5).attempts == 1
    assert workplace.ledger() == dict.fromkeys(ids, 1)


DELETING = {"WORKER_RETENTION_SECONDS": "0"}


@pytest.mark.parametrize("shape", [{}, TEXTBOOK, DELETING], ids=["batches", "textbook", "deleting"])
@pytest.mark.parametrize(("kind", "role"), [("gated", "commit"), ("own", "pool"), ("gated_plain", "commit")])
def test_a_commit_that_was_applied_but_not_answered_counts_once(
    private_workplace: Workplace, shape: dict[str, str], kind: str, role: str
) -> None:
    """K1, guarantee 9: looked up, neither repeated nor forgotten."""
    workplace = private_workplace
    daemon = workplace.daemon(**shape, WORKER_LEASE_SECONDS="12", WORKER_QUERY_TIMEOUT_SECONDS="3")
    id = workplace.add(kind, {"gate": "gate"}, key="answered")
    workplace.wait_for_notes("start")
    with commits_wait_for_a_standby(workplace.url):
        workplace.open_gate()
        lose_answer(workplace, role, "SyncRep")
        wait_for(lambda: workplace.states()["running"] == 0, 2)
        # Nobody may believe it yet: the primary alone has it.
        time.sleep(0.5)
        assert daemon.find("job_succeeded", job_id=id) == []
    daemon.wait_for_event("job_succeeded", job_id=id)
    assert workplace.states() == ({} if shape is DELETING else {"succeeded": 1})
    assert len(workplace.notes("start")) == 1
    assert workplace.ledger() == ({} if kind == "gated_plain" else {id: 1})
    assert daemon.find("job_failed") == daemon.find("job_abandoned") == []
    workplace.healthy()


@pytest.mark.parametrize(("kind", "role"), [("gated", "commit"), ("own", "pool"), ("gated_plain", "commit")])
def test_a_commit_whose_wait_for_a_standby_was_cut_short_is_not_believed(
    private_workplace: Workplace, kind: str, role: str
) -> None:
    """Somebody cancels it: the server answers as always, with a warning, which the role does not care to see."""
    workplace = private_workplace
    workplace.db.execute("ALTER DATABASE postgres SET client_min_messages = 'error'")
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="12", WORKER_QUERY_TIMEOUT_SECONDS="3")
    id = workplace.add(kind, {"gate": "gate"}, key="cut-short")
    workplace.wait_for_notes("start")
    with commits_wait_for_a_standby(workplace.url):
        workplace.open_gate()
        lose_answer(workplace, role, "SyncRep", by="pg_cancel_backend")
        wait_for(lambda: workplace.states()["running"] == 0)
        # It is looked up, and so is nobody's success before the standby is there.
        wait_for(lambda: workplace.ask("SELECT pid FROM pg_stat_activity WHERE state = 'active' AND query ~ 'proof AS'"))
        assert daemon.find("job_succeeded", job_id=id) == []
    daemon.wait_for_event("job_succeeded", job_id=id)
    assert len(workplace.notes("start")) == 1
    assert daemon.find("job_failed") == daemon.find("job_abandoned") == []
    workplace.healthy()


@SHAPES
def test_a_failure_that_was_written_but_not_answered_counts_once(private_workplace: Workplace, shape: dict[str, str]) -> None:
    """K1 on the other statement that ends an attempt."""
    workplace = private_workplace
    long = {"WORKER_LEASE_SECONDS": "12", "WORKER_QUERY_TIMEOUT_SECONDS": "3", "WORKER_BACKOFF_BASE_SECONDS": "60"}
    daemon = workplace.daemon(**shape, **long)
    id = workplace.add("fail", {"gate": "gate"})
    workplace.wait_for_notes("start")
    with commits_wait_for_a_standby(workplace.url):
        workplace.open_gate()
        lose_answer(workplace, "commit", "SyncRep")
    daemon.wait_for_event("job_failed", job_id=id)
    row = workplace.job(id)
    assert (row.state, row.attempts) == ("ready", 1)
    assert len(workplace.failures(id)) == len(daemon.find("job_failed")) == 1
    assert daemon.find("job_abandoned") == []


@SHAPES
@pytest.mark.parametrize(("kind", "role", "attempts"), [("deferred", "commit", 1), ("own_deferred", "pool", 2)])
def test_a_commit_that_was_rolled_back_and_not_answered_is_made_again(
    workplace: Workplace, shape: dict[str, str], kind: str, role: str, attempts: int
) -> None:
    """K2: the same error at the client, the opposite truth. Recorded effects are written again without running the handler; a
    transaction of the handler's own is its attempt's failure."""
    daemon = workplace.daemon(**shape, WORKER_LEASE_SECONDS="12")
    with psycopg.connect(workplace.url, autocommit=True) as gatekeeper:
        gatekeeper.execute("SELECT pg_advisory_lock(4711)")
        id = workplace.add(kind, key="rolled-back")
        lose_answer(workplace, role, "advisory")
        gatekeeper.execute("SELECT pg_advisory_unlock(4711)")
    row = workplace.wait_for_state(id, "succeeded")
    assert row.attempts == len(workplace.notes("start")) == attempts
    assert workplace.ledger("deferred_ledger") == {id: 1}
    daemon.wait_for_event("job_succeeded", job_id=id)


def test_a_frozen_commit_is_looked_up_when_it_has_ended(private_workplace: Workplace) -> None:
    """K4 on the committer: its session may still commit, so nothing is decided before."""
    workplace = private_workplace
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="6")
    workplace.healthy()
    id = workplace.add("gated", {"gate": "gate"}, key="frozen")
    workplace.wait_for_notes("start", "frozen")
    with frozen(workplace.backends("commit")):
        workplace.open_gate()
        # As soon as a statement takes too long, on a new connection.
        workplace.wait_for_state(id, "succeeded", timeout_seconds=4)
    daemon.wait_for_event("job_succeeded", job_id=id)
    assert workplace.job(id).attempts == 1
    assert workplace.ledger()[id] == 1
    workplace.healthy()


# --- connecting ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hostile_port(*, accepts: bool) -> Iterator[tuple[int, list[float]]]:
    """A port on which nobody listens, or one that closes what it accepts; and when it was tried."""
    moments: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ended = threading.Event()
        if not accepts:
            listener.close()
            yield port, moments
            return
        listener.settimeout(0.05)

        def accept() -> None:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    stream, _ = listener.accept()
                    moments.append(time.monotonic())
                    stream.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield port, moments
        finally:
            ended.set()
            thread.join()


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


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


@pytest.mark.parametrize("accepts", [False, True], ids=["closed", "closing"])
def test_reconnecting_floods_neither_log_nor_network(workplace: Workplace, accepts: bool) -> None:
    """A5: growing, jittered pauses."""
    with hostile_port(accepts=accepts) as (port, moments):
        daemon = workplace.daemon(DATABASE_URL=f"postgresql://127.0.0.1:{port}/nowhere", ready=False)
        daemon.wait_for_event("database_lost")
        used = cpu_seconds(daemon.pid)
        time.sleep(8)
        assert cpu_seconds(daemon.pid) - used < 0.4
        assert len(daemon.events) <= 4
        # Doubling from 0.1 s: seven tries, each perhaps with and without TLS.
        assert len(moments) <= 20
        if accepts:
            gaps = [after - before for before, after in itertools.pairwise(moments)]
            assert max(gaps) > 4 * min(gap for gap in gaps if gap > 0.01)
        assert daemon.process.poll() is None


def test_a_running_daemon_floods_neither_log_nor_server(workplace: Workplace) -> None:
    """A5, with all its loops: jobs in hand, the database away for 6 s."""
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="30")
    workplace.add("nap", {"seconds": 1})
    workplace.wait_for_notes("start")
    used, lines = cpu_seconds(daemon.pid), len(daemon.events)
    with workplace.outage():
        time.sleep(6)
        assert cpu_seconds(daemon.pid) - used < 0.6
        assert len(daemon.events) - lines < 20
    workplace.healthy()


def test_a_daemon_waits_for_a_database_that_starts_after_it(private_workplace: Workplace) -> None:
    """A7: unready, never half started."""
    workplace = private_workplace
    id = workplace.add("nap")
    workplace.cluster.stop()
    daemon = workplace.daemon(ready=False)
    daemon.wait_for_event("database_lost")
    time.sleep(1)
    assert daemon.find("daemon_ready") == []
    assert daemon.process.poll() is None
    workplace.cluster.start()
    daemon.wait_for_event("daemon_ready", 10)
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
        process.wait_for_event("daemon_ready")
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
        names = {"role": sql.Identifier(name), "db": sql.Identifier(workplace.db.info.dbname)}
        workplace.db.execute(sql.SQL(refuse).format(**names))
        try:
            assert workplace.terminate() >= 4
            daemon.wait_for_event("database_lost")
            workplace.wait_for_notes("told:lease_untrusted")
        finally:
            workplace.db.execute(sql.SQL(allow).format(**names))
        daemon.wait_for_event("database_restored")
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
            failed = daemon.wait_for_event("claim_failed")
            assert "too many connections for role" in failed["error"]
            waiting = workplace.add("nap")
            assert workplace.wait_for_state(running, "succeeded").attempts == 1
            assert workplace.job(waiting).state == "ready"
        workplace.wait_for_state(waiting, "succeeded")
        workplace.db.execute(sql.SQL("ALTER ROLE {} CONNECTION LIMIT -1").format(own))
        assert daemon.find("job_abandoned") == []
        assert daemon.process.poll() is None
        assert daemon.stop() == 0


# --- the shared connections ----------------------------------------------------------------------------------------------------


def test_handlers_that_keep_every_pooled_connection_starve_no_renewal(workplace: Workplace) -> None:
    """A13: the smallest pool, handlers that sit on its connections for two leases; the loops have their own."""
    workplace.daemon(WORKERS="8", WORKER_POOL_SIZE="2", WORKER_LEASE_SECONDS="1", WORKER_QUERY_TIMEOUT_SECONDS="20")
    ids = [workplace.add("reading", {"seconds": 2}) for _ in range(8)]
    workplace.wait_for_notes("start", count=8)
    other = workplace.daemon(WORKER_LEASE_SECONDS="1")
    workplace.wait_until_all("succeeded", 20)
    assert {workplace.job(id).attempts for id in ids} == {1}
    assert workplace.ledger() == dict.fromkeys(ids, 1)
    assert other.find("lease_expired") == []


def test_no_pooled_connection_is_lost_by_cancelling_who_waits_for_it(workplace: Workplace) -> None:
    """A12: sixty handlers cancelled while they hold one or wait for one; the pool is whole afterwards."""
    workplace.daemon(WORKERS="20", WORKER_POOL_SIZE="4", WORKER_QUERY_TIMEOUT_SECONDS="20", WORKER_LEASE_SECONDS="30")
    for round in range(3):
        ids = [workplace.add("reading", {"seconds": 30}) for _ in range(20)]
        workplace.wait_for_notes("start", count=20 * (round + 1))
        for id in ids:
            workplace.ask("SELECT cancel_job(%s)", id)
        workplace.wait_for_notes("told:cancelled", count=20 * (round + 1))
    ids = [workplace.add("reading", {"seconds": 0.5}) for _ in range(4)]
    for id in ids:
        workplace.wait_for_state(id, "succeeded")
    starts = [note.at_seconds for note in workplace.notes("start")[-4:]]
    ends = [note.at_seconds for note in workplace.notes("end")[-4:]]
    assert max(starts) < min(ends)
    assert len(workplace.backends("pool")) <= 4
