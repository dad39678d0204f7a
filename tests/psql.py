"""psql as a user would call it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from worker.server_programs import programs_for, server_account


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
