"""The arithmetic of a bench, and what it reads of the machine: ratios, medians, quantiles, shares of cores, CPU time."""

from __future__ import annotations

import json
import os

import psycopg
import pytest

from tests.waiting import wait_for
from worker.bench import machine
from worker.bench.arena import text_of
from worker.bench.results import Book, Sample, Usage, quantile
from worker.bench.running import Cores


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
            assert first is not None

            def is_more() -> bool:
                # A session of another test that ends while all are read may be missing.
                second = machine.server_cpu_seconds(postmaster)
                assert second is not None
                return second > first

            wait_for(is_more)
    assert machine.postmaster_of(os.getpid(), user="", database="") is None
