"""Worker: the pool inside an application's own loop and process, and the core of the daemon.

    async with Worker(handlers, settings) as worker:      # in a web application's lifespan, for example
        ...

It touches no signals and no logging, and leaves by the same drain as the daemon. One page holds the life of a process: what starts,
in what order, what stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Self

from worker import events, logs
from worker.assembly import Parts, assemble
from worker.builtin import Chaos, builtin_handlers
from worker.cancellation import is_cancelled
from worker.claimer import Claimer
from worker.clock import local_seconds
from worker.databases import Databases
from worker.drain import Drain, name_what_is_left, release_behind
from worker.handlers import Handlers, Lifespan
from worker.health import HealthFile
from worker.lifespans import Lifespans
from worker.rights import RightsThread
from worker.settings import Settings, load_settings
from worker.store import waiting
from worker.store.connection import DATABASE_ERRORS
from worker.version import VERSION
from worker.watch import seen_alive

_BURST_LOOK_SECONDS = 0.2
_BEAT_SECONDS = 5.0
_LEAVE_RESERVE_SECONDS = 0.5
"""Lifespans end so long before the budget of a stop does: whoever hangs there is named, instead of ending the process by force."""
_STALL_INTERVALS = 1.5


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
        process_id: str | None = None,
        burst: bool = False,
        health_file: Callable[[str], HealthFile] | None = None,
        on_beat: Callable[[], None] = lambda: None,
        on_alive: Callable[[], None] = lambda: None,
        on_waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.settings = load_settings() if settings is None else settings
        self.id = process_id or f"{self.settings.name}-{secrets.token_hex(4)}"
        """Identity of this process: `processes.id`, and the lease owner of its jobs."""
        self.handlers = self._builtin_handlers() if handlers is None else handlers
        self._databases = Databases(self.settings)
        self._lifespans = Lifespans(self.handlers, self._leave_seconds, self._note_hang)
        self.status = 0
        self.has_deaf = False
        """Some handler did not end: its task or thread outlives the drain."""
        self.connections_beside = 0
        """What else in this process opens connections to the database: said before the start, by whoever does."""
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
        self._beats: asyncio.Task[None] | None = None
        self.parts: Parts | None = None
        self._starts_nothing = False
        self._stop_reason = ""
        self._grace_until = 0.0
        self._close_until: float | None = None

    def _builtin_handlers(self) -> Handlers:
        of = self.settings
        # Longer than a renewal interval: where the event loop had to renew, it would miss one.
        chaos = Chaos(crash=of.chaos_crash, latency=of.chaos_latency, stall_seconds=of.renew_seconds * _STALL_INTERVALS)
        return builtin_handlers(of.schema_name, chaos)

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
                self._skip_grace()
        await self._life
        if cancelled:
            raise asyncio.CancelledError

    def request_stop(self, reason: str, since: float | None = None) -> None:
        """Begin the drain (the first call), or skip what is left of the grace (a later call with the reason `signal`).

        `since`: the local moment from which the grace counts, if it was asked for before this loop came round to it.
        """
        if self._stop.is_set():
            if reason == "signal":
                self._skip_grace()
            return
        self._stop_reason = reason
        self._grace_until = (local_seconds() if since is None else since) + self.settings.shutdown_grace_seconds
        self._stop.set()
        self._lifespans.stop()

    def _skip_grace(self) -> None:
        self._grace_until = min(self._grace_until, local_seconds())
        self._hurry.set()
        self._lifespans.hurry()

    def request_stop_soon(self, reason: str, since: float) -> None:
        """`request_stop` from any thread. From now on no handler starts, even if one that blocks the loop holds up the rest."""
        self._starts_nothing = True
        self.call_soon(lambda: self.request_stop(reason, since))

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call it in this Worker's loop, from any thread; nothing happens once that has ended."""
        assert self._life is not None
        try:
            self._life.get_loop().call_soon_threadsafe(function)
        except RuntimeError:
            pass

    @property
    def is_stopping(self) -> bool:
        return self._starts_nothing or self._stop.is_set()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    @property
    def budget_seconds(self) -> float:
        """What a stop may take after the grace: one budget for everything."""
        return self.settings.lease_margin_seconds + 2 * self.settings.query_timeout_seconds

    @property
    def stop_left_seconds(self) -> float:
        """What is left of the grace and the budget of a stop; the budget if none was asked for."""
        grace_seconds = self._grace_until - local_seconds() if self._stop.is_set() else 0
        return grace_seconds + self.budget_seconds

    def _leave_seconds(self) -> float:
        return self.stop_left_seconds - _LEAVE_RESERVE_SECONDS

    def _note_hang(self, error: TimeoutError) -> None:
        logs.emit(events.INTERNAL_ERROR, where="lifespan", exception=error)
        self.status = self.status or 1

    async def _beat(self, health: HealthFile | None) -> None:
        """While lifespans end: that has a limit of its own, which may be long."""
        async with seen_alive(health, process_id=self.id, version=VERSION):
            while True:
                self._on_beat()
                self._on_alive()
                await asyncio.sleep(_BEAT_SECONDS)

    async def _end_beats(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.wait({self._beats})

    # --- the life of a process

    async def _live(self) -> None:
        self.rights.start()
        if self.settings.chaos_crash or self.settings.chaos_latency:
            logs.emit(events.CHAOS_ENABLED, crash=self.settings.chaos_crash, latency=self.settings.chaos_latency)
        try:
            async with contextlib.AsyncExitStack() as stack:
                health = None if self._make_health_file is None else self._make_health_file(self.id)
                if health is not None:
                    stack.callback(health.remove)
                stack.push_async_callback(self._end_beats)
                async with seen_alive(health, process_id=self.id, version=VERSION):
                    await self._databases.reach(self._stop, connections_beside=self.connections_beside, on_waiting=self._on_waiting)
                    resources = {} if self.is_stopping else await self._lifespans.enter(stack)
                if not self.is_stopping:
                    await self._work(resources, health)
                self._beats = asyncio.create_task(self._beat(health), name="last beats")
        finally:
            self.rights.stop(timeout_seconds=1.0)

    async def _work(self, resources: dict[Lifespan, object], health: HealthFile | None) -> None:
        """Run the loops until a stop is requested, then drain."""
        rights = self.rights
        parts = assemble(
            self.settings,
            process_id=self.id,
            handlers=self.handlers,
            resources=resources,
            database=self._databases.main,
            listen_database=self._databases.listen,
            rights=rights,
            health=health,
            is_stopping=lambda: self.is_stopping,
            on_beat=self._on_beat,
            on_alive=self._on_alive,
            on_bug=self._stop_for_a_bug,
        )
        self.parts = parts
        rights.spawn("keeper", lambda: self._guard("keeper", parts.keeper.run()))
        rights.spawn("committer", lambda: self._guard("committer", parts.committer.run()))
        if self._databases.has_spare_connection:
            rights.spawn("second committer", lambda: self._guard("second committer", parts.committer.run_beside()))
        rights.spawn("watch", lambda: self._guard("watch", parts.watch.run()))
        try:
            async with asyncio.TaskGroup() as group:
                claiming_task = group.create_task(self._guard("claimer", parts.claimer.run()), name="claimer")
                helpers = [
                    group.create_task(self._guard("reaper", parts.reaper.run()), name="reaper"),
                    group.create_task(self._guard("listener", parts.listener.run()), name="listener"),
                    group.create_task(self._tell_ready(parts.claimer), name="ready"),
                ]
                if self._burst:
                    helpers.append(group.create_task(self._guard("burst", self._end_of_burst(parts)), name="burst"))
                await self._stop.wait()
                await self._drain(parts, claiming_task)
                for helper in helpers:
                    helper.cancel()
        finally:
            await parts.close(rights, self._close_until or local_seconds() + self.budget_seconds)

    async def _guard(self, name: str, loop: Coroutine[object, object, None]) -> None:
        """A bug in a loop becomes a request to stop with status 1: the orderly stop still releases and commits."""
        try:
            await loop
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            self._stop_for_a_bug(name, error)
        except Exception as error:
            self._stop_for_a_bug(name, error)

    def _stop_for_a_bug(self, name: str, error: BaseException) -> None:
        logs.emit(events.INTERNAL_ERROR, where=name, exception=error)
        self.status = 1
        self.call_soon(lambda: self.request_stop(f"internal error in {name}"))

    async def _tell_ready(self, the_claimer: Claimer) -> None:
        await the_claimer.first_pass.wait()
        if not self.is_stopping:
            logs.emit(events.DAEMON_READY, kinds=sorted(self.handlers.kinds))
            self._ready.set()

    async def _end_of_burst(self, parts: Parts) -> None:
        """Request a stop once nothing that this process could do is running or ready, retries of the future included."""
        while True:
            await asyncio.sleep(_BURST_LOOK_SECONDS)
            if parts.pool.busy() or len(parts.holdings) or not self.is_ready:
                continue
            try:
                async with parts.connections.acquire(timeout_seconds=self.settings.query_timeout_seconds) as connection:
                    async with asyncio.timeout(self.settings.query_timeout_seconds):
                        work_is_left = await waiting.work_is_left(
                            connection, self._databases.main, queues=self.settings.queues, kinds=list(self.handlers.kinds)
                        )
                if not work_is_left:
                    self.request_stop("burst is over")
                    return
            except DATABASE_ERRORS:
                continue

    async def _drain(self, parts: Parts, claiming_task: asyncio.Task[None]) -> None:
        of = self.settings
        logs.emit(
            events.SHUTDOWN_STARTED,
            reason=self._stop_reason,
            running=len(parts.pool.running()),
            grace_seconds=of.shutdown_grace_seconds,
        )
        drain = Drain(
            parts,
            self.rights,
            self._databases.main,
            process_id=self.id,
            grace_until=self._grace_until,
            stopping_seconds=of.lease_margin_seconds + of.query_timeout_seconds,
            budget_seconds=self.budget_seconds,
            hurry=self._hurry,
        )
        await drain.run(claiming_task)
        self.status = self.status or drain.status
        self.has_deaf = drain.has_deaf
        self._close_until = drain.close_until

    # --- the end of a process whose loop is blocked; called in the rights thread's loop

    async def release_behind(self) -> None:
        """Give back what cannot run any more because a handler blocks the loop, and with it the drain."""
        if self.parts is None or self._life is None:
            return
        blocking = asyncio.current_task(self._life.get_loop())
        await release_behind(self.parts, self._databases.main, process_id=self.id, blocking=blocking)

    def name_what_is_left(self) -> int:
        """Log each job that is left to lease expiry; 75 if there is one, else 0."""
        return 0 if self.parts is None else name_what_is_left(self.parts)
