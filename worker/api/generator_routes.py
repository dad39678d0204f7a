"""`/api/generator`: the wanted state, and how it goes. The answer is the same from any instance: it stands in the database."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from worker.api import models
from worker.api.problems import invalid
from worker.api.rendering import generator_response
from worker.api.state import Api
from worker.store import generating


def add_generator_routes(app: FastAPI, api: Api) -> None:

    @app.get("/api/generator", tags=["generator"], response_model=models.Generator, summary="What is wanted, and who produces")
    async def show() -> Response:
        async with api.connection() as connection:
            return generator_response(await generating.status(connection, api.database))

    @app.post("/api/generator/start", tags=["generator"], response_model=models.Generator, summary="Want it STARTED")
    async def start(request: Request) -> Response:
        await _refuse_body(request)
        async with api.connection() as connection:
            return generator_response(await generating.start(connection, api.database))

    @app.post("/api/generator/stop", tags=["generator"], response_model=models.Generator, summary="Want it STOPPED")
    async def stop(request: Request) -> Response:
        await _refuse_body(request)
        async with api.connection() as connection:
            return generator_response(await generating.stop(connection, api.database))


async def _refuse_body(request: Request) -> None:
    """Whoever sends a rate here must not take the answer for one that was put in."""
    if await request.body():
        raise invalid("the body: none is taken here; rate and kind are set by `worker generator`")
