"""A pooler that is restarted or paused under load, or whose server is: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pooled_workplace import PooledWorkplace, pooled_by, troubles
from tests.pooling import needs_pgbouncer
from tests.processes import Daemon
from tests.servers import PrivateCluster

pytestmark = needs_pgbouncer


@pytest.fixture
def pooled_server(
    private_cluster: Callable[..., PrivateCluster], daemon: Callable[..., Daemon], tmp_path: Path
) -> Iterator[PooledWorkplace]:
    """As `pooled`, on a server of its own, which may be stopped."""
    cluster = private_cluster()
    place = PooledWorkplace.on(cluster, tmp_path, daemon)
    with contextlib.closing(place), pooled_by(place, cluster.dsn):
        yield place


def work_under_load(place: PooledWorkplace) -> list[int]:
    """Jobs whose effects are under way when this returns."""
    ids = place.add_many(200, "nap", {"seconds": 0.02}) + place.add_many(50, "own")
    place.wait_for_notes("end", count=20)
    return ids


def all_were_done_once(place: PooledWorkplace, ids: list[int], *processes: Daemon) -> None:
    place.wait_until_all("succeeded", 30)
    assert place.ledger() == dict.fromkeys(ids, 1)
    assert [process.process.poll() for process in processes] == [None] * len(processes)
    assert not {"internal_error", "job_dead", "config_invalid"} & {str(event["event"]) for event in troubles(*processes)}


def test_a_restart_of_the_pooler_under_load_loses_and_doubles_nothing(pooled: PooledWorkplace) -> None:
    processes = [pooled.daemon(**pooled.listening()), pooled.daemon()]
    ids = work_under_load(pooled)
    pooled.bouncer.stop()
    for process in processes:
        process.wait_for_event("database_lost")
    pooled.bouncer.start()
    all_were_done_once(pooled, ids, *processes)


def test_a_pause_of_the_pooler_under_load_loses_and_doubles_nothing(pooled: PooledWorkplace) -> None:
    """As operators do before a switch-over: it takes everything and answers nothing, for longer than a lease."""
    processes = [pooled.daemon(**pooled.listening()), pooled.daemon()]
    ids = work_under_load(pooled)
    pooled.bouncer.ask("PAUSE")
    for process in processes:
        process.wait_for_event("database_lost")
    pooled.wait_until_leases_are_over()
    pooled.bouncer.ask("RESUME")
    all_were_done_once(pooled, ids, *processes)


def test_a_restart_of_the_server_behind_the_pooler_loses_and_doubles_nothing(pooled_server: PooledWorkplace) -> None:
    place = pooled_server
    processes = [place.daemon(**place.listening()), place.daemon()]
    ids = work_under_load(place)
    place.cluster.stop()
    for process in processes:
        process.wait_for_event("database_lost")
    place.cluster.start()
    place.reconnect()
    all_were_done_once(place, ids, *processes)
