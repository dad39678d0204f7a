"""Waking up: NOTIFY is a hint. With it a job starts at once, without it at the next poll, and nothing is lost either way."""

from __future__ import annotations

import resource
from pathlib import Path
from random import Random

import psycopg

from tests.stopping import LONG_LEASE
from tests.waiting import any_moment, wait_for
from tests.workplace import POLL_NEVER, Workplace, both_shapes, frozen

ONLY_WOKEN = LONG_LEASE | POLL_NEVER
"""Nobody tells a process whose presence has lapsed: a short one might, when the machine stands still for a while."""


@both_shapes
def test_a_hungry_process_is_woken_by_an_insert(workplace: Workplace, shape: dict[str, str]) -> None:
    workplace.daemon(**shape, **ONLY_WOKEN)
    for _ in range(3):
        workplace.wait_until_only_notifications_wake()
        workplace.wait_for_state(workplace.add("nap"), "succeeded")


def test_a_lost_listener_is_replaced(workplace: Workplace) -> None:
    """B1: a job inserted later starts at once."""
    daemon = workplace.daemon(**ONLY_WOKEN)
    workplace.wait_until_only_notifications_wake()
    assert workplace.terminate("listen") == 1
    daemon.wait_for_event("listener_lost")
    daemon.wait_for_event("listener_restored")
    workplace.wait_until_only_notifications_wake()
    workplace.wait_for_state(workplace.add("nap"), "succeeded")


def test_a_job_inserted_while_nobody_listens_is_found_right_after(workplace: Workplace) -> None:
    """B3: after every LISTEN comes one look at the table."""
    workplace.daemon(**ONLY_WOKEN)
    for _ in range(3):
        workplace.wait_until_only_notifications_wake()
        with workplace.db.transaction():  # the notification goes out after its listener has gone
            assert workplace.terminate("listen") == 1
            id = workplace.add("nap")
        workplace.wait_for_state(id, "succeeded")


def test_a_frozen_listener_is_found_out_and_replaced(private_workplace: Workplace) -> None:
    """K4: no error, no end, no notification; it answers no probe."""
    workplace = private_workplace
    daemon = workplace.daemon(**ONLY_WOKEN)
    workplace.wait_until_only_notifications_wake()
    (pid,) = workplace.backends("listen")
    with frozen([pid]):
        daemon.wait_for_event("listener_lost", 30)
        wait_for(lambda: [other for other in workplace.backends("listen") if other != pid])
        workplace.wait_for_state(workplace.add("nap"), "succeeded")


def test_a_process_asks_to_be_woken_again_where_a_new_connection_leads(workplace: Workplace) -> None:
    """After a failover to a standby that has not heard of it yet, for example."""
    workplace.daemon(**ONLY_WOKEN)
    workplace.wait_until_only_notifications_wake()
    with workplace.db.transaction():
        workplace.db.execute("UPDATE processes SET hungry = false")
        workplace.terminate()
    workplace.wait_until_hungry()


def test_the_size_of_a_payload_never_reaches_the_notification(workplace: Workplace) -> None:
    """B5: 8,000 bytes are too much for a NOTIFY. And 5,000 jobs in one transaction are one."""
    workplace.daemon(**ONLY_WOKEN, WORKER_LOG_LEVEL="warning", ready=False, WORKERS="50")
    workplace.wait_until_only_notifications_wake()
    large = workplace.add("nap", {"text": "x" * 1_000_000})
    workplace.wait_for_state(large, "succeeded")
    workplace.wait_until_only_notifications_wake()
    workplace.add_many(5_000, "noop")
    workplace.wait_until_all("succeeded", 45)


def test_an_insert_by_a_role_that_may_only_insert_wakes_too(workplace: Workplace) -> None:
    workplace.daemon(**ONLY_WOKEN)
    workplace.wait_until_only_notifications_wake()
    with psycopg.connect(workplace.url, autocommit=True) as owner:
        role = f"inserts_{workplace.db.info.dbname}"
        owner.execute(f"CREATE ROLE {role}; GRANT INSERT ON jobs TO {role}")
        try:
            owner.execute(f"SET ROLE {role}")
            owner.execute("INSERT INTO jobs (kind, payload) VALUES ('nap', '{}')")
            owner.execute("RESET ROLE")
            wait_for(lambda: workplace.states() == {"succeeded": 1})
        finally:
            owner.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")


def test_many_sleepers_do_not_fight_over_single_jobs(workplace: Workplace) -> None:
    """B6: four daemons of eight tasks; a job costs a few transactions, not one of everybody for every task."""
    before = transactions(workplace)
    daemons = [workplace.daemon(WORKERS="8", WORKER_LOG_LEVEL="warning", ready=False) for _ in range(4)]
    workplace.wait_until_hungry(4)
    jobs, arrivals = 400, Random(6)
    with psycopg.connect(workplace.url, autocommit=True) as other:
        for _ in range(jobs):
            other.execute("INSERT INTO jobs (kind, payload) VALUES ('noop', '{}')")
            any_moment(arrivals, 0.008)
    wait_for(lambda: workplace.states() == {"succeeded": jobs}, 30)
    for daemon in daemons:
        assert daemon.stop() == 0
    wait_for(lambda: not workplace.backends())
    # The insert, the completion, and a few looks of each daemon; one of each task would be 32.
    assert transactions(workplace) - before < 25 * jobs


def test_a_flood_of_notifications_ends_in_one_look(workplace: Workplace) -> None:
    """B8: the loop is blocked while 20,000 of them arrive; memory stays flat, and the next job starts at once."""
    daemon = workplace.daemon(**ONLY_WOKEN)
    workplace.wait_until_only_notifications_wake()
    workplace.wait_for_state(workplace.add("nap"), "succeeded")
    channel = workplace.value("SELECT wake_channel()")
    before = resident_bytes(daemon.pid)
    blocking = workplace.add("block", {"seconds": 2})
    workplace.wait_for_notes("start", workplace.job(blocking).idempotency_key)
    workplace.db.execute("SELECT count(pg_notify(%s, 'default' || n)) FROM generate_series(1, 20000) AS n", (channel,))
    workplace.wait_for_state(blocking, "succeeded")
    workplace.wait_for_state(workplace.add("nap"), "succeeded")
    assert resident_bytes(daemon.pid) - before < 20 * 2**20


@both_shapes
def test_a_retry_wakes_a_process(workplace: Workplace, shape: dict[str, str]) -> None:
    workplace.daemon(**shape, **ONLY_WOKEN)
    id = workplace.add("fail", max_attempts=1)
    workplace.wait_for_state(id, "dead")
    workplace.wait_until_only_notifications_wake()
    assert workplace.value("SELECT retry_job(%s)", id) == "ready"
    workplace.wait_for_notes("start", count=2)


def test_a_reaped_job_wakes_a_process_that_reaps_nothing_itself(workplace: Workplace) -> None:
    workplace.daemon(**ONLY_WOKEN, WORKER_REAP_SECONDS="300")
    workplace.wait_until_only_notifications_wake()
    workplace.daemon(WORKER_QUEUES="another")
    workplace.db.execute("""
        INSERT INTO jobs (kind, payload, state, attempts, lease_owner, lease_until)
        VALUES ('nap', '{}', 'running', 1, 'nobody', now() + interval '500 milliseconds')
    """)
    wait_for(lambda: workplace.states() == {"succeeded": 1})


def transactions(workplace: Workplace) -> int:
    """Committed in this database by sessions that have ended: each has told of all its own by then."""
    count: int = workplace.value("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
    return count


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
