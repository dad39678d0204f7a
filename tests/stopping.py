"""Stopping a daemon in tests: the signal, its exit status, and the time that it may take."""

from __future__ import annotations

import signal
import time

from tests.processes import Daemon
from tests.workplace import LEASE_SECONDS

# What a stop may take after the grace, with the settings of the workplace: margin + 2 query time-outs.
BUDGET_SECONDS = LEASE_SECONDS / 10 + 2 * 1

# What a loaded machine may add to any of it: far less than what would be waited for wrongly.
SLACK_SECONDS = 3.0


def stopped(daemon: Daemon, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
    """Send the signal; exit status, and the seconds until it ended."""
    began = time.monotonic()
    daemon.signal(number)
    status = daemon.wait()
    return status, time.monotonic() - began


SLOW_CLAIMS = """
CREATE FUNCTION slow_claims() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.4); RETURN NULL; END $$;
CREATE TRIGGER slow_claims AFTER UPDATE ON jobs FOR EACH ROW WHEN (OLD.state = 'ready' AND NEW.state = 'running')
    EXECUTE FUNCTION slow_claims();
"""

# It has taken a row, and sleeps before its COMMIT (a lock on the table would be seen of an empty claim as well).
CLAIM_IN_FLIGHT = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
