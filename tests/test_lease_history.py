"""Fifty processes fight for one lease while some are frozen, killed and cut off: there are never two holders at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg.rows import namedtuple_row

from tests.lease_contenders import NAME, TTL_SECONDS
from tests.ports import Proxy
from tests.processes import environment
from tests.servers import PrivateCluster
from tests.waiting import any_moment, await_for
from worker.clock import local_seconds

CONTENDERS = 50
SECONDS = 14.0
FAULTS = ("freeze", "cut", "freeze", "kill", "cut")
SOME_FAULTS = 3
SOME_BLOCKS = 20

# What the holders write behind check_fence; and, by a trigger, when each lease began and when the one before it had ended.
TABLES = """
CREATE TABLE history (seq bigint GENERATED ALWAYS AS IDENTITY, fence bigint NOT NULL, pid int NOT NULL, what text NOT NULL);
CREATE TABLE terms (fence bigint, holder text, began_at timestamptz, former_fence bigint, former_ended_at timestamptz);
CREATE FUNCTION note_term() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO terms VALUES (NEW.fence, NEW.holder, NEW.created_at, OLD.fence, LEAST(OLD.released_at, OLD.expires_at));
    RETURN NULL;
END $$;
CREATE TRIGGER note_term AFTER UPDATE ON leases FOR EACH ROW WHEN (NEW.fence <> OLD.fence) EXECUTE FUNCTION note_term();
"""


class Note(NamedTuple):
    """From when to when a process `held` the lease, as it believed, or was `asleep`, by the clock of the host."""

    what: str
    pid: int
    began_at: float
    ended_at: float


@contextlib.contextmanager
def contenders(folder: Path, dsns: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.lease_contenders", str(folder), *dsns],
        env=environment(folder),
        cwd=folder,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def disturb(db: psycopg.Connection[Any], proxy: Proxy) -> Counter[str]:
    """Freeze, kill and cut off whoever has the lease, in turn: how often each.

    For SECONDS at least, and on a busy machine for as long as it takes until enough has happened to be judged.
    """
    started = local_seconds()
    faults: Counter[str] = Counter()
    choices = random.Random()

    def is_enough() -> bool:
        blocks = db.execute("SELECT count(*) FROM history WHERE what = 'leave'").fetchone()
        return blocks is not None and blocks[0] > SOME_BLOCKS and min(faults[fault] for fault in FAULTS) >= SOME_FAULTS

    for fault in itertools.cycle(FAULTS):
        await asyncio.to_thread(any_moment, choices, 0.8)
        passed_seconds = local_seconds() - started
        assert passed_seconds < SECONDS * 6, faults
        if passed_seconds > SECONDS and is_enough():
            return faults
        row = db.execute(
            "SELECT split_part(holder, '-', 2)::int FROM leases WHERE released_at IS NULL AND expires_at > clock_timestamp()"
        ).fetchone()
        if row is None:
            continue
        if fault == "cut":
            proxy.cut()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(row[0], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault == "freeze":
            await asyncio.to_thread(any_moment, choices, 2 * TTL_SECONDS)  # it may be over, or not
            os.kill(row[0], signal.SIGCONT)
        faults[fault] += 1
    raise AssertionError("never here")


@pytest.mark.timeout(300)
async def test_fifty_processes_never_have_two_holders_at_once_whatever_happens_to_them(
    private_cluster: Callable[..., PrivateCluster], tmp_path: Path
) -> None:
    dsn = private_cluster().dsn
    with psycopg.connect(dsn, autocommit=True, row_factory=namedtuple_row) as db:
        db.execute(TABLES)
        async with Proxy(dsn) as proxy:
            dsns = [proxy.dsn if number % 2 else dsn for number in range(CONTENDERS)]
            with contenders(tmp_path, dsns):
                await await_for(lambda: db.execute("SELECT count(*) FROM terms").fetchone()[0] > 5, 30)
                faults = await disturb(db, proxy)

        # The database: each term began after the one before it had ended, under a higher fence.
        terms = db.execute("SELECT * FROM terms ORDER BY fence").fetchall()
        assert len(terms) > sum(faults.values()) / 3
        assert [term.former_fence for term in terms[1:]] == [term.fence for term in terms[:-1]]
        assert [term for term in terms if term.began_at < term.former_ended_at] == []
        assert len({term.holder for term in terms}) > 5, "a few had it all the time"

        # What is guarded: whoever wrote had the highest fence so far, and a fence belongs to one process.
        history = db.execute("SELECT * FROM history ORDER BY seq").fetchall()
        fences = [entry.fence for entry in history]
        assert fences == sorted(fences)
        assert set(fences) <= {term.fence for term in terms} | {terms[0].former_fence}
        assert all(
            len({entry.pid for entry in entries}) == 1 for _, entries in itertools.groupby(history, lambda entry: entry.fence)
        )
        # The holders: nobody believed to hold it while another did, but for those that did not run meanwhile.
        notes = [note for path in tmp_path.glob("contender-*") for note in map(read, path.read_text().splitlines())]
        beliefs = sorted((note for note in notes if note.what == "held"), key=lambda belief: belief.began_at)
        asleep = [note for note in notes if note.what == "asleep"]
        assert len(beliefs) > SOME_BLOCKS
        overlaps = [(one, two) for one, two in itertools.combinations(beliefs, 2) if two.began_at < one.ended_at]
        assert [overlap for overlap in overlaps if not any(slept(belief, asleep) for belief in overlap)] == []

        # H13: whoever was killed last with it, it is free after its time.
        await await_for(lambda: db.execute("SELECT outcome FROM acquire_lease(%s, 'test')", [NAME]).fetchone()[0] == "acquired", 30)


def read(line: str) -> Note:
    what, pid, began_at, ended_at = line.split()
    return Note(what, int(pid), float(began_at), float(ended_at))


def slept(belief: Note, asleep: list[Note]) -> bool:
    return any(one.pid == belief.pid and one.began_at < belief.ended_at and one.ended_at > belief.began_at for one in asleep)
