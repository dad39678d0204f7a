"""The faults that `sleep` makes on purpose: they are real, they are only where they were asked for, and jobs survive them."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.inprocess import running
from tests.processes import Daemon, below_a_namespace, environment
from tests.waiting import wait_for
from tests.workplace import VARIABLES, Supervisor, Workplace
from worker.builtin import Chaos, builtin_handlers
from worker.events import CHAOS_ENABLED

BUILT_IN = {"WORKER_HANDLERS": ""}


def test_a_crash_kills_the_process_and_the_job_is_recovered_elsewhere(workplace: Workplace) -> None:
    chaotic = workplace.daemon(WORKER_HANDLERS="", WORKER_LEASE_SECONDS="1", WORKER_CHAOS_CRASH="1")
    warning = chaotic.wait_for_event("chaos_enabled")
    assert (warning["level"], warning["crash"], warning["latency"]) == ("warning", 1, 0)
    id = workplace.add("sleep", {"sleep_duration_seconds": 0.2})
    assert chaotic.wait() == -signal.SIGKILL
    assert workplace.job(id).state == "running"
    sound = workplace.daemon(WORKER_HANDLERS="", WORKER_LEASE_SECONDS="20")
    row = workplace.wait_for_state(id, "succeeded")
    assert (row.attempts, row.crashes) == (2, 1)
    assert not sound.find("chaos_enabled")


def test_a_job_that_crashes_every_process_ends_dead_after_its_attempts(workplace: Workplace) -> None:
    id = workplace.add("sleep", {"sleep_duration_seconds": 0.1}, max_attempts=2)
    message = workplace.add("message", {"message": "no chaos here"})
    with Supervisor(workplace, WORKER_HANDLERS="", WORKER_CHAOS_CRASH="1") as supervisor:
        row = workplace.wait_for_state(id, "dead", timeout_seconds=30)
        workplace.wait_for_state(message, "succeeded")
    assert (row.attempts, row.crashes) == (2, 2)
    assert supervisor.crashes == 2


def test_a_crash_ends_process_1_of_a_container_too(workplace: Workplace) -> None:
    """The kernel keeps process 1 from being killed by its own signals."""
    command = (*below_a_namespace(), sys.executable, "-m", "worker", "run")
    variables = environment(workplace.directory, DATABASE_URL=workplace.url, **VARIABLES | BUILT_IN, WORKER_CHAOS_CRASH="1")
    outer = Daemon(command, variables, workplace.directory, "process-1")
    try:
        outer.wait_for_event("daemon_ready", 20, pid=1)
        workplace.add("sleep", {"sleep_duration_seconds": 0})
        assert outer.wait(10) == 128 + signal.SIGKILL
    finally:
        outer.kill()


def test_a_crash_comes_at_any_step_of_a_long_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is a step: with a probability of 0.5 nobody gets far."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    monkeypatch.setattr(os, "_exit", lambda status: None)
    chaos = Chaos(crash=0.5)
    for _ in range(1000):
        chaos.strike()
    assert set(killed) == {signal.SIGKILL}
    assert 400 < len(killed) < 600


def test_a_stall_blocks_the_loop_past_a_renewal_and_the_lease_survives_it(workplace: Workplace) -> None:
    # A stall takes 2.25 s: longer than two beats of the watch, and far shorter than the lease.
    lease = {"WORKER_LEASE_SECONDS": "15", "WORKER_RENEW_SECONDS": "1.5"}
    chaotic = workplace.daemon(WORKER_HANDLERS="", WORKER_CHAOS_LATENCY="1", **lease)
    id = workplace.add("sleep", {"sleep_duration_seconds": 1.5})  # two steps
    blocked = chaotic.wait_for_event("loop_blocked", 20)
    assert blocked["kind"] == "sleep"
    row = workplace.wait_for_state(id, "succeeded")
    assert (row.attempts, row.crashes) == (1, 0)
    assert chaotic.wait_for_event("job_succeeded", job_id=id)["duration_ms"] >= 1500 + 2 * 2250
    assert workplace.failures(id) == []


async def test_chaos_is_told_of_wherever_the_pool_runs(database_url: str) -> None:
    async with running(database_url, builtin_handlers("public"), chaos_latency=0.25) as run:
        assert [(said["crash"], said["latency"]) for said in run.log.find(CHAOS_ENABLED)] == [(0, 0.25)]
    async with running(database_url, builtin_handlers("public")) as run:
        assert run.log.find(CHAOS_ENABLED) == []


@pytest.mark.slow
def test_a_fleet_in_chaos_finishes_all_that_is_asked_of_it(workplace: Workplace) -> None:
    """What the example in deploy/ shows: crashes and stalls at random, and every job ends well."""
    variables = BUILT_IN | {"WORKER_CHAOS_CRASH": "0.3", "WORKER_CHAOS_LATENCY": "0.1"}
    ids = [workplace.add("sleep", {"sleep_duration_seconds": number % 3}, max_attempts=20) for number in range(20)]
    with Supervisor(workplace, **variables, WORKERS="8") as supervisor:
        wait_for(lambda: supervisor.crashes > 0, 30)  # all that there is to do is done by it until then
        sound = workplace.daemon(WORKER_HANDLERS="", WORKERS="2")
        for id in ids:
            workplace.wait_for_state(id, "succeeded", timeout_seconds=60)
    assert sound.process.poll() is None
