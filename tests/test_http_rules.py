"""Rules of the HTTP interface that need no server: what an attempt is told, cursors, tokens, addresses."""

from __future__ import annotations

import contextlib
import json
import socket
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from worker.api import models
from worker.api.auth import Tokens, addresses_of, check_local_caller, is_loopback, require_tokens
from worker.api.judging import VERBS, judge, remote_failure
from worker.api.problems import Problem
from worker.api.rendering import cursor_of, read_cursor
from worker.api.strict import MOST_FIELDS, read_body
from worker.errors import ConfigError
from worker.store.tasks import Standing, Task

FENCE = 7


def standing(
    state: str,
    *,
    fence: int = FENCE,
    owner: str | None = None,
    claimed_by: str | None = "me",
    live: bool = True,
    failure: str | None = None,
) -> Standing:
    task = Task(1, "k", "kind", "q", "{}", state, None, fence, 1, "", None, None, None, None, None)
    return Standing(owner, claimed_by, live, 30.0, failure, 1.0, task)


def told(verb: str, found: Standing | None) -> str:
    problem = judge(verb, found, fence=FENCE, owner="http:me")  # type: ignore[arg-type]
    return "ok" if problem is None else problem.code


@pytest.mark.parametrize("verb", VERBS)
def test_no_row_is_not_found(verb: str) -> None:
    assert told(verb, None) == "not_found"


@pytest.mark.parametrize(
    ("found", "answers"),
    [
        # heartbeat, complete, fail, release
        (standing("succeeded"), ("ok", "ok", "already_processed", "already_processed")),
        (standing("succeeded", claimed_by="other"), ("already_processed",) * 4),
        (standing("succeeded", claimed_by=None), ("already_processed",) * 4),
        (standing("succeeded", fence=FENCE + 1), ("already_processed",) * 4),
        (
            standing("succeeded", fence=FENCE + 1, failure="error"),
            ("already_processed", "already_processed", "ok", "already_processed"),
        ),
        (standing("ready", failure="error"), ("not_owner", "not_owner", "ok", "not_owner")),
        (standing("dead", failure="error"), ("already_processed", "already_processed", "ok", "already_processed")),
        (standing("running", fence=FENCE + 1, owner="http:other", failure="error"), ("not_owner", "not_owner", "ok", "not_owner")),
        (standing("ready"), ("not_owner", "not_owner", "not_owner", "ok")),
        (standing("ready", claimed_by="other"), ("not_owner",) * 4),
        (standing("ready", failure="lease_lost"), ("lease_expired",) * 4),
        (standing("ready", fence=0, claimed_by=None), ("not_owner",) * 4),
        (standing("dead", failure="lease_lost"), ("already_processed",) * 4),
        (standing("cancelled"), ("already_processed",) * 4),
        (standing("running", fence=FENCE + 1, owner="http:me"), ("not_owner",) * 4),
        (standing("running", owner="http:other"), ("not_owner",) * 4),
        (standing("running", owner="host-00000000"), ("not_owner",) * 4),
        (standing("running", fence=FENCE + 1, owner="http:other", failure="lease_lost"), ("lease_expired",) * 4),
        # Still this worker's, and could not be written: somebody keeps the row locked.
        (standing("running", owner="http:me"), ("busy",) * 4),
        (standing("running", owner="http:me", live=False), ("lease_expired", "busy", "busy", "busy")),
    ],
)
def test_an_attempt_is_told_the_truth_about_itself(found: Standing, answers: tuple[str, ...]) -> None:
    assert tuple(told(verb, found) for verb in VERBS) == answers


def test_nothing_is_ever_ok_for_another_fence_unless_its_failure_is_on_record() -> None:
    """Over all combinations: a zombie cannot mistake an answer for success."""
    states = ("ready", "running", "succeeded", "dead", "cancelled")
    owners = (None, "http:me", "http:other")
    failures = (None, "error", "timeout", "lease_lost", "crashed")
    for state, owner, failure, live, by in product(states, owners, failures, (True, False), ("me", "other", None)):
        found = standing(state, fence=FENCE + 1, owner=owner, claimed_by=by, live=live, failure=failure)
        for verb in VERBS:
            if told(verb, found) == "ok":
                assert verb == "fail"
                assert failure in ("error", "timeout")


@given(st.text(max_size=20_000))
def test_an_error_text_always_fits_the_tables(text: str) -> None:
    failed = remote_failure(text + "\x00\ud83d")
    assert len(failed.error) <= 1_000
    assert len(failed.detail.encode()) <= 8_192
    assert "\x00" not in failed.error + failed.detail


@given(st.integers(0, 2**63 - 1))
def test_a_cursor_is_read_back_by_its_own_list_only(id: int) -> None:
    cursor = cursor_of("tasks.all", id)
    assert read_cursor("tasks.all", cursor) == id
    with pytest.raises(Problem):
        read_cursor("leases.all", cursor)


@given(st.text(max_size=60))
def test_no_other_text_is_a_cursor(text: str) -> None:
    with contextlib.suppress(Problem):
        id = read_cursor("tasks.all", text)
        assert id is not None
        assert cursor_of("tasks.all", id) == text


def test_tokens_are_compared_whole() -> None:
    tokens = Tokens(["a" * 16, "b" * 16])
    assert tokens
    assert not Tokens([])
    assert tokens.accept(b"Bearer " + b"b" * 16)
    for wrong in (None, b"", b"Bearer", b"Bearer ", b"Bearer " + b"b" * 15, b"Bearer " + b"b" * 17, b"Token " + b"b" * 16, b"\xff"):
        assert not tokens.accept(wrong)


def test_a_flood_of_faults_costs_no_more_than_one() -> None:
    """Two megabytes of them, listed one by one, would keep everybody else waiting for seconds."""
    with pytest.raises(ValidationError) as refused:
        models.ClaimTask.model_validate({"processor": "p", "kinds": [1] * 10_000})
    assert refused.value.error_count() == 1
    body = json.dumps({"payload": 1} | dict.fromkeys(map(str, range(10_000)))).encode()
    with pytest.raises(Problem) as flood:
        read_body(models.NewTask, "application/json", body)
    assert (flood.value.status_code, "10,001 fields" in flood.value.message) == (422, True)
    known = max(len(one.model_fields) for one in (models.NewTask, models.ClaimTask, models.AcquireLease, models.CompleteTask))
    assert known <= MOST_FIELDS


@pytest.mark.parametrize("address", ["127.0.0.1", "127.255.255.254", "::1"])
def test_loopback_needs_no_token(address: str) -> None:
    assert is_loopback(address)
    require_tokens("x", [address], Tokens([]))


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "x"])
def test_every_other_address_needs_a_token(address: str) -> None:
    with pytest.raises(ConfigError, match="WORKER_HTTP_TOKENS"):
        require_tokens("x", ["127.0.0.1", address], Tokens([]))
    require_tokens("x", [address], Tokens(["a" * 16]))


def test_an_empty_host_is_every_address() -> None:
    found = {address for _, address in addresses_of("", 0)}
    assert found <= {"0.0.0.0", "::"}
    assert (socket.AF_INET, "0.0.0.0") in addresses_of("", 0)


def test_a_caller_without_a_host_is_refused() -> None:
    assert check_local_caller(None, None) is not None
    assert check_local_caller(b"localhost", None) is None
    assert check_local_caller(b"localhost:8080", b"http://localhost:8080") is None
    assert check_local_caller(b"localhost:8080", b"http://localhost:9090") is not None
    assert check_local_caller(b"[::1", None) is not None
