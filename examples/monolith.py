"""A web application that runs its own workers, in any number of replicas: one process, one loop, one database.

    pip install uvicorn                                                  # or any other ASGI server
    cd examples && DATABASE_URL=postgresql://… uvicorn monolith:app

POST /welcome?name=… enqueues a job and answers with its id; the pool in this process, or in another replica, runs it. It is
plain ASGI, to need no framework: with FastAPI or Starlette `lifespan` is all there is to it, as `FastAPI(lifespan=lifespan)`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import asyncpg
from app.jobs import Welcome, handlers, welcome

from worker import Settings, Worker

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@contextlib.asynccontextmanager
async def lifespan(app: object) -> AsyncIterator[dict[str, asyncpg.Pool]]:
    """The pool of workers beside the application's own connections; leaving drains the workers first."""
    async with (
        asyncpg.create_pool(os.environ["DATABASE_URL"], min_size=0) as database,
        # What is not given here comes from the environment. By default it waits for its database for ever, and no web server
        # breaks off a start that waits.
        Worker(handlers, Settings(workers=4, connect_wait_seconds=30)),
    ):
        yield {"database": database}


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await serve_lifespan(scope, receive, send)
    elif scope["type"] == "http":
        await serve_request(scope, send)


async def serve_request(scope: Message, send: Send) -> None:
    status, answer = 404, {"error": "POST /welcome?name=…"}
    if (scope["method"], scope["path"]) == ("POST", "/welcome"):
        name = parse_qs(scope["query_string"].decode()).get("name", ["you"])[0]
        # In the transaction of whatever else the request changes: if that rolls back, the job was never there.
        async with scope["state"]["database"].acquire() as connection, connection.transaction():
            enqueued = await welcome.enqueue(connection, Welcome(message=f"hello {name}"), key=f"welcome-{name}")
        status, answer = 202, enqueued._asdict()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def serve_lifespan(scope: Message, receive: Receive, send: Send) -> None:
    """What a framework does with `lifespan`."""
    await receive()
    try:
        async with lifespan(app) as state:
            scope["state"].update(state)
            await send({"type": "lifespan.startup.complete"})
            await receive()
    except Exception as error:
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        raise
    await send({"type": "lifespan.shutdown.complete"})
