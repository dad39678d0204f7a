"""Rows as no test data has them: numbers beyond 32 bits or floats, moments beyond calendars, texts that steer a terminal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.commands import worker
from tests.every_ending import everything, everything_works, id_of
from tests.inprocess import both_shapes, quick, seen
from tests.waiting import await_for, until_cancelled
from worker import Job, Worker, events


@both_shapes
async def test_ids_and_fences_beyond_32_bits_work_everywhere(database_url: str, shape: dict[str, Any]) -> None:
    """G2."""
    big = 3_000_000_000
    handlers, started = everything(), []

    @handlers.job("long")
    async def long(job: Job[object]) -> None:
        started.append(job.id)
        await until_cancelled()

    async with seen(database_url) as run:
        await run.connection.execute(f"ALTER TABLE jobs ALTER id RESTART WITH {big}; ALTER SEQUENCE fence_seq RESTART WITH {big}")
        await run.connection.execute("CREATE TABLE ledger (key text, fence bigint)")
        async with Worker(handlers, quick(database_url, lease_seconds=20, renew_seconds=0.3, shutdown_grace_seconds=0, **shape)):
            await everything_works(run)
            assert await run.value("SELECT min(fence) FROM ledger") >= big
            long_one = await run.enqueue("long")
            assert long_one > big
            await await_for(lambda: long_one in started)
            until = (await run.row(long_one))["lease_until"]

            async def renewed() -> bool:
                return bool((await run.row(long_one))["lease_until"] > until)

            await await_for(renewed)
            cancelled = await run.enqueue("long")
            await await_for(lambda: cancelled in started)
            assert await run.value("SELECT cancel_job($1)", cancelled) == "cancelled"
            await run.said(events.JOB_ABANDONED, job_id=cancelled, reason="cancelled")
            dead = await id_of(run, "fail0")
            assert await run.value("SELECT retry_job($1)", dead) == "ready"
            assert (await run.ended(dead))["state"] == "dead"
            assert await run.value("SELECT check_fence('resource', $1)", big + 1) is True
        row = await run.row(long_one)
        assert (row["state"], row["attempts"]) == ("ready", 0)
        assert row["fence"] > big


ODD_ROWS = r"""
INSERT INTO jobs (idempotency_key, kind, payload, available_at, created_at, max_attempts) VALUES
    ('long ago', 'echo', '1', '-infinity', '-infinity', 1),
    ('bc', 'echo', '2', '4000-01-01 BC', '4000-01-01 BC', 1),
    ('far', 'echo', '3', '294000-01-01', 'infinity', 1),
    ('never', 'echo', '4', 'infinity', '294000-01-01', 1),
    ('digits', 'echo', repeat('9', 5000)::jsonb, now(), now(), 1),
    ('fraction', 'echo', ('0.' || repeat('9', 5000))::jsonb, now(), now(), 1),
    ('beyond floats', 'echo', '1e400', now(), now(), 1),
    ('half beyond floats', 'echo', ('1' || repeat('0', 400) || '.5')::jsonb, now(), now(), 1),
    ('next to nothing', 'echo', '1e-5000', now(), now(), 1),
    ('deep', 'echo', (repeat('[', 4000) || repeat(']', 4000))::jsonb, now(), now(), 1),
    (E'key\n\x1b[31m\u202e\u0001', 'echo', '6', now(), now(), 1),
    ('kind', E'kind\n\x1b[31m {} %s \\', '7', now(), now(), 1),
    ('null', 'echo', 'null', now(), now(), 1);
INSERT INTO jobs (idempotency_key, payload, state, completed_at, started_at, available_at) VALUES
    ('done never', '1', 'succeeded', 'infinity', '-infinity', 'infinity'),
    ('done once', '1', 'succeeded', '-infinity', 'infinity', '-infinity'),
    ('done lately', '1', 'succeeded', now(), '-infinity', now()),
    ('done without a start', '1', 'succeeded', now(), NULL, now()),
    ('dead', '1', 'dead', 'infinity', NULL, now());
INSERT INTO jobs (idempotency_key, payload, state, lease_owner, lease_until, started_at) VALUES
    ('held for ever', '1', 'running', 'nobody', 'infinity', 'infinity'),
    ('held long ago', '1', 'running', 'nobody', '-infinity', '-infinity');
INSERT INTO job_failures (job_id, fence, attempt, worker, failed_at, outcome, error)
    SELECT id, -1, 2147483647, 'w', 'infinity', 'error', E'\x1b[31m' FROM jobs;
INSERT INTO job_effects (idempotency_key, job_id, fence, committed_at) VALUES ('x', 1, 1, 'infinity'), ('y', 1, 1, '-infinity');
INSERT INTO processes (id, name, hostname, pid, version, queues, slots, started_at, seen_at, expires_at, health) VALUES
    ('odd', E'\x1b[31m', 'h', -1, '', ARRAY[]::text[], -1, 'infinity', '-infinity', 'infinity', '[]'),
    ('odder', 'n', 'h', 0, 'v', ARRAY[NULL, ''], 0, '-infinity', 'infinity', 'infinity', '{"kinds": [1, null, {}, "k"]}');
"""


async def test_rows_that_nobody_would_write_harm_neither_their_neighbours_nor_whoever_looks(
    database_url: str, tmp_path: Path
) -> None:
    """I14: moments, numbers and texts that are legal in SQL and that no Python can hold, or no terminal should."""
    handlers = everything()

    @handlers.job("echo")
    async def echo(job: Job[object]) -> object:
        return job.payload

    async def look() -> None:
        for command in ("stats", "stats --json", "jobs list", "jobs list --json", "jobs show 5 --json"):
            result = await asyncio.to_thread(worker, *command.split(), directory=tmp_path, DATABASE_URL=database_url)
            assert (result.returncode, result.stderr) == (0, ""), command
            if "--json" in command:
                json.loads(result.stdout, parse_int=str)
            assert "\x1b[31m" not in result.stdout

    async with seen(database_url) as run:
        await run.connection.execute("CREATE TABLE ledger (key text, fence bigint)")
        await run.connection.execute(ODD_ROWS)
        await look()
        async with Worker(handlers, quick(database_url, retention_seconds=3600, ledger_retention_seconds=3600)):
            await everything_works(run)

            async def all_ended() -> bool:
                waiting = "state = 'ready' AND kind = 'echo' AND available_at <= now()"
                return not await run.value(f"SELECT count(*) FROM jobs WHERE {waiting}")

            await await_for(all_ended, 30)
        for event in (events.CLAIM_FAILED, events.REAPER_FAILED, events.RENEW_FAILED, events.INTERNAL_ERROR):
            assert {said.get("error_type") for said in run.log.find(event)} <= {"TimeoutError"}  # a busy machine
        await look()
        states = dict(await run.connection.fetch("SELECT idempotency_key, state FROM jobs"))
    assert states["null"] == states["long ago"] == states["bc"] == states["beyond floats"] == "succeeded"
    assert states["digits"] == states["deep"] == states["half beyond floats"] == "dead"
    assert states["far"] == states["never"] == "ready"
