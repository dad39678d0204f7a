"""`worker bench`: every scenario runs on real daemons, says all that a reader needs, and leaves nothing behind.

No speed is asserted: the machine of a test has other things to do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.commands import worker, worker_at_a_terminal
from tests.roles import role, url_as
from tests.servers import Server, execute
from tests.small_bench import SMALL, samples, schemas
from worker.bench import machine

USUAL = ["drain", "latency", "enqueue", "history", "snapshot", "processes"]
OTHERS = ["payloads", "faults", "contended", "shapes", "pruning", "ledger"]


def ratios(document: dict[str, Any], scenario: str) -> dict[str, float]:
    return {ratio["name"]: ratio["median"] for ratio in document["ratios"] if ratio["scenario"] == scenario}


def check(document: dict[str, Any], scenarios: list[str], runs: int) -> None:
    """What is true of every document: each case was run so often, and every figure is made of its runs."""
    assert document["failures"] == []
    assert [*dict.fromkeys(figure["scenario"] for figure in document["figures"])] == scenarios
    # So few jobs may end in fewer groups than sixths, and then there is no rate to compare.
    assert {ratio["scenario"] for ratio in document["ratios"]} | {"snapshot"} == {*scenarios, "snapshot"}
    for figure in document["figures"]:
        assert len(figure["runs"]) == len(figure["values"]) == runs, figure
        assert 0 < figure["min"] <= figure["median"] <= figure["max"]
        assert figure["values"] == [run["value"] for run in figure["runs"]]
    for ratio in document["ratios"]:
        assert len(ratio["values"]) == runs, ratio


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_usual_scenarios_run_for_an_ordinary_role_and_leave_nothing_behind(
    server: Server, empty_database_url: str, tmp_path: Path
) -> None:
    with role(server, empty_database_url) as name:
        with psycopg.connect(empty_database_url, autocommit=True) as connection:
            execute(empty_database_url, "GRANT CREATE ON DATABASE {} TO {}", connection.info.dbname, name)
        # A configuration of the user's own: what the bench decides by itself is not taken from it.
        variables = {"WORKERS": "3", "WORKER_QUEUES": "mine", "WORKER_RETENTION_SECONDS": "0", "WORKER_HANDLERS": "no.such:thing"}
        url = url_as(name, empty_database_url)
        result = worker("bench", "--json", *SMALL, directory=tmp_path, timeout_seconds=280, DATABASE_URL=url, **variables)
        assert (result.returncode, result.stderr) == (0, "")
        document = json.loads(result.stdout)

    check(document, USUAL, 1)
    for figure in document["figures"]:
        assert set(figure["per_job"]) >= {
            "worker_cpu_microseconds",
            "server_cpu_microseconds",
            "wal_bytes",
            "dead_tuples",
            "statements",
            "transactions",
        }
    drained = samples(document, "drain")
    for runs in drained.values():
        assert all(run["value"] == pytest.approx(run["jobs"] / run["seconds"]) for run in runs)
        assert all(run["usage"]["wal_bytes"] > 0 for run in runs)
    # Each job is updated twice, whatever else happens.
    assert all(run["usage"]["dead_tuples"] >= 2 * run["jobs"] for run in drained["one effect, 4 tasks"])
    assert all(run["usage"]["transactions"] > 0 for run in drained["one effect, 4 tasks"])
    assert {*ratios(document, "drain")} == {
        f"{words}, 4 tasks / {yardstick}, {words}"
        for words in ("no effect", "one effect")
        for yardstick in ("naive", "one by one", "ceiling")
    }
    [[under_snapshot]] = samples(document, "snapshot").values()
    assert len(under_snapshot["parts"]) == 6
    if 0 not in under_snapshot["parts"]:
        last_to_first = ratios(document, "snapshot")["last sixth / first sixth"]
        assert last_to_first == pytest.approx(under_snapshot["parts"][5] / under_snapshot["parts"][0])
    assert [case.split()[0] for case in samples(document, "processes")] == ["1", "2", "4"]
    if machine.has_proc():
        busy = {name: value for name, value in ratios(document, "processes").items() if name.startswith("busy share")}
        assert len(busy) == 6
        assert all(value >= 0 for value in busy.values())
    assert len(ratios(document, "enqueue")) == 5
    assert len(ratios(document, "history")) == 2

    assert document["plan"] == {
        "jobs": 150,
        "rows": 1500,
        "ledger_rows": 2000,
        "minutes": 0.02,
        "runs": 1,
        "tasks": [4],
        "scenarios": USUAL,
    }
    assert document["database"]["durability"].keys() >= {"fsync", "synchronous_commit", "full_page_writes", "wal_level"}
    assert document["machine"]["cores"] >= 1
    assert set(document["libraries"]) >= {"asyncpg", "uvloop"}
    assert document["daemon_settings"]["commit_batch"] == 300
    # The extension is preloaded in the tests' server, but not created in this database.
    assert "pg_stat_database" in document["not_measured"]["statements"]
    assert "database_url" not in result.stdout
    assert "only-for-tests" not in result.stdout

    assert schemas(empty_database_url) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_other_scenarios_check_what_they_measure(empty_database_url: str, tmp_path: Path) -> None:
    result = worker("bench", "--json", *OTHERS, *SMALL, directory=tmp_path, timeout_seconds=280, DATABASE_URL=empty_database_url)
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    check(document, OTHERS, 1)

    assert [*samples(document, "payloads")] == [
        f"{words}, {size}" for size in ("64 B", "4 kB", "100 kB") for words in ("no effect", "one effect")
    ]
    assert len(ratios(document, "payloads")) == 4
    faults = samples(document, "faults")
    assert {run["jobs"] for runs in faults.values() for run in runs} == {101}
    assert set(ratios(document, "faults")) == {f"{case} / 101 jobs, none fails" for case in faults} - {
        "101 jobs, none fails / 101 jobs, none fails"
    }
    # The shared row's update leaves a dead row beside the two of the job itself.
    assert all(run["usage"]["dead_tuples"] >= 3 * 150 for runs in samples(document, "contended").values() for run in runs)
    single = samples(document, "contended")["the same with WORKER_COMMIT_BATCH=1"][0]
    assert single["usage"]["transactions"] >= 150, "one transaction a job"
    assert [*samples(document, "shapes")] == ["plain", "750 beside them due tomorrow", "two queues, in turn", "three priorities"]
    assert len(ratios(document, "shapes")) == 3
    assert [*samples(document, "pruning")] == [
        "one effect, all rows kept",
        "one effect, old rows being removed",
        "rows removed meanwhile",
    ]
    assert len(ratios(document, "pruning")) == 1
    assert [*samples(document, "ledger")] == ["empty ledger, random keys", "2,000 ledger rows, random keys"]
    assert schemas(empty_database_url) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_aged_table_is_compared_with_a_fresh_one_or_its_load_is_said_to_be_too_much_for_this_machine(
    empty_database_url: str, tmp_path: Path
) -> None:
    result = worker("bench", "--json", "aged", *SMALL, directory=tmp_path, timeout_seconds=280, DATABASE_URL=empty_database_url)
    document = json.loads(result.stdout)
    if document["failures"]:
        [said] = document["failures"]
        assert "this machine cannot take the load of this scenario" in said
        assert said in result.stderr
        assert result.returncode == 1
    else:
        assert (result.returncode, result.stderr) == (0, "")
        check(document, ["aged"], 1)
        assert [runs[0]["jobs"] for runs in samples(document, "aged").values()] == [20, 20, 20]
        assert len(ratios(document, "aged")) == 2
    assert schemas(empty_database_url) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_statements_are_counted_where_the_extension_is(server: Server, empty_database_url: str, tmp_path: Path) -> None:
    try:
        execute(empty_database_url, "CREATE EXTENSION pg_stat_statements")
    except psycopg.Error as error:
        pytest.skip(f"this server has no pg_stat_statements: {error}")
    arguments = ("bench", "--json", "drain", *SMALL, "--runs", "2")
    result = worker(*arguments, directory=tmp_path, timeout_seconds=280, DATABASE_URL=empty_database_url)
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    check(document, ["drain"], 2)
    cases = samples(document, "drain")
    for one_by_one in cases["one by one, one effect"]:
        # Claim, BEGIN, completion, COMMIT; the effect is counted by itself, and each connection's last claim finds nothing.
        assert 4 * one_by_one["jobs"] <= one_by_one["usage"]["statements"] <= 4 * one_by_one["jobs"] + 60
        assert one_by_one["usage"]["effect_statements"] == one_by_one["jobs"]
    for drained in cases["one effect, 4 tasks"]:
        assert drained["usage"]["effect_statements"] == drained["jobs"]
        assert drained["usage"]["statements"] < drained["jobs"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_person_sees_tables_with_method_and_what_is_going_on(empty_database_url: str, tmp_path: Path) -> None:
    variables = {"DATABASE_URL": empty_database_url, "COLUMNS": "160"}
    status, shown = worker_at_a_terminal(
        "bench", "latency", *SMALL, "--runs", "2", directory=tmp_path, timeout_seconds=280, **variables
    )
    assert status == 0
    assert "latency, 20 jobs, run 2 of 2 …" in shown
    assert "pick-up p50" in shown
    assert "pick-up p50 / bare NOTIFY round trip p50 + bare claim commit p50" in shown
    assert "from the first claim as the database recorded it" in shown
    assert '"fsync": ' in shown


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_measures_on_the_private_server(data_dir: Path, tmp_path: Path) -> None:
    private = ("--embedded", "--data-dir", str(data_dir))
    result = worker("bench", "--json", "latency", *SMALL, *private, directory=tmp_path, timeout_seconds=280)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["database"]["on_this_machine"] is Path("/proc/self/stat").exists()
