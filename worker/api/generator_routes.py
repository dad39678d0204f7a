"""`/api/generator`: the wanted state, and how it goes. The answer is the same from any instance: it stands in the database."""

from __future__ import annotations

from fastapi import FastAPI, Response

from worker.api import models
from worker.api.rendering import generator_response
from worker.api.state import Api
from worker.store import generating


def add_generator_routes(app: FastAPI, api: Api) -> None:

    @app.get("/api/generator", tags=["generator"], response_model=models.Generator, summary="What is wanted, and who produces")
    async def show() -> Response:
        async with api.connection() as connection:
            return generator_response(await generating.status(connection, api.database))

    @app.post("/api/generator/start", tags=["generator"], response_model=models.Generator, summary="Want it STARTED")
    async def start() -> Response:
        async with api.connection() as connection:
            return generator_response(await generating.start(connection, api.database))

    @app.post("/api/generator/stop", tags=["generator"], response_model=models.Generator, summary="Want it STOPPED")
    async def stop() -> Response:
        async with api.connection() as connection:
            return generator_response(await generating.stop(connection, api.database))
