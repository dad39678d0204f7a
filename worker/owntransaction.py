"""A handler's own fenced transaction: the fence first, its COMMIT never guessed.

The completion is the first statement. It takes the row lock, which keeps the reaper and every other owner away for as long as the
transaction lives, and read committed sees the newest row behind it. So it may outlive the lease, which nobody can renew inside: as
long as the keeper is told that the row is locked. A connection may have gone mute and the transaction be over, unheard.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from worker.clock import local_seconds
from worker.errors import EffectAlreadyApplied, LeaseLost
from worker.holding import Held, Phase
from worker.store import settling
from worker.store.connection import DATABASE_ERRORS, is_unavailable, sqlstate, underlying

if TYPE_CHECKING:
    from worker.job import Surroundings
    from worker.store.connection import Connection, Transaction

_LOOK_DELAY_SECONDS = (0.05, 1.0)


@contextlib.asynccontextmanager
async def fenced(held: Held, around: Surroundings, result: Callable[[], str | None]) -> AsyncIterator[Connection]:
    """The connection inside a transaction that has completed the job; committed when the block ends without an exception."""
    job = held.job
    with contextlib.ExitStack() as afterwards:  # once the connection has been given back
        async with around.pool.acquire(
            timeout_seconds=around.query_timeout_seconds, leave_seconds=around.leave_seconds
        ) as connection:
            session = underlying(connection)
            # asyncpg's own, so that `tx.transaction()` inside is a savepoint.
            transaction = connection.transaction(isolation="read_committed")
            await transaction.start()
            with _losing_protection_with(session, held) as protection:
                try:
                    session.stay_in_transaction(True)
                    already_applied = await settling.open_own(
                        connection, around.database, job, owner=around.owner, deletes=around.deletes
                    )
                    if already_applied is None:
                        afterwards.callback(held.lose, "lease_lost")  # cancels the handler, which is to see LeaseLost first
                        raise LeaseLost(f"job {job.id}: fence {job.fence} is stale")
                    if already_applied:
                        raise EffectAlreadyApplied(f"the effect of key {job.key!r} was committed before")
                    # Not before this answer: until then nobody knows that the row is locked, and the lease is what counts. Nor when
                    # the session has ended right behind it, as its listener has spoken already.
                    if not session.is_closed() and held.phase is Phase.RUNNING:
                        held.phase = Phase.OWN_TRANSACTION
                    yield connection
                    if not await settling.close_own(connection, around.database, job, result=result()):
                        raise RuntimeError("the transaction was ended by hand inside job.transaction()")
                except BaseException as error:
                    session.stay_in_transaction(False)
                    is_cancelled = isinstance(error, asyncio.CancelledError)
                    limit_seconds = around.leave_seconds if is_cancelled else around.query_timeout_seconds
                    try:
                        await _roll_back(session, transaction, limit_seconds)
                    finally:
                        _unprotect(held)
                    raise
                session.stay_in_transaction(False)
                # From here on the phase stays: a job that is (or may be) complete has no lease to renew or to lose.
                protection.close()
                try:
                    lost_answer = await _commit(session, transaction)
                except DATABASE_ERRORS:
                    _unprotect(held)
                    raise
    if lost_answer is not None:
        await _resolve(held, around, lost_answer)


@contextlib.contextmanager
def _losing_protection_with(session: Connection, held: Held) -> Iterator[contextlib.ExitStack]:
    """While the block runs and until the stack is closed: a session that ends takes its row lock with it, so the lease has to be
    renewed and trusted again like any other."""

    def ended(_connection: object) -> None:
        _unprotect(held)

    session.add_termination_listener(ended)
    with contextlib.ExitStack() as protection:
        protection.callback(session.remove_termination_listener, ended)
        yield protection


def _unprotect(held: Held) -> None:
    """The lease alone counts again; unless the attempt was decided without its handler meanwhile, and waits to be written."""
    if held.phase is Phase.OWN_TRANSACTION:
        held.phase = Phase.RUNNING


async def _roll_back(connection: Connection, transaction: Transaction, timeout_seconds: float) -> None:
    """End the transaction, on a connection that may be broken or busy: in doubt drop it, which the server answers the same way."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await transaction.rollback()
    except DATABASE_ERRORS:
        connection.terminate()


async def _commit(connection: Connection, transaction: Transaction) -> BaseException | None:
    """COMMIT; returns the error when nobody knows whether it happened. Raises what the server refused it with."""
    try:
        await transaction.commit()
    except DATABASE_ERRORS as error:
        if sqlstate(error) is not None and not is_unavailable(error):
            raise  # a deferred constraint: rolled back, and said so
        connection.terminate()
        return error
    if connection.take_cut_short_wait():
        return ConnectionError("the wait for a synchronous standby was cut short")
    return None


async def _resolve(held: Held, around: Surroundings, lost_answer: BaseException) -> None:
    """Return if the lost COMMIT happened; raise `lost_answer` if it did not, LeaseLost if the job is somebody else's.

    Ends at the latest when somebody else may have the job.
    """
    low, high = _LOOK_DELAY_SECONDS
    delay_seconds = low
    while True:
        try:
            async with around.pool.acquire(timeout_seconds=around.query_timeout_seconds) as connection:
                async with asyncio.timeout(around.query_timeout_seconds):
                    rulings = await settling.rule(connection, around.database, [held.job], owner=around.owner)
            if not rulings[held.key].undecided:
                break
        except DATABASE_ERRORS:
            pass  # ask again
        if local_seconds() >= held.safe_until:
            raise lost_answer from None
        await asyncio.sleep(delay_seconds * random.uniform(0.5, 1))
        delay_seconds = min(delay_seconds * 2, high)
    ruling = rulings[held.key]
    # A key that was chosen has its ledger row as proof; a generated one has only the row, which our COMMIT was to delete.
    gone_as_planned = around.deletes and ruling.state is None and held.job.has_generated_key
    if ruling.done or gone_as_planned:
        return
    if ruling.mine:
        _unprotect(held)
        raise lost_answer
    held.lose("lease_lost")
    raise LeaseLost(f"job {held.job.id}: fence {held.job.fence} is stale")
