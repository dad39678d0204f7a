"""`worker lease`: acquire, renew, release and list named leases; run a command while one is held."""

from __future__ import annotations

import asyncio
import functools
import json as json_text
import secrets
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from worker.cli.printing import OutputFailed, flush, print_error, print_json, print_line, print_rows, safe
from worker.cli.reaching import DataDir, Embedded, Json, Work, connected, database_of, reach, with_schema
from worker.domain_json import decode_json
from worker.errors import LeaseHeld, LeaseLost
from worker.lease_terms import DEFAULT_TTL_SECONDS
from worker.settings import Settings
from worker.store import leases, schema
from worker.store.connection import Connection, Database
from worker.store.leases import Ended, Held, Lease

if TYPE_CHECKING:
    from worker.guardian import Guardian

T = TypeVar("T")

app = typer.Typer(help="Named leases: who may do something, for how long, under which fence.", no_args_is_help=True)

EX_HELD = 73
EX_LOST = 75
LIST_COLUMNS = ("id", "resource", "state", "holder", "fence", "expires_in_ms", "ttl_seconds", "created_at", "renewed_at")
_MOST = 2**63 - 1


def _not_empty(text: str | None) -> str | None:
    """As an unset variable of a shell gives it: meant for somebody, and not for everybody's default."""
    if text == "":
        raise typer.BadParameter("it is empty")
    return text


Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The resource: 1 to 512 bytes.")]
Holder = Annotated[
    str | None, typer.Option("--holder", help="Who holds it; WORKER_NAME by default.", show_default=False, callback=_not_empty)
]
Fence = Annotated[int, typer.Option("--fence", min=1, max=_MOST, help="The fence it was acquired with.", show_default=False)]
Ttl = Annotated[float, typer.Option("--ttl", metavar="SECONDS", help="Its length: 1 s to 24 h.")]


class State(StrEnum):
    active = "active"
    expired = "expired"
    renewed = "renewed"
    released = "released"


@app.command()
def acquire(
    name: Name,
    holder: Holder = None,
    ttl: Ttl = DEFAULT_TTL_SECONDS,
    request_id: Annotated[
        str | None,
        typer.Option("--request-id", help="Asked again with the same id: the same lease.", show_default=False, callback=_not_empty),
    ] = None,
    metadata: Annotated[str, typer.Option(help="A JSON object to keep with it.")] = "{}",
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Acquire it, or say who has it (exit status 1). Nobody renews it but `worker lease renew`.

    When its fence cannot be printed it is given back (exit status 1); with --request-id it is not: ask again.
    """
    try:
        details = decode_json(metadata)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--metadata") from None
    if not isinstance(details, dict):
        raise typer.BadParameter("a JSON object is needed", param_hint="--metadata")

    async def work(connection: Connection, database: Database, settings: Settings) -> Lease | Held | Ended:
        return await leases.acquire(
            connection,
            database,
            resource=name,
            holder=holder or settings.name,
            ttl_seconds=ttl,
            request_id=request_id,
            metadata=details,
        )

    async def give_back(connection: Connection, database: Database, settings: Settings) -> None:
        assert isinstance(answer, Lease)
        await leases.let_go(connection, database, resource=name, holder=answer.holder, fence=answer.fence)

    answer = _asked(embedded, data_dir, work)
    if isinstance(answer, Lease):
        try:
            _print_lease(answer, json)
            flush()
        except (OutputFailed, BrokenPipeError) as error:
            # Nobody has heard of its fence. Under a request_id whoever asks again does, and somebody may have asked before.
            if request_id is not None:
                raise OutputFailed(f"{_reason(error)}; lease {name!r} is held: ask again with this --request-id") from None
            with_schema(embedded, data_dir, give_back)
            raise OutputFailed(f"{_reason(error)}; lease {name!r} was given back") from None
        return
    if isinstance(answer, Held):
        said = {"error": "held", "holder": answer.holder, "retry_after_ms": answer.retry_after_ms}
        text = f"lease {name!r} is held by {answer.holder or 'somebody'}, for {answer.retry_after_ms / 1000:g} s"
    else:
        said = {"error": "ended", "id": answer.id, "fence": answer.fence}
        text = f"lease {name!r}: what this request acquired (fence {answer.fence}) has ended"
    if json:
        print_json(said)
    print_error(text)
    raise typer.Exit(1)


@app.command()
def renew(
    name: Name,
    fence: Fence,
    holder: Holder = None,
    ttl: Annotated[
        float | None, typer.Option("--ttl", metavar="SECONDS", help="From now; as long as before by default.", show_default=False)
    ] = None,
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Let it go on from now. Exit status 1 when this holder does not have it under this fence any more."""

    async def work(connection: Connection, database: Database, settings: Settings) -> Lease | None:
        return await leases.renew(connection, database, resource=name, holder=holder or settings.name, fence=fence, ttl_seconds=ttl)

    _answer(name, fence, _asked(embedded, data_dir, work), json)


@app.command()
def release(
    name: Name,
    fence: Fence,
    holder: Holder = None,
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """End it at once; again with the same fence: the same answer. Exit status 1 when this holder does not have it."""

    async def work(connection: Connection, database: Database, settings: Settings) -> Lease | None:
        # One transaction: a rival that acquires behind the release would make what was released look as if it had not been held.
        async with connection.transaction(isolation="read_committed"):
            return await leases.release(connection, database, resource=name, holder=holder or settings.name, fence=fence)

    _answer(name, fence, _asked(embedded, data_dir, work), json)


@app.command("list")
def list_leases(
    state: Annotated[State | None, typer.Option("--state", help="Only those; all by default.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Show at most so many.")] = 50,
    json: Json = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """List leases, in the order in which their names were first used."""

    async def work(connection: Connection, database: Database, settings: Settings) -> list[Lease]:
        return await leases.list_leases(connection, database, which="all" if state is None else state.value, limit=limit)

    found = [_shown(lease) for lease in with_schema(embedded, data_dir, work)]
    if json:
        print_json(found)
    else:
        print_rows(
            LIST_COLUMNS,
            [[lease[column] for column in LIST_COLUMNS] for lease in found],
            nothing="no leases",
            folded=("resource", "holder"),
            spared=("ttl_seconds", "created_at", "renewed_at"),
        )


@app.command()
def run(
    name: Name,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", show_default=False, help="What to run.")],
    wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", help="Wait so long for it, if it is held.")] = 0.0,
    ttl: Ttl = DEFAULT_TTL_SECONDS,
    holder: Annotated[
        str | None,
        typer.Option(
            "--holder", help="Who holds it; WORKER_NAME and random digits by default.", show_default=False, callback=_not_empty
        ),
    ] = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Run a command only while the lease is held, with WORKER_LEASE_FENCE in its environment.

    The lease is renewed for as long as the command runs. When it is lost the command's process group is stopped, TERM first, KILL
    before the lease can pass on; what the command leaves of its group when it exits is stopped as well, and then the lease is
    released. Exits with the command's status (128 + n for signal n, 126 or 127 when it cannot be started); 73 when the lease was
    not to be had, 75 when it was lost.
    """
    from worker.guardian import Guardian

    guardian = Guardian.start()  # forks: before anything starts a thread
    try:
        with reach(embedded, data_dir) as settings:
            if embedded:
                asyncio.run(_migrate(settings))
            status = asyncio.run(_run(settings, guardian, name, command, wait=wait, ttl=ttl, holder=holder))
    finally:
        guardian.end()
    raise typer.Exit(status)


async def _migrate(settings: Settings) -> None:
    """A private PostgreSQL gets the schema here: nobody else would give it one."""
    database = database_of(settings)
    async with connected(database) as connection:
        await schema.migrate(connection, database.schema)


async def _run(
    settings: Settings, guardian: Guardian, name: str, command: list[str], *, wait: float, ttl: float, holder: str | None
) -> int:
    from worker.lease_command import CannotStart, LeasedCommand
    from worker.lease_transport import DatabaseTransport
    from worker.leases import Leases

    holding = Leases(transport=functools.partial(DatabaseTransport, database_of(settings)))
    try:
        hold = holding.hold(name, ttl_seconds=ttl, wait_seconds=wait, holder=holder or f"{settings.name}-{secrets.token_hex(4)}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        async with holding:
            return await LeasedCommand(command, guardian, ttl_seconds=ttl).run(hold)
    except LeaseHeld as error:
        print_error(str(error))
        return EX_HELD
    except LeaseLost as error:
        print_error(f"{error}: the command was stopped")
        return EX_LOST
    except CannotStart as error:
        print_error(str(error))
        return error.status


def _reason(error: OutputFailed | BrokenPipeError) -> str:
    return str(error.strerror if isinstance(error, BrokenPipeError) else error)


def _asked(embedded: bool, data_dir: Path | None, work: Work[T]) -> T:
    try:
        return with_schema(embedded, data_dir, work)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _answer(name: str, fence: int, lease: Lease | None, json: bool) -> None:
    """Print the lease; without one say so, and exit with 1."""
    if lease is not None:
        _print_lease(lease, json)
        return
    if json:
        print_json({"error": "not_held"})
    print_error(f"lease {name!r} is not held by this holder under fence {fence}")
    raise typer.Exit(1)


def _print_lease(lease: Lease, json: bool) -> None:
    shown = _shown(lease)
    if json:
        print_json(shown)
        return
    for field, value in shown.items():
        if field == "metadata":
            value = json_text.dumps(value, ensure_ascii=False)
        print_line(f"{field}: {'-' if value is None else safe(str(value))}")


def _shown(lease: Lease) -> dict[str, object]:
    return {field: _moment(value) if isinstance(value, datetime) else value for field, value in asdict(lease).items()}


def _moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # as they come: in UTC
