"""What a long-running process says that cannot even begin: in its log, like everything else of it."""

from __future__ import annotations

import os
import secrets
import socket

import typer

from worker import ending, logs
from worker.errors import ConfigError
from worker.settings import fit_name
from worker.version import VERSION


def refused(error: ConfigError) -> typer.Exit:
    """Log what is wrong; the exit to raise. The settings that would say how to log may be what is wrong."""
    console = os.environ.get("WORKER_LOG_FORMAT", "").strip().lower() == "console"
    name = fit_name(os.environ.get("WORKER_NAME", "").strip() or socket.gethostname())
    logs.configure(format="console" if console else "json", worker=f"{name}-{secrets.token_hex(4)}", version=VERSION)
    status = ending.status_of(error, where="start")
    logs.flush(1)
    return typer.Exit(status)
