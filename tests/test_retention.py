"""The walks of the retention, a few statements a step: they rest together, and one that fails keeps no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from worker import retention
from worker.clock import local_seconds
from worker.retention import REST_SECONDS, STEP_SECONDS, Retention
from worker.store import pruning
from worker.store.connection import Database
from worker.store.pruning import PruneStep

HOUR = 3_600.0
OLD_JOBS = """
INSERT INTO jobs (payload, state, created_at, completed_at)
SELECT '1', $1, now() - interval '1 day', now() - interval '1 day' FROM generate_series(1, $2)
"""


def walking(database_url: str) -> Retention:
    return Retention(
        Database(database_url, environ={}),
        retention_seconds=HOUR,
        dead_retention_seconds=None,
        ledger_retention_seconds=HOUR,
        statement_seconds=30,
    )


async def test_walks_of_different_lengths_rest_together_and_begin_again_together(
    database_url: str, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead jobs that stay are walked over each time; the ledger is at its end at once."""
    asked: Counter[str] = Counter()
    now = local_seconds()

    def counted(name: str, prune: Callable[..., Awaitable[PruneStep]]) -> Callable[..., Awaitable[PruneStep]]:
        async def turn(*arguments: object, **options: object) -> PruneStep:
            nonlocal now
            asked[name] += 1
            now += STEP_SECONDS  # so a round takes several steps
            return await prune(*arguments, **options)

        return turn

    for name in ("prune_jobs", "prune_ledger", "prune_leases"):
        monkeypatch.setattr(pruning, name, counted(name, getattr(pruning, name)))
    monkeypatch.setattr(retention, "local_seconds", lambda: now)
    await connection.execute(OLD_JOBS, "dead", 1_500)
    await connection.fetchrow("SELECT * FROM acquire_lease('nightly', 'me', 600)")
    walks = walking(database_url)
    for round in (1, 2):
        for _ in range(20):
            await walks.step(connection)
        assert asked == {"prune_jobs": 3 * round, "prune_leases": 2 * round, "prune_ledger": round}
        rested_at = now + REST_SECONDS
        now = rested_at - 0.1
        await walks.step(connection)
        assert now == rested_at - 0.1
        now = rested_at


async def test_a_walk_that_fails_keeps_no_other_from_beginning_again(database_url: str, connection: asyncpg.Connection) -> None:
    await connection.execute("ALTER TABLE job_effects RENAME TO somewhere_else")
    walks = walking(database_url)
    for _ in range(3):
        await connection.execute(OLD_JOBS, "succeeded", 10)
        for _ in range(2):  # the end of the walk, and its start
            with pytest.raises(asyncpg.UndefinedTableError):
                await walks.step(connection)
        assert await connection.fetchval("SELECT count(*) FROM jobs") == 0
