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

OLD_EFFECTS = """
INSERT INTO job_effects (idempotency_key, job_id, fence, committed_at)
SELECT 'old ' || n, n, n, now() - interval '1 day' FROM generate_series(1, 10) AS n
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


@pytest.mark.parametrize(
    ("away", "other", "fill"),
    [
        ("job_failures", "job_effects", OLD_EFFECTS),
        ("job_effects", "jobs", OLD_JOBS.replace("$1", "'succeeded'").replace("$2", "10")),
        ("leases", "jobs", OLD_JOBS.replace("$1", "'succeeded'").replace("$2", "10")),
    ],
    ids=["of the jobs", "of the ledger", "of the leases"],
)
async def test_a_walk_that_always_fails_keeps_no_other_from_going_on(
    database_url: str, connection: asyncpg.Connection, away: str, other: str, fill: str
) -> None:
    await connection.execute(f"ALTER TABLE {away} RENAME TO somewhere_else")
    walks = walking(database_url)
    for _ in range(3):
        await connection.execute(fill)
        for _ in range(3):  # the one that fails, the end of the others, and their start
            with pytest.raises(asyncpg.UndefinedTableError):
                await walks.step(connection)
        assert await connection.fetchval(f"SELECT count(*) FROM {other}") == 0
