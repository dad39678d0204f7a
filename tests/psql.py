"""psql as a user would call it, and the files of ours that it is given."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.servers import SCHEMA_SQL
from worker.server_programs import programs_for, server_account

GRANTS = ROOT / "deploy" / "grants.sql"
ODD = 'Odd-"Name"'
"""The name of a schema that has to be quoted."""


def psql(dsn: str, *arguments: str, schema: str = "public") -> subprocess.CompletedProcess[str]:
    """Run psql with `schema` first in the search_path; the test is skipped where there is none."""
    program = shutil.which("psql") or str(programs_for(server_account(Path("/nonexistent"))) / "psql")
    if not os.access(program, os.X_OK):
        pytest.skip("there is no psql here")
    quoted = '"' + schema.replace('"', '""') + '"'
    return subprocess.run(
        [program, dsn, "-X", "-q", "-v", "ON_ERROR_STOP=1", *arguments],
        env=os.environ | {"PGOPTIONS": f"-csearch_path={quoted}"},
        capture_output=True,
        text=True,
        timeout=30,
    )


def apply_by_psql(dsn: str, schema: str) -> subprocess.CompletedProcess[str]:
    """schema.sql, into this schema."""
    return psql(dsn, "-f", str(SCHEMA_SQL), schema=schema)


def grant(dsn: str, what: str, role: str, *, schema: str = "public") -> None:
    """Give a role what deploy/grants.sql has for it: `what` is `daemon` or `application`."""
    granted = psql(dsn, "-v", f"{what}={role}", "-v", f"schema={schema}", "-f", str(GRANTS))
    assert granted.returncode == 0, granted.stderr
