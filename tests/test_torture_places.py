"""Where `worker torture --embedded` puts the PostgreSQL of its own, and what it says of rules that it could not try."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from tests.commands import worker
from worker.cli import torture
from worker.server_programs import ClusterError
from worker.torture.breaches import RULES
from worker.torture.server import own_server


def test_its_own_server_lives_in_the_directory_that_is_named_and_goes_with_it(data_dir: Path) -> None:
    with own_server(data_dir) as server:
        assert (data_dir / "postgresql" / "PG_VERSION").exists()
        with psycopg.connect(server.dsn) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    assert not data_dir.exists()


def test_a_directory_that_holds_something_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data" / "postgresql").mkdir(parents=True)
    for path in (tmp_path / "data", Path("~/data")):
        with pytest.raises(ClusterError, match="is not empty"), own_server(path):
            pass
    result = worker("torture", "--embedded", "--data-dir", "data", directory=tmp_path)
    assert (result.returncode, result.stdout) == (69, "")
    assert "is not empty" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert (tmp_path / "data" / "postgresql").is_dir()


def test_a_directory_is_of_no_use_without_a_server_of_its_own(tmp_path: Path) -> None:
    result = worker("torture", "--data-dir", "data", directory=tmp_path, DATABASE_URL="postgresql://nobody@nowhere/nothing")
    assert (result.returncode, result.stdout) == (2, "")
    assert "it needs --embedded" in result.stderr


@pytest.mark.parametrize("untried", [[], ["guarded", "recovery"]])
def test_the_report_names_the_rules_that_were_tried_on_nothing(untried: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    times = {"jobs": 0, "p50": None, "p99": None, "limit": 7.0}
    named = ("version", "server_version", "where", "seed", "seconds", "processes", "lease_seconds", "acknowledged")
    rules = {name: {"promise": text, "tried": int(name not in untried), "breaches": 0} for name, text in RULES.items()}
    document = dict.fromkeys(named, 1) | {name: {} for name in ("faults", "faults_without_effect", "return_seconds", "counts")}
    document |= {"recovery_seconds": times, "reaped_after_expiry_seconds": times, "stale_attempts_refused": 0, "skipped": {}}
    torture._print_report(document | {"rules": rules, "breaches": []})
    said = [line for line in capsys.readouterr().out.splitlines() if "proved" in line]
    assert [line.partition(": ")[2] for line in said] == ([", ".join(untried)] if untried else [])
