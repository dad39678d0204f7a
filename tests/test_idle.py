"""What a daemon costs when there is nothing to do, and that it does not grow when there is much."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import cpu_seconds
from tests.waiting import wait_for, wait_while
from tests.workplace import VARIABLES, Workplace

MEASURED_SECONDS = 8.0
# The settings of an ordinary process: what tests make quick counts here.
ORDINARY = dict.fromkeys(VARIABLES.keys() - {"WORKER_HANDLERS"}, "")


def statements(workplace: Workplace) -> int:
    """Statements of this database so far, our own included."""
    count: int = workplace.value("""
        SELECT sum(calls)::bigint FROM pg_stat_statements
        WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
    """)
    return count


@pytest.mark.parametrize("workers", [1, 50])
def test_an_idle_process_costs_next_to_nothing(private_workplace: Workplace, workers: int) -> None:
    """B7: at most five statements a second whatever WORKERS is, and under 1 % of a core."""
    workplace = private_workplace
    workplace.db.execute("CREATE EXTENSION pg_stat_statements")
    daemon = workplace.daemon(**(ORDINARY | {"WORKERS": str(workers)}))
    workplace.wait_until_hungry()
    began, before, used = time.monotonic(), statements(workplace), cpu_seconds(daemon.pid)
    wait_while(lambda: daemon.process.poll() is None, MEASURED_SECONDS)
    seconds = time.monotonic() - began
    assert (statements(workplace) - before - 1) / seconds <= 5
    assert (cpu_seconds(daemon.pid) - used) / seconds < 0.01
    assert len(workplace.backends()) <= 5


class Size(NamedTuple):
    resident_mb: float
    files: int
    threads: int
    tasks: int

    @classmethod
    def of(cls, pid: int) -> Size:
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        return cls(
            resident_mb=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            files=len(list((process / "fd").iterdir())),
            threads=len(list((process / "task").iterdir())),
            tasks=0,
        )


def wait_until_idle(workplace: Workplace) -> None:
    wait_for(lambda: "ready" not in workplace.states() and "running" not in workplace.states(), 90)


def settled_size(workplace: Workplace, pid: int) -> Size:
    """The size of an idle process, as its handlers' loop sees it too."""
    wait_until_idle(workplace)
    id = workplace.add("count_tasks")
    tasks = workplace.wait_for_state(id, "succeeded").result
    return Size.of(pid)._replace(tasks=tasks)


def comes_back_to(before: Size, workplace: Workplace, pid: int) -> bool:
    """One file or thread may come and go by itself, and a task may be there for a moment; what leaks stays."""
    after = settled_size(workplace, pid)
    assert after.resident_mb < 1.1 * before.resident_mb, (before, after)
    assert after.files <= before.files + 1, (before, after)
    assert after.threads <= before.threads + 1, (before, after)
    assert after.tasks <= before.tasks, (before, after)
    return True


@pytest.mark.timeout(300)
def test_memory_does_not_grow_with_the_number_of_jobs(workplace: Workplace) -> None:
    """E14: 20,000 that succeed and 2,000 that fail."""
    daemon = workplace.daemon(WORKERS="10", WORKER_LOG_LEVEL="error", ready=False, WORKER_BACKOFF_BASE_SECONDS="0.01")
    workplace.add_many(12_000, "noop")
    workplace.db.execute("INSERT INTO jobs (kind, payload, max_attempts) SELECT 'fail', '{}', 2 FROM generate_series(1, 1000)")
    before = settled_size(workplace, daemon.pid)
    workplace.add_many(20_000, "noop")
    workplace.db.execute("INSERT INTO jobs (kind, payload, max_attempts) SELECT 'fail', '{}', 2 FROM generate_series(1, 2000)")
    wait_until_idle(workplace)
    wait_for(lambda: comes_back_to(before, workplace, daemon.pid))
    workplace.db.execute("DELETE FROM jobs WHERE kind = 'count_tasks'")
    assert workplace.states() == {"succeeded": 32_000, "dead": 3_000}


def test_nothing_is_left_behind_by_reconnecting(workplace: Workplace) -> None:
    """E14: 60 times, every connection."""
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="30", WORKER_POLL_SECONDS="0.05", WORKER_LOG_LEVEL="error", ready=False)
    workplace.healthy()
    before = settled_size(workplace, daemon.pid)
    for _ in range(60):
        wait_for(lambda: len(workplace.backends()) >= 2)
        workplace.terminate()
    workplace.healthy()
    wait_for(lambda: comes_back_to(before, workplace, daemon.pid))
