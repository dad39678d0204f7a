"""The application: all routes behind the gate."""

from __future__ import annotations

from fastapi import FastAPI

from worker.api import problems
from worker.api.gate import Gate
from worker.api.generator_routes import add_generator_routes
from worker.api.lease_routes import add_lease_routes
from worker.api.state import Api
from worker.api.status_routes import add_status_routes
from worker.api.strict import COMMON, StrictRoute
from worker.api.task_routes import add_task_routes
from worker.version import VERSION

DESCRIPTION = "Tasks are the jobs of this database, claimed under a lease and ended under its fence."


def make_app(api: Api) -> FastAPI:
    """The routes, and the OpenAPI document of them."""
    app = FastAPI(
        title="reliable-worker",
        version=VERSION,
        description=DESCRIPTION,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses=COMMON,
    )
    # Straight into the application: routers that are included cost every request a walk through them.
    app.router.route_class = StrictRoute
    for add_routes in (add_task_routes, add_lease_routes, add_generator_routes, add_status_routes):
        add_routes(app, api)
    problems.install(app)
    return app


def make_gate(api: Api) -> Gate:
    """What the server calls."""
    return Gate(make_app(api), api.tokens)
