"""`worker enqueue`: one job, or a whole file of them or nothing of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psycopg
import pytest

from tests.commands import worker, worker_at_a_terminal, worker_in_this_process
from worker.cli import enqueue
from worker.store.bulk import KeyVanished


def rows(
    database_url: str, columns: str = "kind, payload, idempotency_key, queue, priority, max_attempts"
) -> list[tuple[object, ...]]:
    with psycopg.connect(database_url) as connection:
        return connection.execute(f"SELECT {columns} FROM jobs ORDER BY available_at, id").fetchall()  # type: ignore[arg-type]


def test_it_prints_id_created_and_state(database_url: str, tmp_path: Path) -> None:
    arguments = ["enqueue", "welcome", '{"a": "\\\\u0000 stays"}', "--key", "k", "--queue", "mail", "--priority", "-5"]
    first = worker(*arguments, "--max-attempts", "3", directory=tmp_path, DATABASE_URL=database_url)
    assert (first.returncode, first.stderr) == (0, "")
    assert json.loads(first.stdout) == {"id": 1, "created": True, "state": "ready"}
    again = worker(*arguments, "--json", directory=tmp_path, DATABASE_URL=database_url)
    assert json.loads(again.stdout) == {"id": 1, "created": False, "state": "ready"}
    assert rows(database_url) == [("welcome", {"a": "\\u0000 stays"}, "k", "mail", -5, 3)]


def test_the_payload_comes_from_standard_input_or_a_file_too(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "payload.json").write_text('{"from": "file ü"}')
    for payload, stdin in (("-", '{"from": "stdin ü"}'), ("@payload.json", "")):
        result = worker("enqueue", "message", payload, stdin=stdin, directory=tmp_path, DATABASE_URL=database_url)
        assert result.returncode == 0, result.stderr
    assert rows(database_url, "payload") == [({"from": "stdin ü"},), ({"from": "file ü"},)]


def test_delay_and_moment_are_kept_to_the_second(database_url: str, tmp_path: Path) -> None:
    for arguments in (["--delay", "3600"], ["--at", "2031-05-06T08:00:00+02:00"], ["--at", "2031-05-06T06:00:00Z"]):
        result = worker("enqueue", "k", "1", *arguments, directory=tmp_path, DATABASE_URL=database_url, TZ="Asia/Tokyo")
        assert result.returncode == 0, result.stderr
    delays = [float(delay) for (delay,) in rows(database_url, "extract(epoch FROM available_at - created_at)")]
    assert 3_600 <= delays[0] < 3_660
    assert [str(moment) for (moment,) in rows(database_url, "available_at AT TIME ZONE 'UTC'")][1:] == ["2031-05-06 06:00:00"] * 2


LINES = [
    '{"payload": {"n": 1}}',
    "",
    '{"kind": "welcome", "payload": {"n": 2}, "key": "k", "queue": "mail", "priority": 7, "max_attempts": 2}',
    '{"payload": null, "run_at": "2031-01-01T00:00:00Z", "key": null}',
    '{"payload": 3, "key": "k"}',
    '{"payload": [4], "delay_seconds": 1.5}',
]


def write(directory: Path, lines: list[str]) -> str:
    (directory / "jobs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return "jobs.jsonl"


def test_a_file_becomes_jobs_a_line_each_in_its_order_and_a_count(database_url: str, tmp_path: Path) -> None:
    result = worker("enqueue", "--file", write(tmp_path, LINES), directory=tmp_path, DATABASE_URL=database_url)
    assert (result.returncode, result.stderr) == (0, "5 jobs: 4 created, 1 there before\n")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    with psycopg.connect(database_url) as connection:
        numbers = dict(connection.execute("SELECT id, payload->>'n' FROM jobs").fetchall())
    assert [numbers[answer["id"]] for answer in answers[:2]] == ["1", "2"]
    assert answers[1] == {"id": answers[1]["id"], "created": True, "state": "ready"}
    assert answers[3] == {"id": answers[1]["id"], "created": False, "state": "ready"}
    stored = rows(database_url, "kind, payload, queue, priority, max_attempts")
    assert sorted(stored, key=str) == sorted(
        [
            ("message", {"n": 1}, "default", 0, 5),
            ("welcome", {"n": 2}, "mail", 7, 2),
            ("message", [4], "default", 0, 5),
            ("message", None, "default", 0, 5),
        ],
        key=str,
    )


def test_a_file_from_standard_input_gives_one_array_with_json(database_url: str, tmp_path: Path) -> None:
    text = "\n".join(LINES)
    result = worker("enqueue", "--file", "-", "--json", stdin=text, directory=tmp_path, DATABASE_URL=database_url)
    answers = json.loads(result.stdout)
    assert [answer["created"] for answer in answers] == [True, True, True, False, True]
    assert answers[1]["id"] == answers[3]["id"]
    one = worker("enqueue", "--file", "-", stdin='{"payload": 1}', directory=tmp_path, DATABASE_URL=database_url)
    assert one.stderr == "1 job: 1 created, 0 there before\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"payload": 1, "colour": "red"}', "unknown key 'colour'"),
        ('{"kind": "message"}', "payload: is required"),
        ("{bad", "Expecting property name"),
        ("[1]", "an object is needed"),
        ('{"payload": NaN}', "NaN is not JSON"),
        ('{"payload": 1e999}', "payload: NaN and infinities"),
        ('{"payload": "\\u0000"}', "payload: contains a NUL"),
        ('{"payload": "\\ud800"}', "payload: contains an unpaired surrogate"),
        ('{"payload": 1, "key": "auto:1"}', 'key: "auto:" is reserved'),
        ('{"payload": 1, "run_at": "2031-01-01T00:00:00"}', "run_at: .* has no time zone"),
        ('{"payload": 1, "run_at": 7}', "run_at: a datetime is needed"),
        ('{"payload": 1, "run_at": "2031-01-01T00:00:00Z", "delay_seconds": 1}', "give one of them"),
        (json.dumps({"payload": "x" * 1_048_577}), "payload: 1 MiB"),
    ],
)
def test_a_bad_line_is_named_by_number_and_nothing_is_written(database_url: str, tmp_path: Path, line: str, message: str) -> None:
    # Far behind the first chunk.
    file = write(tmp_path, ['{"payload": 1}'] * 5_500 + [line] + ['{"payload": 1}'])
    result = worker("enqueue", "--file", file, directory=tmp_path, DATABASE_URL=database_url)
    assert (result.returncode, result.stdout) == (2, "")
    assert "line 5501: " in result.stderr
    assert re.search(message, result.stderr)
    assert rows(database_url) == []


def test_bytes_that_are_no_text_are_named_by_line(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_bytes(b'{"payload": 1}\n{"payload": "\xff"}\n')
    result = worker("enqueue", "--file", "jobs.jsonl", directory=tmp_path, DATABASE_URL=database_url)
    assert result.returncode == 2
    assert "line 2: " in result.stderr
    assert rows(database_url) == []


def test_a_key_that_an_open_transaction_has_is_said_to_be_in_the_way_and_nothing_is_written(
    database_url: str, tmp_path: Path
) -> None:
    with psycopg.connect(database_url) as other:
        other.execute("INSERT INTO jobs (idempotency_key, payload) VALUES ('k', '1')")
        for arguments in (["message", "1", "--key", "k"], ["--file", write(tmp_path, LINES)]):
            result = worker("enqueue", *arguments, directory=tmp_path, DATABASE_URL=database_url)
            assert (result.returncode, result.stdout) == (1, "")
            assert "another transaction is in the way, try again when it has ended" in result.stderr
        other.rollback()
    assert rows(database_url) == []


def test_a_long_file_is_one_transaction_without_parts_of_its_own(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 64 of them would slow down every snapshot that anybody takes meanwhile."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setattr(enqueue, "CHUNK_JOBS", 10)
    lines = "".join(json.dumps({"payload": number, "key": f"k{number}"}) + "\n" for number in range(100))
    result = worker_in_this_process("enqueue", "--file", "-", stdin=lines.encode())
    assert (result.status, result.err) == (0, "100 jobs: 100 created, 0 there before\n")
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(DISTINCT xmin::text) FROM jobs").fetchone() == (1,)


def test_a_key_that_comes_and_goes_meanwhile_is_said_and_nothing_is_written(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def vanished(*_: object, **__: object) -> None:
        raise KeyVanished("k17")

    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setattr(enqueue, "enqueue_part", vanished)
    result = worker_in_this_process("enqueue", "--file", "-", stdin=b'{"payload": 1}\n')
    assert (result.status, result.out) == (1, "")
    assert result.err == "worker: key 'k17' came and went meanwhile; nothing was enqueued, try again\n"
    assert rows(database_url) == []


def test_an_empty_file_is_no_jobs(database_url: str, tmp_path: Path) -> None:
    for options, printed in ((), ""), (("--json",), "[]\n"):
        result = worker("enqueue", "--file", "-", *options, directory=tmp_path, DATABASE_URL=database_url)
        assert (result.returncode, result.stdout, result.stderr) == (0, printed, "0 jobs: 0 created, 0 there before\n")


def test_a_bar_is_for_terminals_only(database_url: str, tmp_path: Path) -> None:
    file = write(tmp_path, ['{"payload": 1}'] * 6_000)
    status, shown = worker_at_a_terminal("enqueue", "--file", file, directory=tmp_path, DATABASE_URL=database_url)
    assert status == 0
    assert "enqueueing" in shown
    assert "6000 jobs: 6000 created, 0 there before" in shown
    assert "enqueueing" not in shown[shown.index('{"id"') :], "drawn again with every line, it takes ten times as long"
    piped = worker("enqueue", "--file", file, directory=tmp_path, DATABASE_URL=database_url)
    assert piped.stderr == "6000 jobs: 6000 created, 0 there before\n"
