"""A workplace behind PgBouncer: its daemons go through it as a role with grants and limits, the test itself goes straight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
from psycopg import sql

from tests.pooling import PgBouncer, pgbouncer
from tests.processes import Daemon
from tests.psql import grant
from tests.roles import PASSWORD, role, url_as
from tests.servers import Server
from tests.workplace import Workplace

LIMITS = {"statement_timeout": "1s", "lock_timeout": "300ms", "idle_in_transaction_session_timeout": "600ms"}
"""What the role carries, for the lease of these tests."""
TROUBLE = {"warning", "error"}


class PooledWorkplace(Workplace):
    """A workplace whose daemons go through the pooler, as a role with the grants and the limits; the test itself goes straight."""

    def join(self, bouncer: PgBouncer, name: str) -> None:
        self.bouncer = bouncer
        self.role = name
        self.pooled_url = bouncer.dsn(user=name, dbname=self.db.info.dbname)
        self.direct_url = url_as(name, self.url)

    def daemon(self, *arguments: str, ready: bool = True, **variables: str) -> Daemon:
        return super().daemon(
            *arguments, ready=ready, **{"DATABASE_URL": self.pooled_url, "WORKER_POOLER": "transaction"} | variables
        )

    def listening(self) -> dict[str, str]:
        """The setting for a direct route."""
        return {"WORKER_LISTEN_DATABASE_URL": self.direct_url}


@contextlib.contextmanager
def daemons_role(server_dsn: str, url: str, limits: dict[str, str]) -> Iterator[str]:
    """A role with the grants of deploy/grants.sql, and these limits."""
    with role(Server(dsn=server_dsn, template="", origin="", version=""), url) as name:
        with psycopg.connect(url, autocommit=True) as db:
            for setting, value in limits.items():
                db.execute(sql.SQL("ALTER ROLE {} SET {} = {}").format(*map(sql.Identifier, (name, setting)), sql.Literal(value)))
            db.execute(sql.SQL("GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA public TO {}").format(sql.Identifier(name)))
        grant(url, "daemon", name)
        yield name


@contextlib.contextmanager
def pooled_by(place: PooledWorkplace, server_dsn: str) -> Iterator[None]:
    with daemons_role(server_dsn, place.url, LIMITS) as name, pgbouncer(place.url, roles=[(name, PASSWORD)]) as bouncer:
        place.join(bouncer, name)
        yield


def troubles(*processes: Daemon) -> list[dict[str, object]]:
    return [event for process in processes for event in process.events if event["level"] in TROUBLE]
