"""What is wished of the generator: kept for all instances, in force from then on, and refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.slots import Instance, due
from worker.clock import local_seconds
from worker.generation import NOTHING, rate_of, wish
from worker.new_job import new_job
from worker.store import generating
from worker.store.connection import Database


async def test_before_anybody_has_started_it_it_is_stopped(database_url: str) -> None:
    database = Database(database_url)
    connection = await database.connect("test")
    one = Instance(database, connection)
    status = await one.status()
    assert (status.state, status.holder, status.fence, status.rate, status.produced) == ("STOPPED", None, None, 1.0, 0)
    assert (status.kind, status.min_seconds, status.max_seconds, status.every_seconds) == ("sleep", 1, 10, 1)
    await one.acquire()
    assert (await one.produce()).outcome == "stopped"
    # The first instance starts it; a wish to stop that came before stays.
    assert (await generating.prepare(connection, database, NOTHING)).state == "STARTED"
    await connection.execute("DELETE FROM generators")
    assert (await generating.stop(connection, database)).state == "STOPPED"
    assert (await generating.prepare(connection, database, wish(rate=5))).state == "STOPPED"
    assert (await one.status()).rate == 5
    await connection.close()


async def test_nothing_is_produced_once_a_stop_has_committed_nor_made_up_for_after_it(instance: Instance) -> None:
    await instance.age(5)
    await generating.stop(instance.db, instance.database)
    assert (await instance.produce()).outcome == "stopped"
    await instance.age(300)
    started_at = local_seconds()
    status = await instance.start()
    assert status.state == "STARTED"
    made = await due(instance)
    assert 1 <= made.produced <= local_seconds() - started_at + 1
    assert made.skipped == 0


async def test_a_start_of_what_is_started_loses_no_slot(instance: Instance) -> None:
    await instance.age(5)
    await instance.start(wish(min=2))
    assert (await instance.produce()).produced in instance.since_aged()


async def test_a_new_spacing_counts_from_its_beginning(instance: Instance) -> None:
    """The slots of a minute ago that the new rate would have had are not due in hindsight."""
    await instance.age(50)
    before = await instance.db.fetchval("SELECT clock_timestamp()")
    await instance.start(wish(rate=1000))
    await due(instance)
    assert (await instance.slots())[0] >= before


async def test_keys_never_repeat_whatever_is_changed(instance: Instance) -> None:
    for one in (wish(rate=500), wish(rate=1000), wish(job=new_job("other", {})), wish(rate=500, min=1), wish(rate=1000)):
        await instance.start(one)
        made = [await due(instance) for _ in range(5)]
        assert {some.skipped for some in made} == {0}
    slots = await instance.slots()
    assert slots == sorted(set(slots))
    status = await instance.status()
    assert status.produced == len(slots) >= 5 * 5


@pytest.mark.parametrize(
    ("least", "most", "whole"), [(1, 10, True), (0, 0, True), (3, 3, True), (0.5, 0.75, False), (0.0001, 0.0002, False)]
)
async def test_pauses_are_random_within_their_bounds(instance: Instance, least: float, most: float, whole: bool) -> None:
    await instance.start(wish(rate=1000, min=least, max=most))
    await instance.age(1)
    assert (await instance.produce()).produced > 900
    rows = await instance.db.fetch("SELECT DISTINCT payload ->> 'sleep_duration_seconds' AS pause FROM jobs WHERE kind = 'sleep'")
    pauses = [float(row["pause"]) for row in rows]
    assert least <= min(pauses) <= max(pauses) <= most
    assert all(pause == int(pause) for pause in pauses) == whole
    if whole:
        assert len(pauses) == most - least + 1


async def test_a_kind_of_ones_own_replaces_pauses_and_pauses_replace_it(instance: Instance) -> None:
    job = new_job("nightly", {"deep": [1, None]})
    status = await instance.start(wish(every=0.01, job=job))
    assert (status.kind, status.min_seconds, status.max_seconds, status.rate) == ("nightly", None, None, 100)
    await instance.age(0.1)
    await instance.produce()
    row = await instance.db.fetchrow("SELECT DISTINCT kind, payload FROM jobs")
    assert (row["kind"], row["payload"]) == ("nightly", '{"deep": [1, null]}')
    status = await instance.start(wish(min=2))
    assert (status.kind, status.min_seconds, status.max_seconds, status.rate) == ("sleep", 2, 10, 100)


async def test_a_bound_that_does_not_fit_the_other_is_refused_and_nothing_has_changed(instance: Instance) -> None:
    before = await instance.status()
    with pytest.raises(ValueError, match=r"^min, max: "):
        await instance.start(wish(min=20, rate=5))
    after = await instance.status()
    assert (after.rate, after.min_seconds, after.max_seconds) == (before.rate, before.min_seconds, before.max_seconds)


async def test_a_payload_beyond_the_limit_is_refused(instance: Instance) -> None:
    with pytest.raises(ValueError, match=r"^payload: 1 MiB"):
        await instance.start(wish(job=new_job("large", ["x" * 1_048_576])))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rate": 0}, "rate: "),
        ({"rate": -1}, "rate: "),
        ({"rate": 10_001}, "rate: "),
        ({"rate": float("nan")}, "rate: "),
        ({"rate": float("inf")}, "rate: "),
        ({"every": 0}, "every: "),
        ({"every": 0.00009}, "every: "),
        ({"every": 2_592_001}, "every: "),
        ({"rate": 1, "every": 1}, "rate, every: "),
        ({"min": -1}, "min: "),
        ({"max": 86_401}, "max: "),
        ({"min": 5, "max": 4}, "min: 5 is more than max, 4"),
        ({"min": 5, "job": new_job("other", {})}, "kind: "),
    ],
)
def test_a_wish_that_cannot_be_meant_is_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        wish(**arguments)


@pytest.mark.parametrize("rate", [0.1, 1, 3, 7, 49, 1000 / 3, 10_000])
def test_a_rate_is_shown_as_it_was_given(rate: float) -> None:
    assert rate_of(wish(rate=rate).every_seconds or 0) == pytest.approx(rate, rel=1e-11)
    assert rate_of(1 / 49) == 49
