"""`Leases(url=…)`: a program without access to the database holds named leases over HTTP, by the same rules."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import warnings
from collections.abc import Callable

import pytest

from tests.serving import TOKEN, Served, eating
from tests.waiting import await_for, until_cancelled
from worker import LeaseHeld, LeaseLost, Leases, lease_http
from worker.clock import local_seconds
from worker.errors import ConfigError
from worker.holding import HeldName
from worker.http_calls import Answer
from worker.lease_http import HttpTransport
from worker.name_renewals import NameRenewals, terms_of


async def test_leaving_it_closes_every_connection_also_when_nobody_answers(
    database_url: str, serve: Callable[..., Served], name: str
) -> None:
    served = serve(database_url)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        for hangs, ttl_seconds in ((False, 60), (True, 6)):
            async with contextlib.AsyncExitStack() as stack:
                leases = await stack.enter_async_context(Leases(url=served.url, bearer=TOKEN))
                async with asyncio.TaskGroup() as group:
                    for number in range(12):
                        group.create_task(hold_until_lost(leases, f"{name}-{hangs}-{number}", ttl_seconds))
                    # Several connections for acquisitions, and where it hangs later for renewals.
                    there = "SELECT FROM leases WHERE starts_with(resource, %s) AND (ttl_seconds > 6 OR renewed_at IS NOT NULL)"
                    await await_for(lambda: len(served.ask(there, f"{name}-{hangs}-")) == 12, 30)  # noqa: B023
                    if hangs:
                        os.kill(served.process.pid, signal.SIGSTOP)
                    await stack.aclose()
        del leases
        gc.collect()
    os.kill(served.process.pid, signal.SIGCONT)
    assert [str(one.message) for one in said if issubclass(one.category, ResourceWarning)] == []


async def hold_until_lost(leases: Leases, name: str, ttl_seconds: float) -> None:
    with pytest.raises(LeaseLost):
        async with leases.hold(name, ttl_seconds=ttl_seconds):
            await until_cancelled()


async def test_renewals_begin_with_the_lease_that_is_trusted_for_the_shortest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = HttpTransport("http://127.0.0.1:1", None)
    asked: list[object] = []

    async def call(method: str, path: str, body: dict[str, object], *, seconds: float) -> Answer:
        asked.append(body["resource"])
        return Answer(200, {"expires_in_ms": 3_000})

    monkeypatch.setattr(transport._renewals, "call", call)
    held = [
        HeldName(resource=str(at), holder="h", id=at, fence=1, terms=terms_of(3), asked_at=at, remaining_seconds=3)
        for at in (2, 3, 1)
    ]
    renewed = await transport.renew_many(held, limit_seconds=1)
    assert (asked, len(renewed.expires_in_ms)) == (["1", "2", "3"], 3)
    await transport.close(1)


async def test_names_for_which_a_round_has_no_time_are_asked_for_at_once_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the answers move: in half of the time of a round there is room for two dozen of them."""
    transport = HttpTransport("http://127.0.0.1:1", None)
    asked: list[str] = []
    now = 1_000.0

    async def call(method: str, path: str, body: dict[str, str], *, seconds: float) -> Answer:
        nonlocal now
        asked.append(body["resource"])
        now += 0.01
        return Answer(200, {"expires_in_ms": 3_000})

    monkeypatch.setattr(lease_http, "local_seconds", lambda: now)
    monkeypatch.setattr(transport._renewals, "call", call)
    names = NameRenewals(transport)
    for number in range(200):
        names.add(
            HeldName(resource=str(number), holder="h", id=number, fence=1, terms=terms_of(3), asked_at=0, remaining_seconds=3)
        )
    next_at = await names.beat(poked=False)
    assert len(set(asked)) == len(asked) in range(20, 30)
    assert next_at <= local_seconds()
    while len(set(asked)) < 200:
        before = list(asked)
        await names.beat(poked=False)
        first = asked[len(before) :][: 200 - len(set(before))]
        assert not set(before) & set(first)
    await transport.close(1)


async def test_a_program_without_the_database_holds_a_lease_over_http(served: Served, name: str) -> None:
    async with Leases(url=served.url, bearer=TOKEN, holder="a") as leases:
        async with leases.hold(name, ttl_seconds=4, metadata={"why": "test"}) as held:
            [row] = served.ask("SELECT * FROM leases WHERE resource = %s", name)
            assert (row.holder, row.fence, row.metadata) == ("a", held.fence, {"why": "test"})
            assert served.http.post("/api/leases", json={"resource": name, "holder": "b"}).json()["holder"] == "a"
            past_its_term = "SELECT FROM leases WHERE resource = %s AND renewed_at > created_at + interval '4 seconds'"
            await await_for(lambda: served.ask(past_its_term, name), 30)
            held.ensure_lease()
            assert 0 < held.remaining_seconds() <= 4
        acquired = served.http.post("/api/leases", json={"resource": name, "holder": "b", "ttl_seconds": 5}).json()
        assert acquired["fence"] > held.fence
        with pytest.raises(LeaseHeld) as refused:
            async with leases.hold(name):
                pass
        assert refused.value.holder == "b"
        async with leases.hold(name, wait_seconds=30) as again:
            assert again.fence > acquired["fence"]


async def test_a_lease_lost_over_http_stops_the_block(served: Served, name: str) -> None:
    async with Leases(url=served.url, bearer=TOKEN) as leases:

        async def block() -> None:
            async with leases.hold(name, ttl_seconds=9):
                served.ask("UPDATE leases SET fence = nextval('fence_seq'), holder = 'x' WHERE resource = %s RETURNING id", name)
                await until_cancelled()

        with pytest.raises(LeaseLost) as lost:
            await block()
        assert lost.value.reason == "lease_lost"


async def test_a_server_that_hangs_stops_the_block_before_the_lease_can_pass_on(
    database_url: str, serve: Callable[..., Served], name: str
) -> None:
    served = serve(database_url)
    async with Leases(url=served.url, bearer=TOKEN) as leases:

        async def block() -> None:
            async with leases.hold(name, ttl_seconds=10):
                os.kill(served.process.pid, signal.SIGSTOP)
                try:
                    await until_cancelled()
                finally:
                    [row] = served.ask("SELECT expires_at > clock_timestamp() AS live FROM leases WHERE resource = %s", name)
                    assert row.live, "it went on after its lease"

        try:
            with pytest.raises(LeaseLost) as lost:
                await block()
            assert lost.value.reason == "lease_untrusted"
        finally:
            os.kill(served.process.pid, signal.SIGCONT)


async def test_a_wrong_token_or_address_is_a_matter_of_configuration(served: Served, name: str) -> None:
    async with Leases(url=served.url, bearer="wrong-token-wrong-token") as leases:
        with pytest.raises(ConfigError, match="not accepted"):
            async with leases.hold(name):
                pass
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        async with Leases(url="ftp://elsewhere"):
            pass


async def test_an_acquisition_whose_answer_was_eaten_locks_nobody_out(served: Served, name: str) -> None:
    with eating(served, every=2) as url:
        async with Leases(url=url, bearer=TOKEN, holder="a") as leases, leases.hold(name, ttl_seconds=600) as held:
            [row] = served.ask("SELECT holder, fence FROM leases WHERE resource = %s", name)
            assert (row.holder, row.fence) == ("a", held.fence)
    [row] = served.ask("SELECT released_at FROM leases WHERE resource = %s", name)
    assert row.released_at is not None
