"""What requests and answers look like: checked field by field, and the source of the OpenAPI document.

Requests are strict: no field that is not here, no number in quotes. Answers are written by `rendering`; their models describe them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from worker.lease_terms import (
    MAX_HOLDER_BYTES,
    MAX_REQUEST_ID_BYTES,
    MAX_RESOURCE_BYTES,
    MAX_TTL_SECONDS,
    MIN_TTL_SECONDS,
    check_name,
)
from worker.new_job import DEFAULT_KIND, DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE, KEY_BYTES, MAX_DELAY_SECONDS, NAME_BYTES

MAX_BIGINT = 2**63 - 1
MAX_KINDS = 100
MAX_PAGE = 500


def _bytes(most: int) -> AfterValidator:
    def check(text: str) -> str:
        return check_name("it", text, most)

    return AfterValidator(check)


def _moment(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("a text such as 2030-01-31T08:00:00Z is needed")
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("no ISO 8601 moment such as 2030-01-31T08:00:00Z") from None
    if moment.utcoffset() is None:
        raise ValueError("no time zone, so it is no moment: add one, for example Z")
    return moment


def _any_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a text is needed")
    return value


Key = Annotated[str, Field(min_length=1, max_length=KEY_BYTES), _bytes(KEY_BYTES)]
Name = Annotated[str, Field(min_length=1, max_length=NAME_BYTES), _bytes(NAME_BYTES)]
Holder = Annotated[str, Field(min_length=1, max_length=MAX_HOLDER_BYTES), _bytes(MAX_HOLDER_BYTES)]
Resource = Annotated[str, Field(min_length=1, max_length=MAX_RESOURCE_BYTES), _bytes(MAX_RESOURCE_BYTES)]
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID_BYTES), _bytes(MAX_REQUEST_ID_BYTES)]
Fence = Annotated[int, Field(ge=1, le=MAX_BIGINT)]
Seconds = Annotated[float, Field(ge=MIN_TTL_SECONDS, le=MAX_TTL_SECONDS)]
# Cleaned like a local error, never refused: an attempt that cannot be failed would only wait for its lease to end.
ErrorText = Annotated[str, PlainValidator(_any_text), WithJsonSchema({"type": "string"})]
Json = Annotated[object, WithJsonSchema({"description": "any JSON value"})]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NewTask(_Request):
    """A job to enqueue. With a `key` that exists, that job is the answer."""

    payload: Json
    kind: Name = DEFAULT_KIND
    key: Key | None = None
    queue: Name = DEFAULT_QUEUE
    priority: Annotated[int, Field(ge=-32_768, le=32_767)] = 0
    run_at: Annotated[datetime, BeforeValidator(_moment)] | None = None
    delay_seconds: Annotated[float, Field(ge=0, le=MAX_DELAY_SECONDS)] | None = None
    max_attempts: Annotated[int, Field(ge=1, le=2_147_483_647)] = DEFAULT_MAX_ATTEMPTS


class ClaimTask(_Request):
    """A remote worker asks for its next task. The same `request_id` again: the same task, while its lease lives."""

    processor: Holder
    queue: Name = DEFAULT_QUEUE
    # One fault is enough to hear of: a body has room for a million of them.
    kinds: Annotated[list[Name], Field(min_length=1, max_length=MAX_KINDS, fail_fast=True)] | None = None
    lease_seconds: Seconds | None = None
    request_id: RequestId | None = None


class HoldTask(_Request):
    """Who says it, and under which fence: a heartbeat, a release."""

    processor: Holder
    fence: Fence


class CompleteTask(HoldTask):
    output: Json = None


class FailTask(HoldTask):
    error: ErrorText = "no reason given"


class AcquireLease(_Request):
    resource: Resource
    holder: Holder
    ttl_seconds: Seconds = 30.0
    request_id: RequestId | None = None
    metadata: dict[str, object] = Field(default_factory=dict)


class RenewLease(_Request):
    resource: Resource
    holder: Holder
    fence: Fence


class EndLease(_Request):
    """`holder` and `fence` of a release by id."""

    holder: Holder
    fence: Fence


class EndLeaseQuery(BaseModel):
    """The same in the query, for clients that cannot send a body with DELETE."""

    model_config = ConfigDict(extra="forbid")

    holder: Holder | None = None
    fence: Fence | None = None


class LeaseQuery(EndLeaseQuery):
    """The fields of `RenewLease`."""

    resource: Resource | None = None


class PageQuery(BaseModel):
    """Which part of a list. `cursor` is `next` of the page before."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 100
    cursor: Annotated[str, Field(max_length=200)] | None = None


# --- answers


class Error(BaseModel):
    error: str
    message: str


class HeldError(Error):
    holder: str | None
    retry_after_ms: int


class Task(BaseModel):
    id: int
    key: str
    kind: str
    queue: str
    payload: Json
    state: Literal["ready", "running", "succeeded", "dead", "cancelled"]
    processor: str | None
    fence: int
    attempt: int
    scheduled_at: str
    started_at: str | None
    last_heartbeat_at: str | None
    expires_in_ms: int | None
    completed_at: str | None
    output: Json


class TaskPage(BaseModel):
    items: list[Task]
    next: str | None


class Lease(BaseModel):
    id: int
    resource: str
    holder: str
    fence: int
    ttl_seconds: float
    metadata: dict[str, object]
    state: Literal["active", "expired", "released"]
    expires_in_ms: int
    created_at: datetime
    renewed_at: datetime | None
    released_at: datetime | None


class LeasePage(BaseModel):
    items: list[Lease]
    next: str | None


class WorkerStatus(BaseModel):
    status: Literal["STARTED", "STOPPED"]


class LeaseOverview(LeasePage):
    worker: WorkerStatus
    """Whether this process runs a pool."""


class Generator(BaseModel):
    state: Literal["STARTED", "STOPPED"]
    holder: str | None
    fence: int | None
    rate: float
    produced: int


class Health(BaseModel):
    status: Literal["ok"]


class Readiness(BaseModel):
    status: Literal["ready"]
