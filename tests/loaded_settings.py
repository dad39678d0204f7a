"""Settings as they are read from variables, with a database to go with them."""

from __future__ import annotations

import pytest

from worker.errors import ConfigError
from worker.settings import (
    Settings,
    load_settings,
)

URL = "postgresql://somebody:a-secret@db.example/app"


def loaded(**variables: str) -> Settings:
    return load_settings({"DATABASE_URL": URL, **variables})


def refusals(**variables: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        loaded(**variables)
    return refused.value.lines
