"""A session that was dropped is told from another one that has its number: a later one, or one on another server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.waiting import await_for
from worker.holding import Holdings
from worker.lost_claims import MOST_OUTSTANDING, LostClaims
from worker.store import sessions
from worker.store.connection import Connection, Database

HOUR_US = 3_600_000_000


@pytest.fixture
async def two(database_url: str) -> AsyncIterator[tuple[Connection, Connection]]:
    """A session that looks, and one that is looked for."""
    database = Database(database_url, environ={})
    connections = [await database.connect(role) for role in ("claim", "claim")]
    yield connections[0], connections[1]
    for connection in connections:
        connection.terminate()


async def test_a_session_lives_until_its_server_process_is_gone(two: tuple[Connection, Connection]) -> None:
    one, other = two
    assert other.backend is not None
    assert other.backend.pid == other.get_server_pid()
    assert await sessions.lives(one, other.backend)
    await sessions.end(one, other.backend)

    async def gone() -> bool:
        assert other.backend is not None
        return not await sessions.lives(one, other.backend)

    await await_for(gone)


async def test_a_session_with_the_same_number_is_another_one_and_is_left_alone(two: tuple[Connection, Connection]) -> None:
    one, other = two
    assert other.backend is not None
    elsewhere = other.backend._replace(started_us=other.backend.started_us - HOUR_US)
    assert not await sessions.lives(one, elsewhere)
    await sessions.end(one, elsewhere)
    assert await other.fetchval("SELECT 1") == 1


async def test_claims_without_answer_are_over_after_a_failover_though_others_have_their_numbers(
    database_url: str, two: tuple[Connection, Connection]
) -> None:
    """The new primary has sessions with these numbers, and keeps them: whoever waits for their end claims nothing any more."""
    one, other = two
    assert other.backend is not None
    lost = LostClaims(Database(database_url, environ={}), owner="here", holdings=Holdings(), limit_seconds=60)

    async def lose(started_us: int) -> None:
        other.backend = sessions.Backend(other.get_server_pid(), started_us)
        with pytest.raises(TimeoutError), lost.watching(other):
            raise TimeoutError

    began_us = other.backend.started_us
    for number in range(MOST_OUTSTANDING):
        await lose(began_us - HOUR_US - number)
    with pytest.raises(ConnectionError), lost.watching(one):
        raise AssertionError("claimed one more")
    await lost.give_back(one)
    assert not lost.outstanding
    # One of this server's own is waited for.
    await lose(began_us)
    await lost.give_back(one)
    assert lost.outstanding
