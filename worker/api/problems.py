"""What goes wrong, in one shape: `{"error": code, "message": text}`, with the status that means it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match, Route, compile_path

from worker import events, logs
from worker.store.connection import DATABASE_ERRORS, is_unavailable, sqlstate

if TYPE_CHECKING:
    from fastapi import FastAPI

JSON = "application/json"
RETRY_AFTER_SECONDS = 1
_MESSAGE_CHARACTERS = 500
_LOCK_NOT_AVAILABLE = "55P03"
_QUERY_CANCELED = "57014"


class Problem(HTTPException):
    """A refusal that the caller can act on. `more`: further fields of the answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code = code
        self.message = message
        self.more = more or {}

    def body(self) -> bytes:
        return orjson.dumps({"error": self.code, "message": self.message, **self.more})

    def response(self) -> Response:
        return Response(self.body(), self.status_code, headers=dict(self.headers or {}), media_type=JSON)


AWAY: tuple[type[Exception], ...] = (Problem, *DATABASE_ERRORS)
"""Whatever asking the database may raise in here."""


def invalid(message: str) -> Problem:
    return Problem(422, "invalid", message[:_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode())


def _later(code: str, message: str) -> Problem:
    return Problem(503, code, message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def database_unavailable() -> Problem:
    return _later("database_unavailable", "the database is away; try again")


def overloaded() -> Problem:
    return _later("overloaded", "too many requests wait; try again")


def busy() -> Problem:
    return _later("busy", "another transaction holds it, or the database takes too long; try again")


def of_database(error: BaseException) -> Problem:
    """The answer to an error of the database; what is neither an outage nor a matter of waiting is a bug, and logged as one."""
    code = sqlstate(error)
    if code in (_LOCK_NOT_AVAILABLE, _QUERY_CANCELED):
        return busy()
    if is_unavailable(error):
        return database_unavailable()
    logs.emit(events.INTERNAL_ERROR, where="http", exception=error)
    return internal()


def internal() -> Problem:
    """Never says what it was: that is in the log."""
    return Problem(500, "internal", "internal error; the log says more")


class _Id(Convertor[int]):
    """`{id:id}` in the path of a route. The framework's own `int` takes digits without end, and Python makes no number of 5,000."""

    regex = "[0-9]{1,19}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("id", _Id())


def install(app: FastAPI) -> None:
    """Whatever is raised in a route becomes an answer in the one shape. To be called when all routes are there."""
    # The framework finds no route for `/api/tasks/abc`; for `/api/tasks/0` it does.
    with_id = [compile_path(route.path.replace("{id:id}", "{id}"))[0] for route in _routes(app) if "{id:id}" in route.path]

    async def known(_: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return error.response()

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return refused_input(error.errors()).response()

    async def of_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        if error.status_code == 404:
            if any(pattern.match(request.scope["path"]) for pattern in with_id):
                return invalid("id: must be a whole number, 1 or more").response()
            return Problem(404, "not_found", "there is no such route").response()
        if error.status_code == 405:
            return Problem(405, "method_not_allowed", "not with this method", headers={"Allow": _methods(app, request)}).response()
        if error.status_code == 400:
            return invalid("the body cannot be read").response()
        return Problem(error.status_code, "refused", "refused").response()

    async def of_store(_: Request, error: Exception) -> Response:
        return of_database(error).response()

    async def bug(_: Request, error: Exception) -> Response:
        return internal().response()  # whoever called the app logs it

    app.add_exception_handler(Problem, known)
    app.add_exception_handler(RequestValidationError, refused)
    app.add_exception_handler(StarletteHTTPException, of_framework)
    for kind in DATABASE_ERRORS:
        app.add_exception_handler(kind, of_store)
    app.add_exception_handler(Exception, bug)


def refused_input(faults: Sequence[Any]) -> Problem:
    """Of pydantic's errors location and rule, never the value: it may be a payload or a secret."""
    return invalid("; ".join(f"{_place(fault['loc'])}: {fault['msg']}" for fault in faults[:10]))


def _place(location: tuple[int | str, ...]) -> str:
    """`("body", "kinds", 0)` → `kinds.0`; the name of an unknown field is the caller's, so it is cut and made printable."""
    if not location:
        return "the body"
    parts = location[1:] if location[0] in ("body", "query", "path") and len(location) > 1 else location
    text = ".".join(map(str, parts))
    return "".join(one if one.isprintable() else "?" for one in text[:100])


def _methods(app: FastAPI, request: Request) -> str:
    """The methods of every route with this path; the framework names those of the first one only."""
    found = {
        method for route in _routes(app) if route.matches(request.scope)[0] is not Match.NONE for method in route.methods or ()
    }
    return ", ".join(sorted(found))


def _routes(app: FastAPI) -> list[Route]:
    return [route for route in app.routes if isinstance(route, Route)]
