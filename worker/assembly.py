"""What a process consists of: connections, holdings and loops, put together from the settings. Nothing runs yet."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson

from worker import committer, events, keeper, listener, reaper
from worker.claimer import Claimer
from worker.clock import local_seconds
from worker.committer import Committer
from worker.domain import Backoff, Lease, clean_text
from worker.handlers import Handlers, Lifespan
from worker.health import HealthFile
from worker.holding import Holdings
from worker.job import Surroundings
from worker.job_renewals import JobRenewals
from worker.keeper import Keeper
from worker.listener import Listener
from worker.patience import Patience
from worker.pool import Pool
from worker.reaper import Reaper
from worker.retention import Retention
from worker.rights import RightsThread
from worker.settings import Settings
from worker.store import claiming, leasing
from worker.store.connection import Database, Lane
from worker.store.connection import Pool as Connections
from worker.version import VERSION
from worker.watch import Watch

_HOSTNAME_CHARACTERS = 255
_CLOSE_SECONDS = 0.2
_LEAVE_SHARE = 0.25
"""Of the margin: a cancelled handler's roll-back may take so long, and so may giving its connection back."""
_AT_ONCE_SECONDS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one process."""

    connections: Connections
    holdings: Holdings
    pool: Pool
    claimer: Claimer
    reaper: Reaper
    listener: Listener
    keeper: Keeper
    renewals: JobRenewals
    committer: Committer
    watch: Watch
    lanes_here: tuple[Lane, ...]
    """Used in the loop of the handlers."""
    lanes_there: tuple[Lane, ...]
    """Used in the rights thread."""

    def outlive_leases(self) -> None:
        """The process ends and leaves leases to expire, which must make no job a suspect (call it in the keeper's loop)."""
        self.renewals.outlive_leases()
        self.keeper.poke()

    async def close(self, rights: RightsThread, until: float) -> None:
        """Close what was opened, in peace as long as there is time until that moment, else at once; the keeper ends last."""

        def limit() -> float:
            return min(max(until - local_seconds(), _AT_ONCE_SECONDS), _CLOSE_SECONDS)

        self.pool.close()
        for lane in self.lanes_here:
            await lane.close(limit())
        await self.connections.close(limit())

        async def close_there() -> None:
            await rights.cancel_all()
            for lane in self.lanes_there:
                await lane.close(limit())

        try:
            await rights.run(close_there(), timeout_seconds=max(until - local_seconds(), _CLOSE_SECONDS / 2))
        except TimeoutError:
            pass  # the thread is a daemon thread, its connections end with the process


def assemble(
    of: Settings,
    *,
    process_id: str,
    handlers: Handlers,
    resources: Mapping[Lifespan, object],
    database: Database,
    listen_database: Database,
    rights: RightsThread,
    health: HealthFile | None,
    is_stopping: Callable[[], bool],
    on_beat: Callable[[], None],
    on_alive: Callable[[], None],
    on_bug: Callable[[str, BaseException], None],
) -> Parts:
    """Make the parts. Call it in the loop of the handlers."""
    lease = Lease(of.lease_seconds, of.lease_margin_seconds)
    # A renewal is worth waiting for as long as another one still fits into the trust.
    renewal_seconds = min(of.query_timeout_seconds, of.renew_seconds / 2)
    statement_seconds = database.limits.statement_timeout_seconds + 0.5
    holdings = Holdings()
    connections = database.pool(of.pool_size)
    claim_lane = Lane(
        database,
        claiming.ROLE,
        statement_timeout_seconds=of.claim_timeout_seconds * 0.8,
        settings=claiming.CLAIM_SETTINGS,
    )
    commit_lane, second_commit_lane = (Lane(database, committer.ROLE, settings=committer.COMMIT_SETTINGS) for _ in range(2))
    lease_lane = Lane(
        database,
        keeper.ROLE,
        statement_timeout_seconds=renewal_seconds * 0.8,
        settings=keeper.LEASE_SETTINGS,
    )
    reap_lane = Lane(database, reaper.ROLE, settings=reaper.REAP_SETTINGS)
    listen_lane = Lane(listen_database, listener.ROLE, idle_seconds=None, max_age_seconds=math.inf)

    renewals = JobRenewals(
        database,
        lease_lane,
        presence=leasing.Presence(
            process_id,
            of.name,
            clean_text(socket.gethostname(), _HOSTNAME_CHARACTERS),  # the kernel lets it be any bytes
            os.getpid(),
            VERSION,
            list(of.queues),
            of.workers,
        ),
        lease=lease,
        holdings=holdings,
        renew_seconds=of.renew_seconds,
        statement_seconds=renewal_seconds,
        busy=lambda: pool.busy(),
        hungry=lambda: the_claimer.is_hungry,
        health=lambda: orjson.dumps(
            {
                "held": len(holdings),
                "unwritten": the_committer.waiting,
                "loop_lag_seconds": watch.lag_seconds,
                "kinds": sorted(handlers.kinds),
            }
        ).decode(),
    )
    the_keeper = Keeper(
        renewals,
        patience=Patience(
            events.RENEW_FAILED, first_seconds=min(of.renew_seconds / 16, 1.0), longest_seconds=min(of.renew_seconds / 2, 5.0)
        ),
        on_return=lambda: the_committer.retry_now(),
    )

    def on_trouble() -> None:
        rights.call(the_keeper.poke)
        connections.doubt()

    the_committer = Committer(
        database,
        commit_lane,
        second_commit_lane,
        owner=process_id,
        holdings=holdings,
        backoff=Backoff(of.backoff_base_seconds, of.backoff_max_seconds),
        batch=of.commit_batch,
        deletes=of.retention_seconds == 0,
        group_seconds=renewal_seconds,
        statement_seconds=statement_seconds,
        work_loop=asyncio.get_running_loop(),
        rights_loop=rights.loop,
        on_failed=(lambda job, error, will_retry: pool.failed(job, error, will_retry)) if handlers.failure_hooks else None,
        on_room=lambda: pool.fill(),
        on_trouble=on_trouble,
    )
    pool = Pool(
        workers=of.workers,
        handlers=handlers,
        resources=resources,
        surroundings=Surroundings(
            database=database,
            pool=connections,
            owner=process_id,
            deletes=of.retention_seconds == 0,
            query_timeout_seconds=of.query_timeout_seconds,
            leave_seconds=of.lease_margin_seconds * _LEAVE_SHARE,
            may_start=lambda: not is_stopping(),
        ),
        committer=the_committer,
        job_timeout_seconds=of.job_timeout_seconds,
        deaf_seconds=of.lease_margin_seconds,
        on_bug=lambda error: on_bug("worker", error),
    )
    the_claimer = pool.claimer = Claimer(
        database,
        claim_lane,
        owner=process_id,
        queues=of.queues,
        lease=lease,
        holdings=holdings,
        slots=pool,
        batch=of.claim_batch,
        claim_timeout_seconds=of.claim_timeout_seconds,
        poll_seconds=of.poll_seconds,
        on_trouble=on_trouble,
    )
    loop = asyncio.get_running_loop()

    def suspect_gone() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(the_claimer.suspect_ended)

    holdings.on_suspect_gone = suspect_gone
    the_reaper = Reaper(
        database,
        reap_lane,
        reap_seconds=of.reap_seconds,
        statement_seconds=statement_seconds,
        retention=Retention(
            database,
            retention_seconds=of.retention_seconds,
            dead_retention_seconds=of.dead_retention_seconds,
            ledger_retention_seconds=of.ledger_retention_seconds,
            statement_seconds=statement_seconds,
        ),
        unwritten=lambda: the_committer.waiting,
        on_ready=lambda: the_claimer.wake(queue=""),
    )
    the_listener = Listener(
        listen_lane,
        schema=of.schema_name,
        owner=process_id,
        queues=frozenset(of.queues),
        answer_seconds=of.query_timeout_seconds,
        delivers=not listen_database.pooler,
        on_jobs=lambda queue: the_claimer.wake(queue=queue),
        on_cancel=lambda: rights.call(the_keeper.poke),
    )
    watch = Watch(
        process_id=process_id,
        version=VERSION,
        pool=pool,
        claimer=the_claimer,
        keeper=the_keeper,
        claim_allowed_seconds=of.poll_seconds * 1.2 + of.claim_timeout_seconds * 3 + of.connect_timeout_seconds + 1,
        health_file=health,
        beat=on_beat,
        alive=on_alive,
        stopping=is_stopping,
    )
    return Parts(
        connections=connections,
        holdings=holdings,
        pool=pool,
        claimer=the_claimer,
        reaper=the_reaper,
        listener=the_listener,
        keeper=the_keeper,
        renewals=renewals,
        committer=the_committer,
        watch=watch,
        lanes_here=(claim_lane, reap_lane, listen_lane),
        lanes_there=(commit_lane, second_commit_lane, lease_lane),
    )
