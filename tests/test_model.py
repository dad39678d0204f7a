"""The models of the protocol: every state they reach keeps the promises, each mutant breaks one, and the real statements do to each
row what the models say they do."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.model import statements
from tests.model.checker import Explored, Protocol, explore
from tests.model.jobs import jobs
from tests.model.runs import MUTANTS, SOUND, Mutant
from tests.model.statements import MAX_ATTEMPTS, Row, State, Verb
from tests.model.world import Bounds
from tests.processes import ROOT
from worker.domain import ClaimedJob, Verdict
from worker.store import claiming, leasing, reaping, settling
from worker.store.connection import Connection, Database, read_moments_as_microseconds
from worker.store.settling import Completion, Settlement

KEY = "k"


@pytest.fixture(scope="module")
def explored() -> dict[str, Explored]:
    return {name: explore(protocol) for name, protocol in SOUND.items()}


@pytest.mark.parametrize("name", SOUND)
def test_every_state_keeps_every_promise_and_the_work_can_always_end(explored: dict[str, Explored], name: str) -> None:
    assert explored[name].breach is None


def test_what_the_promises_are_about_happens_in_the_models(explored: dict[str, Explored]) -> None:
    for names in (
        ("one faulty process, crash, operator, two claims", "connections that hold, crash, operator, four claims"),
        ("two clocks",),
        ("a named lease", "a named lease, two clients of one name"),
    ):
        assert not set.intersection(*(set(explored[name].unseen) for name in names))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_condition_left_out_breaks_a_promise_and_the_shortest_way_there_is_shown(mutant: Mutant) -> None:
    breach = explore(mutant.protocol).breach
    assert breach is not None
    assert (breach.promise, len(breach.trace)) == (mutant.breaks, mutant.steps), "\n".join(breach.trace)


def test_the_second_look_carries_the_promise_and_the_lock_of_the_first_spares_a_round() -> None:
    """Were the look to read a locked row, it would find the outcome still to be written, and that would match nothing: it is then
    looked at again."""
    without_lock: Protocol[Any] = jobs(Bounds(fences=2, crash=True), {"look's lock"})
    assert explore(without_lock).breach is None


def test_the_document_names_tests_that_exist_and_figures_that_are_true(explored: dict[str, Explored]) -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    there = {name for path in (ROOT / "tests").glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert set(re.findall(r"`(test_\w+)`", text)) <= there
    states = [explored[name].states for name in SOUND]
    assert len(states) == 6
    for figure in (sum(states[:3]), states[3], sum(states[4:])):
        assert f"| {figure:,} " in text
    assert f"{len(MUTANTS)} conditions are left out" in text
    for mutant in MUTANTS:
        if f"    {mutant.name} → " in text:
            breach = explore(mutant.protocol).breach
            assert breach is not None
            assert "\n        ".join((f"    {mutant.name} → {breach.promise}", *breach.trace)) in text


# --- the models' rows and the real ones

UNLEASED: tuple[State, ...] = ("ready", "succeeded", "dead", "cancelled")
ROWS = [
    *(
        Row(1, "running", owner, fence, live, attempts)
        for owner, fence, live, attempts in itertools.product("ab", (1, 2), (True, False), (0, 1, 2))
    ),
    *(Row(1, state, None, fence, False, attempts) for state, fence, attempts in itertools.product(UNLEASED, (0, 1, 2), (0, 1, 2))),
]
"""Every row that the schema's CHECKs let in, with two owners and two fences: more than the models reach."""
KEYS = ((1, 1), (1, 2))
VERBS: tuple[Verb, ...] = ("complete", "retry", "bury", "give_back")


class Table:
    """The real table, with one row in it."""

    def __init__(self, connection: Connection, database: Database) -> None:
        self.connection = connection
        self.database = database
        self.id = 0

    async def put(self, row: Row) -> None:
        await self.connection.execute(
            "UPDATE jobs SET state = $1, lease_owner = $2, fence = $3, attempts = $4, crashes = 0, available_at = now(),"
            " lease_until = CASE WHEN $1 = 'running' THEN now() + CASE WHEN $5 THEN 1 ELSE -1 END * interval '1 h' END,"
            " completed_at = CASE WHEN $1 NOT IN ('ready', 'running') THEN now() END",
            row.state, row.owner, row.fence, row.attempts, row.live,
        )  # fmt: skip

    async def row(self) -> Row:
        row = await self.connection.fetchrow(
            "SELECT state, lease_owner, fence, COALESCE(lease_until > now(), false), attempts FROM jobs"
        )
        return Row(1, *row)

    def job(self, key: tuple[int, int]) -> ClaimedJob:
        return ClaimedJob(self.id, key[1], KEY, "k", "default", 0, "{}", 1, MAX_ATTEMPTS, 0, 0)

    async def claim(self, owner: str, fence: int) -> bool:
        await self.connection.execute("SELECT setval('fence_seq', $1)", fence - 1)
        jobs = await claiming.claim(
            self.connection, self.database, queue="default", priority=0, limit=1, owner=owner, lease_seconds=60, payload_bytes=1000
        )
        return bool(jobs)

    async def renew(self, owner: str, key: tuple[int, int]) -> bool:
        held = [(self.id, key[1])]
        return bool(await leasing.renew(self.connection, self.database, held=held, owner=owner, lease_seconds=60))

    async def end(self, owner: str, key: tuple[int, int], verb: Verb) -> bool:
        if verb == "complete":
            completion = Completion(self.id, key[1], None, False)
            return bool(await settling.complete(self.connection, self.database, [completion], owner=owner, deletes=False))
        verdict = Verdict(verb, 0.0, None if verb == "give_back" else "error", None, "detail")
        return bool(await settling.settle(self.connection, self.database, [Settlement(self.id, key[1], verdict)], owner=owner))

    async def end_of_several(self, owner: str, key: tuple[int, int]) -> bool:
        completion = Completion(self.id, key[1], None, False)
        return bool(await settling.complete_for_several(self.connection, self.database, [(completion, owner)]))

    async def reap(self) -> bool:
        return bool(await reaping.reap(self.connection, self.database, horizon=reaping.FROM_THE_START))

    async def recover(self, owner: str, held: frozenset[tuple[int, int]], bound: int) -> bool:
        await self.connection.execute("SELECT setval('fence_seq', $1)", bound)
        keys = [(self.id, fence) for _, fence in held]
        return bool(await claiming.recover(self.connection, self.database, owner=owner, held=keys))

    async def rule(self, owner: str, key: tuple[int, int], ledger: tuple[int, int] | None) -> statements.Ruling:
        await self.connection.execute("DELETE FROM job_effects")
        if ledger is not None:
            await self.connection.execute("INSERT INTO job_effects VALUES ($1, $2, $3)", KEY, self.id, ledger[1])
        (ruling,) = (await settling.rule(self.connection, self.database, [self.job(key)], owner=owner)).values()
        return "done" if ruling.done else "mine" if ruling.mine else "moved on"


async def _with_table(url: str, check: Any) -> int:
    database = Database(url, environ={})
    connection = await database.connect("test", settings=claiming.CLAIM_SETTINGS)
    try:
        await read_moments_as_microseconds(connection)
        table = Table(connection, database)
        table.id = await connection.fetchval(
            "INSERT INTO jobs (idempotency_key, kind, payload, max_attempts) VALUES ($1, 'k', '{}', $2) RETURNING id",
            KEY, MAX_ATTEMPTS,
        )  # fmt: skip
        count: int = await check(table)
        return count
    finally:
        await connection.close()


def _cases(row: Row) -> Iterator[tuple[str, Row | None, Any]]:
    """Every statement with all arguments: what the model makes of `row` (None: not matched), and how it is really run."""
    for owner in "ab":
        yield f"claim {owner}", statements.claim(row, owner, 3), lambda table, owner=owner: table.claim(owner, 3)
        for held in (frozenset(), frozenset({KEYS[0]}), frozenset({KEYS[1]})):
            for bound in (1, 2):
                recovered = statements.recover(row, owner, held, bound)
                name = f"recover {owner} {held} up to {bound}"
                yield name, recovered, lambda table, owner=owner, held=held, bound=bound: table.recover(owner, held, bound)
        for key in KEYS:
            name = f"{owner} {key}"
            renewed = statements.renew(row, key[0], owner, key[1])
            yield f"renew {name}", renewed, lambda table, owner=owner, key=key: table.renew(owner, key)
            for verb in VERBS:
                ended = statements.end(row, key[0], owner, key[1], verb)
                yield f"{verb} {name}", ended, lambda table, owner=owner, key=key, verb=verb: table.end(owner, key, verb)
            completed = statements.end(row, key[0], owner, key[1], "complete")
            yield f"complete_for_several {name}", completed, lambda table, owner=owner, key=key: table.end_of_several(owner, key)
    yield "reap", statements.reap(row), lambda table: table.reap()


def test_each_statement_does_to_each_row_what_the_model_says(database_url: str) -> None:
    async def check(table: Table) -> int:
        count = 0
        for row in ROWS:
            for name, expected, run in _cases(row):
                await table.put(row)
                matched = await run(table)
                assert (matched, await table.row()) == (expected is not None, expected or row), (name, row)
                count += 1
        return count

    assert asyncio.run(_with_table(database_url, check)) > 1_000


def test_cancel_and_retry_do_to_each_row_what_the_model_says(database_url: str) -> None:
    async def check(table: Table) -> int:
        for row in ROWS:
            for function, becomes in (("cancel_job", statements.cancel(row)), ("retry_job", statements.retry(row))):
                await table.put(row)
                state: State = await table.connection.fetchval(f"SELECT {function}($1)", table.id)
                assert (state, await table.row()) == ((becomes or row).state, becomes or row), (function, row)
        return len(ROWS)

    asyncio.run(_with_table(database_url, check))


def test_the_look_after_a_lost_answer_rules_on_each_row_as_the_model_does(database_url: str) -> None:
    async def check(table: Table) -> int:
        for row, owner, key, ledger in itertools.product(ROWS, "ab", KEYS, (None, *KEYS)):
            await table.put(row)
            expected = statements.rule(row, ledger, locked=False, id=1, owner=owner, fence=key[1])
            assert await table.rule(owner, key, ledger) == expected, (row, owner, key, ledger)
        return len(ROWS)

    asyncio.run(_with_table(database_url, check))


def test_the_look_does_not_judge_a_locked_row(database_url: str) -> None:
    async def check(table: Table) -> int:
        row = Row(1, "running", "a", 1, True, 1)
        await table.put(row)
        other = await table.database.connect("other")
        try:
            async with other.transaction():
                await other.execute("SELECT FROM jobs FOR NO KEY UPDATE")
                (ruling,) = (await settling.rule(table.connection, table.database, [table.job((1, 1))], owner="a")).values()
        finally:
            await other.close()
        assert statements.rule(row, None, locked=True, id=1, owner="a", fence=1) == "undecided"
        assert (ruling.undecided, ruling.mine, ruling.done) == (True, False, False)
        return 1

    asyncio.run(_with_table(database_url, check))
