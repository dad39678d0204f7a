"""`/api/tasks`: enqueue, look, claim, and what a remote worker says of its attempt."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Path, Query, Request, Response

from worker.api import models
from worker.api.connections import CONNECTION
from worker.api.heartbeats import Beat
from worker.api.judging import Verb, remote_failure
from worker.api.models import MAX_BIGINT
from worker.api.outcomes import Ending
from worker.api.problems import Problem, busy, invalid
from worker.api.rendering import cursor_of, read_cursor, task_page, task_response
from worker.api.state import Api
from worker.api.strict import CONFLICT, NOT_FOUND, Answers
from worker.domain import Failed, Released, Succeeded
from worker.domain_json import encode_json
from worker.new_job import NewJob, new_job
from worker.store import standbys, tasks
from worker.store.bulk import enqueue_checked
from worker.store.connection import DATABASE_ERRORS, sqlstate
from worker.store.enqueueing import PAYLOAD_BYTES, refuse_oversized
from worker.store.tasks import OWNER_PREFIX, Task, Which

Id = Annotated[int, Path(ge=1, le=MAX_BIGINT)]
Page = Annotated[models.PageQuery, Query()]

_REFUSED: Answers = NOT_FOUND | CONFLICT
# Shorter text cannot become more than 1 MiB of jsonb: "1," takes the most, 12 bytes for 2 characters.
_SURELY_FITTING_CHARACTERS = 150_000


def add_task_routes(app: FastAPI, api: Api) -> None:

    async def page(which: Which, query: models.PageQuery) -> Response:
        before_id = read_cursor(f"tasks.{which}", query.cursor)
        async with api.connection() as connection:
            found = await tasks.list_tasks(
                connection, api.database, which=which, before_id=MAX_BIGINT if before_id is None else before_id, limit=query.limit
            )
        next_cursor = cursor_of(f"tasks.{which}", found.tasks[-1].id) if found.has_more else None
        return task_page(found.tasks, next_cursor)

    @app.get("/api/tasks", tags=["tasks"], response_model=models.TaskPage, summary="All tasks, newest first")
    async def list_all(query: Page) -> Response:
        return await page("all", query)

    @app.get("/api/tasks/started", tags=["tasks"], response_model=models.TaskPage, summary="Tasks that somebody works on")
    async def list_started(query: Page) -> Response:
        return await page("started", query)

    @app.get(
        "/api/tasks/processed",
        tags=["tasks"],
        response_model=models.TaskPage,
        summary="Tasks that have ended: succeeded, dead or cancelled",
    )
    async def list_processed(query: Page) -> Response:
        return await page("processed", query)

    @app.post(
        "/api/tasks",
        tags=["tasks"],
        status_code=201,
        response_model=models.Task,
        responses={200: {"model": models.Task, "description": "the key existed"}},
        summary="Enqueue",
    )
    async def create(body: models.NewTask) -> Response:
        try:
            job = new_job(**{name: getattr(body, name) for name in models.NewTask.model_fields})
        except (TypeError, ValueError) as error:
            raise invalid(str(error)) from None
        task, created = await _enqueue(api, job)
        return task_response(task, 201 if created else 200)

    @app.get("/api/tasks/{id:id}", tags=["tasks"], response_model=models.Task, responses=NOT_FOUND, summary="One task")
    async def show(id: Id) -> Response:
        async with api.connection() as connection:
            task = await tasks.get(connection, api.database, id=id)
        if task is None:
            raise Problem(404, "not_found", "there is no such task")
        return task_response(task, 200)

    @app.post(
        "/api/tasks/next",
        tags=["tasks"],
        response_model=models.Task,
        responses={204: {"description": "nothing is due"}},
        summary="Claim the next task",
    )
    async def claim(body: models.ClaimTask, request: Request) -> Response:
        api.require_database()
        grant = await api.claims.next(
            processor=body.processor,
            queue=body.queue,
            kinds=body.kinds,
            lease_seconds=api.settings.lease_seconds if body.lease_seconds is None else body.lease_seconds,
            request_id=body.request_id,
        )
        if grant is None:
            return Response(status_code=204)
        if request.scope["state"][CONNECTION].is_gone:
            grant.refuse()
        return task_response(grant.task, 200)

    async def end(verb: Verb, id: int, body: models.HoldTask, outcome: Succeeded | Failed | Released) -> Response:
        api.require_database()
        ending = Ending(verb, id, body.fence, f"{OWNER_PREFIX}{body.processor}", outcome)
        return task_response(await api.outcomes.end(ending), 202)

    @app.put(
        "/api/tasks/{id:id}/heartbeat",
        tags=["tasks"],
        status_code=202,
        response_model=models.Task,
        responses=_REFUSED,
        summary="Renew the lease",
    )
    async def heartbeat(id: Id, body: models.HoldTask) -> Response:
        api.require_database()
        return task_response(await api.heartbeats.renew(Beat(id, body.fence, f"{OWNER_PREFIX}{body.processor}")), 202)

    @app.put(
        "/api/tasks/{id:id}/complete",
        tags=["tasks"],
        status_code=202,
        response_model=models.Task,
        responses=_REFUSED,
        summary="The attempt succeeded",
    )
    async def complete(id: Id, body: models.CompleteTask) -> Response:
        result = None if body.output is None else await _storable(api, body.output)
        return await end("complete", id, body, Succeeded(result=result, effects=()))

    @app.put(
        "/api/tasks/{id:id}/fail",
        tags=["tasks"],
        status_code=202,
        response_model=models.Task,
        responses=_REFUSED,
        summary="The attempt failed: again later, or dead",
    )
    async def fail(id: Id, body: models.FailTask) -> Response:
        return await end("fail", id, body, remote_failure(body.error))

    @app.put(
        "/api/tasks/{id:id}/release",
        tags=["tasks"],
        status_code=202,
        response_model=models.Task,
        responses=_REFUSED,
        summary="Give the task back, attempt refunded",
    )
    async def release(id: Id, body: models.HoldTask) -> Response:
        return await end("release", id, body, Released(reason="requested"))


async def _enqueue(api: Api, job: NewJob) -> tuple[Task, bool]:
    async with api.connection() as connection:
        try:
            await refuse_oversized(connection, job)
            [enqueued] = await enqueue_checked(connection, [job], schema=api.database.schema)
            if not enqueued.created:
                await standbys.prove(connection)
        except ValueError as error:
            raise invalid(str(error)) from None
        except DATABASE_ERRORS as error:
            raise _refused_value(error, "the task") or error from None
        task = await tasks.get(connection, api.database, id=enqueued.id)
    if task is None:  # it was there, and has been pruned since
        raise busy()
    return task, enqueued.created


async def _storable(api: Api, output: object) -> str:
    """JSON text that can be stored as a result. Raises Problem before anything is changed."""
    try:
        text = encode_json(output, "output")
    except (TypeError, ValueError) as error:
        raise invalid(str(error)) from None
    if len(text) <= _SURELY_FITTING_CHARACTERS:
        return text
    async with api.connection() as connection:
        try:
            size = await tasks.measure_result(connection, text)
        except DATABASE_ERRORS as error:
            raise _refused_value(error, "output") or error from None
    if size > PAYLOAD_BYTES:
        raise invalid(f"output: 1 MiB ({PAYLOAD_BYTES:,} bytes) as stored is allowed, this has {size:,}")
    return text


def _refused_value(error: BaseException, what: str) -> Problem | None:
    """PostgreSQL cannot hold this value (class 22: data, 23: constraint, 54: too complex)."""
    code = sqlstate(error) or ""
    return invalid(f"{what}: PostgreSQL cannot store it (SQLSTATE {code})") if code[:2] in ("22", "23", "54") else None
