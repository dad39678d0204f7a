"""Calls of a `worker serve`, for programs without access to the database: strict JSON both ways, a time limit on each, and three
kinds of answers: what was asked for, a refusal to act on, or none that anybody could trust. Needs httpx, from the extra `http`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from worker.domain_json import decode_json, encode_json
from worker.errors import ConfigError
from worker.masking import remember, safe_text
from worker.store.trouble import ConnectFailed

_BEARER = re.compile(r"[A-Za-z0-9._~+/=-]+")
_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 5.0
_WHOLE = 2
"""To connect, to send and each wait for a piece of the answer have the limit; all of it together has so many times that."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A status that means something to the caller, and the object that came with it (empty for 204)."""

    status: int
    body: Mapping[str, object]

    @property
    def error(self) -> str:
        """The code of a refusal."""
        return str(self.body.get("error", ""))

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))


class HttpCalls:
    """Keep-alive connections to one server. Raises ConfigError for an address or a token that cannot be right."""

    def __init__(self, url: str, *, bearer: str | None, timeout_seconds: float, connections: int) -> None:
        self.where = _where(url)
        """Without what may be a secret in it."""
        remember(bearer)
        # What cannot be sent would be shown by whoever refuses to send it.
        if bearer is not None and not _BEARER.fullmatch(bearer):
            raise ConfigError("bearer: letters, digits and characters of . _ ~ + / = - are needed, no space and no end of a line")
        self.timeout_seconds = timeout_seconds
        # A pool of httpx looks at all its connections for every request. So each client here has one, and the one used last is used
        # next.
        self._make_client = functools.partial(
            httpx.AsyncClient,
            base_url=url,
            headers={} if bearer is None else {"Authorization": f"Bearer {bearer}"},
            timeout=timeout_seconds,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=30.0),
            follow_redirects=False,
            verify=httpx.create_ssl_context(),
        )
        self._turns = asyncio.Semaphore(connections)
        self._clients: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []

    async def call(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, seconds: float | None = None
    ) -> Answer:
        """The answer, if it says anything: 2xx, or one of ours with 404, 409, 413, 422.

        Raises ConnectionError (nothing is known: ask again) when there is none, or the server says that it cannot now, or somebody
        on the way answers in its place; of these ConnectFailed when the request has not even been sent; ConfigError for what asking
        again cannot mend (a token that is not accepted, something else than our server).
        """
        content = None if body is None else encode_json(body, "the request").encode()
        limit_seconds = self.timeout_seconds if seconds is None else max(min(seconds, self.timeout_seconds), 0.01)
        try:
            async with self._connection(limit_seconds) as client, asyncio.timeout(limit_seconds * _WHOLE):
                response = await client.request(
                    method,
                    path,
                    content=content,
                    headers={} if content is None else {"Content-Type": "application/json"},
                    timeout=limit_seconds,
                )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ConnectFailed(f"{self.where}: {str(error) or type(error).__name__}", sqlstate=None, refused=False) from None
        except (TimeoutError, httpx.TimeoutException):
            raise ConnectionError(f"{self.where}: no answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionError(f"{self.where}: {str(error) or type(error).__name__}") from None
        status = response.status_code
        if status == 413:  # of a proxy, too: the same request will not be smaller the next time
            return Answer(status, {"error": "too_large", "message": "too large for the server, or for a proxy before it"})
        if status in (401, 403):
            raise ConfigError(f"{self.where}: {_read(response).message or status}")
        if status >= 500 or status in (408, 429):
            raise ConnectionError(f"{self.where}: {status} {_read(response).error}")
        if not (200 <= status < 300 or status in (404, 409, 422)):
            raise ConfigError(f"{self.where}: answers {status}; is it `worker serve`?")
        answer = _read(response)
        if status >= 400 and not answer.error:
            raise ConnectionError(f"{self.where}: {status} that is not of `worker serve`")
        return answer

    @contextlib.asynccontextmanager
    async def _connection(self, limit_seconds: float) -> AsyncIterator[httpx.AsyncClient]:
        try:
            async with asyncio.timeout(limit_seconds):
                await self._turns.acquire()
        except TimeoutError:
            raise ConnectFailed(f"{self.where}: all connections are in use", sqlstate=None, refused=False) from None
        try:
            client = self._free.pop() if self._free else self._new_client()
            try:
                yield client
            finally:
                self._free.append(client)
        finally:
            self._turns.release()

    def _new_client(self) -> httpx.AsyncClient:
        try:
            client = self._make_client()
        except (ValueError, ImportError, httpx.InvalidURL) as error:  # it reads the variables that name proxies
            raise ConfigError(f"{self.where}: {safe_text(error)}") from None
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


def _where(url: str) -> str:
    """Scheme, host, port and path of an address that httpx will take too. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        httpx.URL(url)
    except (ValueError, KeyError, httpx.InvalidURL):
        parts, port = urlsplit(""), 0
    if not parts.hostname:
        raise ConfigError("the address of the server must be http://HOST:PORT or https://HOST:PORT")
    return f"{parts.scheme}://{parts.hostname}:{port}{parts.path}"


def _read(response: httpx.Response) -> Answer:
    if not response.content:
        return Answer(response.status_code, {})
    try:
        body = decode_json(response.content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        # A proxy's page, say.
        raise ConnectionError(f"{response.status_code} without a JSON object")
    return Answer(response.status_code, body)


def delay_seconds(failures: int) -> float:
    """How long to wait before asking again, after so many failures in a row: growing, with jitter."""
    return min(_FIRST_DELAY_SECONDS * 2.0 ** min(failures, 16), _LONGEST_DELAY_SECONDS) * random.uniform(0.5, 1)
