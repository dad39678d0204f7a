"""`worker bench`: every scenario runs on real daemons, says all that a reader needs, and leaves nothing behind.

No speed is asserted: the machine of a test has other things to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.commands import worker, worker_at_a_terminal
from tests.processes import ROOT, environment
from tests.roles import role, url_as
from tests.servers import Server, execute
from tests.waiting import wait_for
from worker.bench import machine
from worker.bench.arena import text_of
from worker.bench.results import Book, Sample, Usage, quantile
from worker.bench.running import Cores

SMALL = ("--jobs", "150", "--rows", "1500", "--ledger-rows", "2000", "--minutes", "0.02", "--runs", "1", "--tasks", "4")
USUAL = ["drain", "latency", "enqueue", "history", "snapshot", "processes"]
OTHERS = ["payloads", "faults", "contended", "shapes", "pruning", "aged", "ledger"]


def schemas(url: str) -> list[str]:
    """What is left of a bench, or there already."""
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT nspname FROM pg_namespace WHERE nspname ^@ 'worker_bench_'")]


def daemons(url: str) -> list[int]:
    """The process ids of the daemons that now work in a schema of a bench."""
    for schema in schemas(url):
        with psycopg.connect(url) as connection, contextlib.suppress(psycopg.errors.UndefinedTable):
            if found := connection.execute(f'SELECT pid FROM "{schema}".processes').fetchall():
                return [row[0] for row in found]
    return []


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextlib.contextmanager
def bench(url: str, directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`worker bench --json` under way."""
    process = subprocess.Popen(
        [sys.executable, "-m", "worker", "bench", "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(directory, DATABASE_URL=url),
        cwd=directory,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def samples(document: dict[str, Any], scenario: str) -> dict[str, list[dict[str, Any]]]:
    return {figure["case"]: figure["runs"] for figure in document["figures"] if figure["scenario"] == scenario}


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
        assert all(0 <= value <= 1.1 for value in busy.values()), "a share; ticks are coarse"
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
    assert [runs[0]["jobs"] for runs in samples(document, "aged").values()] == [20, 20, 20]
    assert len(ratios(document, "aged")) == 2
    assert [*samples(document, "ledger")] == ["empty ledger, random keys", "2,000 ledger rows, random keys"]
    assert schemas(empty_database_url) == []


@pytest.mark.slow
def test_statements_are_counted_where_the_extension_is(server: Server, empty_database_url: str, tmp_path: Path) -> None:
    try:
        execute(empty_database_url, "CREATE EXTENSION pg_stat_statements")
    except psycopg.Error as error:
        pytest.skip(f"this server has no pg_stat_statements: {error}")
    result = worker("bench", "--json", "drain", *SMALL, "--runs", "2", directory=tmp_path, DATABASE_URL=empty_database_url)
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
def test_a_person_sees_tables_with_method_and_what_is_going_on(empty_database_url: str, tmp_path: Path) -> None:
    status, shown = worker_at_a_terminal(
        "bench", "latency", *SMALL, "--runs", "2", directory=tmp_path, DATABASE_URL=empty_database_url, COLUMNS="160"
    )
    assert status == 0
    assert "latency, 20 jobs, run 2 of 2 …" in shown
    assert "pick-up p50" in shown
    assert "pick-up p50 / bare NOTIFY round trip p50 + bare claim commit p50" in shown
    assert "from the first claim as the database recorded it" in shown
    assert '"fsync": ' in shown


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_removes_its_schema_and_ends_its_daemons(
    empty_database_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    with bench(empty_database_url, tmp_path, "drain", "--jobs", "100000") as process:
        pids = wait_for(lambda: daemons(empty_database_url), 30)
        assert all(map(lives, pids))
        process.send_signal(number)
        printed, complaint = process.communicate(timeout=60)
        assert (process.returncode, printed, complaint) == (130, "", "")
    assert schemas(empty_database_url) == []
    assert not any(map(lives, pids))


@pytest.mark.slow
def test_a_scenario_that_fails_is_named_and_the_others_go_on(empty_database_url: str, tmp_path: Path) -> None:
    with bench(empty_database_url, tmp_path, "processes", "latency", *SMALL, "--jobs", "3000") as process:
        os.kill(wait_for(lambda: daemons(empty_database_url), 30)[0], signal.SIGKILL)
        printed, complaint = process.communicate(timeout=100)
    document = json.loads(printed)
    assert process.returncode == 1
    assert len(document["failures"]) == 1
    assert document["failures"][0].startswith("processes: a daemon ended with status -9")
    assert document["failures"][0] in complaint
    assert "pick-up p50" in samples(document, "latency")
    assert schemas(empty_database_url) == []


def test_a_role_that_may_not_create_a_schema_is_told_so(server: Server, empty_database_url: str, tmp_path: Path) -> None:
    with role(server, empty_database_url) as name:
        result = worker("bench", *SMALL, directory=tmp_path, DATABASE_URL=url_as(name, empty_database_url))
    assert (result.returncode, result.stdout) == (78, "")
    assert f"the role '{name}' may not create it: CREATE on the database is missing" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("drain", "speed"), "'speed' is none of drain, latency, enqueue, history, snapshot, processes, payloads, faults,"),
        (("--minutes", "0"), "--minutes"),
        (("--tasks", "10,x"), "numbers from 1 to 10000"),
        (("--tasks", "0"), "numbers from 1 to 10000"),
        (("--jobs", "10"), "--jobs"),
        (("--runs", "0"), "--runs"),
        (("--data-dir", "x"), "--embedded"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_touched(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    result = worker("bench", *arguments, directory=tmp_path, DATABASE_URL="postgresql://nobody@127.0.0.1:1/none")
    assert result.returncode == 2
    assert said in " ".join(result.stderr.split())


@pytest.mark.slow
def test_it_measures_on_the_private_server(data_dir: Path, tmp_path: Path) -> None:
    result = worker("bench", "--json", "latency", *SMALL, "--embedded", "--data-dir", str(data_dir), directory=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["database"]["on_this_machine"] is Path("/proc/self/stat").exists()


# --- the arithmetic


def test_ratios_are_made_turn_by_turn_and_from_sums() -> None:
    book = Book()
    for case, values in {"a": (6.0, 20.0), "b": (1.0, 4.0), "c": (2.0, 1.0)}.items():
        for value in values:
            book.add("s", case, "u", Sample(value=value, jobs=1, seconds=1.0))
    book.compare("s", "a", "b")
    book.compare("s", "a", "b", "c")
    assert [(ratio.name, list(ratio.values)) for ratio in book.ratios] == [("a / b", [6.0, 5.0]), ("a / b + c", [2.0, 4.0])]


def test_what_a_job_used_is_the_median_of_runs_and_nothing_where_one_is_unknown() -> None:
    book = Book()
    for jobs, seconds, wal in ((10, 0.001, 100), (10, 0.002, None), (10, 0.009, 300)):
        book.add("s", "a", "u", Sample(value=1, jobs=jobs, seconds=1, usage=Usage(worker_cpu_seconds=seconds, wal_bytes=wal)))
    per_job = book.figures[0].per_job()
    assert per_job["worker_cpu_microseconds"] == pytest.approx(200)
    assert per_job["wal_bytes"] is None
    assert per_job["server_cpu_microseconds"] is None


def test_how_busy_each_core_was_is_a_share_of_the_time_between_two_looks() -> None:
    assert Cores(10.0, (5.0, 7.0)).shares_until(Cores(14.0, (7.0, 11.0))) == [0.5, 1.0]
    assert Cores(10.0, None).shares_until(Cores(14.0, (7.0, 11.0))) is None


def test_a_quantile_is_a_value_that_was_measured() -> None:
    ordered = [float(value) for value in range(1, 101)]
    assert [quantile(ordered, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert quantile([7.0], 0.99) == 7.0


def test_payloads_have_the_size_they_are_named_after() -> None:
    for size in (64, 4_096, 102_400):
        payload = json.dumps({"n": 10_000, "text": text_of(size)})
        assert len(payload) == size


@pytest.mark.skipif(not machine.has_proc(), reason="there is no /proc here")
def test_cpu_time_is_read_of_this_process_and_of_the_whole_server(empty_database_url: str) -> None:
    before = machine.process_cpu_seconds(os.getpid())
    assert before is not None
    while os.times().user + os.times().system < before + 0.05:
        pass
    after = machine.process_cpu_seconds(os.getpid())
    assert after is not None
    assert after > before
    with psycopg.connect(empty_database_url) as connection:
        postmaster = machine.postmaster_of(connection.info.backend_pid, user=connection.info.user, database=connection.info.dbname)
        # None when the tests' server is a container, whose processes have other numbers here.
        if postmaster is not None:
            first = machine.server_cpu_seconds(postmaster)
            connection.execute("SELECT count(*) FROM generate_series(1, 1000000)")
            second = machine.server_cpu_seconds(postmaster)
            assert first is not None
            assert second is not None
            assert second > first
    assert machine.postmaster_of(os.getpid(), user="", database="") is None


# --- beside other libraries


@pytest.mark.slow
def test_the_comparison_prints_ratios_of_one_run_and_names_what_cannot_be_installed(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.compare", "--database-url", server.dsn, "--directory", str(tmp_path)]
    amount = ("--jobs", "100", "--runs", "2", "--tasks", "2", "--workloads", "effect", "--json", str(tmp_path / "results.json"))
    ours, deleting = "reliable-worker", "reliable-worker-deleting"
    done = subprocess.run(
        [*command, *amount, "--peers", f"{ours},{deleting},graphile"],
        capture_output=True,
        text=True,
        # Nowhere is there an npm.
        env=environment(tmp_path, PATH=str(tmp_path)),
        cwd=ROOT,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    head, first, second, third = rows
    assert head[-2:] == [f"{ours} / it", f"{deleting} / it"]
    assert first[0].startswith(f"{ours} (")
    assert first[4:] == ["100", "one transaction", "kept", "1.00 (1.00–1.00)", first[-1]]
    assert second[4:] == ["100", "one transaction", "deleted", second[-2], "1.00 (1.00–1.00)"]
    assert third[0] == "graphile"
    assert "no figure" in third[1]
    assert "npm" in third[1]
    document = json.loads((tmp_path / "results.json").read_text())
    # Interleaved turn by turn, each time another one first; and every effect was counted, else there would be no rate.
    order = [(result["turn"], result["peer"]) for result in document["results"]]
    assert order == [(0, ours), (0, deleting), (1, deleting), (1, ours)]
    assert all(result["rate"] > 0 for result in document["results"])
