"""What encode_json accepts, PostgreSQL stores and gives back; what it refuses, it refuses by name."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from worker.domain_json import MAX_TEXT_CHARACTERS, decode_json, encode_json

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def test_every_accepted_value_comes_back_from_jsonb_unchanged(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:

        @settings(max_examples=60, deadline=None)
        @given(value=VALUES)
        def check(value: object) -> None:
            text = encode_json(value, "payload")
            [stored] = connection.execute("SELECT %s::jsonb::text", [text]).fetchone()
            assert decode_json(stored) == value

        check()


@pytest.mark.parametrize("value", [None, [], "x", 7, True, {}, 2**63, -(10**30), 0.1, "Ünïcode \U0001f600"])
def test_any_json_value_is_a_payload(value: object) -> None:
    assert decode_json(encode_json(value, "payload")) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [1, float("-inf")]}])
def test_nan_and_infinities_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^payload: NaN and infinities are not JSON"):
        encode_json(value, "payload")


@pytest.mark.parametrize("value", ["a\x00b", {"a\x00": 1}, ["\\\x00"], "\\\\\x00"])
def test_a_nul_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^result: contains a NUL"):
        encode_json(value, "result")


@pytest.mark.parametrize("text", ["\\u0000", "\\\\u0000", "C:\\u0000", "\\\\\\u0000"])
def test_the_literal_text_of_an_escaped_nul_stays_intact(text: str) -> None:
    assert decode_json(encode_json({"a": text}, "payload")) == {"a": text}


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, ["ok", "\ud83d"]])
def test_an_unpaired_surrogate_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^payload: contains an unpaired surrogate"):
        encode_json(value, "payload")


@pytest.mark.parametrize("value", [{1: "a"}, {"a": [{None: 1}]}, {True: 1}, ({"a": {2.5: 1}},)])
def test_a_key_that_is_no_string_is_refused_and_not_turned_into_one(value: object) -> None:
    with pytest.raises(TypeError, match=r"^payload: the key .* is not a string"):
        encode_json(value, "payload")


@pytest.mark.parametrize("value", [datetime(2030, 1, 1, tzinfo=UTC), {1, 2}, b"x", object(), {b"k": 1}])
def test_what_json_has_no_word_for_is_a_type_error_that_names_the_field(value: object) -> None:
    with pytest.raises(TypeError, match=r"^payload: "):
        encode_json(value, "payload")


def test_circular_and_bottomless_values_are_refused() -> None:
    circular: list[object] = []
    circular.append(circular)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (circular, deep):
        with pytest.raises(ValueError, match=r"^payload: (circular|nested)"):
            encode_json(value, "payload")
    with pytest.raises(ValueError, match=r"nested too deeply"):
        decode_json("[" * 100_000 + "]" * 100_000)


def test_what_is_far_too_long_is_refused_before_it_travels() -> None:
    with pytest.raises(ValueError, match=r"^payload: .* more than 1 MiB can hold"):
        encode_json("x" * MAX_TEXT_CHARACTERS, "payload")


def test_pydantic_models_are_dumped_wherever_they_stand() -> None:
    class Inner(BaseModel):
        at: datetime
        by_number: dict[int, str] = {}

    inner = Inner(at=datetime(2030, 1, 1, tzinfo=UTC), by_number={1: "a"})
    expected = {"at": "2030-01-01T00:00:00Z", "by_number": {"1": "a"}}
    assert json.loads(encode_json(inner, "payload")) == expected
    assert json.loads(encode_json([{"inner": inner}], "payload")) == [{"inner": expected}]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "[-Infinity]", "{bad", "", "1 2", b"\xff"])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (the message is the standard library's)
        decode_json(text)


def test_a_number_beyond_floats_that_a_handler_echoes_is_refused() -> None:
    """1e400 is fine in jsonb, which hands it over in full; with a fraction Python can only make an infinity of it."""
    assert decode_json("1" + "0" * 400) == 10**400
    with pytest.raises(ValueError, match=r"NaN and infinities"):
        encode_json(decode_json("1" + "0" * 400 + ".5"), "result")
