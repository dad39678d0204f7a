"""`/api/leases`: named leases for programs without access to the database."""

from __future__ import annotations

from typing import Annotated, TypeVar

from fastapi import Body, FastAPI, Query, Response
from pydantic import BaseModel

from worker.api import models
from worker.api.name_beats import not_held
from worker.api.problems import Problem, invalid
from worker.api.rendering import cursor_of, lease_page, lease_response, read_cursor
from worker.api.state import Api
from worker.api.strict import NOT_FOUND, Answers
from worker.api.task_routes import Id, Page
from worker.store import leases
from worker.store.lease_renewals import Renewal
from worker.store.leases import Lease, Which

M = TypeVar("M", bound=BaseModel)

_UNSEEN_MS = 100
_NOT_HELD: Answers = {404: {"model": models.Error, "description": "no such live lease of this holder and fence"}}
_HELD: Answers = {
    409: {"model": models.HeldError, "description": "`held` by somebody else, or `ended`: this request's lease is over"}
}


def add_lease_routes(app: FastAPI, api: Api) -> None:

    async def page(which: Which, query: models.PageQuery) -> tuple[list[Lease], str | None]:
        after_id = read_cursor(f"leases.{which}", query.cursor)
        async with api.connection() as connection:
            found = await leases.list_leases(connection, api.database, which=which, after_id=after_id, limit=query.limit + 1)
        shown = found[: query.limit]
        return shown, cursor_of(f"leases.{which}", shown[-1].id) if len(found) > query.limit else None

    @app.get(
        "/api/leases",
        tags=["leases"],
        response_model=models.LeaseOverview,
        summary="All leases, and whether this process runs a pool",
    )
    async def list_all(query: Page) -> Response:
        shown, next_cursor = await page("all", query)
        return lease_page(shown, next_cursor, worker={"status": "STARTED" if api.host.runs_pool else "STOPPED"})

    @app.get("/api/leases/active", tags=["leases"], response_model=models.LeasePage)
    async def list_active(query: Page) -> Response:
        return lease_page(*await page("active", query))

    @app.get(
        "/api/leases/expired", tags=["leases"], response_model=models.LeasePage, summary="Leases that ran out and were not released"
    )
    async def list_expired(query: Page) -> Response:
        return lease_page(*await page("expired", query))

    @app.get(
        "/api/leases/renewed",
        tags=["leases"],
        response_model=models.LeasePage,
        summary="Leases renewed at least once since they were acquired",
    )
    async def list_renewed(query: Page) -> Response:
        return lease_page(*await page("renewed", query))

    @app.get("/api/leases/released", tags=["leases"], response_model=models.LeasePage)
    async def list_released(query: Page) -> Response:
        return lease_page(*await page("released", query))

    @app.post("/api/leases", tags=["leases"], status_code=201, response_model=models.Lease, responses=_HELD, summary="Acquire")
    async def acquire(body: models.AcquireLease) -> Response:
        async with api.connection() as connection:
            try:
                answer = await leases.acquire(connection, api.database, **dict(body))
            except ValueError as error:
                raise invalid(str(error)) from None
        match answer:
            case leases.Held():
                # Whose acquisition is not committed has no name and no time yet: asked again at once, it would be the same.
                retry_after_ms = _UNSEEN_MS if answer.holder is None else answer.retry_after_ms
                more = {"holder": answer.holder, "retry_after_ms": retry_after_ms}
                raise Problem(409, "held", "somebody else holds it", more=more)
            case leases.Ended():
                more = {"holder": body.holder, "retry_after_ms": 0, "id": answer.id, "fence": answer.fence}
                raise Problem(409, "ended", "what this request_id acquired is over", more=more)
        return lease_response(answer, 201)

    @app.put(
        "/api/leases/renew",
        tags=["leases"],
        response_model=models.Lease,
        responses=_NOT_HELD,
        summary="Renew for as long as before, by a body or a query",
    )
    async def renew(
        query: Annotated[models.LeaseQuery, Query()], body: Annotated[models.RenewLease | None, Body()] = None
    ) -> Response:
        chosen = _chosen(models.RenewLease, body, query)
        api.require_database()
        return lease_response(await api.name_beats.renew(Renewal(**dict(chosen))), 200)

    @app.delete(
        "/api/leases/release",
        tags=["leases"],
        response_model=models.Lease,
        responses=_NOT_HELD,
        summary="Release, by a body or a query",
    )
    async def release(
        query: Annotated[models.LeaseQuery, Query()], body: Annotated[models.RenewLease | None, Body()] = None
    ) -> Response:
        chosen = _chosen(models.RenewLease, body, query)
        async with api.transaction() as connection:
            return _held(await leases.release(connection, api.database, **dict(chosen)))

    @app.get("/api/leases/{id:id}", tags=["leases"], response_model=models.Lease, responses=NOT_FOUND, summary="One lease")
    async def show(id: Id) -> Response:
        async with api.connection() as connection:
            lease = await leases.get(connection, api.database, id=id)
        if lease is None:
            raise Problem(404, "not_found", "there is no such lease")
        return lease_response(lease, 200)

    @app.delete(
        "/api/leases/{id:id}", tags=["leases"], response_model=models.Lease, responses=_NOT_HELD, summary="Release, by its id"
    )
    async def release_by_id(
        id: Id, query: Annotated[models.EndLeaseQuery, Query()], body: Annotated[models.EndLease | None, Body()] = None
    ) -> Response:
        chosen = _chosen(models.EndLease, body, query)
        async with api.transaction() as connection:
            return _held(await leases.release_by_id(connection, api.database, id=id, **dict(chosen)))


def _chosen(model: type[M], body: M | None, query: BaseModel) -> M:
    """The body, or else the query, which then has to hold all of it."""
    given = query.model_dump(exclude_none=True)
    if body is not None:
        if given:
            raise invalid("give a body or a query, not both")
        return body
    missing = [name for name in model.model_fields if name not in given]
    if missing:
        raise invalid(f"{', '.join(missing)}: needed, in a JSON body or in the query")
    return model.model_validate(given)


def _held(lease: Lease | None) -> Response:
    if lease is None:
        raise not_held()
    return lease_response(lease, 200)
