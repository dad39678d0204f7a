"""PgBouncer in transaction mode, the real program: with WORKER_POOLER it costs daemons nothing but notifications."""

from __future__ import annotations

import time

import pytest
from psycopg import sql

from tests.pooled_workplace import PooledWorkplace, troubles
from tests.pooling import FEW_CONNECTIONS, needs_pgbouncer, pgbouncer
from tests.roles import PASSWORD
from tests.waiting import wait_for
from tests.workplace import both_shapes

pytestmark = needs_pgbouncer


@both_shapes
@pytest.mark.parametrize("has_direct_route", [True, False], ids=["direct", "polling"])
def test_two_daemons_do_five_hundred_jobs_without_one_error(
    pooled: PooledWorkplace, shape: dict[str, str], has_direct_route: bool
) -> None:
    """A10: no statement that "already exists" or "does not exist", though sessions change hands with every transaction."""
    route = pooled.listening() if has_direct_route else {}
    # One error is too many: so nothing is called late that only a busy machine makes late.
    pooled.db.execute(sql.SQL("ALTER ROLE {} SET statement_timeout = '15s'").format(sql.Identifier(pooled.role)))
    patient = {"WORKER_LEASE_SECONDS": "60", "WORKER_QUERY_TIMEOUT_SECONDS": "15", "WORKER_CLAIM_TIMEOUT_SECONDS": "15"}
    processes = [pooled.daemon(**shape, **route, **patient) for _ in range(2)]
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
    process = pooled.daemon(WORKER_POLL_SECONDS="0.3", WORKER_LEASE_SECONDS="6")
    for number in range(5):
        pooled.add("nap", key=f"poll-{number}")
        pooled.wait_for_notes("start", f"poll-{number}")
    id = pooled.add("gated", {"gate": "never"}, key="cancelled")
    pooled.wait_for_notes("start", "cancelled")
    assert pooled.value("SELECT cancel_job(%s)", id) == "cancelled"
    # The next renewal finds it out.
    pooled.wait_for_notes("told:cancelled", "cancelled")
    process.wait_for_event("job_abandoned", job_id=id)
    (lost,) = process.find("listener_lost")
    assert "WORKER_LISTEN_DATABASE_URL" in str(lost["error"])
    assert len(process.find("job_abandoned")) == 1


def test_a_stop_gives_back_what_it_does_not_finish(pooled: PooledWorkplace) -> None:
    process = pooled.daemon(WORKER_SHUTDOWN_GRACE_SECONDS="5", WORKER_LEASE_SECONDS="12")
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
    wait_for(lambda: pooled.states() == {"dead": 6}, 30)
    id = pooled.add("limits")
    assert pooled.wait_for_state(id, "succeeded").result == {
        "statement_timeout": 1000,
        "lock_timeout": 300,
        "idle_in_transaction_session_timeout": 600,
    }
    assert pooled.ledger() == {}
    pooled.healthy()


def test_a_pooler_in_session_mode_works_under_the_same_setting(pooled: PooledWorkplace) -> None:
    """It is what a refused user sets. Only LISTEN would work there, too; it is not tried."""
    with pgbouncer(pooled.url, roles=[(pooled.role, PASSWORD)], pool_mode="session", default_pool_size="20") as bouncer:
        process = pooled.daemon(DATABASE_URL=bouncer.dsn(user=pooled.role, dbname=pooled.db.info.dbname))
        ids = pooled.add_many(50, "nap")
        pooled.wait_until_all("succeeded")
        assert pooled.ledger() == dict.fromkeys(ids, 1)
        assert process.stop() == 0
