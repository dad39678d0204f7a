"""The life of a job as a state machine: several owners do everything in any order, and the guarantees hold after every step.

The machine runs the daemon's own statements on a real database and keeps a model beside it: what each row must look like, and who
holds what. "A lease expires" is done by ageing the row, never by waiting.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.torture_recorded import PATIENT
from worker.domain import ClaimedJob, Verdict
from worker.store import claiming, leasing, pruning, reaping, settling
from worker.store.connection import Connection, Database, read_moments_as_microseconds
from worker.store.settling import Completion, Settlement

OWNERS = ("a-0000000a", "b-0000000b", "c-0000000c")
KEYS = ("k1", "k2", "k3")
LEASE_SECONDS = 3600.0
BYTES = 10_000_000

T = TypeVar("T")


@dataclass
class Row:
    """What a job's row must look like."""

    id: int
    key: str
    max_attempts: int
    state: str = "ready"
    attempts: int = 0
    crashes: int = 0
    owner: str | None = None
    fence: int = 0
    expired: bool = False

    def end(self, state: str) -> None:
        self.state, self.owner, self.expired = state, None, False


@dataclass
class Lease:
    """What an owner was once given, and believes in until it is told otherwise."""

    owner: str
    job: ClaimedJob


@dataclass
class Model:
    rows: dict[int, Row] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    present: set[str] = field(default_factory=set)
    ledger: dict[str, int] = field(default_factory=dict)
    effects: list[tuple[str, int]] = field(default_factory=list)
    highest_fence: int = 0
    ever_claimed: set[tuple[int, int]] = field(default_factory=set)

    def holds(self, owner: str, id: int, fence: int) -> bool:
        """Owner and fence decide, not the time."""
        row = self.rows.get(id)
        return row is not None and row.state == "running" and (row.owner, row.fence) == (owner, fence)


class Jobs(RuleBasedStateMachine):
    """One database for all runs; `batch` bounds how many leases a statement is about."""

    batch = 10
    deletes = False
    runner: asyncio.Runner
    database: Database
    connection: Connection

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        tables = ("jobs", "job_effects", "job_failures", "processes", "effects")
        again = "ALTER TABLE jobs ALTER id RESTART"  # the same ids, or a failure could not be made smaller
        self.wait(self.connection.execute("; ".join([*(f"DELETE FROM {table}" for table in tables), again])))
        self.model.highest_fence = self.wait(self.connection.fetchval("SELECT nextval('fence_seq')"))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def some(self, data: st.DataObject) -> tuple[str, list[ClaimedJob]]:
        """Who writes, and about which attempts, at most one of a job (the committer sees to that): live ones, stale ones, somebody
        else's, and as often as not old attempts of a job that has been claimed again, by the same owner or another."""
        rows = self.model.rows
        stale = [
            one
            for one in self.model.leases
            if one.job.id in rows and rows[one.job.id].state == "running" and rows[one.job.id].fence != one.job.fence
        ]
        among = stale if stale and data.draw(st.booleans()) else self.model.leases
        chosen = data.draw(st.lists(st.sampled_from(among), min_size=1, max_size=self.batch, unique_by=lambda one: one.job.id))
        row = rows.get(chosen[0].job.id)
        likely = (row.owner if row else None) or chosen[0].owner
        return data.draw(st.sampled_from([likely, likely, *OWNERS])), [one.job for one in chosen]

    @initialize(owner=st.sampled_from(OWNERS))
    def begin_with_work_under_way(self, owner: str) -> None:
        for key in (*KEYS, None):
            self.enqueue(key, 3, 0)
        self.claim(owner, self.batch, 0, True)

    # --- callers

    @rule(key=st.sampled_from([*KEYS, None]), max_attempts=st.integers(1, 3), priority=st.sampled_from([0, 0, 5]))
    def enqueue(self, key: str | None, max_attempts: int, priority: int) -> None:
        row = self.wait(
            self.connection.fetchrow(
                "SELECT * FROM enqueue_job('k', '{}', $1, priority => $2, max_attempts => $3)", key, priority, max_attempts
            )
        )
        known = [one for one in self.model.rows.values() if one.key == key and key is not None]
        if known:
            assert tuple(row) == (known[0].id, False, known[0].state)
        else:
            assert row["created"] is True
            assert row["id"] not in self.model.rows
            self.model.rows[row["id"]] = Row(row["id"], key or f"auto:{row['id']}", max_attempts)

    @rule(data=st.data())
    @precondition(lambda self: self.model.rows)
    def cancel(self, data: st.DataObject) -> None:
        row = self.model.rows[data.draw(st.sampled_from(sorted(self.model.rows)))]
        if row.state in ("ready", "running"):
            row.end("cancelled")
        assert self.wait(self.connection.fetchval("SELECT cancel_job($1)", row.id)) == row.state

    @rule(data=st.data())
    @precondition(lambda self: self.model.rows)
    def retry(self, data: st.DataObject) -> None:
        row = self.model.rows[data.draw(st.sampled_from(sorted(self.model.rows)))]
        if row.state in ("dead", "cancelled"):
            row.state, row.attempts = "ready", 0
        assert self.wait(self.connection.fetchval("SELECT retry_job($1)", row.id)) == row.state

    @rule(data=st.data())
    @precondition(lambda self: any(row.state == "ready" for row in self.model.rows.values()))
    def use_up_attempts_by_hand(self, data: st.DataObject) -> None:
        ready = [row for row in self.model.rows.values() if row.state == "ready"]
        row = data.draw(st.sampled_from(ready))
        row.attempts = row.max_attempts
        self.wait(self.connection.execute("UPDATE jobs SET attempts = max_attempts WHERE id = $1", row.id))
        buried = self.wait(reaping.bury(self.connection, self.database))
        assert [job.id for job in buried] == [row.id]
        row.end("dead")

    @rule()
    def prune(self) -> None:
        gone = [id for id, row in self.model.rows.items() if row.state in ("succeeded", "dead", "cancelled")]
        step = self.wait(pruning.prune_jobs(self.connection, self.database, retention_seconds=0, dead_retention_seconds=0))
        assert step.deleted == len(gone)
        for id in gone:
            del self.model.rows[id]

    # --- workers

    @rule(owner=st.sampled_from(OWNERS), wish=st.sampled_from([1, 3, 10]), priority=st.sampled_from([0, 5]), presence=st.booleans())
    def claim(self, owner: str, wish: int, priority: int, presence: bool) -> None:
        limit = min(wish, self.batch)
        self.take(
            owner,
            presence,
            self.wait(
                claiming.claim(
                    self.connection,
                    self.database,
                    queue="default",
                    priority=priority,
                    limit=limit,
                    owner=owner,
                    lease_seconds=LEASE_SECONDS,
                    payload_bytes=BYTES,
                )
            ),
            limit,
        )

    @rule(owner=st.sampled_from(OWNERS), priority=st.sampled_from([0, 5]))
    def claim_suspect(self, owner: str, priority: int) -> None:
        suspects = self.wait(
            claiming.claim_suspect(
                self.connection, self.database, queue="default", priority=priority, owner=owner, lease_seconds=LEASE_SECONDS
            )
        )
        assert all(job.crashes > 0 for job in suspects)
        self.take(owner, True, suspects, 1)

    def take(self, owner: str, presence: bool, jobs: list[ClaimedJob], limit: int) -> None:
        assert len(jobs) <= limit
        assert jobs == sorted(jobs, key=lambda job: (job.available_at, job.id))
        assert len({job.fence for job in jobs}) == len(jobs)
        fences_before = self.model.highest_fence
        for job in jobs:
            row = self.model.rows[job.id]
            assert row.state == "ready", "claimed although somebody holds it, or it is over"
            assert job.fence > fences_before, "fences rise strictly"
            self.model.highest_fence = max(self.model.highest_fence, job.fence)
            row.state, row.owner, row.fence, row.attempts = "running", owner, job.fence, row.attempts + 1
            assert (job.attempt, job.max_attempts, job.crashes) == (row.attempts, row.max_attempts, row.crashes)
            assert (job.id, job.fence) not in self.model.ever_claimed
            self.model.ever_claimed.add((job.id, job.fence))
            self.model.leases.append(Lease(owner, job))
        if jobs and presence:
            here = leasing.Presence(owner, "n", "h", 1, "v", ["default"], 1)
            self.wait(
                leasing.write_presence(
                    self.connection, self.database, here, busy=0, hungry=False, health="{}", lease_seconds=LEASE_SECONDS
                )
            )
            self.model.present.add(owner)

    @rule(owner=st.sampled_from(OWNERS))
    def lose_process(self, owner: str) -> None:
        self.wait(self.connection.execute("UPDATE processes SET expires_at = now() - interval '1 s' WHERE id = $1", owner))
        self.model.present.discard(owner)

    @rule(data=st.data())
    @precondition(lambda self: self.model.leases)
    def renew(self, data: st.DataObject) -> None:
        owner, jobs = self.some(data)
        keys = [job[:2] for job in jobs]
        renewed = self.wait(leasing.renew(self.connection, self.database, held=keys, owner=owner, lease_seconds=LEASE_SECONDS))
        live = {key for key in keys if self.model.holds(owner, *key) and not self.model.rows[key[0]].expired}
        assert renewed == live, "a late renewal never counts, and everybody else's lease stays as it was"
        standings = self.wait(leasing.look(self.connection, self.database, held=keys, owner=owner))
        for key in keys:
            row = self.model.rows.get(key[0])
            assert (row is None) == (key not in standings)
            if row is not None:
                assert standings[key].state == row.state
                assert (standings[key].mine and row.state == "running") == self.model.holds(owner, *key)
                assert (standings[key].mine and standings[key].live) == (key in live)

    @rule(data=st.data())
    @precondition(lambda self: any(row.state == "running" for row in self.model.rows.values()))
    def let_a_lease_expire(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([row for row in self.model.rows.values() if row.state == "running"]))
        row.expired = True
        self.wait(self.connection.execute("UPDATE jobs SET lease_until = now() - interval '1 second' WHERE id = $1", row.id))

    @rule()
    def reap(self) -> None:
        reaped = self.wait(reaping.reap(self.connection, self.database, horizon=reaping.FROM_THE_START))
        expired = {row.id for row in self.model.rows.values() if row.expired}
        assert {job.id for job in reaped} == expired, "exactly what has expired"
        for job in reaped:
            row = self.model.rows[job.id]
            assert (job.fence, job.lost_worker) == (row.fence, row.owner)
            assert job.crashed == (row.owner not in self.model.present)
            row.crashes += job.crashed
            row.end("dead" if row.attempts >= row.max_attempts else "ready")
            assert job.state == row.state

    @rule(data=st.data(), owner=st.sampled_from([None, None, *OWNERS]))
    @precondition(lambda self: any(row.state == "running" for row in self.model.rows.values()))
    def lose_a_job_and_claim_again(self, data: st.DataObject, owner: str | None) -> None:
        """The way to two attempts of one job in one hand, which chance alone takes too seldom."""
        losers = {row.owner for row in self.model.rows.values() if row.state == "running" and row.owner}
        self.let_a_lease_expire(data)
        self.reap()
        owner = owner or data.draw(st.sampled_from(sorted(losers)))
        for priority in (0, 5):
            self.claim(owner, self.batch, priority, True)
            self.claim_suspect(owner, priority)

    @rule(data=st.data(), has_effects=st.booleans())
    @precondition(lambda self: self.model.leases)
    def complete(self, data: st.DataObject, has_effects: bool) -> None:
        owner, leases = self.some(data)
        answer = self.wait(self.commit(leases, owner, has_effects))
        mine = {job[:2] for job in leases if self.model.holds(owner, *job[:2])}
        assert set(answer) == mine, "stale owners and fences change nothing"
        for job in leases:
            if job[:2] not in mine:
                continue
            row = self.model.rows[job.id]
            chosen = not row.key.startswith("auto:")
            already = has_effects and chosen and row.key in self.model.ledger
            assert answer[job[:2]] == already
            if has_effects and chosen and not already:
                self.model.ledger[row.key] = job.fence
            if has_effects and not already:
                self.model.effects.append((job.key, job.fence))
            if self.deletes:
                del self.model.rows[row.id]
            else:
                row.end("succeeded")

    async def commit(self, jobs: list[ClaimedJob], owner: str, has_effects: bool) -> dict[tuple[int, int], bool]:
        async with self.connection.transaction():
            answer = await settling.complete(
                self.connection,
                self.database,
                [Completion(job.id, job.fence, '{"a": 1}', has_effects) for job in jobs],
                owner=owner,
                deletes=self.deletes,
            )
            for job in jobs:
                if has_effects and answer.get(job[:2]) is False:
                    await self.connection.execute("INSERT INTO effects VALUES ($1, $2, $3)", job.key, job.id, job.fence)
        return answer

    @rule(
        data=st.data(),
        verdict=st.sampled_from(
            [
                Verdict("retry", 0.0, "error", "E: e", "detail"),
                Verdict("retry", 0.0, "timeout", "TimeoutError: t", "detail"),
                Verdict("bury", None, "error", "Discard: d", "detail"),
                Verdict("give_back", 0.0, None, None, None),
                Verdict("give_back", None, None, None, None),
            ]
        ),
    )
    @precondition(lambda self: self.model.leases)
    def fail_snooze_or_release(self, data: st.DataObject, verdict: Verdict) -> None:
        owner, jobs = self.some(data)
        keys = [job[:2] for job in jobs]
        settled = self.wait(
            settling.settle(self.connection, self.database, [Settlement(*key, verdict) for key in keys], owner=owner)
        )
        assert set(settled) == {key for key in keys if self.model.holds(owner, *key)}
        for id, _ in settled:
            row = self.model.rows[id]
            is_dead = verdict.verb == "bury" or (verdict.verb == "retry" and row.attempts >= row.max_attempts)
            row.end("dead" if is_dead else "ready")
            row.attempts -= verdict.verb == "give_back"

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def recover_a_lost_claim(self, data: st.DataObject, owner: str) -> None:
        mine = [row for row in self.model.rows.values() if row.owner == owner]
        held = data.draw(st.lists(st.sampled_from(mine), unique_by=lambda row: row.id)) if mine else []
        returned = self.wait(
            claiming.recover(self.connection, self.database, owner=owner, held=[(row.id, row.fence) for row in held])
        )
        orphans = [row for row in mine if row not in held]
        assert {job[:2] for job in returned} == {(row.id, row.fence) for row in orphans}
        for row in orphans:
            row.end("ready")
            row.attempts -= 1

    @rule(data=st.data())
    @precondition(lambda self: self.model.leases)
    def look_after_a_lost_answer(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.model.leases))
        (ruling,) = self.wait(settling.rule(self.connection, self.database, [one.job], owner=one.owner)).values()
        row = self.model.rows.get(one.job.id)
        assert ruling.state == (row.state if row else None)
        assert (ruling.mine and ruling.state == "running") == self.model.holds(one.owner, *one.job[:2])
        completed = row is not None and row.state == "succeeded" and row.fence == one.job.fence
        assert ruling.done == (completed or (self.model.ledger.get(one.job.key) == one.job.fence))

    # --- what holds after every step

    @invariant()
    def the_table_is_what_the_model_says(self) -> None:
        rows = self.wait(
            self.connection.fetch(
                "SELECT id, state, attempts, crashes, lease_owner, fence, COALESCE(lease_until < now(), false) AS expired,"
                " max_attempts, lease_until IS NULL AS unleased, completed_at IS NULL AS unfinished FROM jobs"
            )
        )
        assert {row["id"] for row in rows} == set(self.model.rows)
        for row in rows:
            wanted = self.model.rows[row["id"]]
            assert (row["state"], row["attempts"], row["crashes"], row["lease_owner"], row["fence"], row["expired"]) == (
                wanted.state,
                wanted.attempts,
                wanted.crashes,
                wanted.owner,
                wanted.fence,
                wanted.expired,
            )
            assert 0 <= row["attempts"] <= row["max_attempts"]
            assert row["state"] != "ready" or row["attempts"] < row["max_attempts"], "ready with its attempts used up"
            assert (row["state"] == "running") == (row["lease_owner"] is not None) == (not row["unleased"])
            assert (row["state"] in ("ready", "running")) == row["unfinished"]

    @invariant()
    def no_chosen_key_has_two_effects(self) -> None:
        effects = [(row[0], row[1]) for row in self.wait(self.connection.fetch("SELECT key, fence FROM effects ORDER BY fence"))]
        assert effects == sorted(self.model.effects, key=lambda effect: effect[1])
        chosen = [key for key, _ in effects if not key.startswith("auto:")]
        assert len(chosen) == len(set(chosen))
        ledger = self.wait(self.connection.fetch("SELECT idempotency_key, fence FROM job_effects"))
        assert {row[0]: row[1] for row in ledger} == self.model.ledger

    def teardown(self) -> None:
        """Whatever happened: once the faults stop, every job ends."""
        try:
            self.the_table_is_what_the_model_says()
        except AssertionError:
            return  # it has failed already, and that is what is to be shown
        for owner in OWNERS:
            self.lose_process(owner)
        self.wait(self.connection.execute("UPDATE jobs SET lease_until = now() - interval '1 second' WHERE state = 'running'"))
        for row in self.model.rows.values():
            row.expired = row.state == "running"
        self.reap()
        for _ in range(100):
            if all(row.state in ("succeeded", "dead", "cancelled") for row in self.model.rows.values()):
                break
            before = len(self.model.leases)
            for priority in (0, 5):
                self.claim(OWNERS[0], 10, priority, True)
                self.claim_suspect(OWNERS[0], priority)
            new = [one.job for one in itertools.islice(self.model.leases, before, None)]
            assert new, "unfinished jobs, but nothing to claim"
            self.wait(self.commit(new, OWNERS[0], True))
            for job in new:
                self.model.rows[job.id].end("succeeded")
        else:
            raise AssertionError("it never ends")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("batch", "deletes"),
    [(10, False), (1, False), (10, True)],
    ids=["batches", "single", "batches, deleting what is done"],
)
def test_any_order_of_everything_keeps_the_guarantees(database_url: str, batch: int, deletes: bool) -> None:
    async def connect() -> Connection:
        connection = await Jobs.database.connect("test", settings=claiming.CLAIM_SETTINGS)
        await read_moments_as_microseconds(connection)
        await connection.execute("CREATE TABLE effects (key text, job_id bigint, fence bigint)")
        return connection

    class OneShape(Jobs):
        pass

    OneShape.batch, OneShape.deletes = batch, deletes
    with asyncio.Runner() as runner:
        Jobs.runner, Jobs.database = runner, Database(database_url, environ={}, limits=PATIENT)
        Jobs.connection = runner.run(connect())
        try:
            run_state_machine_as_test(
                OneShape,
                settings=settings(
                    max_examples=80,
                    stateful_step_count=40,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            Jobs.connection.terminate()
