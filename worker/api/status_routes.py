"""`/healthz`, `/readyz`, `/metrics`.

The first two need no token: an orchestrator's probes carry none, and they say nothing but a word. `/healthz` never looks at the
database: restarting this process would not bring it back. `/metrics` names queues and kinds, so it is as guarded as the rest.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Response

from worker.api import models
from worker.api.cached import Cached
from worker.api.metrics import CONTENT_TYPE, Metrics
from worker.api.problems import AWAY, RETRY_AFTER_SECONDS, Problem
from worker.api.rendering import json_response
from worker.api.state import Api
from worker.api.strict import Answers
from worker.store.shared_pool import ping

PING_SECONDS = 1.0
_NOT_READY: Answers = {503: {"model": models.Error, "description": "not ready; the message says why"}}


def add_status_routes(app: FastAPI, api: Api) -> None:
    metrics = Metrics(api)

    async def database_answers() -> bool:
        try:
            async with asyncio.timeout(PING_SECONDS), api.connection() as connection:
                await ping(connection)
        except AWAY:
            return False
        return True

    database = Cached(database_answers, seconds=PING_SECONDS)

    @app.get("/healthz", tags=["status"], response_model=models.Health, summary="The process turns")
    async def healthz() -> Response:
        return json_response({"status": "ok"})

    @app.get(
        "/readyz",
        tags=["status"],
        response_model=models.Readiness,
        responses=_NOT_READY,
        summary="The database answers, the pool claims",
    )
    async def readyz() -> Response:
        why = api.host.why_not_ready() or (None if await database.get() else "database")
        if api.host.is_stopping:
            why = "stopping"
        if why is not None:
            raise Problem(503, "not_ready", why, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
        return json_response({"status": "ready"})

    for path, route in (("/healthz", healthz), ("/readyz", readyz)):
        app.add_api_route(path, route, methods=["HEAD"], include_in_schema=False)  # some probes ask so; no body is sent

    @app.get("/metrics", tags=["status"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def show_metrics() -> Response:
        return Response(await metrics.render(), headers={"Content-Type": CONTENT_TYPE})
