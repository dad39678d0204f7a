"""Worker: the pool inside an application's own loop and process, and the core of the daemon.

    async with Worker(handlers, settings) as worker:      # in a web application's lifespan, for example
        ...

It touches no signals and no logging, and leaves by the same drain as the daemon. One page holds the life of a process: what starts,
in what order, what stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Self

import orjson

from worker import committer, events, keeper, listener, logs, reaper
from worker.builtin import builtin_handlers
from worker.claimer import Claimer
from worker.clock import local_seconds
from worker.committer import Committer
from worker.domain import Backoff, Lease
from worker.errors import ConfigError, DatabaseUnavailable
from worker.handlers import Handlers, Lifespan
from worker.health import HealthFile
from worker.holding import Holdings
from worker.job import Surroundings
from worker.keeper import Keeper
from worker.listener import Listener
from worker.patience import Patience
from worker.pool import Pool
from worker.reaper import Reaper
from worker.retention import Retention
from worker.rights import RightsThread
from worker.settings import Settings, load_settings
from worker.store import claiming, leasing, schema, waiting
from worker.store.connection import DATABASE_ERRORS, ConnectFailed, Connection, Database, Lane, SessionLimits
from worker.store.connection import Pool as Connections
from worker.version import VERSION
from worker.watch import Watch

_NOT_NOW: tuple[type[BaseException], ...] = (*DATABASE_ERRORS, DatabaseUnavailable)
_EXIT_RESERVE_SECONDS = 0.5
_BURST_LOOK_SECONDS = 0.2


class Worker:
    """A pool of worker tasks over the jobs table, inside the running loop. Use it with `async with`.

    Entering returns once jobs are being claimed; it raises DatabaseUnavailable when the database cannot be reached within
    CONNECT_WAIT_SECONDS, ConfigError when settings, schema or grants do not fit. Leaving drains: no new work, the grace for what
    runs, then cancellation; `status` tells how it went (the daemon's exit status: 0, 1 or 75).
    """

    def __init__(
        self,
        handlers: Handlers | None = None,
        settings: Settings | None = None,
        *,
        burst: bool = False,
        health_file: Callable[[str], HealthFile] | None = None,
        on_beat: Callable[[], None] = lambda: None,
        on_alive: Callable[[], None] = lambda: None,
        on_waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.settings = load_settings() if settings is None else settings
        self.id = f"{self.settings.name}-{secrets.token_hex(4)}"
        """Identity of this process: `processes.id`, and the lease owner of its jobs."""
        self.handlers = builtin_handlers(self.settings.schema_name) if handlers is None else handlers
        self.status = 0
        self.has_deaf = False
        """Some handler did not end: its task or thread outlives the drain."""
        self.rights = RightsThread()
        self._burst = burst
        self._make_health_file = health_file
        self._on_beat = on_beat
        self._on_alive = on_alive
        self._on_waiting = on_waiting
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ready = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self.pool: Pool | None = None
        self._stop_reason = ""
        self._stopping_since = 0.0

        of = self.settings
        self._lease = Lease(of.lease_seconds, of.lease_margin_seconds)
        self._renewal_seconds = min(of.query_timeout_seconds, of.renew_seconds / 2)
        self._limits = SessionLimits.of(lease_seconds=of.lease_seconds, query_timeout_seconds=of.query_timeout_seconds)
        self._database = self._database_of(of.database_url.get_secret_value() if of.database_url else None, "DATABASE_URL")
        self._listen_database = self._database
        if of.listen_database_url is not None:
            self._listen_database = self._database_of(
                of.listen_database_url.get_secret_value(), "WORKER_LISTEN_DATABASE_URL", pooler=False
            )

    def _database_of(self, dsn: str | None, variable: str, *, pooler: bool | None = None) -> Database:
        of = self.settings
        return Database(
            dsn,
            schema=of.schema_name,
            connect_timeout_seconds=of.connect_timeout_seconds,
            limits=self._limits,
            pooler=of.pooler == "transaction" if pooler is None else pooler,
            variable=variable,
        )

    # --- from outside

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.request_stop("left its block")
        await self.wait_stopped()

    async def start(self) -> None:
        """Start and return when jobs are being claimed; raises what kept it from starting."""
        self._life = asyncio.create_task(self._live(), name="worker")
        ready = asyncio.create_task(self._ready.wait(), name="worker ready")
        try:
            await asyncio.wait({self._life, ready}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.request_stop("cancelled while starting")
            await self.wait_stopped()
            raise
        finally:
            ready.cancel()
        if self._life.done():
            await self._life

    async def wait_stopped(self) -> None:
        """Wait for the end, also when the caller is cancelled meanwhile: the drain has limits of its own."""
        assert self._life is not None
        cancelled = False
        while not self._life.done():
            try:
                await asyncio.wait({self._life})
            except asyncio.CancelledError:
                cancelled = True
                self.request_stop("cancelled")
                self._hurry.set()
        await self._life
        if cancelled:
            raise asyncio.CancelledError

    def request_stop(self, reason: str, since: float | None = None) -> None:
        """Begin the drain (the first call), or skip what is left of the grace (a later call with the reason `signal`).

        `since`: the local moment from which the grace counts, if it was asked for before this loop came round to it.
        """
        if self._stop.is_set():
            if reason == "signal":
                self._hurry.set()
            return
        self._stop_reason = reason
        self._stopping_since = local_seconds() if since is None else since
        self._stop.set()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    @property
    def budget_seconds(self) -> float:
        """What a stop may take after the grace: one budget for everything."""
        return self.settings.lease_margin_seconds + 2 * self.settings.query_timeout_seconds

    # --- the life of a process

    async def _live(self) -> None:
        self.rights.start()
        try:
            async with contextlib.AsyncExitStack() as stack:
                health = None if self._make_health_file is None else self._make_health_file(self.id)
                if health is not None:
                    stack.callback(health.remove)
                await self._reach_database()
                if not self.is_stopping:
                    resources = await self._enter_lifespans(stack)
                    await self._work(resources, health)
        finally:
            self.rights.stop(timeout_seconds=1.0)

    async def _reach_database(self) -> None:
        """Wait until the database answers and fits: for CONNECT_WAIT_SECONDS, or for ever, unready."""
        limit_seconds = self.settings.connect_wait_seconds
        until = math.inf if limit_seconds is None else local_seconds() + limit_seconds
        patience = Patience(events.DATABASE_LOST)
        while not self.is_stopping:
            try:
                connection = await self._database.connect("start")
                try:
                    async with asyncio.timeout(self.settings.query_timeout_seconds * 2):
                        await schema.verify(connection, self.settings.schema_name)
                        await waiting.verify_session(connection, self._database)
                        lanes = waiting.LANES if self._listen_database is self._database else waiting.LANES - 1
                        await waiting.verify_room(connection, self._database, pool_size=self.settings.pool_size, lanes=lanes)
                finally:
                    await _close(connection)
                return
            except _NOT_NOW as error:
                if isinstance(error, ConnectFailed) and error.refused:
                    raise ConfigError(str(error)) from None
                self._on_waiting("waiting for the database")
                delay_seconds = patience.delay_seconds(error)
                if local_seconds() + delay_seconds >= until:
                    raise DatabaseUnavailable(f"no database within {limit_seconds:g} s: {error}") from None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_seconds):
                        await self._stop.wait()

    async def _enter_lifespans(self, stack: contextlib.AsyncExitStack) -> dict[Lifespan, object]:
        resources: dict[Lifespan, object] = {}
        for lifespan in self.handlers.lifespans.values():
            if lifespan not in resources:
                resources[lifespan] = await stack.enter_async_context(lifespan())
        return resources

    async def _work(self, resources: dict[Lifespan, object], health: HealthFile | None) -> None:
        """Build the loops, run them until a stop is requested, drain."""
        of, database, rights = self.settings, self._database, self.rights
        statement_seconds = self._limits.statement_timeout_seconds + 0.5
        holdings = Holdings()
        connections = database.pool(of.pool_size)
        claim_lane = Lane(
            database,
            claiming.ROLE,
            statement_timeout_seconds=of.claim_timeout_seconds * 0.8,
            settings=claiming.CLAIM_SETTINGS,
        )
        commit_lane = Lane(database, committer.ROLE, settings=committer.COMMIT_SETTINGS)
        lease_lane = Lane(
            database,
            keeper.ROLE,
            statement_timeout_seconds=self._renewal_seconds * 0.8,
            settings=keeper.LEASE_SETTINGS,
        )
        reap_lane = Lane(database, reaper.ROLE, settings=reaper.REAP_SETTINGS)
        listen_lane = Lane(self._listen_database, listener.ROLE, idle_seconds=None, max_age_seconds=math.inf)

        the_keeper = Keeper(
            database,
            lease_lane,
            presence=leasing.Presence(self.id, of.name, socket.gethostname(), os.getpid(), VERSION, list(of.queues), of.workers),
            lease=self._lease,
            holdings=holdings,
            renew_seconds=of.renew_seconds,
            statement_seconds=self._renewal_seconds,
            busy=lambda: pool.busy(),
            hungry=lambda: the_claimer.is_hungry,
            health=lambda: orjson.dumps(
                {
                    "held": len(holdings),
                    "unwritten": the_committer.waiting,
                    "loop_lag_seconds": watch.lag_seconds,
                    "kinds": sorted(self.handlers.kinds),
                }
            ).decode(),
        )

        def on_trouble() -> None:
            rights.call(the_keeper.poke)

        the_committer = Committer(
            database,
            commit_lane,
            owner=self.id,
            holdings=holdings,
            backoff=Backoff(of.backoff_base_seconds, of.backoff_max_seconds),
            batch=of.commit_batch,
            deletes=of.retention_seconds == 0,
            group_seconds=self._renewal_seconds,
            statement_seconds=statement_seconds,
            work_loop=asyncio.get_running_loop(),
            rights_loop=rights.loop,
            on_failed=(lambda job, error, will_retry: pool.failed(job, error, will_retry)) if self.handlers.failure_hooks else None,
            on_trouble=on_trouble,
        )
        pool = Pool(
            workers=of.workers,
            handlers=self.handlers,
            resources=resources,
            surroundings=Surroundings(
                database=database,
                pool=connections,
                owner=self.id,
                deletes=of.retention_seconds == 0,
                query_timeout_seconds=of.query_timeout_seconds,
                may_start=lambda: not self.is_stopping,
            ),
            committer=the_committer,
            job_timeout_seconds=of.job_timeout_seconds,
            deaf_seconds=of.lease_margin_seconds,
        )
        the_claimer = pool.claimer = Claimer(
            database,
            claim_lane,
            owner=self.id,
            queues=of.queues,
            lease=self._lease,
            holdings=holdings,
            slots=pool,
            batch=of.claim_batch,
            claim_timeout_seconds=of.claim_timeout_seconds,
            poll_seconds=of.poll_seconds,
            on_trouble=on_trouble,
        )
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
            on_ready=lambda: the_claimer.wake(notified=True),
        )
        the_listener = Listener(
            listen_lane,
            schema=of.schema_name,
            owner=self.id,
            queues=frozenset(of.queues),
            answer_seconds=of.query_timeout_seconds,
            delivers=not self._listen_database.pooler,
            on_jobs=lambda: the_claimer.wake(notified=True),
            on_cancel=on_trouble,
        )
        watch = Watch(
            process_id=self.id,
            version=VERSION,
            pool=pool,
            claimer=the_claimer,
            keeper=the_keeper,
            claim_allowed_seconds=of.poll_seconds * 1.2 + of.claim_timeout_seconds * 3 + of.connect_timeout_seconds + 1,
            health_file=health,
            beat=self._on_beat,
            alive=self._on_alive,
            stopping=lambda: self.is_stopping,
        )
        self.pool, self.holdings, self.committer = pool, holdings, the_committer

        rights.spawn("keeper", lambda: self._guard("keeper", the_keeper.run()))
        rights.spawn("committer", lambda: self._guard("committer", the_committer.run()))
        rights.spawn("watch", lambda: self._guard("watch", watch.run()))
        try:
            async with asyncio.TaskGroup() as group:
                claiming_task = group.create_task(self._guard("claimer", the_claimer.run()), name="claimer")
                working = [
                    group.create_task(self._guard("worker", pool.work()), name=f"worker {number}") for number in range(of.workers)
                ]
                helpers = [
                    group.create_task(self._guard("reaper", the_reaper.run()), name="reaper"),
                    group.create_task(self._guard("listener", the_listener.run()), name="listener"),
                    group.create_task(self._tell_ready(the_claimer), name="ready"),
                ]
                if self._burst:
                    helpers.append(group.create_task(self._guard("burst", self._end_of_burst(connections, pool)), name="burst"))
                await self._stop.wait()
                await self._drain(pool, the_claimer, claiming_task, working)
                for helper in helpers:
                    helper.cancel()
        finally:
            await self._leave([claim_lane, reap_lane, listen_lane], [commit_lane, lease_lane], connections, pool)

    async def _guard(self, name: str, loop: Coroutine[object, object, None]) -> None:
        """A bug in a loop becomes a request to stop with status 1: the orderly stop still releases and commits."""
        try:
            await loop
        except Exception as error:
            logs.emit(events.INTERNAL_ERROR, where=name, exception=error)
            self.status = 1
            self._stop_from_any_thread(f"internal error in {name}")

    def _stop_from_any_thread(self, reason: str) -> None:
        assert self._life is not None
        try:
            self._life.get_loop().call_soon_threadsafe(self.request_stop, reason)
        except RuntimeError:
            pass  # that loop has ended

    async def _tell_ready(self, the_claimer: Claimer) -> None:
        await the_claimer.first_pass.wait()
        if not self.is_stopping:
            logs.emit(events.DAEMON_READY, kinds=sorted(self.handlers.kinds))
            self._ready.set()

    async def _end_of_burst(self, connections: Connections, pool: Pool) -> None:
        """Request a stop once nothing that this process could do is running or ready, retries of the future included."""
        while True:
            await asyncio.sleep(_BURST_LOOK_SECONDS)
            if pool.busy() or len(self.holdings) or not self.is_ready:
                continue
            try:
                async with connections.acquire(timeout_seconds=self.settings.query_timeout_seconds) as connection:
                    if not await waiting.work_is_left(
                        connection, self._database, queues=self.settings.queues, kinds=list(self.handlers.kinds)
                    ):
                        self.request_stop("burst is over")
                        return
            except DATABASE_ERRORS:
                continue

    # --- the end

    async def _drain(
        self,
        pool: Pool,
        the_claimer: Claimer,
        claiming_task: asyncio.Task[None],
        working: list[asyncio.Task[None]],
    ) -> None:
        """No new work; return what has not started; the grace for what runs, with renewals going on; then cancel it. After the
        grace one budget (M + 2Q) for all the rest."""
        of = self.settings
        logs.emit(
            events.SHUTDOWN_STARTED,
            reason=self._stop_reason,
            running=len(pool.running()),
            grace_seconds=of.shutdown_grace_seconds,
        )
        the_claimer.stop()
        pool.stop_starting()
        ended = asyncio.ensure_future(asyncio.wait(working))
        hurried = asyncio.create_task(self._hurry.wait(), name="hurry")
        # From the request on: a loop that was blocked meanwhile has used up its grace.
        grace_until = self._stopping_since + of.shutdown_grace_seconds
        await asyncio.wait({ended, hurried}, timeout=_left(grace_until), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        deadline = min(local_seconds(), grace_until) + self.budget_seconds - _EXIT_RESERVE_SECONDS
        if not ended.done():
            pool.cancel_running()
            await asyncio.wait({ended}, timeout=min(self.settings.lease_margin_seconds + of.query_timeout_seconds, _left(deadline)))
        await asyncio.wait({claiming_task}, timeout=_left(deadline))
        await self._finish_writing(pool, deadline)
        self.has_deaf = any(not attempt.is_over for attempt in pool.running())
        for attempt in pool.running():
            self.status = self.status or 75
            job = attempt.held.job
            logs.emit(
                events.JOB_ABANDONED,
                job_id=job.id,
                kind=job.kind,
                queue=job.queue,
                attempt=job.attempt,
                fence=job.fence,
                duration_ms=round((local_seconds() - attempt.held.started_at) * 1000, 3),
                reason="deaf_handler",
            )
        await self._release_the_rest(deadline)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_left(deadline)):
                await pool.hooks_ended()
        for task in (*working, claiming_task):
            task.cancel()
        ended.cancel()

    async def _finish_writing(self, pool: Pool, deadline: float) -> None:
        try:
            await self.rights.run(self.committer.drained(), timeout_seconds=_left(deadline))
        except TimeoutError:
            pass
        for one in self.committer.leftovers():
            self.status = self.status or 75
            job = one.held.job
            logs.emit(
                events.COMPLETION_DEFERRED,
                job_id=job.id,
                kind=job.kind,
                queue=job.queue,
                attempt=job.attempt,
                fence=job.fence,
                error="not written before the end; left to lease expiry",
                waiting=self.committer.waiting,
            )
        if self.committer.unwritten:
            self.status = self.status or 75

    async def _release_the_rest(self, deadline: float) -> None:
        """One statement for whatever is still ours without anybody holding it: a claim whose answer was lost, for example."""
        try:
            async with asyncio.timeout(_left(deadline)):
                connection = await self._database.connect("release")
                try:
                    released = await claiming.recover(connection, self._database, owner=self.id, held=self.holdings.keys())
                    if not self.holdings.keys():
                        await leasing.remove_presence(connection, self._database, process_id=self.id)
                finally:
                    await _close(connection)
        except DATABASE_ERRORS as error:
            if self.holdings.keys():
                self.status = self.status or 75
            logs.emit(events.CLAIM_FAILED, error=error, error_type=type(error).__name__)
            return
        for job in released:
            logs.emit(
                events.JOB_RELEASED,
                job_id=job.id,
                kind=job.kind,
                queue=job.queue,
                attempt=job.attempt,
                fence=job.fence,
                reason="claim_lost",
            )

    async def _leave(self, here: list[Lane], there: list[Lane], connections: Connections, pool: Pool) -> None:
        """Close what was opened, each within its limit; the keeper ends last."""
        pool.close()
        for lane in here:
            await lane.close(0.2)
        await connections.close(0.2)

        async def close_there() -> None:
            await self.rights.cancel_all()
            for lane in there:
                await lane.close(0.2)

        with contextlib.suppress(TimeoutError):
            await self.rights.run(close_there(), timeout_seconds=2.0)


def _left(deadline: float) -> float:
    return max(deadline - local_seconds(), 0.01)


async def _close(connection: Connection) -> None:
    try:
        await connection.close(timeout=1.0)
    except DATABASE_ERRORS:
        connection.terminate()
