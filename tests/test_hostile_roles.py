"""Roles whose defaults nobody would have set: isolation, time limits, formats, time zones. The same work, done right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest

from tests.every_ending import everything, everything_works
from tests.inprocess import both_shapes, quick, seen
from tests.roles import role, url_as
from tests.servers import Server, execute
from tests.waiting import await_for
from worker import Worker, enqueue, enqueue_many, events
from worker.store.connection import Database

MakeUser = Callable[..., str]


@pytest.fixture
def user(server: Server, database_url: str) -> Iterator[MakeUser]:
    """`user(setting=value, …)`: the URL for a fresh role that may do what a daemon does and carries these settings."""
    with role(server, database_url) as name:

        def make(**settings: str) -> str:
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                for setting, value in settings.items():
                    statement = psycopg.sql.SQL("ALTER ROLE {} SET {} = {}")
                    connection.execute(statement.format(psycopg.sql.Identifier(name), psycopg.sql.Identifier(setting), value))
            execute(database_url, "CREATE TABLE IF NOT EXISTS public.ledger (key text, fence bigint)")
            execute(database_url, "GRANT ALL ON ALL TABLES IN SCHEMA public TO {}", name)
            execute(database_url, "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {}", name)
            return url_as(name, database_url)

        yield make


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@both_shapes
async def test_the_roles_isolation_level_breaks_no_claim_and_no_commit(
    user: MakeUser, database_url: str, level: str, shape: dict[str, Any]
) -> None:
    """G11."""
    url = user(default_transaction_isolation=level)
    async with seen(database_url) as run:
        async with Worker(everything(), quick(url, **shape)), Worker(everything(), quick(url, **shape)):
            await everything_works(run, 40)
        assert await run.column("SELECT DISTINCT result #>> '{}' FROM jobs WHERE kind = 'own'") == ["read committed"]
        assert "could not serialize" not in run.log.text


@pytest.mark.parametrize(
    "limits",
    [
        {"statement_timeout": "100ms"},
        {"lock_timeout": "1ms"},
        {"idle_in_transaction_session_timeout": "50ms"},
        {"idle_session_timeout": "100ms"},
        {"transaction_timeout": "500ms"},
        {"default_transaction_deferrable": "on", "default_transaction_isolation": "serializable"},
        {
            "standard_conforming_strings": "off",
            "bytea_output": "escape",
            "DateStyle": "German",
            "IntervalStyle": "postgres_verbose",
        },
        {"search_path": "", "row_security": "on", "extra_float_digits": "-5", "xmloption": "document"},
    ],
    ids=lambda limits: next(iter(limits)),
)
async def test_time_limits_and_formats_of_the_role_are_not_ours(
    server: Server, user: MakeUser, database_url: str, limits: dict[str, str]
) -> None:
    """G12: each alone."""
    if "transaction_timeout" in limits and int(server.version.split(".")[0]) < 17:
        pytest.skip("transaction_timeout needs PostgreSQL 17")
    async with seen(database_url) as run, Worker(everything(), quick(user(**limits), poll_seconds=5)):
        await everything_works(run)

        async def hungry() -> bool:
            return bool(await run.value("SELECT hungry FROM processes"))

        async def idle_for_longer_than_the_limits() -> bool:
            idle = (
                "SELECT clock_timestamp() - state_change > interval '0.7 second' FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE '% listen'"
            )
            return bool(await run.value(idle))

        await await_for(hungry)
        await await_for(idle_for_longer_than_the_limits)
        assert run.log.find(events.LISTENER_LOST) == []
        row = await run.run("effect", key="later")
        assert row["attempts"] == 1


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "America/St_Johns"])
async def test_moments_are_right_to_the_second_whatever_the_time_zones(
    user: MakeUser, database_url: str, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G19: the role's, the process's and the caller's."""
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    url = user(timezone=zone)
    moments = {
        "offset": datetime(2030, 6, 1, 12, 0, 0, tzinfo=timezone(timedelta(hours=2))),
        "utc": datetime(2030, 6, 1, 10, 0, 0, tzinfo=UTC),
    }
    connection = await Database(url, environ={}).connect("test")
    try:
        for key, moment in moments.items():
            await enqueue(connection, "effect", {}, key=key, run_at=moment)
        with pytest.raises(ValueError, match="run_at"):
            await enqueue(connection, "effect", {}, run_at=datetime(2030, 6, 1))  # noqa: DTZ001
        await enqueue_many(connection, [{"payload": {}, "key": "many", "run_at": moments["offset"]}])
        await enqueue(connection, "effect", {}, key="delayed", delay_seconds=3600)
    finally:
        connection.terminate()
    async with seen(database_url) as run, Worker(everything(), quick(url)):
        epochs = await run.column(
            "SELECT DISTINCT extract(epoch FROM available_at)::bigint FROM jobs WHERE idempotency_key <> 'delayed'"
        )
        assert epochs == [int(moments["utc"].timestamp())]
        delay = await run.value(
            "SELECT extract(epoch FROM available_at - created_at)::float8 FROM jobs WHERE idempotency_key = 'delayed'"
        )
        assert 3_600 <= delay < 3_660
        before = await run.value("SELECT now()")
        row = await run.run("fail", max_attempts=1)
        failed_at = await run.value("SELECT failed_at FROM job_failures")
        assert before <= row["started_at"] <= row["completed_at"] <= await run.value("SELECT now()")
        assert row["started_at"] <= failed_at <= await run.value("SELECT now()")
