"""Connections: what one client, or ten thousand, may hold of this process. Below HTTP, so that they are bounded without a request.

- A request has HEAD_SECONDS for its head, from its first byte or the start of the connection, and REQUEST_SECONDS for its body.
- A connection between two requests is closed after IDLE_SECONDS.
- At most `most` connections stand at a time: another one closes the one that has been without a request for longest. Idle ones
  can therefore crowd out nobody who has something to say.
- A connection may have sent MOST_PIPELINED requests ahead of the one that is being answered; one more closes it.
- A response that its client does not read is dropped after UNREAD_SECONDS, and when too many are not read.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_SECONDS = 10.0
REQUEST_SECONDS = 15.0
IDLE_SECONDS = 60.0
UNREAD_SECONDS = 30.0
MOST_UNREAD = 32
MOST_PIPELINED = 64
HEAD_BYTES = 64 * 1024
MOST_CONNECTIONS = 2_000
CONNECTION = "worker.connection"
"""Where a request's `state` names its connection."""
RESERVED_DESCRIPTORS = 128
"""For the database, files, and whatever handlers open."""


def connection_limit() -> int:
    """As many as this process may have open, with some left for other purposes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - RESERVED_DESCRIPTORS
    return max(min(MOST_CONNECTIONS, allowed), 16)


class Crowd:
    """The connections of one server that wait for a request, longest first, and those whose response is not read."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.all = 0
        self.waiting: dict[Connection, None] = {}
        self.unread: dict[Connection, None] = {}

    def make_room(self) -> None:
        """Another connection has come."""
        if self.all > self.most and self.waiting:
            next(iter(self.waiting)).abort()

    def note_unread(self, connection: Connection) -> None:
        self.unread[connection] = None
        if len(self.unread) > MOST_UNREAD:
            next(iter(self.unread)).abort()


class Connection(HttpToolsProtocol):
    """One client's connection. uvicorn makes it, with the keywords of its own protocols and ours."""

    def __init__(self, *, crowd: Crowd, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._crowd = crowd
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._in_request = False
        self._counted = False

    def abort(self) -> None:
        """Away with it, whatever it holds."""
        self._forget()
        self.transport.abort()

    @property
    def is_gone(self) -> bool:
        """Nobody is there any more to be answered."""
        return self.transport is None or self.transport.is_closing()

    # --- what uvicorn calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._crowd.all += 1
        self._counted = True
        self._await_request()
        self._set_deadline(HEAD_SECONDS)
        self._crowd.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_request:
            self._in_request = True
            self._head_bytes = 0
            self._set_deadline(HEAD_SECONDS)
        if self._in_head:
            self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][CONNECTION] = self

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._crowd.waiting.pop(self, None)
        self._set_deadline(REQUEST_SECONDS)
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > HEAD_BYTES:
            self._refuse_head()
        # A proxy's request, or no path at all.
        if self.transport.is_closing() or not self.url.startswith(b"/") or self.parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("head refused")
        # A read of a quarter of a megabyte may hold 14,000 of them.
        if len(self.pipeline) >= MOST_PIPELINED:
            raise httptools.HttpParserError("too many requests at once")
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._clear_deadline()
        self._in_head, self._in_request = True, False
        self._head_bytes = 0
        self._rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline and not self.transport.is_closing():
            self.flow.pause_reading()  # uvicorn reads on after each response, however many requests wait
        self._rest()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self.abort)
        self._crowd.note_unread(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_again()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "bad_request", "this is not HTTP as it is understood here")

    # --- ours

    def _parse(self, data: bytes) -> None:
        left = data
        while left:
            try:
                self.parser.feed_data(left)
                return
            except httptools.HttpParserUpgrade as upgrade:
                left = self._stay(left[upgrade.args[0] :])
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _stay(self, rest: bytes) -> bytes:
        """A client offers to go on in another protocol, HTTP/2 as a rule, and does not mind when it is not taken up. But the parser
        ends the request there, before its body: what is to be read again, as if nothing had been offered."""
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*head, b"", rest])

    def _rest(self) -> None:
        """Nothing is left to answer: another connection may have the place. An answer that does not need the body, such as a 401,
        may come before the end of the request."""
        if self.cycle.response_complete and not self.transport.is_closing():
            self._await_request()
            if not self._in_request:
                self._set_deadline(IDLE_SECONDS)

    def _await_request(self) -> None:
        self._crowd.waiting.pop(self, None)
        self._crowd.waiting[self] = None

    def _refuse_head(self) -> None:
        self._refuse(431, "head_too_large", f"at most {HEAD_BYTES:,} bytes of head are taken")

    def _refuse(self, status: int, code: str, message: str) -> None:
        if self.transport.is_closing():
            return
        body = orjson.dumps({"error": code, "message": message})
        head = b"content-type: application/json\r\ncache-control: no-store\r\nconnection: close\r\n"
        if self.cycle is None or self.cycle.response_complete:  # else it would be in the middle of another answer
            self.transport.write(b"%b%bcontent-length: %d\r\n\r\n%b" % (STATUS_LINE[status], head, len(body), body))
        self.transport.close()

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        if self.pipeline and self.flow.read_paused:
            self._set_deadline(REQUEST_SECONDS)  # it is we who do not read: those before it have to be answered first
        elif not self.transport.is_closing():
            self.transport.close()

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _read_again(self) -> None:
        self._crowd.unread.pop(self, None)
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _forget(self) -> None:
        self._clear_deadline()
        self._read_again()
        self._crowd.waiting.pop(self, None)
        if self._counted:
            self._counted = False
            self._crowd.all -= 1
