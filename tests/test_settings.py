"""Settings: what is set is meant, and what cannot be meant is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import ConfigError
from worker.settings import (
    Documented,
    Settings,
    documented_settings,
    load_settings,
    unknown_settings,
    variable_of,
)

URL = "postgresql://somebody:a-secret@db.example/app"


def loaded(**variables: str) -> Settings:
    return load_settings({"DATABASE_URL": URL, **variables})


def refusals(**variables: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        loaded(**variables)
    return refused.value.lines


NUMBERS = [row for row in documented_settings() if row.least is not None]
WHOLE = {"WORKERS", "WORKER_CLAIM_BATCH", "WORKER_COMMIT_BATCH", "WORKER_POOL_SIZE"}
OPTIONAL = [row.variable for row in documented_settings() if row.variable != "DATABASE_URL"]
# Their upper bounds are relations to the lease.
RELATED = {"WORKER_RENEW_SECONDS", "WORKER_LEASE_MARGIN_SECONDS", "WORKER_CLAIM_TIMEOUT_SECONDS"}


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
@pytest.mark.parametrize("variable", [variable_of(name) for name in Settings.model_fields if name != "database_url"])
def test_unset_and_empty_mean_the_default(variable: str, text: str) -> None:
    assert loaded(**{variable: text}) == loaded()


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


def test_the_defaults_are_those_of_the_contract() -> None:
    settings = loaded()
    assert (settings.workers, settings.queues, settings.lease_seconds) == (4, ("default",), 30)
    assert (settings.renew_seconds, settings.lease_margin_seconds, settings.claim_timeout_seconds) == (
        10,
        3,
        2,
    )
    assert (settings.query_timeout_seconds, settings.connect_timeout_seconds) == (3, 3)
    assert (settings.retention_seconds, settings.dead_retention_seconds) == (604_800, None)
    assert (settings.claim_batch, settings.commit_batch, settings.pool_size) == (300, 300, 4)
    assert (settings.ledger_retention_seconds, settings.connect_wait_seconds, settings.handlers) == (
        None,
        None,
        None,
    )


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


def test_every_fault_has_a_line_of_its_own() -> None:
    lines = refusals(WORKERS="0", WORKER_POLL_SECONDS="fast", WORKER_LOG_LEVEL="loud", WORKER_QUEUES=",")
    assert [line.split("=")[0] for line in lines] == [
        "WORKERS",
        "WORKER_QUEUES",
        "WORKER_POLL_SECONDS",
        "WORKER_LOG_LEVEL",
    ]


@pytest.mark.parametrize("variable", ["WORKER_RETENTION_SECONDS", "WORKER_DEAD_RETENTION_SECONDS"])
def test_never_is_a_retention(variable: str) -> None:
    settings = loaded(**{variable: "never"})
    assert getattr(settings, variable.removeprefix("WORKER_").lower()) is None


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


def test_without_a_database_the_refusal_says_what_to_set() -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings({})
    (line,) = refused.value.lines
    assert line.startswith("DATABASE_URL is not set: set it to postgresql://")


@pytest.mark.parametrize("variable", ["PGHOST", "PGDATABASE"])
def test_the_pg_variables_can_stand_for_the_url(variable: str) -> None:
    assert load_settings({variable: "app"}).database_url is None


def test_the_url_can_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text(f"\n{URL}\n")
    url = load_settings({"DATABASE_URL_FILE": f" {path} "}).database_url
    assert url is not None
    assert url.get_secret_value() == URL


@pytest.mark.parametrize("content", [None, b"", b"  \n", b"\xff\xfe"])
def test_a_url_file_that_cannot_be_used_is_refused_by_its_name(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "url"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load_settings({"DATABASE_URL_FILE": str(path)})
    assert refused.value.lines[0].startswith(f"DATABASE_URL_FILE='{path}'")


def test_a_url_and_a_url_file_together_are_refused(tmp_path: Path) -> None:
    (line,) = refusals(DATABASE_URL_FILE=str(tmp_path / "url"))
    assert "DATABASE_URL are both set" in line


def test_no_secret_is_shown_by_settings_or_refusals() -> None:
    settings = loaded(WORKER_LISTEN_DATABASE_URL=URL)
    assert "a-secret" not in f"{settings!r} {settings} {settings.model_dump()}"
    for variable in ("WORKERS", "WORKER_NAME", "DATABASE_URL_FILE"):
        (line,) = refusals(**{variable: URL})
        assert "a-secret" not in line
    with pytest.raises(ConfigError) as refused:
        Settings(database_url=b"\xff a-secret", listen_database_url=3)
    assert [line.split()[0] for line in refused.value.lines] == ["DATABASE_URL", "WORKER_LISTEN_DATABASE_URL"]
    assert "a-secret" not in str(refused.value)


def test_arguments_win_over_the_environment_and_the_environment_over_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://other.example/app")
    monkeypatch.setenv("WORKERS", "7")
    monkeypatch.setenv("WORKER_LEASE_SECONDS", "not used")
    settings = Settings(database_url=URL, lease_seconds=12)
    assert settings.database_url is not None
    assert settings.database_url.get_secret_value() == URL
    assert (settings.workers, settings.lease_seconds, settings.renew_seconds) == (7, 12, 4)


def test_an_argument_is_held_to_the_same_rules() -> None:
    with pytest.raises(ConfigError) as refused:
        Settings(database_url=URL, workers=True, lease_seconds=float("nan"), pool_size=2.5, worker=1)
    assert [line.split("=")[0] for line in refused.value.lines] == [
        "WORKERS",
        "WORKER_LEASE_SECONDS",
        "WORKER_POOL_SIZE",
        "Settings has no 'worker'; the nearest is 'workers'",
    ]


def test_no_dotenv_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("WORKERS=9\n")
    monkeypatch.chdir(tmp_path)
    assert loaded().workers == 4


def test_an_unknown_name_is_told_with_the_nearest_setting() -> None:
    environ = {
        "WORKER_LEASE_SECOND": "3",
        "WORKER_WORKERS": "3",
        "WORKER_PORT": "tcp://10.0.0.1:80",
        "WORKER_QUEUES": "a",
        "WORKERS": "3",
        "OTHER": "x",
    }
    unknown = dict(unknown_settings(environ))
    assert unknown["WORKER_LEASE_SECOND"] == "WORKER_LEASE_SECONDS"
    assert unknown["WORKER_WORKERS"] == "WORKERS"
    assert unknown.keys() == {"WORKER_LEASE_SECOND", "WORKER_WORKERS", "WORKER_PORT"}


def test_no_setting_has_a_name_that_kubernetes_sets_for_a_service_called_worker() -> None:
    names = [row.variable.removeprefix("WORKER_") for row in documented_settings()]
    assert not [name for name in names if name.startswith(("SERVICE_", "PORT"))]


def test_the_documented_table_gives_the_defaults_that_are_loaded() -> None:
    rows = {row.variable: row for row in documented_settings()}
    assert (rows["WORKERS"].default, rows["WORKERS"].least, rows["WORKERS"].most) == ("4", 1, 10_000)
    assert rows["WORKER_RENEW_SECONDS"].default == "lease/3"
    assert rows["WORKER_RETENTION_SECONDS"].default == "604800"
    assert rows["WORKER_HANDLERS"].least is None
    assert rows.keys() == {variable_of(name) for name in Settings.model_fields}
