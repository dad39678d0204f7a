"""Reaching the database at the start: one that is away is waited for, for as long as was said; one that refuses us is not."""

from __future__ import annotations

from types import SimpleNamespace

import asyncpg
import pytest

from tests.inprocess import listening
from worker import events, reaching
from worker.errors import ConfigError, DatabaseUnavailable
from worker.reaching import reach_database
from worker.store.connection import ConnectFailed

AWAY = ConnectFailed("cannot connect", sqlstate=None, refused=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The local clock, which goes on by what is slept."""
    now = [1000.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(reaching, "local_seconds", lambda: now[0])
    monkeypatch.setattr(reaching, "asyncio", SimpleNamespace(sleep=sleep))
    return now


class Server:
    """Fails so often with this error, then is there."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error = error
        self.times = times
        self.asked = 0
        self.told: list[str] = []
        self.lines = 0

    async def prepare(self) -> None:
        self.asked += 1
        if self.asked <= self.times:
            raise self.error

    async def reach(self, wait_seconds: float | None) -> None:
        with listening() as log:
            await reach_database(self.prepare, wait_seconds=wait_seconds, on_waiting=self.told.append)
        self.lines = len(log.find(events.DATABASE_LOST))


@pytest.mark.parametrize(
    "error", [AWAY, DatabaseUnavailable("a standby"), TimeoutError(), asyncpg.QueryCanceledError("statement timeout")]
)
async def test_what_may_change_by_itself_is_waited_for(clock: list[float], error: Exception) -> None:
    server = Server(error, 20)
    await server.reach(None)
    assert server.asked == 21
    assert server.told == ["waiting for the database"] * 20
    assert server.lines > 0
    assert clock[0] - 1000 > 30


async def test_the_wait_ends_when_it_was_said_to_and_names_what_was_in_the_way(clock: list[float]) -> None:
    server = Server(AWAY, 1_000)
    with pytest.raises(DatabaseUnavailable, match=r"^no database within 12.5 s: cannot connect$"):
        await server.reach(12.5)
    assert clock[0] <= 1012.5


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectFailed("no such user", sqlstate="28000", refused=True), r"^no such user$"),
        (
            asyncpg.InsufficientPrivilegeError("permission denied for schema x"),
            r"^permission denied for schema x \(SQLSTATE 42501\)$",
        ),
        (asyncpg.UndefinedColumnError('column "x" does not exist'), r'^column "x" does not exist \(SQLSTATE 42703\)$'),
        (ConfigError("no tables"), "^no tables$"),
    ],
)
async def test_what_waiting_does_not_mend_is_said_at_once(clock: list[float], error: Exception, said: str) -> None:
    server = Server(error, 1)
    with pytest.raises(ConfigError, match=said):
        await server.reach(None)
    assert (server.asked, server.told, clock) == (1, [], [1000.0])
