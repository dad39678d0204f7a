"""Stopping a daemon in tests: the signal, its exit status, and the time that it may take."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from tests.processes import Daemon
from tests.waiting import wait_for
from tests.workplace import Workplace, frozen

LONG_LEASE_SECONDS = 12.0
LONG_LEASE = {"WORKER_LEASE_SECONDS": f"{LONG_LEASE_SECONDS:g}", "WORKER_LEASE_MARGIN_SECONDS": "0.6"}
"""No lease is lost because the machine stood still for a while; the margin, and so the budget of a stop, is small all the same."""
PATIENT = LONG_LEASE | {"WORKER_QUERY_TIMEOUT_SECONDS": "5"}
"""Nor is a statement given up; so the budget is large."""

# What a stop may take after the grace, with LONG_LEASE and the workplace's query time-out: margin + 2 query time-outs.
BUDGET_SECONDS = 0.6 + 2 * 1

# What a loaded machine may add to any of it: far less than what would be waited for wrongly.
SLACK_SECONDS = 10.0


def stopped(daemon: Daemon, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
    """Send the signal; exit status, and the seconds until it ended."""
    began = time.monotonic()
    daemon.signal(number)
    status = daemon.wait()
    return status, time.monotonic() - began


def leases_are_over(workplace: Workplace) -> None:
    """As if the time of all leases had passed, and as much of the presence of the processes that had them."""
    workplace.db.execute(f"""
        UPDATE jobs SET lease_until = lease_until - interval '{LONG_LEASE_SECONDS} seconds' WHERE state = 'running';
        UPDATE processes SET expires_at = expires_at - interval '{LONG_LEASE_SECONDS} seconds'
    """)


# A claim does not end before there is a row in `claims_may_end`.
SLOW_CLAIMS = """
CREATE TABLE claims_may_end ();
CREATE FUNCTION slow_claims() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    WHILE NOT EXISTS (SELECT FROM public.claims_may_end) LOOP PERFORM pg_sleep(0.02); END LOOP;
    RETURN NULL;
END $$;
CREATE TRIGGER slow_claims AFTER UPDATE ON jobs FOR EACH ROW WHEN (OLD.state = 'ready' AND NEW.state = 'running')
    EXECUTE FUNCTION slow_claims();
"""

# It has taken a row, and sleeps before its COMMIT (a lock on the table would be seen of an empty claim as well).
CLAIM_IN_FLIGHT = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"


@contextlib.contextmanager
def frozen_in_a_claim(workplace: Workplace, pids: Callable[[], Sequence[int]]) -> Iterator[None]:
    """These server processes stand still for the block, the one that claims before its COMMIT."""

    def caught() -> contextlib.ExitStack | None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(frozen(pids()))
            return stack.pop_all() if workplace.value(CLAIM_IN_FLIGHT) else None

    standing_still = wait_for(caught, 30)
    assert standing_still is not None
    with standing_still:
        yield
