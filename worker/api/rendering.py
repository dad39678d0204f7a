"""Answers as bytes. A payload or output goes out as the JSON text that is stored, exact to the last digit."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import asdict

import orjson
from fastapi import Response

from worker.api.problems import JSON, invalid
from worker.domain_json import encode_json
from worker.store.generating import GeneratorStatus
from worker.store.leases import Lease
from worker.store.tasks import Task


def json_response(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_UTC_Z), status, media_type=JSON)


def task_response(task: Task, status: int) -> Response:
    return json_response(_task(task), status)


def task_page(tasks: Sequence[Task], next_cursor: str | None) -> Response:
    return json_response({"items": [_task(task) for task in tasks], "next": next_cursor})


def lease_response(lease: Lease, status: int) -> Response:
    return json_response(_lease(lease), status)


def lease_page(leases: Sequence[Lease], next_cursor: str | None, **more: object) -> Response:
    return json_response({"items": [_lease(lease) for lease in leases], "next": next_cursor, **more})


def generator_response(status: GeneratorStatus) -> Response:
    shown = {name: getattr(status, name) for name in ("state", "holder", "fence", "rate", "produced")}
    return json_response(shown)


def _task(task: Task) -> dict[str, object]:
    fields = task._asdict()
    fields["payload"] = orjson.Fragment(task.payload)
    fields["output"] = None if task.output is None else orjson.Fragment(task.output)
    return fields


def _lease(lease: Lease) -> dict[str, object]:
    fields = asdict(lease)
    try:
        # Not orjson's own, which knows no integer beyond 64 bits.
        fields["metadata"] = orjson.Fragment(encode_json(lease.metadata, "metadata"))
    except ValueError:
        fields["metadata"] = {}  # written by hand in SQL: a number that only PostgreSQL can read
    return fields


def cursor_of(list_name: str, id: int) -> str:
    """Where the next page of this list begins; opaque to callers."""
    return base64.urlsafe_b64encode(f"{list_name}:{id}".encode()).decode().rstrip("=")


def read_cursor(list_name: str, cursor: str | None) -> int | None:
    """The id in a cursor of this list. Raises Problem for anything else, a cursor of another list among it."""
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        name, _, id = base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True).decode("ascii").partition(":")
        if name == list_name and id.isdecimal() and cursor_of(name, int(id)) == cursor and int(id) < 2**63:
            return int(id)
    except (ValueError, binascii.Error):
        pass
    raise invalid("cursor: not one that this list has given")
