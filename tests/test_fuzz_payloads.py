"""Payloads, results and errors of every sort: what is accepted comes to the handler equal, what is not is refused in the same words
whichever way it came, and whatever a handler raises is stored within bounds.

Equal: integers are exact; a number with a fraction or beyond 2^53 is the same float, though it may come back as an integer, since
jsonb keeps 1e23 as its 24 digits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import asyncpg
import psycopg
import pytest
from hypothesis import example, given, note
from hypothesis import strategies as st

from tests.commands import worker_in_this_process
from tests.fuzzing import EDGES, STORABLE, tries
from tests.servers import Server
from worker import Handlers, Job, domain, enqueue, enqueue_many, log_lines
from worker.domain_json import MAX_DEPTH
from worker.store.enqueueing import Enqueued
from worker.testing import drain

NAN, INFINITY = float("nan"), float("inf")

TEXT = st.text(STORABLE, max_size=12) | EDGES
NUMBERS = (
    st.integers()
    | st.integers(-(10**4299), 10**4299)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.1, 1e22, 1e23, 2.0**53, 5e-324, 1.7976931348623157e308, -0.0, 2**63, 2**64, -(2**63) - 1, 10**4299])
)
GOOD = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
# Refused: these, wherever they stand.
BAD = st.sampled_from(
    [
        NAN,
        INFINITY,
        -INFINITY,
        "\x00",
        "a\x00",
        "\ud800",
        "\udfff\ud800",
        10**4300,
        b"x",
        {1},
        object,
        {1: 2},
        {None: 1},
        {"\x00": 1},
    ]
)


@dataclass(frozen=True, slots=True)
class Nested:
    """A value some levels down: said in short, since Hypothesis could not print it."""

    inner: object
    depth: int
    in_dicts: bool

    def value(self) -> object:
        value = self.inner
        for _ in range(self.depth):
            value = {"a": value} if self.in_dicts else [value]
        return value


DEPTHS = st.integers(0, 3) | st.sampled_from([MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 254, 900, 5000])
VALUES = GOOD | st.builds(Nested, GOOD | BAD, DEPTHS, st.booleans())


def is_equal(there: object, back: object) -> bool:
    """Walked by hand: two lists of a few hundred levels are more than == can compare from here."""
    pairs = [(there, back)]
    for one, other in pairs:
        match one, other:
            case (list() | tuple(), list()) if len(one) == len(other):
                pairs += zip(one, other, strict=True)
            case dict(), dict() if one.keys() == other.keys():
                pairs += [(inner, other[key]) for key, inner in one.items()]
            case bool() | None | str(), _:
                if type(one) is not type(other) or one != other:
                    return False
            case int(), int():
                if one != other or isinstance(other, bool):
                    return False
            case float(), int() | float():
                if float(other) != one:
                    return False
            case _:
                return False
    return True


class Echo:
    """A process's handlers: what they were given comes back, as the result and in `seen`."""

    def __init__(self) -> None:
        self.handlers = Handlers()
        self.seen: dict[int, object] = {}
        self.raises: dict[int, BaseException] = {}
        # Read by this package, and by pydantic.
        self.handlers.job("untyped")(self.echo)
        self.handlers.job("typed", payload=object)(self.typed)
        self.handlers.job("raise", max_attempts=1)(self.fail)

    async def echo(self, job: Job[object]) -> object:
        self.seen[job.id] = job.payload
        return job.payload

    async def typed(self, job: Job[object]) -> object:
        return await self.echo(job)

    async def fail(self, job: Job[object]) -> None:
        raise self.raises[job.id]


@pytest.fixture(scope="module")
def url(server: Server) -> Iterator[str]:
    with server.database(template=server.template) as url:
        yield url


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def db(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


async def offered(url: str, values: list[object]) -> list[tuple[Enqueued, Enqueued] | str]:
    """Each value enqueued alone and among many, for both sorts of handlers; or why not, which is the same both times."""
    connection = await asyncpg.connect(url)
    answers: list[tuple[Enqueued, Enqueued] | str] = []
    try:
        for value in values:
            try:
                one = await enqueue(connection, "untyped", value, max_attempts=1)
            except (TypeError, ValueError) as error:
                answers.append(str(error))
                with pytest.raises(type(error), match=rf"\Ajob 1: {re.escape(answers[-1])}\Z"):
                    await enqueue_many(connection, [{"payload": 1}, {"kind": "typed", "payload": value}])
            else:
                [many] = await enqueue_many(connection, [{"kind": "typed", "payload": value, "max_attempts": 1}])
                answers.append((one, many))
    finally:
        await connection.close()
    return answers


def test_a_value_is_refused_by_name_or_comes_to_the_handler_and_back_equal(
    url: str, db: psycopg.Connection[Any], loop: asyncio.Runner
) -> None:
    @tries(15)
    @given(given_values=st.lists(VALUES, min_size=1, max_size=20))
    @example(given_values=[Nested(1, depth, in_dicts) for depth in (MAX_DEPTH, MAX_DEPTH + 1, 995) for in_dicts in (True, False)])
    @example(given_values=[10**4299, 10**4300, 1e23, "\ud800", "\x00", NAN])
    def check(given_values: list[object]) -> None:
        values = [one.value() if isinstance(one, Nested) else one for one in given_values]
        db.execute("TRUNCATE jobs")
        answers = loop.run(offered(url, values))
        echo = Echo()
        loop.run(drain(echo.handlers, url))
        results = dict(db.execute("SELECT id, result::text FROM jobs").fetchall())
        for value, answer in zip(values, answers, strict=True):
            if isinstance(answer, str):
                assert answer.startswith("payload: ")
                assert answer.isprintable()
                assert len(answer) < 300
                continue
            for job in answer:
                note(db.execute("SELECT kind, state, last_error FROM jobs WHERE id = %s", [job.id]).fetchone())
                assert is_equal(value, echo.seen[job.id])
                assert results[job.id] is None if value is None else is_equal(value, json.loads(results[job.id]))

    check()


# --- the same JSON text by the command line and in SQL

# fmt: off
TEXTS = GOOD.map(lambda value: json.dumps(value, ensure_ascii=False)) | st.sampled_from([
    "1", "{}", "NaN", "-Infinity", "[NaN]", "1e400", "-1e400", "1e-400", "0.1000000000000000055511151231257827", "1" * 4300,
    '"\\u0000"', '"\\\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', '{"a": 1, "a": 2}', "", "{", "1 2", "'a'", "\ufeff1", "01", "1.",
    "1" * 4301, ".5", "-", '"\t"', "[" * 200 + "]" * 200, "[" * 201 + "]" * 201, "[" * 7000 + "]" * 7000, '"' + "[" * 300 + '"',
    "1e200000",
]) | st.text('[]{}":,0123456789eE+-.\\untrfals ', max_size=12)
# fmt: on
NOT_JSONB = (
    psycopg.errors.InvalidTextRepresentation,
    psycopg.errors.UntranslatableCharacter,  # a NUL, or half of a surrogate pair
    psycopg.errors.StatementTooComplex,  # too deep
    psycopg.errors.NumericValueOutOfRange,
)


def test_the_command_line_accepts_only_what_sql_accepts_and_stores_the_same(
    url: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", url)

    @tries(60)
    @given(text=TEXTS)
    def check(text: str) -> None:
        stored = None
        with contextlib.suppress(*NOT_JSONB):
            stored = db.execute("SELECT id FROM enqueue_job('k', %s::text::jsonb)", [text]).fetchone()
        ended = worker_in_this_process("enqueue", "k", "-", stdin=text.encode())
        note(ended)
        if ended.status == 0:
            assert stored is not None
            ids = [stored[0], json.loads(ended.out)["id"]]
            [by_sql, by_command] = [
                row[0] for row in db.execute("SELECT payload::text FROM jobs WHERE id = ANY (%s) ORDER BY id", [ids])
            ]
            assert is_equal(json.loads(by_sql), json.loads(by_command)), "but for digits that no float has"
        else:
            assert ended.status == 2
            assert "payload: " in ended.err
            assert "Traceback" not in ended.err

    check()


# --- errors


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit("no message")


class NoDetail(Exception):
    @property
    def detail(self) -> str:
        raise SystemExit


class NoText(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


def chained(messages: list[str]) -> BaseException:
    error: BaseException = ValueError("the first")
    for message in messages:
        following = RuntimeError(message)
        following.__cause__ = error
        following.__notes__ = [message]  # type: ignore[attr-defined]
        error = following
    return error


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)
MESSAGES = (
    ANY_TEXT
    | EDGES
    | st.builds(lambda text, times: text * times, ANY_TEXT, st.sampled_from([1, 100, 100_000]))
    | st.just("\U0001f600" * 400_000)
)
NAMES = st.text(STORABLE, min_size=1, max_size=40)
BUILT_IN = st.sampled_from(
    [ValueError, KeyError, OSError, StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
ODD = [
    Unspeakable(),
    NoDetail("x"),
    NoText(),
    ValueError(10**5000),
    ValueError("x" * 1500),
    ValueError("\U0001f600" * 900),
    ValueError(b"\xff"),
    ValueError(*range(10_000)),
    UnicodeDecodeError("utf-8", b"\xff" * 1000, 0, 1, "\ud800"),
]
ERRORS = st.one_of(
    st.sampled_from(ODD),
    st.builds(lambda kind, message: kind(message), BUILT_IN, MESSAGES),
    st.builds(lambda name, message: type(name, (Exception,), {})(message), NAMES, MESSAGES),
    st.builds(chained, st.lists(MESSAGES, max_size=3)),
    st.builds(lambda message, times: chained([message] * times), ANY_TEXT, st.sampled_from([50, 2000])),
    st.builds(ExceptionGroup, ANY_TEXT, st.lists(MESSAGES.map(ValueError), min_size=1, max_size=30)),
    st.builds(lambda *parts: SyntaxError("s", parts), MESSAGES, st.integers() | st.none(), st.integers(), MESSAGES),
)


@tries(150)
@given(error=ERRORS)
@example(error=Unspeakable())
@example(error=NoDetail("x"))
def test_any_exception_becomes_texts_that_fit_and_can_be_stored(error: BaseException) -> None:
    failed = domain.failure(error)
    assert 1 <= len(failed.error) <= 1000
    assert 1 <= len(failed.detail.encode()) <= 8192
    assert 1 <= len(failed.error_type) <= 128
    assert "\x00" not in failed.error + failed.detail + failed.error_type
    line = log_lines.json_line(
        log_lines.Identity("w", "v"), "error", "job_failed", {"error": error, "exception": log_lines.traceback_text(error)}
    )
    assert json.loads(line)["event"] == "job_failed"
    assert len(line) <= 128 * 1024


def test_any_exception_of_a_handler_is_stored_within_bounds_and_ends_that_job_alone(
    url: str, db: psycopg.Connection[Any], loop: asyncio.Runner
) -> None:
    async def add(number: int) -> list[int]:
        connection = await asyncpg.connect(url)
        try:
            return [job.id for job in await enqueue_many(connection, [{"kind": "raise", "payload": 0, "max_attempts": 1}] * number)]
        finally:
            await connection.close()

    @tries(12)
    @given(errors=st.lists(ERRORS, min_size=1, max_size=15))
    @example(errors=[*ODD, ValueError("a neighbour")])
    def check(errors: list[BaseException]) -> None:
        db.execute("TRUNCATE jobs, job_failures")
        echo = Echo()
        echo.raises = dict(zip(loop.run(add(len(errors))), errors, strict=True))
        loop.run(drain(echo.handlers, url))
        rows = db.execute("SELECT state, char_length(last_error) FROM jobs").fetchall()
        assert [row[0] for row in rows] == ["dead"] * len(errors)
        assert all(1 <= row[1] <= 1000 for row in rows)
        sizes = db.execute("SELECT octet_length(error) FROM job_failures").fetchall()
        assert len(sizes) == len(errors)
        assert all(1 <= size <= 8192 for (size,) in sizes)

    check()
