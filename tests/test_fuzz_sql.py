"""The functions of schema.sql, called with any arguments of their types: only documented SQLSTATEs come out, and after every call
the tables are what the contract says; for named leases, what a small model says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import example, given, note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.fuzzing import EDGES, STORABLE, tries
from tests.servers import Server

TEXT = (
    st.none()
    | EDGES
    | st.text(STORABLE, max_size=20)
    | st.sampled_from(["a", "default", "auto:1", "x" * 128, "x" * 129, "ü" * 257, "x" * 9000])
)
BIGINT = st.none() | st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-(2**63), 2**63 - 1, 2**31])
INT = st.none() | st.integers(-5, 40_000) | st.sampled_from([-(2**31), 2**31 - 1, -32_768, -32_769, 32_767, 32_768])
DOUBLE = st.none() | st.floats() | st.floats(0.5, 100_000) | st.sampled_from([1.0, 86_400.0, 0.999, 86_400.001])
MOMENT = st.none() | st.sampled_from(
    [
        "infinity",
        "-infinity",
        "4714-11-24 00:00:00+00 BC",
        "294276-12-31 23:59:59.999999+00",
        "now",
        "2000-01-01",
        "1969-12-31 12:00-15:59:59",
    ]
)
LARGE = '"' + "x" * 1_048_600 + '"'
JSONB = st.none() | st.sampled_from(
    ["null", "{}", "[]", '"x"', "0", "-1e-300", "1e2000", '{"a": {"b": [1, null, ""]}}', LARGE, '{"a": "' + "x" * 8192 + '"}']
)
BOOLEAN = st.none() | st.booleans()
TYPES = {
    "text": TEXT, "bigint": BIGINT, "integer": INT, "double precision": DOUBLE, "timestamp with time zone": MOMENT, "jsonb": JSONB
}  # fmt: skip

# What each may raise; docs/guarantees.md says the same.
NOT_NULL, CHECK, STALE, INVALID = "23502", "23514", "RW001", "22023"
FUNCTIONS = {
    "enqueue_job": {INVALID, NOT_NULL, CHECK},
    "cancel_job": set(),
    "retry_job": set(),
    "check_fence": {STALE, INVALID},
    "acquire_lease": {INVALID},
    "renew_lease": {INVALID, STALE},
    "release_lease": {STALE},
    "lease_expires_in_ms": set(),
    "produce_slots": {INVALID},
    "wake_workers": set(),
    "wake_channel": set(),
}

ARGUMENTS = """
SELECT p.proname, ARRAY(SELECT a FROM unnest(p.proargnames, p.proargmodes) AS n (a, mode) WHERE COALESCE(mode, 'i') IN ('i', 'b')),
    ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes) AS t)
FROM pg_proc AS p
WHERE p.pronamespace = 'public'::regnamespace AND p.prorettype <> 'trigger'::regtype
"""

# SPEC's state machine, as far as one row can show it, and the limits.
BROKEN_JOBS = """
SELECT * FROM jobs
WHERE (state = 'running') <> (lease_owner IS NOT NULL) OR (state = 'running') <> (lease_until IS NOT NULL)
    OR (state IN ('succeeded', 'dead', 'cancelled')) <> (completed_at IS NOT NULL)
    OR state = 'ready' AND attempts >= max_attempts OR attempts NOT BETWEEN 0 AND max_attempts
    OR octet_length(idempotency_key) NOT BETWEEN 1 AND 512 OR octet_length(kind) NOT BETWEEN 1 AND 128
    OR octet_length(queue) NOT BETWEEN 1 AND 128 OR pg_column_size(payload) > 1048576
"""
BROKEN_LEASES = """
SELECT * FROM leases
WHERE ttl_seconds NOT BETWEEN 1 AND 86400 OR fence < 0 OR fence > (SELECT last_value FROM fence_seq)
    OR octet_length(resource) NOT BETWEEN 1 AND 512 OR octet_length(holder) NOT BETWEEN 1 AND 128
    OR expires_at > clock_timestamp() + interval '1 day' OR created_at > clock_timestamp()
"""


@pytest.fixture(scope="module")
def db(server: Server) -> Iterator[psycopg.Connection[Any]]:
    with server.database(template=server.template) as url, psycopg.connect(url, autocommit=True) as connection:
        connection.execute("INSERT INTO generators (name, state) VALUES ('a', 'STARTED')")
        yield connection


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
KINDS = {
    **dict.fromkeys(("resource", "holder", "name"), "text"),
    **dict.fromkeys(("ttl_seconds", "late_seconds"), "double precision"),
    "fence": "bigint",
    "most": "integer",
}


def one(db: psycopg.Connection[Any], statement: str, *arguments: object) -> Any:
    row = db.execute(statement, arguments).fetchone()
    assert row is not None
    return row[0] if len(row) == 1 else row


def signatures(db: psycopg.Connection[Any]) -> dict[str, dict[str, str]]:
    return {name: dict(zip(arguments, types, strict=True)) for name, arguments, types in db.execute(ARGUMENTS)}


def call(db: psycopg.Connection[Any], name: str, types: dict[str, str], given: dict[str, object]) -> list[Any] | str:
    """Its rows, or the SQLSTATE."""
    arguments = ", ".join(f"{argument} => %s::{types[argument]}" for argument in given)
    try:
        return db.execute(
            f"SELECT * FROM {name}({arguments})", [None if value is None else str(value) for value in given.values()]
        ).fetchall()
    except psycopg.Error as error:
        note(f"{name}: {error}")
        return str(error.sqlstate)


def test_every_published_function_is_among_them(db: psycopg.Connection[Any]) -> None:
    assert signatures(db).keys() == FUNCTIONS.keys()


def test_any_arguments_give_an_answer_or_a_documented_sqlstate_and_break_no_row(db: psycopg.Connection[Any]) -> None:
    known = signatures(db)
    calls = st.sampled_from(sorted(FUNCTIONS)).flatmap(
        lambda name: st.tuples(
            st.just(name), st.fixed_dictionaries({argument: TYPES[kind] for argument, kind in known[name].items()})
        )
    )

    @tries(120)
    @given(
        batch=st.lists(calls, min_size=1, max_size=12),
        isolation=st.sampled_from(["read committed", "repeatable read", "serializable"]),
    )
    @example(batch=[("lease_expires_in_ms", {"expires_at": "infinity", "released_at": None})], isolation="read committed")
    @example(batch=[("renew_lease", {"resource": "", "holder": "", "fence": 0, "ttl_seconds": "nan"})], isolation="read committed")
    @example(
        batch=[
            ("enqueue_job", {"kind": "k", "payload": "{}", "run_at": "infinity"}),
            ("enqueue_job", {"kind": "k", "payload": "{}", "run_at": "-infinity"}),
        ],
        isolation="read committed",
    )
    def check(batch: list[tuple[str, dict[str, object]]], isolation: str) -> None:
        db.execute(f"SET default_transaction_isolation = '{isolation}'")
        for name, given_arguments in batch:
            answer = call(db, name, known[name], given_arguments)
            note(f"{name}({given_arguments}) -> {answer}"[:500])
            if isinstance(answer, str):
                assert answer in FUNCTIONS[name], f"{name}: SQLSTATE {answer}"
            else:
                assert len(answer) == 1
        assert db.execute(BROKEN_JOBS).fetchall() == []
        assert db.execute(BROKEN_LEASES).fetchall() == []

    check()


SLOTS = "SELECT last_slot_at, produced + skipped + failed FROM generators WHERE name = 'a'"


def test_whoever_holds_the_generator_settles_each_slot_once_whatever_it_asks_for(db: psycopg.Connection[Any]) -> None:
    db.execute("SET default_transaction_isolation = 'read committed'")
    db.execute(
        "DELETE FROM jobs; DELETE FROM leases; UPDATE generators SET every_seconds = 7200, produced = 0, skipped = 0, failed = 0"
    )
    fence = one(db, "SELECT fence FROM acquire_lease('a', 'h', 86400)")

    @tries(40)
    @given(late=DOUBLE, most=INT, hours=st.integers(0, 50))
    @example(late=0.0, most=-5, hours=50)
    @example(late=1e300, most=1, hours=1)
    def check(late: float | None, most: int | None, hours: int) -> None:
        db.execute("UPDATE generators SET last_slot_at = last_slot_at - %s * interval '1 hour'", [hours])
        [before_at, before] = one(db, SLOTS)
        answer = call(db, "produce_slots", KINDS, {"name": "a", "holder": "h", "fence": fence, "late_seconds": late, "most": most})
        [after_at, after] = one(db, SLOTS)
        note(answer)
        if isinstance(answer, str):
            assert answer == INVALID
            assert (after_at, after) == (before_at, before)
        else:
            assert answer[0][0] in ("produced", "not_due")
            assert after_at >= before_at, "the mark only rises"
            assert answer[0][1] <= (most or 0)
            spacing = timedelta(hours=2)
            assert after - before == (after_at - EPOCH) // spacing - (before_at - EPOCH) // spacing

    check()


# --- named leases beside a model

RESOURCES = ("a", "b")
HOLDERS = ("h", "i")
REQUESTS = (None, None, "r", "s")


@dataclass
class Remembered:
    """What the row of a resource remembers of its last acquisition."""

    holder: str
    fence: int
    request_id: str | None
    is_live: bool = True
    is_released: bool = False

    def answers(self, holder: str, request_id: str | None) -> bool:
        return request_id is not None and (self.holder, self.request_id) == (holder, request_id)


@dataclass
class Model:
    leases: dict[str, Remembered] = field(default_factory=dict)
    past: list[tuple[str, str, int]] = field(default_factory=list)
    """Every resource, holder and fence there ever was."""
    highest_fence: int = 0


class Leases(RuleBasedStateMachine):
    """Nothing waits: a lease expires when its row is aged."""

    db: psycopg.Connection[Any]

    def __init__(self) -> None:
        super().__init__()
        self.db.execute("DELETE FROM leases")
        self.model = Model(highest_fence=one(self.db, "SELECT nextval('fence_seq')"))

    @initialize()
    def begin_with_a_lease(self) -> None:
        self.acquire("a", "h", "r", 3600.0, False)

    @rule(
        resource=st.sampled_from(RESOURCES),
        holder=st.sampled_from(HOLDERS),
        request_id=st.sampled_from(REQUESTS),
        ttl=st.sampled_from([3600.0, 86_400.0]),
        is_rolled_back=st.sampled_from([False, False, False, True]),
    )
    def acquire(self, resource: str, holder: str, request_id: str | None, ttl: float, is_rolled_back: bool) -> None:
        if is_rolled_back:
            self.db.execute("BEGIN")
        outcome, fence, by, left_ms = one(
            self.db,
            "SELECT outcome, fence, holder, expires_in_ms FROM acquire_lease(%s, %s, %s, %s)",
            resource,
            holder,
            ttl,
            request_id,
        )
        known = self.model.leases.get(resource)
        if known is not None and known.answers(holder, request_id):
            assert (outcome, fence, by) == ("acquired" if known.is_live else "ended", known.fence, holder), "the same fence again"
            assert (left_ms > 0) == known.is_live
        elif known is not None and known.is_live:
            assert (outcome, fence, by) == ("held", None, known.holder), "never two live holders"
            assert left_ms > 0
        else:
            assert (outcome, by) == ("acquired", holder)
            assert fence > self.model.highest_fence, "fences strictly rise"
            assert ttl * 1000 - 60_000 < left_ms <= ttl * 1000
            self.model.highest_fence = fence
            if not is_rolled_back:
                self.model.leases[resource] = Remembered(holder, fence, request_id)
                self.model.past.append((resource, holder, fence))
        if is_rolled_back:
            self.db.execute("ROLLBACK")

    def some(self, data: st.DataObject) -> tuple[str, str, int]:
        """A lease of now or before; sometimes by the wrong holder, under the wrong fence, of the wrong resource."""
        resource, holder, fence = data.draw(st.sampled_from(self.model.past[-8:]))
        return (
            data.draw(st.sampled_from([resource, resource, *RESOURCES])),
            data.draw(st.sampled_from([holder, holder, *HOLDERS])),
            data.draw(st.sampled_from([fence, fence, fence, fence + 1, 0, 2**63 - 1])),
        )

    def is_last(self, resource: str, holder: str, fence: int) -> bool:
        known = self.model.leases.get(resource)
        return known is not None and (known.holder, known.fence) == (holder, fence)

    @rule(data=st.data(), ttl=st.sampled_from([None, 3600.0]))
    @precondition(lambda self: self.model.past)
    def renew(self, data: st.DataObject, ttl: float | None) -> None:
        named = self.some(data)
        answer = call(
            self.db, "renew_lease", KINDS, {**dict(zip(("resource", "holder", "fence"), named, strict=True)), "ttl_seconds": ttl}
        )
        if self.is_last(*named) and self.model.leases[named[0]].is_live:
            assert isinstance(answer, list)
            assert answer[0][0] > 0
        else:
            assert answer == STALE, "an end is an end: no renewal brings it back"

    @rule(data=st.data())
    @precondition(lambda self: self.model.past)
    def release(self, data: st.DataObject) -> None:
        named = self.some(data)
        answer = call(self.db, "release_lease", KINDS, dict(zip(("resource", "holder", "fence"), named, strict=True)))
        if self.is_last(*named) and (self.model.leases[named[0]].is_live or self.model.leases[named[0]].is_released):
            assert answer == [(True,)], "also when repeated"
            known = self.model.leases[named[0]]
            known.is_live, known.is_released = False, True
        else:
            assert answer == STALE

    @rule(
        resource=st.sampled_from(RESOURCES),
        at=st.sampled_from(["clock_timestamp()", "clock_timestamp() - interval '1 day'", "'-infinity'"]),
    )
    def let_it_expire(self, resource: str, at: str) -> None:
        known = self.model.leases.get(resource)
        if known is not None and known.is_live:
            self.db.execute(f"UPDATE leases SET expires_at = {at} WHERE resource = %s", [resource])
            known.is_live = False

    @rule(resource=st.sampled_from(RESOURCES))
    def prune(self, resource: str) -> None:
        known = self.model.leases.get(resource)
        if known is not None and not known.is_live:
            self.db.execute("DELETE FROM leases WHERE resource = %s", [resource])
            del self.model.leases[resource]

    @rule(data=st.data())
    @precondition(lambda self: self.model.past)
    def guard(self, data: st.DataObject) -> None:
        """check_fence keeps the highest that it has seen."""
        resource, _, fence = self.some(data)
        seen = self.db.execute("SELECT fence FROM fences WHERE resource = %s", [f"guarded {resource}"]).fetchone()
        if 0 < fence < 2**63 - 1:
            answer = call(self.db, "check_fence", KINDS, {"resource": f"guarded {resource}", "fence": fence})
            assert answer == ([(True,)] if seen is None or fence >= seen[0] else STALE)

    @invariant()
    def the_table_is_what_the_model_says(self) -> None:
        rows = self.db.execute(
            "SELECT resource, holder, fence, request_id, released_at IS NULL AND expires_at > clock_timestamp(),"
            " released_at IS NOT NULL FROM leases"
        ).fetchall()
        assert {row[0]: Remembered(*row[1:]) for row in rows} == self.model.leases


def test_named_leases_keep_to_the_model_in_any_order_of_everything(db: psycopg.Connection[Any]) -> None:
    db.execute("SET default_transaction_isolation = 'read committed'")
    Leases.db = db
    run_state_machine_as_test(Leases, settings=tries(40, stateful_step_count=40))
