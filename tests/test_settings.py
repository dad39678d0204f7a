"""Settings come from arguments, variables and a file; each has a name and a default, and no secret is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loaded_settings import URL, loaded, refusals
from worker.errors import ConfigError
from worker.settings import Settings, documented_settings, load_settings, unknown_settings, variable_of


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
@pytest.mark.parametrize("variable", [variable_of(name) for name in Settings.model_fields if name != "database_url"])
def test_unset_and_empty_mean_the_default(variable: str, text: str) -> None:
    assert loaded(**{variable: text}) == loaded()


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


def test_the_documented_table_gives_the_defaults_that_are_loaded() -> None:
    rows = {row.variable: row for row in documented_settings()}
    assert (rows["WORKERS"].default, rows["WORKERS"].least, rows["WORKERS"].most) == ("4", 1, 10_000)
    assert rows["WORKER_RENEW_SECONDS"].default == "lease/3"
    assert rows["WORKER_RETENTION_SECONDS"].default == "604800"
    assert rows["WORKER_HANDLERS"].least is None
    assert rows.keys() == {variable_of(name) for name in Settings.model_fields}


def test_every_fault_has_a_line_of_its_own() -> None:
    lines = refusals(WORKERS="0", WORKER_POLL_SECONDS="fast", WORKER_LOG_LEVEL="loud", WORKER_QUEUES=",")
    assert [line.split("=")[0] for line in lines] == [
        "WORKERS",
        "WORKER_QUEUES",
        "WORKER_POLL_SECONDS",
        "WORKER_LOG_LEVEL",
    ]


# --- where they come from


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


# --- which database


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
