"""Settings that are numbers: how they are read, their bounds, and what they have to be to each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.loaded_settings import URL, loaded, refusals
from worker.settings import Documented, Settings, documented_settings

NUMBERS = [row for row in documented_settings() if row.least is not None]
WHOLE = {"WORKERS", "WORKER_CLAIM_BATCH", "WORKER_COMMIT_BATCH", "WORKER_POOL_SIZE"}
# Their upper bounds are relations to the lease.
RELATED = {"WORKER_RENEW_SECONDS", "WORKER_LEASE_MARGIN_SECONDS", "WORKER_CLAIM_TIMEOUT_SECONDS"}


@pytest.mark.parametrize(
    "text",
    [
        "-1",
        "1e1",
        "abc",
        "٤",
        "4x",
        "4 4",
        "inf",
        "nan",
        "-inf",
        "1_0",
        "0x4",
        "4,0",
        "+4",
        "5s",
        ".",
        "9" * 40,
    ],
)
@pytest.mark.parametrize("variable", [row.variable for row in NUMBERS])
def test_a_misread_number_is_refused_with_variable_value_and_rule(variable: str, text: str) -> None:
    (line,) = refusals(**{variable: text})
    assert line.startswith(f"{variable}={text!r} must be")


@pytest.mark.parametrize("variable", sorted(WHOLE))
def test_a_whole_number_has_no_point(variable: str) -> None:
    (line,) = refusals(**{variable: "4.0"})
    assert "must be a whole number from" in line


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.variable)
def test_bounds_are_included_and_what_lies_beyond_is_refused(row: Documented) -> None:
    assert row.least is not None
    assert row.most is not None
    # With these, the least renewal interval and margin are allowed, and the least ledger retention.
    beside = {"WORKER_LEASE_SECONDS": "1", "WORKER_RETENTION_SECONDS": "0"}
    for value in [row.least] if row.variable in RELATED else [row.least, row.most]:
        assert loaded(**{**beside, row.variable: str(value)})
    step = 1 if row.variable in WHOLE else 0.01
    for beyond in (row.least - step, row.most + step):
        text = str(int(beyond)) if row.variable in WHOLE else f"{beyond:.2f}"
        (line,) = refusals(**{row.variable: text})
        assert f"from {row.least:g} to" in line


@pytest.mark.parametrize(("text", "workers"), [("4 ", 4), (" 4", 4), ("10000", 10_000), ("007", 7)])
def test_spaces_around_a_value_are_trimmed(text: str, workers: int) -> None:
    assert loaded(WORKERS=text).workers == workers


@pytest.mark.parametrize("variable", ["WORKER_RETENTION_SECONDS", "WORKER_DEAD_RETENTION_SECONDS"])
def test_never_is_a_retention(variable: str) -> None:
    settings = loaded(**{variable: "never"})
    assert getattr(settings, variable.removeprefix("WORKER_").lower()) is None


# --- one beside another


@given(st.floats(1, 86_400))
def test_the_lease_alone_at_any_legal_value_is_a_valid_configuration(lease_seconds: float) -> None:
    settings = Settings(database_url=URL, lease_seconds=lease_seconds)
    T, R, M = settings.lease_seconds, settings.renew_seconds, settings.lease_margin_seconds
    assert lease_seconds == T
    assert T / 3 >= R > 0
    assert 2 * R + min(settings.query_timeout_seconds, R / 2) <= T - M
    assert M >= T / 20
    assert settings.claim_timeout_seconds <= T / 2


@given(st.decimals(1, 86_400, places=3))
def test_the_lease_alone_is_valid_as_text_too(lease: object) -> None:
    assert loaded(WORKER_LEASE_SECONDS=str(lease)).renew_seconds == pytest.approx(float(str(lease)) / 3)


@pytest.mark.parametrize(("workers", "pool_size"), [(1, 2), (4, 4), (16, 16), (100, 16)])
def test_the_pool_follows_the_workers_within_bounds(workers: int, pool_size: int) -> None:
    assert loaded(WORKERS=str(workers)).pool_size == pool_size


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORKER_RENEW_SECONDS": "11"}, ["WORKER_RENEW_SECONDS=11", "WORKER_LEASE_SECONDS=30"]),
        (
            {"WORKER_LEASE_MARGIN_SECONDS": "8"},
            ["WORKER_RENEW_SECONDS=10", "WORKER_LEASE_MARGIN_SECONDS=8", "WORKER_QUERY_TIMEOUT_SECONDS=3"],
        ),
        (
            {"WORKER_LEASE_MARGIN_SECONDS": "1.4"},
            ["WORKER_LEASE_MARGIN_SECONDS=1.4", "WORKER_LEASE_SECONDS=30"],
        ),
        (
            {"WORKER_LEASE_SECONDS": "3", "WORKER_CLAIM_TIMEOUT_SECONDS": "1.6"},
            ["WORKER_CLAIM_TIMEOUT_SECONDS=1.6", "WORKER_LEASE_SECONDS=3"],
        ),
        (
            {"WORKER_LEDGER_RETENTION_SECONDS": "604799"},
            ["WORKER_LEDGER_RETENTION_SECONDS=604799", "WORKER_RETENTION_SECONDS=604800"],
        ),
        (
            {"WORKER_LEDGER_RETENTION_SECONDS": "604800", "WORKER_RETENTION_SECONDS": "never"},
            ["WORKER_LEDGER_RETENTION_SECONDS=604800", "WORKER_RETENTION_SECONDS=never"],
        ),
    ],
)
def test_a_broken_relation_names_all_its_variables(variables: dict[str, str], named: list[str]) -> None:
    (line,) = refusals(**variables)
    assert all(name in line for name in named)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORKER_RENEW_SECONDS": "10", "WORKER_LEASE_MARGIN_SECONDS": "1.5"},
        {"WORKER_LEASE_SECONDS": "1.1", "WORKER_LEASE_MARGIN_SECONDS": "0.055"},
        {"WORKER_LEASE_SECONDS": "3", "WORKER_RENEW_SECONDS": "1"},
        {"WORKER_LEDGER_RETENTION_SECONDS": "604800"},
        {"WORKER_LEASE_MARGIN_SECONDS": "7"},
    ],
)
def test_a_relation_just_kept_is_accepted(variables: dict[str, str]) -> None:
    assert loaded(**variables)
