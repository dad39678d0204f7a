"""The HTTP server in a daemon's process (`worker run --serve`): in a thread with a loop of its own, so that a handler that blocks
the daemon's loop holds up no probe and no heartbeat, and nothing here can hold up the drain.

As soon as the daemon is asked to stop, nothing new is accepted; what is under way is answered while the daemon drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvloop

from worker import ending, events, logs
from worker.api.auth import Tokens, read_tokens
from worker.api.hosts import PoolHost
from worker.api.listening import Server, bind
from worker.api.state import LANES, Api, make_api
from worker.drain import LEFT_TO_EXPIRY
from worker.settings import Settings

if TYPE_CHECKING:
    from worker.embedded import Worker

_LOOK_SECONDS = 0.1
_END_SECONDS = 0.3
"""For what is still under way when the daemon has ended."""
_FINISH_SECONDS = 2.0
"""For what goes back then; as a rule there is nothing."""
_JOIN_SECONDS = 3.0
"""For both, and for closing the connections: as far as the budget of the stop reaches."""


class Hosting:
    """Bound before the daemon does anything: an address that cannot be had stops the start."""

    def __init__(self, settings: Settings, *, host: str, port: int) -> None:
        self._settings = settings
        self._tokens: Tokens = read_tokens(settings)
        self._sockets: list[socket.socket] = bind(host, port, self._tokens)
        self._all_went_back = True

    @contextlib.contextmanager
    def beside(self, worker: Worker) -> Iterator[None]:
        """Serve while the block runs, and not for longer. To be entered before the worker starts."""
        worker.connections_beside = LANES + self._settings.pool_size
        over = threading.Event()
        thread = threading.Thread(target=self._turn, args=(worker, over), name="http", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            ending.join_loop(thread, max(min(_JOIN_SECONDS, worker.stop_left_seconds), _END_SECONDS))
            if not self._all_went_back:
                worker.status = worker.status or LEFT_TO_EXPIRY

    def _turn(self, worker: Worker, over: threading.Event) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(worker, over))
        except Exception as error:  # the daemon's work goes on; its readiness probe fails
            logs.emit(events.INTERNAL_ERROR, where="http", exception=error)

    async def _serve(self, worker: Worker, over: threading.Event) -> None:
        asyncio.get_running_loop().set_exception_handler(logs.loop_exception_handler)
        host = PoolHost(worker)
        api = make_api(self._settings, self._tokens, host)
        server = Server(api, self._sockets, stop_seconds=self._settings.shutdown_grace_seconds)
        try:
            async with asyncio.TaskGroup() as group:
                loops = group.create_task(api.run(), name="http loops")
                watching = group.create_task(self._watch(api, worker, server, over), name="http watch")
                self._all_went_back = False  # as far as is known until it is
                await server.listen()
                self._all_went_back = await api.finish(_FINISH_SECONDS)
                loops.cancel()
                watching.cancel()
        finally:
            await api.close()

    async def _watch(self, api: Api, worker: Worker, server: Server, over: threading.Event) -> None:
        """Hear of the database, which the daemon verifies, of the stop, however busy the daemon's loop is, and of its end."""
        while not over.is_set():
            if worker.is_stopping:
                server.should_exit = True
            elif worker.parts is not None and not api.is_verified:
                api.is_verified = True
                logs.emit(events.HTTP_READY)
            await asyncio.sleep(_LOOK_SECONDS)
        server.should_exit = True
        await asyncio.sleep(_END_SECONDS)
        server.force_exit = True
