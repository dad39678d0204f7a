"""Routes that take what they name and nothing else: no unknown query, and bodies that are strict JSON: no NaN, no number that
would be rounded to infinity, integers exact."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from worker.api import models
from worker.api.problems import JSON, invalid, refused_input
from worker.domain_json import decode_json

M = TypeVar("M", bound=BaseModel)
Answers = dict[int | str, dict[str, Any]]

MOST_FIELDS = 50
UNAUTHORIZED: Answers = {401: {"model": models.Error, "description": "no token, or not an accepted one"}}
COMMON: Answers = UNAUTHORIZED | {
    403: {"model": models.Error, "description": "without tokens: not from this machine's own programs"},
    408: {"model": models.Error, "description": "the body did not come in time"},
    413: {"model": models.Error, "description": "the body is too large"},
    422: {"model": models.Error, "description": "bad input"},
    503: {"model": models.Error, "description": "the database is away, or too much waits"},
}
"""What every route may answer."""
NOT_FOUND: Answers = {404: {"model": models.Error, "description": "there is none"}}
CONFLICT: Answers = {409: {"model": models.Error, "description": "not_owner, already_processed or lease_expired"}}


class StrictRoute(APIRoute):
    """A route of this interface. One that takes a body, and at most ids from the path, reads them here: the framework's machinery
    for dependencies, which it does not use, would cost a claim more than the database does. A query in its place is left to the
    framework."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        of = self.dependant
        self._takes_no_query = self.path.startswith("/api/") and not of.query_params
        elsewhere = (*of.header_params, *of.cookie_params, *of.dependencies)
        if len(of.body_params) == 1 and not elsewhere:
            hints = get_type_hints(self.endpoint)
            self._body_name = of.body_params[0].name
            [self._model] = [one for one in get_args(hints[self._body_name]) or (hints[self._body_name],) if one is not NoneType]
            self._without_query = {query.name: hints[query.name]() for query in of.query_params}
            self._answer_query = self.app
            self.app = self._answer

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            self._refuse_query(request.scope)
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly

    def _refuse_query(self, scope: Scope) -> None:
        """Whoever asks for more than there is must not take the answer for all of it. A query that is declared checks itself."""
        if self._takes_no_query and scope["query_string"]:
            raise invalid("the query: none is taken here")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._refuse_query(scope)
        if self._without_query and (scope["query_string"] or not _has_body(scope)):
            await self._answer_query(scope, receive, send)
            return
        request = Request(scope, receive)
        values: dict[str, Any] = self._without_query | {
            self._body_name: read_body(self._model, request.headers.get("content-type"), await request.body())
        }
        for name, value in scope["path_params"].items():
            if not 1 <= value <= models.MAX_BIGINT:
                raise invalid(f"{name}: must be from 1 to {models.MAX_BIGINT}")
            values[name] = value
        if self.dependant.request_param_name is not None:
            values[self.dependant.request_param_name] = request
        response: Response = await self.endpoint(**values)
        await response(scope, receive, send)


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def read_body(model: type[M], content_type: str | None, body: bytes) -> M:
    """The checked body. Raises Problem that names what is wrong with it, never what it holds."""
    if (content_type or "").partition(";")[0].strip().lower() != JSON:
        raise invalid(f"the body must be JSON, said so by Content-Type: {JSON}")
    given = _decoded(body)
    if isinstance(given, dict) and len(given) > MOST_FIELDS:  # each would be a fault of its own, and there is room for many
        raise invalid(f"the body: {len(given):,} fields, of which no route knows more than {MOST_FIELDS}")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise refused_input(error.errors(include_url=False, include_context=False, include_input=False)) from None


def _decoded(body: bytes) -> object:
    try:
        return decode_json(body)
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # Python's words are about Python
            raise invalid(f"an integer in the body has more than {sys.get_int_max_str_digits():,} digits") from None
        # What Python says of text that is no JSON holds positions, not the text.
        raise invalid(f"the body is not JSON: {error}") from None


class _StrictRequest(Request):
    async def json(self) -> object:
        return _decoded(await self.body())
