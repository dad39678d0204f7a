"""The plans of the statements of a job's life stay right, whatever the planner believes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.claims import OWNER, add, claim, session
from tests.inprocess import seen
from worker import committer, keeper, reaper
from worker.store import claiming, leasing, reaping, settling
from worker.store.claiming import START, Cursor
from worker.store.connection import Connection, Database
from worker.store.settling import Completion


class Plans:
    """What the statements read, as the loops' own sessions plan them."""

    def __init__(self, connection: Connection, database: Database) -> None:
        self.connection = connection
        self.database = database

    async def read(self, template: str, *literals: str) -> tuple[int, set[str]]:
        """The pages read, and the indexes (or sequential scans) of jobs used; whatever it did is rolled back."""
        await self.connection.execute("DEALLOCATE ALL; BEGIN")
        try:
            await self.connection.execute(f"PREPARE p AS {self.database.sql(template)}")
            arguments = f"({', '.join(literals)})" if literals else ""
            text = await self.connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE p{arguments}")
        finally:
            await self.connection.execute("ROLLBACK")
        plan = json.loads(text)[0]["Plan"]
        found: set[str] = set()
        self._collect(plan, found)
        return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], found

    def _collect(self, node: dict[str, Any], found: set[str]) -> None:
        if node.get("Relation Name") == "jobs" and node["Node Type"] == "Seq Scan":
            found.add("sequential scan")
        if "Index Name" in node:
            found.add(node["Index Name"])
        for child in node.get("Plans", []):
            self._collect(child, found)


def claim_text(limit: int) -> str:
    return re.sub(r"\{limit\}", str(limit), claiming.CLAIM)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("analyzed", ["never", "while nothing ran", "as it is"])
async def test_plans_stay_right_with_much_history_under_an_old_snapshot(database_url: str, analyzed: str) -> None:
    """Each statement finds its rows by the index that was made for it, whatever the planner believes."""
    async with (
        seen(database_url) as run,
        seen(database_url) as old,
        session(database_url, claiming.CLAIM_SETTINGS) as (connection, database),
    ):
        await run.connection.execute("SET statement_timeout = '120s'; ALTER TABLE jobs SET (autovacuum_enabled = off)")
        await run.connection.execute(
            "INSERT INTO jobs (payload, state, completed_at, fence, available_at, created_at)"
            " SELECT '{}', CASE WHEN n % 50 = 0 THEN 'dead' ELSE 'succeeded' END, now(), nextval('fence_seq'),"
            " now() - interval '2 days', now() - interval '2 days' FROM generate_series(1, 1000000) AS n"
        )
        await old.connection.execute("SET idle_in_transaction_session_timeout = 0")
        await old.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await old.connection.fetchval("SELECT count(*) FROM schema_version")
        # What the old snapshot keeps: the dead entries of jobs that were claimed and completed since.
        await add(run, "gone", 3_000, later_seconds=-36_000)
        cursor = START
        while jobs := await claim(connection, database, 300, cursor=cursor):
            cursor = Cursor(jobs[-1].available_at, jobs[-1].id)
            completions = [Completion(job.id, job.fence, None, False) for job in jobs]
            assert len(await settling.complete(connection, database, completions, owner=OWNER, deletes=False)) == len(jobs)
        if analyzed == "while nothing ran":
            await run.connection.execute("ANALYZE jobs")
        await add(run, "held", 300)
        held = await claim(connection, database, 300, cursor=cursor)
        assert len(held) == 300
        await add(run, "waiting", 300, later_seconds=1_000)
        ids = "'{" + ",".join(str(job.id) for job in held[:100]) + "}'"
        fences = "'{" + ",".join(str(job.fence) for job in held[:100]) + "}'"
        nulls, yes = "array_fill(NULL::text, ARRAY[100])", "array_fill(true, ARRAY[100])"
        behind = await run.value("SELECT available_at::text FROM jobs WHERE id = $1", held[-1].id)

        async def look() -> None:
            async def plans(settings: dict[str, str], template: str, *literals: str) -> tuple[int, set[str]]:
                async with session(database_url, settings) as (other, _):
                    return await Plans(other, database).read(template, *literals)

            arguments = ("'default'", "0", f"'{OWNER}'", "30", f"'{behind}'", str(held[-1].id), "10000000")
            pages, used = await plans(claiming.CLAIM_SETTINGS, claim_text(100), *arguments)
            assert used == {"jobs_ready", "jobs_pkey"}
            assert pages < 4_000
            from_the_start = ("'default'", "0", f"'{OWNER}'", "30", "'-infinity'", "0", "10000000")
            one, _ = await plans(claiming.CLAIM_SETTINGS, claim_text(1), *arguments)
            one_from_the_start, _ = await plans(claiming.CLAIM_SETTINGS, claim_text(1), *from_the_start)
            assert one < 100
            assert one_from_the_start > one, "else there is nothing that a cursor could save"

            for template in settling.COMPLETE.values():
                pages, used = await plans(committer.COMMIT_SETTINGS, template, ids, fences, nulls, yes, f"'{OWNER}'")
                assert "sequential scan" not in used
                assert "jobs_pkey" in used
                assert "jobs_running" not in used
                assert pages < 6_000
            pages, used = await plans(
                committer.COMMIT_SETTINGS, settling.SETTLE, ids, fences, "array_fill('retry'::text, ARRAY[100])",
                "array_fill(1.0::float8, ARRAY[100])", "array_fill('error'::text, ARRAY[100])", nulls,
                "array_fill('x'::text, ARRAY[100])", f"'{OWNER}'",
            )  # fmt: skip
            assert used & {"jobs_pkey", "jobs_running", "sequential scan"} == {"jobs_pkey"}
            pages, used = await plans(committer.COMMIT_SETTINGS, settling.RULE, ids, fences, f"'{OWNER}'", nulls)
            assert used & {"jobs_pkey", "jobs_running", "sequential scan"} == {"jobs_pkey"}

            pages, used = await plans(keeper.LEASE_SETTINGS, leasing.RENEW, ids, fences, f"'{OWNER}'", "30")
            assert used == {"jobs_pkey"}
            assert pages < 4_000
            pages, used = await plans(keeper.LEASE_SETTINGS, leasing.LOOK, ids, fences, f"'{OWNER}'")
            assert used == {"jobs_pkey"}

            pages, used = await plans(reaper.REAP_SETTINGS, reaping.REAP, "now()")
            assert "jobs_running" in used
            assert "sequential scan" not in used
            assert pages < 60
            pages, used = await plans(reaper.REAP_SETTINGS, reaping.BURY)
            assert "jobs_exhausted" in used
            assert "sequential scan" not in used

        if analyzed == "as it is":
            await run.connection.execute("ANALYZE jobs")
        await look()
        await old.connection.execute("ROLLBACK")
