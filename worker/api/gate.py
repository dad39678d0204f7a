"""The gate: every request passes here first. Who asks, how much is asked, how long it may take; and one line about it afterwards.

A body is read as a whole, within its limits, before anything else is done for the request: a slow client holds a buffer, never a
connection to the database.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from worker import events, logs
from worker.api.auth import Tokens, check_local_caller
from worker.api.judging import VERBS
from worker.api.problems import Problem, internal, overloaded
from worker.clock import local_seconds

Message: TypeAlias = MutableMapping[str, Any]  # as ASGI has it
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_BYTES = 2 * 1024 * 1024
"""A payload of 1 MiB fits, with every character escaped twice over."""
DISCARDED_BYTES = 16 * 1024 * 1024
"""So much of a body that is too large is read after the answer: closed with unread bytes, a connection may take that with it."""
SILENT_SECONDS = 1.0
"""So long such a body may pause."""
BODY_SECONDS = 10.0
BUFFERED_BYTES = 64 * 1024 * 1024
"""Of all bodies together."""
REQUESTS = 256
"""At the same time; more are told to come again."""

WITHOUT_TOKEN = frozenset({"/healthz", "/readyz", "/openapi.json"})
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
_FREQUENT = frozenset({"/api/tasks/next", *(f"/api/tasks/{{id}}/{verb}" for verb in VERBS)})
_NO_STORE = (b"cache-control", b"no-store")
_NO_SNIFF = (b"x-content-type-options", b"nosniff")


class Gate:
    """The application that the server calls."""

    def __init__(self, app: Application, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens
        self._requests = 0
        self._buffered_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started_at = local_seconds()
        answer = _Answer(send)
        self._requests += 1
        body: list[bytes] = []
        try:
            self._check(scope)
            await self._read(scope, receive, body)
            await self._app(scope, _replay(b"".join(body), receive), answer)
        except _TooLarge as problem:
            await answer.send_problem(problem, is_all=False)
            await _discard(scope, receive)
            await answer.end()
        except Problem as problem:
            await answer.send_problem(problem)
        except _Gone:
            return
        except Exception as error:
            logs.emit(events.INTERNAL_ERROR, where=f"http {_route(scope)}", exception=error)
            if not answer.status:
                await answer.send_problem(internal())
        finally:
            self._requests -= 1
            self._buffered_bytes -= sum(map(len, body))
        if answer.status != 200 or scope["path"] not in _QUIET:
            _say(scope, answer.status, started_at)

    def _check(self, scope: Scope) -> None:
        """By the head alone. Raises Problem."""
        headers = dict(scope["headers"])
        if self._tokens:
            authorization = headers.get(b"authorization")
            if scope["path"] not in WITHOUT_TOKEN and not self._tokens.accept(authorization):
                raise self._tokens.refusal(authorization)
        elif problem := check_local_caller(headers.get(b"host"), headers.get(b"origin")):
            raise problem
        if self._requests > REQUESTS and scope["path"] not in WITHOUT_TOKEN:
            raise overloaded()

    async def _read(self, scope: Scope, receive: Receive, body: list[bytes]) -> None:
        """The body, piece by piece into `body`. Raises Problem for one that is too large or too slow."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length")
        if length is None and b"transfer-encoding" not in headers:
            return
        announced = int(length) if length is not None and length.isdigit() else 0
        if announced > BODY_BYTES:
            raise _TooLarge
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = True
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise _Gone
                    piece = message.get("body", b"")
                    size += len(piece)
                    more = message.get("more_body", False)
                    if size > BODY_BYTES:
                        raise _TooLarge
                    if self._buffered_bytes + len(piece) > BUFFERED_BYTES:
                        raise overloaded()
                    body.append(piece)
                    self._buffered_bytes += len(piece)
        except TimeoutError:
            raise Problem(
                408, "timeout", f"the body did not come within {BODY_SECONDS:g} s", headers={"Connection": "close"}
            ) from None


class _Gone(Exception):
    """The client has left before its request was whole."""


class _TooLarge(Problem):
    """The body, whatever of it has come."""

    def __init__(self) -> None:
        super().__init__(413, "too_large", f"at most {BODY_BYTES:,} bytes are taken", headers={"Connection": "close"})


async def _discard(scope: Scope, receive: Receive) -> None:
    """Read what is still on its way, within limits; the connection's own limit is above them."""
    if dict(scope["headers"]).get(b"expect", b"").lower() == b"100-continue":
        return  # asking for it would tell the client to send it
    left = DISCARDED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            while left > 0:
                limit.reschedule(asyncio.get_running_loop().time() + SILENT_SECONDS)
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the whole body at once, and then tells whether the client is still there."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class _Answer:
    """Sends what the application answers, and remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), _NO_STORE, _NO_SNIFF]
        await self._send(message)

    async def send_problem(self, problem: Problem, *, is_all: bool = True) -> None:
        """Not `is_all`: it is on its way, but the connection stays until `end`."""
        body = problem.body()
        headers = [(name.lower().encode(), value.encode()) for name, value in (problem.headers or {}).items()]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self({"type": "http.response.start", "status": problem.status_code, "headers": headers})
        await self({"type": "http.response.body", "body": body, "more_body": not is_all})

    async def end(self) -> None:
        await self({"type": "http.response.body"})


def _route(scope: Scope) -> str | None:
    """The template of the route, so that what people write into paths is in no log."""
    return getattr(scope.get("route"), "path_format", None)


def _say(scope: Scope, status: int, started_at: float) -> None:
    client = scope.get("client")
    route = _route(scope)
    logs.emit(
        events.HTTP_TASK_REQUEST if route in _FREQUENT and status < 300 else events.HTTP_REQUEST,
        method=scope["method"],
        route=route,
        status=status,
        duration_ms=round((local_seconds() - started_at) * 1000, 3),
        client=client[0] if client else None,
        **({"job_id": scope["path_params"]["id"]} if "id" in scope.get("path_params", {}) else {}),
    )
