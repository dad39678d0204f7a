"""Least privilege: the daemon runs with deploy/grants.sql and nothing more, an application enqueues with less."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import psycopg
import pytest

from tests.commands import worker
from tests.processes import Daemon
from tests.psql import GRANTS, apply_by_psql, grant, psql
from tests.roles import role, url_as
from tests.servers import Server
from tests.waiting import await_for, wait_for
from worker.store import schema
from worker.store.bulk import enqueue_many
from worker.store.enqueueing import enqueue
from worker.store.finished import wait

HANDLERS = """
from worker import Handlers

handlers = Handlers()

@handlers.job("own_transaction")
async def own_transaction(job):
    async with job.transaction() as tx:
        await tx.execute("INSERT INTO own (key) VALUES ($1)", job.key)
        await tx.fetchval("SELECT public.check_fence('resource', $1)", job.fence)

@handlers.job("outbox")
async def outbox(job):
    job.effect("INSERT INTO own (key) VALUES ($1)", job.key)
    job.enqueue("own_transaction", {}, key="follow-up")

@handlers.job("bad")
async def bad(job):
    raise ValueError("no")
"""


@pytest.fixture
def daemon_role(server: Server, database_url: str) -> Iterator[str]:
    """A role with the grants, in a database that grants nothing to everybody."""
    with role(server, database_url) as name:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(
                "REVOKE ALL ON SCHEMA public FROM PUBLIC; REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC"
            )
        grant(database_url, "daemon", name)
        yield name


def test_the_daemon_runs_with_the_grants_alone(
    database_url: str, daemon_role: str, daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    (tmp_path / "granted_jobs.py").write_text(HANDLERS)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE own (key text PRIMARY KEY); GRANT INSERT, SELECT ON own TO {daemon_role}")
        connection.execute(
            "INSERT INTO jobs (kind, payload, idempotency_key, max_attempts) VALUES"
            " ('own_transaction', '{}', 'a', 1), ('outbox', '{}', 'b', 1), ('bad', '{}', 'c', 1)"
        )
        # One whose worker was lost, for the reaper; finished rows and ledger rows for the pruning.
        connection.execute(
            "INSERT INTO jobs (kind, payload, idempotency_key, state, attempts, lease_owner, lease_until)"
            " VALUES ('outbox', '{}', 'd', 'running', 1, 'lost-12345678', now() - interval '1 minute')"
        )
        connection.execute(
            "INSERT INTO jobs (payload, state, created_at, completed_at)"
            " VALUES ('1', 'succeeded', now() - interval '1 day', now() - interval '1 day')"
        )
        process = daemon(
            DATABASE_URL=url_as(daemon_role, database_url),
            WORKER_HANDLERS="granted_jobs:handlers",
            WORKER_RETENTION_SECONDS="3600",
            WORKER_LEDGER_RETENTION_SECONDS="3600",
        )
        process.wait_for_event("daemon_ready")

        def all_ended() -> bool:
            left = "SELECT count(*) FROM jobs WHERE state IN ('ready', 'running') OR created_at < now() - interval '1 hour'"
            return connection.execute(left).fetchone() == (0,)

        wait_for(all_ended, 60)
        states = dict(connection.execute("SELECT idempotency_key, state FROM jobs").fetchall())
        assert states == {"a": "succeeded", "b": "succeeded", "c": "dead", "d": "succeeded", "follow-up": "succeeded"}
        assert connection.execute("SELECT count(*) FROM own").fetchone() == (4,)
    assert process.stop() == 0
    complaints = [event for event in process.events if "permission denied" in json.dumps(event)]
    assert complaints == []


def test_a_missing_grant_is_one_clear_line_and_exit_78(database_url: str, daemon_role: str, daemon: Callable[..., Daemon]) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"REVOKE DELETE ON job_effects FROM {daemon_role}")
    process = daemon(DATABASE_URL=url_as(daemon_role, database_url))
    assert process.wait() == 78
    [event] = process.find("config_invalid")
    assert event["error"] == f"schema 'public': the role '{daemon_role}' lacks DELETE on the table job_effects: see grants.sql"


async def test_what_is_granted_is_what_verify_asks_for(database_url: str, daemon_role: str) -> None:
    """Neither more nor less: taking any one of them away is noticed."""
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(f"SET ROLE {daemon_role}")
        await schema.verify(connection, "public")
        await connection.execute("RESET ROLE")
        granted = await connection.fetch(
            "SELECT c.relname AS name, CASE c.relkind WHEN 'S' THEN 'sequence' ELSE 'table' END AS sort, a.privilege_type"
            " FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a"
            " WHERE a.grantee = $1::regrole",
            daemon_role,
        )
        assert len(granted) > 15
        for right in granted:
            target = f"{'SEQUENCE' if right['sort'] == 'sequence' else 'TABLE'} {right['name']}"
            await connection.execute(f"REVOKE {right['privilege_type']} ON {target} FROM {daemon_role}; SET ROLE {daemon_role}")
            with pytest.raises(schema.SchemaError) as refusal:
                await schema.verify(connection, "public")
            assert f"lacks {right['privilege_type']} on the {right['sort']} {right['name']}" in str(refusal.value)
            await connection.execute(f"RESET ROLE; GRANT {right['privilege_type']} ON {target} TO {daemon_role}")
    finally:
        await connection.close()


async def test_an_application_enqueues_and_waits_but_reads_nobodys_payload(server: Server, database_url: str) -> None:
    with role(server, database_url) as name:
        grant(database_url, "application", name)
        connection = await asyncpg.connect(url_as(name, database_url))
        try:
            job = await enqueue(connection, "message", {"message": "a"}, key="a")
            assert not (await enqueue(connection, "message", {"message": "a"}, key="a")).created
            assert len(await enqueue_many(connection, [{"payload": 1}, {"payload": 2, "key": "a"}])) == 2
            with pytest.raises(TimeoutError):
                await wait(connection, job.id, timeout_seconds=0)
            for forbidden in (
                "SELECT payload FROM jobs",
                "UPDATE jobs SET state = 'dead'",
                "DELETE FROM jobs",
                "SELECT cancel_job(1)",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(forbidden)
        finally:
            await connection.close()


def test_an_application_enqueues_from_the_command_line_too(server: Server, database_url: str, tmp_path: Path) -> None:
    with role(server, database_url) as name:
        grant(database_url, "application", name)
        url = url_as(name, database_url)
        for arguments, stdin in ((("enqueue", "message", "1"), ""), (("enqueue", "--file", "-"), '{"payload": 1}')):
            result = worker(*arguments, stdin=stdin, directory=tmp_path, DATABASE_URL=url)
            assert (result.returncode, json.loads(result.stdout)["state"]) == (0, "ready"), result.stderr


async def test_a_role_that_may_only_insert_can_enqueue_and_wakes_a_hungry_process(server: Server, database_url: str) -> None:
    with role(server, database_url) as name:
        owner = await asyncpg.connect(database_url)
        writer = await asyncpg.connect(url_as(name, database_url))
        try:
            await owner.execute(
                f"REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC; GRANT INSERT ON jobs TO {name};"
                "INSERT INTO processes (id, name, hostname, pid, version, queues, slots, expires_at, hungry)"
                " VALUES ('p', 'p', 'h', 1, '1', '{default}', 1, now() + interval '1 minute', true)"
            )
            heard: list[object] = []
            channel = await owner.fetchval("SELECT wake_channel()")
            await owner.add_listener(channel, lambda *arguments: heard.append(arguments[-1]))
            await writer.execute("INSERT INTO jobs (payload) VALUES ('{}')")
            await await_for(lambda: heard)
            assert heard == ["default"]
        finally:
            await owner.close()
            await writer.close()


def test_grants_go_to_another_schema_and_to_nothing_without_roles(server: Server, empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute('CREATE SCHEMA "Odd-Name"')
    applied = apply_by_psql(empty_database_url, "Odd-Name")
    assert applied.returncode == 0, applied.stderr
    with role(server, empty_database_url) as name:
        without_roles = psql(empty_database_url, "-v", "schema=Odd-Name", "-f", str(GRANTS))
        assert (without_roles.returncode, without_roles.stderr) == (0, "")
        with psycopg.connect(empty_database_url) as connection:
            given = "SELECT count(*) FROM pg_class WHERE relnamespace = '\"Odd-Name\"'::regnamespace AND relacl IS NOT NULL"
            assert connection.execute(given).fetchone() == (0,)
        grant(empty_database_url, "daemon", name, schema="Odd-Name")
        with psycopg.connect(url_as(name, empty_database_url)) as connection:
            assert connection.execute('SELECT count(*) FROM "Odd-Name".jobs').fetchone() == (0,)
