"""The generator as a process: it stops in order, and waits for its database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path
from typing import NoReturn

import psycopg
import psycopg.sql
import pytest
from psycopg.rows import namedtuple_row

from tests.commands import worker
from tests.generators import CALM, SLOW_MACHINE_SECONDS, Fleet, Route, in_production, slow_insert
from tests.processes import below_a_namespace, process_1_of
from tests.psql import grant
from tests.roles import role, url_as
from tests.servers import Server
from tests.slots import Instance
from tests.waiting import any_moment, await_for, wait_for
from tests.workplace import Workplace
from worker import Leases
from worker.errors import ConfigError
from worker.generator import Generator
from worker.store import generating
from worker.store.connection import Connection, Database, Lane

# --- stopping


def test_a_leader_that_is_told_to_stop_releases_only_after_its_production_has_ended(fleet: Fleet) -> None:
    """H9."""
    fleet.db.execute(slow_insert(1))
    leader = fleet.lead("--every", "0.5", WORKER_LEASE_SECONDS="6", WORKER_QUERY_TIMEOUT_SECONDS="3")
    other = fleet.stand_by(WORKER_LEASE_SECONDS="6", WORKER_QUERY_TIMEOUT_SECONDS="3")
    wait_for(lambda: in_production(fleet))
    leader.signal(signal.SIGTERM)
    assert leader.wait() == 0
    leader.wait_for_event("generator_released")
    ended, released = fleet.value("SELECT max(at) FROM ended"), fleet.value("SELECT released_at FROM leases")
    if released is not None:  # else the other one has it already
        assert ended < released
    assert fleet.produced() > 0
    fence = other.wait_for_event("generator_leader")["fence"]
    assert fence > leader.find("generator_leader")[0]["fence"]


def test_a_production_that_is_locked_out_does_not_hold_up_the_stop(fleet: Fleet) -> None:
    """H9: nothing is written then, the lease is released, another one makes up for the slots."""
    # Its statements wait for a lock no longer than a second.
    leader = fleet.lead("--rate", "5", **CALM)
    fleet.wait_for_more()
    with psycopg.connect(fleet.url) as other:
        other.execute("LOCK TABLE jobs IN SHARE MODE")
        leader.wait_for_event("generator_failed")
        assert leader.stop() == 0  # the lock is still there
        assert leader.find("generator_released")
        other.rollback()
    fleet.lead()
    fleet.wait_for_more(3)
    fleet.each_slot_once(0.2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_every_stop_signal_ends_leader_and_standby_with_0(fleet: Fleet, number: signal.Signals) -> None:
    leader, other = fleet.lead(**CALM), fleet.stand_by(**CALM)
    for one in (other, leader):
        one.signal(number)
        assert one.wait() == 0
        assert [event["event"] for event in one.events][-1] == "shutdown_complete"
        assert one.find("shutdown_complete", status=0)
        assert one.stderr == ""
    assert fleet.holder is None


def test_signals_at_any_moment_of_the_start_end_it_with_0(fleet: Fleet) -> None:
    choices = random.Random(3)
    for _ in range(5):
        one = fleet.run(**CALM)
        one.wait_for_event("generator_started")
        any_moment(choices, 0.3)
        one.signal(signal.SIGTERM)
        one.signal(signal.SIGTERM)
        assert one.wait() == 0
    assert fleet.holder is None


def test_a_second_signal_does_not_wait_for_a_production(fleet: Fleet) -> None:
    fleet.db.execute(slow_insert(50))
    leader = fleet.lead(WORKER_LEASE_SECONDS="120", WORKER_QUERY_TIMEOUT_SECONDS="60")
    wait_for(lambda: in_production(fleet))
    leader.signal(signal.SIGTERM)
    leader.wait_for_event("shutdown_started")
    leader.signal(signal.SIGTERM)
    assert leader.wait() in (0, 75)
    assert fleet.value("SELECT count(*) FROM ended") == 0


async def test_a_second_signal_behind_the_production_leaves_its_last_look_alone(
    instance: Instance, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells whether the lease was released, and so the exit status."""
    await instance.db.execute("DELETE FROM leases")
    lane, look = Lane(instance.database, "generator"), generating.status

    async def look_in_a_hurry(connection: Connection, database: Database) -> generating.GeneratorStatus:
        generator.hurry()
        return await look(connection, database)

    async with Leases(database_url, holder="me") as leases:
        generator = Generator(
            instance.database,
            lane,
            holder="me",
            hold=lambda: leases.hold(generating.NAME, ttl_seconds=60),
            lease_seconds=60,
            poll_seconds=1,
            statement_seconds=10,
        )
        running = asyncio.create_task(generator.run())
        await await_for(lambda: generator.fence is not None)
        monkeypatch.setattr(generating, "status", look_in_a_hurry)
        generator.stop()
        await running
    await lane.close(1)
    assert generator.fence is None


def test_an_instance_as_process_1_stops_like_any_other(fleet: Fleet) -> None:
    outer = fleet.run_below(below_a_namespace(), **CALM)
    outer.wait_for_event("generator_leader", pid=1)
    os.kill(process_1_of(outer), signal.SIGTERM)
    assert outer.wait() == 0
    assert fleet.holder is None


# --- the database away, or not what it should be


def test_an_outage_costs_no_slot(private_workplace: Workplace, tmp_path: Path) -> None:
    """At the start and in the middle it is waited for; two instances, and still one leader."""
    place = private_workplace
    with contextlib.closing(Fleet(place.url, tmp_path)) as fleet:
        first, second = fleet.run("--rate", "10"), fleet.run()
        fleet.leader()
        fleet.wait_for_more(3)
        fleet.db.close()
        place.cluster.stop()
        for one in (first, second):
            one.wait_for_event("database_lost", 15)
        third = fleet.run()
        third.wait_for_event("database_lost", 15)
        place.cluster.start()
        fleet.db = psycopg.connect(fleet.url, autocommit=True, row_factory=namedtuple_row)
        place.reconnect()
        fleet.wait_for_more(3)
        wait_for(lambda: third.find("generator_standby") or third.find("generator_leader"))
        fleet.each_slot_once(0.1)
        for one in fleet.instances:
            assert one.stop() == 0


def test_a_stop_during_an_outage_leaves_the_lease_to_expiry_and_says_so(workplace: Workplace, tmp_path: Path) -> None:
    """Connections are refused: it tries to release for a while, then ends with 75."""
    with contextlib.closing(Fleet(workplace.url, tmp_path)) as fleet:
        limits = {"WORKER_LEASE_SECONDS": "20", "WORKER_QUERY_TIMEOUT_SECONDS": "3"}
        leader, other = fleet.lead(**limits), fleet.stand_by(**limits)
        with workplace.outage():
            for one in (leader, other):
                one.wait_for_event("database_lost")
                one.signal(signal.SIGTERM)
            assert (leader.wait(), other.wait()) == (75, 0)
        assert not leader.find("generator_released")
        # By its own decision, not by the limit of the stop.
        assert "uptime_ms" in leader.find("shutdown_complete", status=75)[0]


def test_a_lease_is_called_released_only_if_the_database_says_so(fleet: Fleet) -> None:
    """H9: somebody keeps its row locked, so that it cannot be released in time."""
    leader = fleet.lead("--every", "3600", WORKER_LEASE_SECONDS="60", WORKER_QUERY_TIMEOUT_SECONDS="4")
    with psycopg.connect(fleet.url) as other:
        other.execute("SELECT FROM leases FOR UPDATE")
        assert leader.stop() == 75
        assert not leader.find("generator_released")
        assert fleet.holder is not None


def test_a_stop_that_gets_no_answer_ends_in_time_with_75(fleet: Fleet) -> None:
    with Route(fleet.url) as route:
        leader = fleet.lead(DATABASE_URL=route.url, WORKER_LEASE_SECONDS="10")
        route.cut()
        leader.signal(signal.SIGTERM)
        # Margin and two query time-outs.
        assert leader.wait(3 + SLOW_MACHINE_SECONDS) == 75
    assert not leader.find("generator_released")
    assert leader.find("shutdown_complete", status=75)


def test_what_is_wrong_at_the_start_has_its_own_exit_status(fleet: Fleet, empty_database_url: str, server: Server) -> None:
    missing = fleet.run(DATABASE_URL=empty_database_url)
    assert missing.wait() == 78
    assert "worker migrate" in missing.find("config_invalid")[0]["error"]
    wrong = fleet.run(WORKER_LEASE_SECONDS="soon")
    assert wrong.wait() == 78
    assert "WORKER_LEASE_SECONDS" in wrong.find("config_invalid")[0]["error"]
    away = fleet.run(DATABASE_URL="postgresql://127.0.0.1:1/x", WORKER_CONNECT_WAIT_SECONDS="0.5")
    assert away.wait() == 69
    assert fleet.run("--min", "20").wait() == 78  # beside the longest pause of 10


def test_it_runs_with_the_grants_of_the_daemon_alone(fleet: Fleet, server: Server) -> None:
    with role(server, fleet.url) as name:
        fleet.db.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC")
        grant(fleet.url, "daemon", name)
        leader = fleet.lead("--rate", "20", DATABASE_URL=url_as(name, fleet.url), **CALM)
        fleet.wait_for_more(5)
        assert leader.stop() == 0


def test_a_grant_that_is_revoked_from_a_running_instance_is_waited_out(fleet: Fleet, server: Server) -> None:
    """As by a daemon: at a start it is a fault of the configuration, from then on somebody's doing that ends."""
    with role(server, fleet.url) as name:
        grant(fleet.url, "daemon", name)
        url = url_as(name, fleet.url)
        leader = fleet.lead("--rate", "20", DATABASE_URL=url, WORKER_LEASE_SECONDS="6")
        rights, own = psycopg.sql.SQL("INSERT, UPDATE ON leases"), psycopg.sql.Identifier(name)
        fleet.db.execute(psycopg.sql.SQL("REVOKE {} FROM {}").format(rights, own))
        leader.wait_for_event("generator_lost", 30)
        wait_for(lambda: any("deploy/grants.sql" in event["error"] for event in leader.find("generator_failed")))
        assert fleet.run(DATABASE_URL=url).wait() == 78
        fleet.db.execute(psycopg.sql.SQL("GRANT {} TO {}").format(rights, own))
        wait_for(lambda: len(leader.find("generator_leader")) >= 2, 30)
        fleet.wait_for_more()
        assert leader.stop() == 0


async def test_an_instance_that_is_refused_the_lease_asks_less_and_less_often(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it may look, so that it seems to be its turn each time."""
    await instance.db.execute("DELETE FROM leases")

    def refuse() -> NoReturn:
        raise ConfigError("permission denied")

    waits: list[float] = []
    lane = Lane(instance.database, "generator")
    generator = Generator(instance.database, lane, holder="me", hold=refuse, lease_seconds=30, poll_seconds=1, statement_seconds=10)

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 8:
            generator.stop()

    monkeypatch.setattr(generator, "_wait", wait)
    await generator.run()
    await lane.close(1)
    assert waits[0] < 0.15
    assert 0.35 < waits[-1] < 1.25


def test_it_leaves_a_heartbeat_for_worker_health(fleet: Fleet) -> None:
    leader, other = fleet.lead(**CALM), fleet.stand_by(**CALM)

    def well() -> bool:
        done = worker("health", directory=fleet.directory)
        return done.returncode == 0 and done.stdout.count("\tok") == 2

    wait_for(well, 30)
    for one in (leader, other):
        assert one.stop() == 0
    assert list(fleet.directory.glob("*.health")) == []
