"""The reaper: however many leases have expired at once."""

from __future__ import annotations

import pytest

from tests.inprocess import quick, seen
from tests.waiting import await_for
from worker import Handlers, Worker

LOST = """
INSERT INTO jobs (kind, payload, state, attempts, max_attempts, lease_owner, lease_until)
SELECT 'lost', '{}', 'running', 1, 1, 'gone-00000000', now() - interval '1 second' FROM generate_series(1, 1000)
"""


async def test_more_expired_leases_than_a_pass_takes_wait_for_no_interval(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 6: nothing stays running with an expired lease for longer than one reap interval."""
    monkeypatch.setattr("worker.reaper._BATCHES_A_PASS", 1)
    async with seen(database_url) as run:
        await run.connection.execute(LOST)
        async with Worker(Handlers(), quick(database_url, reap_seconds=300)):

            async def over() -> bool:
                return not await run.value("SELECT EXISTS (SELECT FROM jobs WHERE state = 'running')")

            await await_for(over, 30)
        assert await run.value("SELECT count(*) FROM jobs WHERE state = 'dead' AND crashes = 1") == 1000
