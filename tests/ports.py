"""Ports of our own in front of a server: silent ones, and a proxy that goes mute, cuts, or loses answers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

from worker.store.dsn import parse


class Port:
    """A TCP port whose connections are served by `serve`, each in a task that ends with the block."""

    def __init__(self) -> None:
        self.accepted = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        # The transports close in the next turn of the loop.
        await asyncio.sleep(0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._tasks.add(asyncio.get_running_loop().create_task(self._serve_one(reader, writer)))

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            try:
                await self.serve(reader, writer)
            finally:
                writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Never a word."""
        await asyncio.Event().wait()


class Proxy(Port):
    """A port in front of a server, which can go mute with its connections open."""

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self._target = parse(dsn, variable="dsn", environ={})
        self._flows = asyncio.Event()
        self._flows.set()
        self._loses_answers = False

    @property
    def dsn(self) -> str:
        target = self._target
        return (
            f"host=127.0.0.1 port={self.port} dbname='{target.dbname}' user='{target.user}'"
            f" password='{target.password or ''}' sslmode=disable"
        )

    def go_mute(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._flows.clear()

    def flow(self) -> None:
        """Everything passes again, for the connections that are left and for new ones."""
        self._flows.set()
        self._loses_answers = False

    def lose_answers(self) -> None:
        """What clients send arrives; at the first piece that the server sends back the connection breaks."""
        self._loses_answers = True

    def cut(self) -> None:
        """Break all connections at once."""
        for task in self._tasks:
            task.cancel()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to = self._target.addresses[0]
        if to.is_socket:
            back = await asyncio.open_unix_connection(f"{to.host}/.s.PGSQL.{to.port}")
        else:
            back = await asyncio.open_connection(to.host, to.port)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, back[1]))
                pumps.create_task(self._pump(back[0], writer, is_answer=True))
        finally:
            back[1].transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool = False) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                await self._flows.wait()
                if is_answer and self._loses_answers:
                    break
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
