"""`worker serve`: the HTTP interface. What it needs is an extra, imported only here."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from worker.cli.reaching import DataDir, Embedded, reach
from worker.cli.refusal import refused
from worker.errors import ConfigError

NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client")


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback it needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes one that is free.")] = 8080,
    embedded: Embedded = False,
    data_dir: DataDir = None,
) -> None:
    """Serve the HTTP interface: tasks for workers in any language, named leases, the generator, health and metrics."""
    require_extra()
    from worker.api import server

    try:
        with reach(embedded, data_dir) as settings:
            status = server.run(settings, host=host, port=port, migrate=embedded)
    except ConfigError as error:
        raise refused(error) from None
    raise typer.Exit(status)


def require_extra() -> None:
    """Raises ConfigError (exit status 78) where the packages of the extra are missing."""
    missing = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise ConfigError(f'{", ".join(missing)} cannot be imported: pip install "reliable-worker[http]"')


def http_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, an IPv6 address in brackets, once the extra is known to be there."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise typer.BadParameter(f"{text!r} is not HOST:PORT, as in 127.0.0.1:8080", param_hint="--serve")
    require_extra()
    return host, int(port)
