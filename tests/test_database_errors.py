"""Errors of the database: which of them are waited out, and what of their text is shown and stored."""

from __future__ import annotations

import asyncpg
import pytest

from tests.connecting import connected
from worker.store.connection import ConnectFailed, is_unavailable, safe_text


def server_error(code: str) -> asyncpg.PostgresError:
    return asyncpg.PostgresError.new({"C": code, "M": "message"})


@pytest.mark.parametrize(
    ("error", "unavailable"),
    [
        *((server_error(code), True) for code in ("08006", "25006", "53300", "57P01", "58030", "XX000")),
        *((server_error(code), False) for code in ("23505", "40001", "42601", "55P03", "57014", "RW001")),
        (asyncpg.InterfaceError("connection is closed"), True),
        (asyncpg.InterfaceError("cannot perform operation: another operation is in progress"), False),
        (ConnectFailed("no", sqlstate="28P01", refused=True), True),
        (TimeoutError(), True),
        (OSError(), True),
        (ValueError("closed"), False),
    ],
    ids=str,
)
def test_only_an_absent_database_is_waited_for(error: Exception, unavailable: bool) -> None:
    assert is_unavailable(error) is unavailable


async def test_the_text_of_an_error_shows_no_row_and_no_secret(empty_database_url: str) -> None:
    async with connected(empty_database_url) as connection:
        await connection.execute("CREATE TABLE t (payload text CHECK (payload = 'no'))")
        with pytest.raises(asyncpg.CheckViolationError) as failed:
            await connection.execute("INSERT INTO t VALUES ('a payload')")
    assert "violates check constraint" in safe_text(failed.value)
    assert "a payload" not in safe_text(failed.value)
    assert safe_text(ValueError("postgresql://u:hidden@h")) == "postgresql://u:***@h"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\x00b\ud800c"), "a\ufffdb\ufffdc"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("x" * 2000), "x" * 1000),
        (Unspeakable(), "(its message cannot be read)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_text_of_an_error_can_always_be_stored(error: Exception, text: str) -> None:
    assert safe_text(error) == text
