"""Listening: sockets bound before anything else, and uvicorn on them, without its own ideas about signals and logs."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from worker import events, logs
from worker.api.app import make_gate
from worker.api.auth import Tokens, addresses_of, require_tokens
from worker.api.connections import IDLE_SECONDS, Connection, Crowd, connection_limit
from worker.api.state import Api
from worker.errors import ConfigError, PortTaken

BACKLOG = 1_024
_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
_NOT_OURS = {errno.EACCES, errno.EPERM, *_NOT_HERE}


def bind(host: str, port: int, tokens: Tokens) -> list[socket.socket]:
    """A listening socket for each address of the host; port 0 finds one that is free.

    Raises ConfigError for an address that cannot be had, PortTaken for one that somebody has, OSError for want of means.
    """
    found = addresses_of(host, port)
    require_tokens(host, [address for _, address in found], tokens)
    bound: list[socket.socket] = []
    refused: OSError | None = None
    for family, address in found:
        try:
            one = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            refused = error
            continue
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address, bound[0].getsockname()[1] if bound else port))
            one.listen(BACKLOG)  # until somebody listens, others can be bound to it as well
        except OSError as error:
            one.close()
            refused = error
            if error.errno not in _NOT_HERE:
                break
        else:
            bound.append(one)
    if refused is not None and (not bound or refused.errno not in _NOT_HERE):
        for one in bound:
            one.close()
        text = f"--host {host} --port {port}: cannot listen there: {refused.strerror}"
        if refused.errno == errno.EADDRINUSE:
            raise PortTaken(text)
        if refused.errno in _NOT_OURS:
            raise ConfigError(text)
        raise OSError(refused.errno, f"cannot listen on {host}, port {port}: {refused.strerror}")
    return bound


class Server(uvicorn.Server):
    """uvicorn, told by us when to stop."""

    def __init__(self, api: Api, sockets: list[socket.socket], *, stop_seconds: float) -> None:
        # What clients do wrong is their business, and in the line of each request.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        connection: Any = functools.partial(Connection, crowd=Crowd(connection_limit()))
        gate: Any = make_gate(api)
        super().__init__(
            uvicorn.Config(
                gate,
                http=connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=int(IDLE_SECONDS),
                timeout_graceful_shutdown=max(int(stop_seconds), 1),
            )
        )
        self._sockets = sockets
        self._tokens = bool(api.tokens)

    async def listen(self) -> None:
        """Until `should_exit`: then nothing new is accepted, and what is under way has `stop_seconds`."""
        host, port = self._sockets[0].getsockname()[:2]
        logs.emit(events.HTTP_STARTED, host=host, port=port, tokens=self._tokens)
        try:
            await self.serve(sockets=self._sockets)
        finally:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.abort()
            logs.emit(events.HTTP_STOPPED, requests=self.server_state.total_requests)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are the process's.
        yield
