"""What cannot work through a pooler is refused, with what to do: one that nobody mentioned, a role without limits, LISTEN."""

from __future__ import annotations

import pytest
from psycopg import sql

from tests.commands import worker
from tests.pooled_workplace import LIMITS, PooledWorkplace
from tests.pooling import needs_pgbouncer, pgbouncer
from tests.roles import PASSWORD
from tests.workplace import VARIABLES
from worker import Leases
from worker.errors import ConfigError

pytestmark = needs_pgbouncer

EVERYTHING_OF_OURS = (
    "statement_timeout,lock_timeout,idle_in_transaction_session_timeout,idle_session_timeout,jit,options,plan_cache_mode,"
    "default_transaction_isolation,default_transaction_deferrable,enable_seqscan,enable_hashjoin,enable_mergejoin,enable_sort"
)


@pytest.mark.parametrize("ignores", [False, True], ids=["strict", "ignoring"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("run",),
        ("run", "--migrate"),
        ("check",),
        ("enqueue", "nap", "{}"),
        ("lease", "run", "x", "--", "true"),
        ("serve", "--port", "0"),
    ],
    ids=" ".join,
)
def test_a_pooler_that_nobody_mentioned_is_refused_in_one_line(
    pooled: PooledWorkplace, arguments: tuple[str, ...], ignores: bool
) -> None:
    """A11: whether it refuses our session settings, or was told to drop them silently; also when the role carries the same ones."""
    settings = {"ignore_startup_parameters": EVERYTHING_OF_OURS} if ignores else {}
    with pgbouncer(pooled.url, roles=[(pooled.role, PASSWORD)], **settings) as bouncer:
        url = bouncer.dsn(user=pooled.role, dbname=pooled.db.info.dbname)
        result = worker(*arguments, directory=pooled.directory, **(VARIABLES | {"DATABASE_URL": url}))
    assert result.returncode == 78, (result.stdout, result.stderr)
    (line,) = (text for text in (result.stdout + result.stderr).splitlines() if "a connection pooler" in text)
    assert "set WORKER_POOLER=transaction" in line


async def test_leases_name_a_pooler_that_nobody_mentioned(pooled: PooledWorkplace) -> None:
    async with Leases(pooled.pooled_url) as leases:
        with pytest.raises(ConfigError, match="give Leases pooler='transaction'"):
            async with leases.hold("nightly"):
                pytest.fail("not held")


@pytest.mark.parametrize("missing", LIMITS)
def test_a_role_without_the_limits_is_refused(pooled: PooledWorkplace, missing: str) -> None:
    alter = sql.SQL("ALTER ROLE {} RESET {}").format(sql.Identifier(pooled.role), sql.Identifier(missing))
    pooled.db.execute(alter)
    process = pooled.daemon(ready=False)
    assert process.wait() == 78
    (refused,) = process.find("config_invalid")
    assert f"ALTER ROLE … SET {missing} = '" in refused["error"]


def test_a_pooler_on_the_route_for_listen_is_named(pooled: PooledWorkplace) -> None:
    """Polling serves the jobs; `worker check` refuses it."""
    process = pooled.daemon(WORKER_LISTEN_DATABASE_URL=pooled.pooled_url)
    lost = process.wait_for_event("listener_lost")
    assert "WORKER_LISTEN_DATABASE_URL has to name a direct route" in lost["error"]
    pooled.healthy()
    through = VARIABLES | {"DATABASE_URL": pooled.pooled_url, "WORKER_POOLER": "transaction"}
    result = worker("check", directory=pooled.directory, **through, WORKER_LISTEN_DATABASE_URL=pooled.pooled_url)
    assert result.returncode == 78
    assert "WORKER_LISTEN_DATABASE_URL has to name a direct route" in result.stderr


def test_options_in_the_url_are_refused_with_what_to_do(pooled: PooledWorkplace) -> None:
    process = pooled.daemon(ready=False, DATABASE_URL=pooled.pooled_url + "&options=-cwork_mem%3D8MB")
    assert process.wait() == 78
    (refused,) = process.find("config_invalid")
    assert "leave options out of the URL" in refused["error"]
