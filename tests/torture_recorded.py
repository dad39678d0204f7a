"""The product's own code at work on one job of a database that records, for the checker of `worker torture` to judge."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from worker.committer import COMMIT_SETTINGS
from worker.committing import Caution, Finished
from worker.domain import Backoff, ClaimedJob, CodePlace, Effect, Outcome, Succeeded
from worker.holding import Held, Holdings
from worker.last_word import LastWord
from worker.store import audit, claiming, leasing, reaping, recording
from worker.store.connection import Connection, Database, Lane, SessionLimits, read_moments_as_microseconds
from worker.store.enqueueing import enqueue
from worker.torture.breaches import Findings
from worker.torture.end_rules import check_end
from worker.torture.job_rules import JobRules, Kinds
from worker.torture.other_rules import check_fences
from worker.writer import Writer

KIND = "torture.effect"
EFFECT = "INSERT INTO torture_effects (key, job_id, fence) VALUES ($1, $2, $3)"
PATIENT = SessionLimits(statement_timeout_seconds=60, lock_timeout_seconds=60, idle_in_transaction_seconds=60)
BACKOFF = Backoff(0.0, 0.0)
A_MOMENT = 0.01
LONG = 600.0


class Process:
    """What one process has: an owner, a connection a role, and a writer of outcomes."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self.owner = f"{name}-aaaaaaaa"
        self.database = Database(url, application_name=name, environ={}, limits=PATIENT)
        self.connections: dict[str, Connection] = {}
        self.lane = Lane(self.database, "commit", settings=COMMIT_SETTINGS)
        self.writer = Writer(
            self.database,
            self.lane,
            LastWord(Holdings(), None),
            owner=self.owner,
            backoff=BACKOFF,
            caution=Caution(300),
            one_at_a_time=asyncio.Lock(),
            batch=300,
            deletes=False,
            group_seconds=60,
            statement_seconds=60,
            on_trouble=lambda: None,
            postpone=lambda one, due_at: None,
            waiting=lambda: 0,
        )

    async def connection(self, role: str) -> Connection:
        if role not in self.connections:
            connection = self.connections[role] = await self.database.connect(role)
            await read_moments_as_microseconds(connection)
        return self.connections[role]

    async def claim(self, *, by: Connection | None = None, lease_seconds: float = A_MOMENT) -> ClaimedJob:
        """The one job there is, whether a process was lost with it or not."""
        connection = by or await self.connection("claim")
        about: dict[str, Any] = {"queue": "default", "priority": 0, "owner": self.owner, "lease_seconds": lease_seconds}
        jobs = await claiming.claim(connection, self.database, limit=1, payload_bytes=1000, **about)
        [job] = jobs or await claiming.claim_suspect(connection, self.database, **about)
        return job

    async def reap(self) -> list[reaping.Reaped]:
        return await reaping.reap(await self.connection("reaper"), self.database, horizon=reaping.FROM_THE_START)

    async def renew(self, job: ClaimedJob) -> None:
        connection = await self.connection("leases")
        await leasing.renew(connection, self.database, held=[job[:2]], owner=self.owner, lease_seconds=LONG)

    async def succeed(self, *jobs: ClaimedJob) -> None:
        await self.writer.write([finished(job) for job in jobs])

    def close(self) -> None:
        self.lane.drop()
        for connection in self.connections.values():
            connection.terminate()


def finished(job: ClaimedJob, outcome: Outcome | None = None) -> Finished:
    """What a handler of the torture leaves: everything carries its fence."""
    if outcome is None:
        effect = Effect(EFFECT, (job.key, job.id, job.fence), False, 1, CodePlace("", 0))
        outcome = Succeeded(f'{{"fence": {job.fence}}}', (effect,))
    return Finished(Held(job, trusted_until=0.0), outcome, 0.0)


class Recorded:
    """A database that records, with one job, and processes at work on it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._processes: dict[str, Process] = {}

    def __getitem__(self, name: str) -> Process:
        if name not in self._processes:
            self._processes[name] = Process(self._url, name)
        return self._processes[name]

    async def __aenter__(self) -> Self:
        self.database = Database(self._url, environ={}, limits=PATIENT)
        self.operator = await self.database.connect("torture")
        await recording.install(self.operator, self.database)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.operator.terminate()
        for process in self._processes.values():
            process.close()

    async def add(self, key: str | None = "k") -> None:
        self.id = (await enqueue(self.operator, KIND, {}, key=key)).id

    async def expired(self) -> bool:
        return bool(await self.operator.fetchval("SELECT lease_until < now() FROM jobs WHERE id = $1", self.id))

    async def waits(self, session: str, *, for_commit: bool = False) -> bool:
        """Whether this session waits for a lock; `for_commit`: at the end of its transaction."""
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND datname = current_database()"
            " AND wait_event_type = 'Lock' AND (wait_event = 'advisory') = $2"
        )
        return bool(await self.operator.fetchval(waiting, session, for_commit))

    async def breaches(self) -> set[str]:
        await self.operator.execute("SELECT cancel_job(id) FROM jobs WHERE state IN ('ready', 'running')")
        findings = Findings()
        kinds = Kinds(with_effect={KIND}, with_next=(), refusing=(), snoozing=())
        rules = JobRules(findings, kinds)
        async for change in audit.changes(self.operator, self.database):
            rules.feed(change)
        check_fences(rules.facts.draws, findings)
        check_end(
            rules.facts,
            findings,
            kinds,
            final=await audit.final_rows(self.operator, self.database),
            effects=await audit.effects(self.operator, self.database),
            ledger=await audit.ledger(self.operator, self.database),
            failures=await audit.failures(self.operator, self.database),
            acknowledged=[self.id],
        )
        return {breach.rule for breach in findings.breaches}
