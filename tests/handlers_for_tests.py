"""The handlers that daemons under test import: each is one way in which work can go, or go wrong.

What they see is appended to the file `notes` in the daemon's working directory, outside the database: it tells what was started,
not what was committed. Effects go into the table `ledger`, inside the fenced transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.noise import make_noise
from tests.odd_failures import raise_oddly
from tests.waiting import await_for, block_loop, until_cancelled
from worker import Discard, EffectAlreadyApplied, Handlers, Job, LeaseLost, Snooze

NEVER_SECONDS = 300
"""What is waited for has come long before, or the test has failed."""
LEDGER = "INSERT INTO ledger (job_id, fence) VALUES ($1, $2)"

handlers = Handlers()


def fails(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a bug for the test")


async def hangs(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


# A bug in a loop of ours, on demand: `module:attribute path` of what is to fail, or to hang.
for variable, bug in (("BROKEN_FOR_TEST", fails), ("HUNG_FOR_TEST", hangs)):
    if place := os.environ.get(variable):
        module, _, path = place.partition(":")
        owner, _, name = path.rpartition(".")
        setattr(operator.attrgetter(owner)(importlib.import_module(module)), name, bug)


def note(word: str, job: Job[Any]) -> None:
    """One line, written in one piece: word, key, attempt, fence, pid, moment."""
    line = f"{word} {job.key} {job.attempt} {job.fence} {os.getpid()} {time.monotonic()}\n"
    file = os.open("notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


@contextlib.contextmanager
def noted(job: Job[Any]) -> Iterator[None]:
    note("start", job)
    try:
        yield
    except asyncio.CancelledError:
        note(f"told:{job.cancel_reason}", job)
        raise
    except LeaseLost:
        note("lease_lost", job)
        raise
    note("end", job)


async def gate(job: Job[Any]) -> None:
    """Wait until the test makes a file named as the payload says; each attempt may have its own."""
    await await_for(Path(job.payload["gate"].format(attempt=job.attempt)).exists, NEVER_SECONDS)


async def work(seconds: float) -> None:
    """It takes this long, and can be cancelled."""
    await asyncio.sleep(seconds)


def work_in_a_thread(seconds: float) -> None:
    """It takes this long, and cannot be cancelled."""
    time.sleep(seconds)


@handlers.job("nap")
async def nap(job: Job[Any]) -> None:
    """Sleeps, and leaves one row in the ledger."""
    with noted(job):
        await work(job.payload.get("seconds", 0))
        job.effect(LEDGER, job.id, job.fence)


@handlers.job("noop")
async def noop(job: Job[Any]) -> None:
    pass


@handlers.job("limits")
async def limits(job: Job[Any]) -> dict[str, int]:
    """The time limits of its sessions, in milliseconds."""
    names = ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"]
    async with job.connection() as connection:
        rows = await connection.fetch("SELECT name, setting::int FROM pg_settings WHERE name = ANY ($1)", names)
    return dict(rows)


@handlers.job("count_tasks")
async def count_tasks(job: Job[Any]) -> int:
    """How many tasks there are in the loop that handlers share."""
    return len(asyncio.all_tasks())


@handlers.job("gated")
async def gated(job: Job[Any]) -> dict[str, int]:
    with noted(job):
        await gate(job)
        job.effect(LEDGER, job.id, job.fence)
        return {"fence": job.fence}


@handlers.job("gated_plain")
async def gated_plain(job: Job[Any]) -> None:
    """Without an effect: its completion is a single statement."""
    with noted(job):
        await gate(job)


@handlers.job("checking")
async def checking(job: Job[Any]) -> None:
    """Goes on until its lease is no longer trusted, however it is told."""
    with noted(job):

        def lost() -> bool:
            job.ensure_lease()
            return False

        await await_for(lost, NEVER_SECONDS)


@handlers.job("own")
async def own(job: Job[Any]) -> None:
    """Commits by itself, after the gate if there is one; sleeps inside the transaction."""
    with noted(job):
        if "gate" in job.payload:
            await gate(job)
        try:
            async with job.transaction() as tx:
                await tx.execute(LEDGER, job.id, job.fence)
                await work(job.payload.get("seconds", 0))
        except EffectAlreadyApplied:
            note("already", job)
            raise


@handlers.job("deferred")
async def deferred(job: Job[Any]) -> None:
    """Its effect has a deferred constraint trigger that a test can make wait."""
    note("start", job)
    job.effect("INSERT INTO deferred_ledger (job_id, fence) VALUES ($1, $2)", job.id, job.fence)


@handlers.job("own_deferred")
async def own_deferred(job: Job[Any]) -> None:
    note("start", job)
    async with job.transaction() as tx:
        await tx.execute("INSERT INTO deferred_ledger (job_id, fence) VALUES ($1, $2)", job.id, job.fence)


@handlers.job("reading")
async def reading(job: Job[Any]) -> None:
    """Keeps a pooled connection while it sleeps."""
    with noted(job):
        async with job.connection() as connection:
            await connection.fetchval("SELECT 1")
            await work(job.payload["seconds"])
        job.effect(LEDGER, job.id, job.fence)


# --- code that does not let go ----------------------------------------------------------------------------------------------


@handlers.job("block", timeout_seconds=300)
async def block(job: Job[Any]) -> None:
    """Blocks the event loop, in a call that releases the interpreter lock."""
    with noted(job):
        block_loop(job.payload["seconds"])
        job.effect(LEDGER, job.id, job.fence)


@handlers.job("block_briefly", timeout_seconds=1.5)
async def block_briefly(job: Job[Any]) -> None:
    """Blocks the event loop past its own time-out."""
    note("start", job)
    block_loop(job.payload["seconds"])


@handlers.job("spin", timeout_seconds=300)
async def spin(job: Job[Any]) -> None:
    """Blocks the event loop with Python code."""
    with noted(job):
        until = time.monotonic() + job.payload["seconds"]
        while time.monotonic() < until:
            sum(range(1000))
        job.effect(LEDGER, job.id, job.fence)


@handlers.job("deaf")
async def deaf(job: Job[Any]) -> None:
    """Swallows every cancellation until its time is over."""
    note("start", job)
    until = time.monotonic() + job.payload["seconds"]
    while (left_seconds := until - time.monotonic()) > 0:
        try:
            await work(left_seconds)
        except asyncio.CancelledError:
            note(f"told:{job.cancel_reason}", job)
    job.effect(LEDGER, job.id, job.fence)
    note("end", job)


@handlers.job("thread", timeout_seconds=300)
def thread(job: Job[Any]) -> None:
    with noted(job):
        work_in_a_thread(job.payload["seconds"])
        job.effect(LEDGER, job.id, job.fence)


@handlers.job("slow", timeout_seconds=0.5)
async def slow(job: Job[Any]) -> None:
    """Has less time than it wants."""
    with noted(job):
        await work(job.payload["seconds"])
        job.effect(LEDGER, job.id, job.fence)


@handlers.job("slow_thread", timeout_seconds=0.5)
def slow_thread(job: Job[Any]) -> None:
    with noted(job):
        work_in_a_thread(job.payload["seconds"])
        job.effect(LEDGER, job.id, job.fence)


# --- what goes wrong --------------------------------------------------------------------------------------------------------


@handlers.job("exit")
async def leave(job: Job[Any]) -> None:
    note("start", job)
    await work(job.payload.get("seconds", 0))
    os._exit(1)


@handlers.job("kill")
async def kill(job: Job[Any]) -> None:
    note("start", job)
    os.kill(os.getpid(), signal.SIGKILL)
    await until_cancelled()


@handlers.job("fail")
async def fail(job: Job[Any]) -> None:
    """Raises, after the gate if there is one; the message may be large."""
    note("start", job)
    if "gate" in job.payload:
        await gate(job)
    raise ValueError("x" * job.payload.get("characters", 10))


@handlers.job("fail_oddly")
async def fail_oddly(job: Job[Any]) -> None:
    raise_oddly(job.payload["how"])


@handlers.job("fail_oddly_in_a_thread")
def fail_oddly_in_a_thread(job: Job[Any]) -> None:
    raise_oddly(job.payload["how"])


@handlers.job("fail_oddly_in_a_transaction")
async def fail_oddly_in_a_transaction(job: Job[Any]) -> None:
    async with job.transaction():
        raise_oddly(job.payload["how"])


@handlers.job("noisy")
async def noisy(job: Job[Any]) -> None:
    """Says things in every way there is."""
    await make_noise(job.log)


@handlers.job("abort")
async def abort(job: Job[Any]) -> None:
    """Ends the process as the C library does when it finds its memory broken."""
    print("last words")
    os.abort()


@handlers.job("snooze")
async def snooze(job: Job[Any]) -> None:
    note("start", job)
    if "gate" in job.payload:
        await gate(job)
    raise Snooze(60)


@handlers.job("discard")
async def discard(job: Job[Any]) -> None:
    raise Discard("refused for good")


@handlers.job("child")
async def child(job: Job[Any]) -> dict[str, int]:
    """Its work is done by a child process."""
    note("start", job)
    process = await asyncio.create_subprocess_exec("sleep", str(job.payload["seconds"]), stdin=subprocess.DEVNULL)
    return {"status": await process.wait()}


@handlers.job("to_thread")
async def to_thread(job: Job[Any]) -> None:
    """Waits for a thread of the loop's own pool, which nobody can end."""
    note("start", job)
    await asyncio.to_thread(work_in_a_thread, job.payload["seconds"])


@handlers.job("library_thread")
async def library_thread(job: Job[Any]) -> None:
    """Some library starts a thread and forgets it."""
    threading.Thread(target=work_in_a_thread, args=(job.payload["seconds"],), name="handler of a library").start()


@handlers.job("exit_in_child")
async def exit_in_child(job: Job[Any]) -> None:
    """Ends with SystemExit in a task of its own."""

    async def end() -> None:
        sys.exit(3)

    async with asyncio.TaskGroup() as group:
        group.create_task(end())
