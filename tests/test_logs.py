"""Logs: the names of events, and what they are inside an application that has logs of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from worker import events, log_lines, logs


@pytest.fixture
def unconfigured() -> Iterator[None]:
    assert logs._output is None
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("unconfigured")
def test_an_application_without_structlog_gets_log_records(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker")
    logs.emit(events.JOB_CLAIMED, job_id=1)
    logs.emit(events.DAEMON_STARTED, name="w", workers=4, error=ValueError("bad"))
    logs.job_logger(job_id=3).warning("mine", name="x")
    first, second = caplog.records
    assert (first.name, first.levelname, first.event) == ("worker", "INFO", "daemon_started")
    assert (first.name_, first.workers, first.error) == ("w", 4, "bad")
    assert first.getMessage() == "daemon_started name=w workers=4 error=bad"
    assert (second.name, second.levelname, second.event, second.job_id) == (
        "worker.job",
        "WARNING",
        "mine",
        3,
    )


@pytest.mark.usefixtures("unconfigured")
def test_an_application_with_structlog_gets_its_own_events() -> None:
    structlog.configure(processors=[structlog.testing.LogCapture()])
    with structlog.testing.capture_logs() as captured:
        logs.emit(events.JOB_FAILED, job_id=1, error="bad")
        logs.job_logger(job_id=2).info("mine")
    assert captured == [
        {"event": "job_failed", "log_level": "warning", "job_id": 1, "error": "bad"},
        {"event": "mine", "log_level": "info", "job_id": 2},
    ]


def test_event_names_are_unique_and_no_event_has_a_payload() -> None:
    said = [(event.name, event.level) for event in events.ALL]
    assert len(said) == len(set(said)) > 30
    assert len({event.name for event in events.ALL}) == len({(event.name, event.fields) for event in events.ALL})
    assert not [event for event in events.ALL if "payload" in event.fields]
    assert not [event for event in events.ALL if log_lines.RESERVED & set(event.fields)]
