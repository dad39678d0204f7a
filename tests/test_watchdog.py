"""What a daemon tells its supervisors: systemd's datagrams, and the heartbeat that `worker health` reads. They say whether it can
work, not whether the database is there; and what runs long is not what is stuck."""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import environment
from tests.waiting import wait_for, wait_while
from tests.workplace import Workplace, frozen

# A claim loop is late after POLL x 1.2 + CLAIM_TIMEOUT x 3 + CONNECT_TIMEOUT + 1 s: here 2.86 s.
IMPATIENT = {
    "WORKER_POLL_SECONDS": "0.05",
    "WORKER_CLAIM_TIMEOUT_SECONDS": "0.4",
    "WORKER_CONNECT_TIMEOUT_SECONDS": "0.6",
}
LATE_SECONDS = 2.86
PING_SECONDS = 1.0


class Manager:
    """A service manager's end of NOTIFY_SOCKET: every datagram, and when it came."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.datagrams: list[tuple[float, dict[str, str]]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._receive, name="manager")
        self._thread.start()

    def _receive(self) -> None:
        while datagram := self._socket.recv(4096):
            states = dict(line.split("=", 1) for line in datagram.decode().splitlines())
            self.datagrams.append((time.monotonic(), states))

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", str(self.path))
        self._thread.join()
        self._socket.close()

    @property
    def variables(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": str(self.path), "WATCHDOG_USEC": "10000000"}

    def told(self, state: str) -> list[float]:
        """When this was said."""
        return [at for at, states in list(self.datagrams) if state in states]

    def wait_for_ping(self, *, after_seconds: float) -> None:
        """One that comes later than in so many seconds."""
        due = time.monotonic() + after_seconds
        wait_for(lambda: any(at > due for at in self.told("WATCHDOG")), after_seconds + 20)

    def has_not_pinged_for(self, seconds: float) -> bool:
        """There were pings, and none for so long."""
        return max(self.told("WATCHDOG"), default=float("inf")) < time.monotonic() - seconds


@pytest.fixture
def manager() -> Iterator[Manager]:
    # A short path: a socket's name has room for about a hundred characters.
    with tempfile.TemporaryDirectory() as directory, contextlib.closing(Manager(Path(directory) / "notify")) as manager:
        yield manager


def health(workplace: Workplace) -> int:
    """The exit status of `worker health` on this host."""
    command = (sys.executable, "-m", "worker", "health")
    return subprocess.run(command, env=environment(workplace.directory), capture_output=True, check=False, timeout=20).returncode


def test_systemd_hears_ready_only_after_the_first_claim_and_stopping_at_the_signal(workplace: Workplace, manager: Manager) -> None:
    """E13."""
    with workplace.outage():
        daemon = workplace.daemon(**manager.variables, ready=False)
        daemon.wait_for_event("database_lost", 20)
        wait_for(lambda: manager.told("STATUS"))
        assert manager.told("READY") == []
    daemon.wait_for_event("daemon_ready", 20)
    wait_for(lambda: manager.told("READY"))
    wait_for(lambda: len(manager.told("WATCHDOG")) >= 6, 30)
    gaps = [later - earlier for earlier, later in itertools.pairwise(manager.told("WATCHDOG"))]
    assert 0.5 * PING_SECONDS < statistics.median(gaps) < 2 * PING_SECONDS
    assert daemon.stop() == 0
    wait_for(lambda: manager.told("STOPPING"))  # what it said last is read here a moment later
    (stopping,) = (states for _, states in manager.datagrams if "STOPPING" in states)
    # The grace of 5 s, the margin, two query time-outs, and a second more.
    assert 7_200_000 <= int(stopping["EXTEND_TIMEOUT_USEC"]) <= 9_200_000
    assert len(manager.told("READY")) == 1


def test_a_daemon_without_watchdog_sends_no_pings(workplace: Workplace, manager: Manager) -> None:
    workplace.daemon(NOTIFY_SOCKET=str(manager.path))
    wait_while(lambda: not manager.told("WATCHDOG"), 2.5 * PING_SECONDS)


def test_a_process_whose_slots_are_all_taken_is_well(workplace: Workplace, manager: Manager) -> None:
    """It claims nothing for as long as its jobs take, and needs not to."""
    workplace.daemon(**manager.variables, **IMPATIENT, WORKERS="2")
    for _ in range(2):
        workplace.add("nap", {"seconds": 100})
    workplace.wait_for_notes("start", count=2)
    manager.wait_for_ping(after_seconds=LATE_SECONDS + PING_SECONDS)
    wait_for(lambda: health(workplace) == 0, 30)
    assert workplace.notes("end") == []  # they are taken still


def test_an_outage_stops_neither_pings_nor_health(workplace: Workplace, manager: Manager) -> None:
    """I12: a restart would not bring the database back."""
    daemon = workplace.daemon(**manager.variables, **IMPATIENT)
    with workplace.outage():
        daemon.wait_for_event("database_lost")
        manager.wait_for_ping(after_seconds=2 * LATE_SECONDS + PING_SECONDS)
        wait_for(lambda: health(workplace) == 0, 30)
    workplace.healthy()


def test_a_handler_that_blocks_the_loop_is_excused_until_its_time_out(workplace: Workplace, manager: Manager) -> None:
    workplace.daemon(**manager.variables, **IMPATIENT)
    workplace.add("block", {"seconds": 100})
    workplace.wait_for_notes("start")
    manager.wait_for_ping(after_seconds=LATE_SECONDS + PING_SECONDS)
    wait_for(lambda: health(workplace) == 0, 30)
    assert workplace.notes("end") == []  # it is blocked still


def test_a_loop_blocked_past_the_time_out_is_not_alive(workplace: Workplace, manager: Manager) -> None:
    """The handler has 1.5 s, and takes 60."""
    daemon = workplace.daemon(**manager.variables, **IMPATIENT)
    workplace.add("block_briefly", {"seconds": 60})
    workplace.wait_for_notes("start")
    wait_for(lambda: manager.has_not_pinged_for(3 * PING_SECONDS) and health(workplace) == 1, 30)
    daemon.wait_for_event("loop_blocked", kind="block_briefly")


def test_a_claim_loop_that_gets_nowhere_is_not_alive(workplace: Workplace, manager: Manager) -> None:
    """I11: the database answers, renewals go on, and yet nothing is claimed."""
    workplace.daemon(**manager.variables, **IMPATIENT, HUNG_FOR_TEST="worker.claimer:Claimer._round", ready=False)
    wait_for(lambda: workplace.backends("leases"), 20)
    wait_for(lambda: manager.has_not_pinged_for(3 * PING_SECONDS) and health(workplace) == 1, 30)
    assert manager.told("READY") == []


def test_a_frozen_claim_connection_is_replaced_before_anybody_restarts_the_process(
    private_workplace: Workplace, manager: Manager
) -> None:
    """I11, K4."""
    workplace = private_workplace
    workplace.daemon(**manager.variables, **IMPATIENT)
    with frozen(workplace.backends("claim")):
        workplace.healthy()
        manager.wait_for_ping(after_seconds=LATE_SECONDS + PING_SECONDS)
        wait_for(lambda: health(workplace) == 0, 30)


def test_health_knows_idle_stopped_and_killed_processes_apart(workplace: Workplace) -> None:
    assert health(workplace) == 1  # nobody lives here
    daemon = workplace.daemon()
    wait_for(lambda: health(workplace) == 0, 30)
    with frozen([daemon.pid]):
        wait_for(lambda: health(workplace) == 1, 30)
    wait_for(lambda: health(workplace) == 0, 30)
    daemon.kill()
    assert health(workplace) == 1
    workplace.daemon()
    wait_for(lambda: health(workplace) == 0, 30)
