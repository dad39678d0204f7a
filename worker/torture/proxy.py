"""A TCP proxy between one daemon and the database, with a network that can be made to fail.

It knows just enough of PostgreSQL's protocol to see a COMMIT go by on a connection that is not encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Literal

_CHUNK: Final = 65_536
_CONNECT_SECONDS: Final = 5.0
_LINGER_SECONDS: Final = 1.0
"""After requests were delivered to a server whose client is gone: so that they are still carried out."""
_COMMITS: Final = (b"COMMIT\0", b"COMMIT;\0")

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
Loss = Literal["applied", "undone", "in_flight"]


class _Gate:
    """Open, or closed until it is opened again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._event.set()

    @property
    def is_open(self) -> bool:
        return self._event.is_set()

    def close(self) -> None:
        self._event.clear()

    def open(self) -> None:
        self._event.set()

    async def passed(self) -> None:
        await self._event.wait()


class Link:
    """One connection of the daemon, with the one to the server that belongs to it."""

    def __init__(self, client: tuple[asyncio.StreamReader, asyncio.StreamWriter], proxy: Proxy) -> None:
        self._from_client, self._to_client = client
        self._proxy = proxy
        self._server: asyncio.StreamWriter | None = None
        self._swallows_answer = False
        self.late = _Gate()
        """Closed: what the client sends stays here until it is opened, even if the client is gone by then."""

    async def run(self) -> None:
        await self._proxy.let_through()
        from_server, self._server = await self._proxy.connect()
        requests = asyncio.create_task(self._requests(self._server), name="proxy requests")
        answers = asyncio.create_task(self._answers(from_server), name="proxy answers")
        try:
            await asyncio.wait({requests, answers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (requests, answers):
                task.cancel()
            for writer in (self._to_client, self._server):
                writer.close()

    def abort(self) -> None:
        """Break it off: both sides see a reset."""
        for writer in (self._to_client, self._server):
            if writer is not None:
                _reset(writer)

    async def _requests(self, server: asyncio.StreamWriter) -> None:
        while data := await self._read(self._from_client):
            await self._proxy.carried()
            was_late = not self.late.is_open
            self._proxy.kept += was_late
            await self.late.passed()
            loss = self._proxy.take_loss() if _is_commit(data) else None
            if loss == "undone":
                self.abort()
                return
            if loss == "applied":
                self._swallows_answer = True
            server.write(data)
            if loss == "in_flight":
                # The server is left alone with it.
                _reset(self._to_client)
                await asyncio.sleep(_LINGER_SECONDS)
                return
            if was_late:
                await asyncio.sleep(_LINGER_SECONDS)

    async def _answers(self, from_server: asyncio.StreamReader) -> None:
        while data := await self._read(from_server):
            await self._proxy.carried()
            if self._swallows_answer:
                self.abort()
                return
            with contextlib.suppress(OSError):
                self._to_client.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(_CHUNK)
        except OSError:
            return b""


class Proxy:
    """Listens on the loopback interface, for one daemon."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._links: set[Link] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._losses: list[Loss] = []
        self.lost_commits: Counter[Loss] = Counter()
        self.network = _Gate()
        self.delay_seconds = 0.0
        self.slowed = 0
        """Pieces that took longer than they had to."""
        self.kept = 0
        """Pieces that stayed on their way."""
        self.port = 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(_CONNECT_SECONDS):
            return await self._connect()

    async def carried(self) -> None:
        """The network's own time, both ways."""
        await self.let_through()
        if self.delay_seconds:
            self.slowed += 1
            await asyncio.sleep(self.delay_seconds)

    async def let_through(self) -> None:
        """At once, unless the network carries nothing."""
        self.kept += not self.network.is_open
        await self.network.passed()

    def lose_commits(self, losses: list[Loss]) -> None:
        """The next COMMITs meet these ends; an empty list: no more."""
        self._losses = losses

    def take_loss(self) -> Loss | None:
        if not self._losses:
            return None
        loss = self._losses.pop(0)
        self.lost_commits[loss] += 1
        return loss

    def break_off(self) -> int:
        """Reset every connection; how many there were."""
        links = list(self._links)
        for link in links:
            link.abort()
        return len(links)

    def delay_requests(self) -> list[Link]:
        """From now on the requests of the present connections stay here; open their gates to deliver them."""
        links = list(self._links)
        for link in links:
            link.late.close()
        return links

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link((reader, writer), self)
        serving = asyncio.current_task()
        assert serving is not None
        self._links.add(link)
        self._serving.add(serving)
        try:
            await link.run()
        except OSError:
            link.abort()  # the server cannot be reached
        finally:
            self._links.discard(link)
            self._serving.discard(serving)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.network.open()
            self.break_off()
            if self._serving:
                await asyncio.wait(self._serving, timeout=2 * _LINGER_SECONDS)


def _is_commit(data: bytes) -> bool:
    """A simple query (`Q`, length, text) that commits."""
    return data[:1] == b"Q" and data[5:] in _COMMITS


def _reset(writer: asyncio.StreamWriter) -> None:
    if writer.transport.is_closing():
        return
    stream = writer.get_extra_info("socket")
    if stream is not None and stream.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
