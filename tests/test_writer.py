"""The writer of outcomes: whose error it was, who has to wait for it, and for how long it may be at work."""

from __future__ import annotations

import asyncio

import pytest

from tests.inprocess import quick, seen
from tests.waiting import await_for
from worker import Handlers, Job, Worker
from worker.store.connection import Database, Lane

# Counts how often it was tried: a sequence is not rolled back.
REFUSE = """
CREATE SEQUENCE tries;
CREATE TABLE applied (key text, tries bigint);
CREATE FUNCTION refuse() RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    PERFORM nextval('tries');
    RAISE EXCEPTION 'too large for me' USING ERRCODE = '53200';
END $$;
CREATE TABLE may_go ();
CREATE FUNCTION wait_to_go() RETURNS void LANGUAGE plpgsql AS $$
BEGIN WHILE NOT EXISTS (SELECT FROM public.may_go) LOOP PERFORM pg_sleep(0.02); END LOOP; END $$
"""
WAITS_TO_GO = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"


async def test_a_statement_that_always_says_the_server_is_in_trouble_holds_up_no_neighbour(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 10: out of memory may be the server's trouble, or that of one statement, which then fails as the only one."""
    monkeypatch.setattr("worker.writer._CONFLICT_TRIES", 4)
    handlers, all_in = Handlers(), asyncio.Barrier(12)

    @handlers.job("first")
    async def first(job: Job[object]) -> None:
        job.effect("SELECT wait_to_go()")

    @handlers.job("write")
    async def write(job: Job[int]) -> None:
        await all_in.wait()
        job.effect("INSERT INTO applied VALUES ($1, 0)", job.key)
        if job.payload == 7:
            job.effect("INSERT INTO applied VALUES ('guilty', refuse())")
        else:
            job.effect("INSERT INTO applied SELECT 'innocent', last_value FROM tries")

    async with seen(database_url) as run:
        await run.connection.execute(REFUSE)
        patient = {"query_timeout_seconds": 20, "lease_seconds": 60}
        async with Worker(handlers, quick(database_url, workers=12, **patient)) as worker:
            assert worker.parts is not None
            committer = worker.parts.committer
            # All are one group, since all have ended while this one is written.
            await run.enqueue("first")
            await await_for(lambda: run.value(WAITS_TO_GO))
            ids = [await run.enqueue("write", number, max_attempts=1) for number in range(1, 13)]
            await await_for(lambda: committer.waiting == 13)
            await run.connection.execute("INSERT INTO may_go DEFAULT VALUES")
            rows = [await run.ended(id, timeout_seconds=30) for id in ids]
        assert [row["state"] for row in rows] == ["succeeded"] * 6 + ["dead"] + ["succeeded"] * 5
        assert "too large for me" in rows[6]["last_error"]
        assert await run.value("SELECT max(tries) FROM applied WHERE key = 'innocent'") <= 2
        assert await run.value("SELECT count(*) FROM applied WHERE key = 'innocent'") == 11


async def test_a_job_with_many_statements_keeps_its_connection_for_as_long_as_they_take(database_url: str) -> None:
    lane = Lane(Database(database_url, environ={}), "commit", idle_seconds=0.05)
    try:
        connection = await lane.get()
        await connection.execute("BEGIN")
        for _ in range(3):
            await connection.execute("SELECT pg_sleep(0.1)")
        await connection.execute("COMMIT")
        await await_for(connection.is_closed)  # now it is idle
    finally:
        lane.drop()
