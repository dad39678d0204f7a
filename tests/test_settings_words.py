"""Settings that are words: queues, handlers, names, levels, directories; what cannot be meant is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.loaded_settings import loaded, refusals


def test_queues_are_trimmed_and_listed_once() -> None:
    assert loaded(WORKER_QUEUES=" b, a ,b").queues == ("b", "a")
    assert loaded(WORKER_QUEUES="ü" * 64).queues == ("ü" * 64,)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("WORKER_QUEUES", "a,,b"),
        ("WORKER_QUEUES", "a" * 129),
        ("WORKER_QUEUES", "ü" * 65),
        ("WORKER_QUEUES", "a\x00b"),
        ("WORKER_QUEUES", "a,\udcff"),
        ("WORKER_HANDLERS", "app.jobs"),
        ("WORKER_HANDLERS", "app/jobs.py:handlers"),
        ("WORKER_HANDLERS", "app..jobs:handlers"),
        ("WORKER_SCHEMA", "s" * 64),
        ("WORKER_SCHEMA", "pg_jobs"),
        ("WORKER_SCHEMA", "o'd\"d"),
        ("WORKER_SCHEMA", "{schema}"),
        ("WORKER_SCHEMA", "s\udcff"),
        ("WORKER_NAME", "two words"),
        ("WORKER_NAME", "http:me"),
        ("WORKER_NAME", "n" * 120),
        ("WORKER_LOG_LEVEL", "verbose"),
        ("WORKER_LOG_FORMAT", "xml"),
        ("WORKER_POOLER", "session"),
        ("WORKER_RUNTIME_DIR", "a\x00b"),
        ("WORKER_CONNECT_WAIT_SECONDS", "never"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(variable: str, text: str) -> None:
    (line,) = refusals(**{variable: text})
    assert line.startswith(f"{variable}='")
    assert " must be " in line


def test_levels_are_read_in_any_case() -> None:
    assert loaded(WORKER_LOG_LEVEL="INFO").log_level == "info"


def test_the_name_of_any_host_fits_an_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "näme with:odd/parts." + "x" * 300)
    name = loaded().name
    assert name.startswith("n-me-with-odd-parts.x")
    assert len(f"{name}-12345678".encode()) == 128
    monkeypatch.setattr("socket.gethostname", lambda: "")
    assert loaded().name == "worker"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b", "XDG_RUNTIME_DIR": "/x"}, "/run/a"),
        ({"XDG_RUNTIME_DIR": "/x", "TMPDIR": "/t"}, "/x"),
        ({"TMPDIR": "/t"}, "/t"),
        ({}, "/tmp"),
        ({"WORKER_RUNTIME_DIR": "/w", "RUNTIME_DIRECTORY": "/run/a"}, "/w"),
        ({"WORKER_RUNTIME_DIR": "here"}, f"{os.getcwd()}/here"),
    ],
)
def test_the_runtime_directory_is_the_first_that_is_named(variables: dict[str, str], expected: str) -> None:
    assert loaded(**variables).runtime_dir == Path(expected)
