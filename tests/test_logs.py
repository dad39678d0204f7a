"""Logs: whatever happens in the process, each line is one JSON object, and nobody waits for a reader."""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from tests.waiting import wait_for
from tests.workplace import Workplace
from worker import events, log_capture, log_lines, logs, masking
from worker.log_lines import Identity, console_line, json_line
from worker.log_sink import Sink

IDENTITY = Identity("w-12345678", "1.2.3")


def rendered(**fields: object) -> dict[str, Any]:
    """The fields as they are read back from the line."""
    line = json_line(IDENTITY, "info", "tested", fields)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    read: dict[str, Any] = json.loads(line)
    return read


def run(code: str, *, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """A process that configures logs and then runs `code`."""
    program = "from worker import events, logs\nlogs.configure(worker='w-1', version='1')\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", program],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


def said(code: str) -> list[dict[str, Any]]:
    """The lines of that process, each parsed; it fails when one of them is no JSON object."""
    lines = [json.loads(line) for line in run(code).stdout.splitlines()]
    for line in lines:
        assert list(line)[:6] == ["timestamp", "level", "event", "worker", "pid", "version"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["timestamp"])
    return lines


def only(code: str) -> dict[str, Any]:
    (line,) = said(code)
    return line


# --- one line


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


CYCLE: list[object] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        ("\ud800 lone", "\ufffd lone"),
        ("two\nlines\r\x1b[31m", "two\nlines\r\x1b[31m"),
        (b"\xff\x00x", "\\xff\x00x"),
        ({1}, [1]),
        (2**70, str(2**70)),
        (-(2**63), -(2**63)),
        ({1: {"\udfff": 2}}, {"1": {"\ufffd": 2}}),
        (ValueError("wrong"), "ValueError: wrong"),
        (Unspeakable(), "<Unspeakable that cannot be shown>"),
        ([Unspeakable(), 2**65], ["<Unspeakable that cannot be shown>", str(2**65)]),
        ("x" * 40_000, "x" * 40_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_odd_values_are_made_safe(value: object, read: object) -> None:
    assert rendered(value=value)["value"] == read


def test_times_are_written_in_iso_8601() -> None:
    moment = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
    assert rendered(at=moment)["at"] == "2024-02-29T12:00:00Z"
    assert rendered(at=moment, odd=2**70)["at"] == "2024-02-29T12:00:00+00:00"


def test_a_cycle_and_a_deep_nest_are_cut() -> None:
    deep: object = "bottom"
    for _ in range(2000):
        deep = [deep]
    assert "… (cut)" in json.dumps(rendered(cycle=CYCLE, deep=deep), ensure_ascii=False)


@pytest.mark.parametrize(
    "value",
    ["m" * 1_000_000, ["m" * 30_000] * 50, {f"key {n}": "m" * 30_000 for n in range(50)}, 10**100_000],
    ids=lambda value: type(value).__name__,
)
def test_a_line_has_an_end_whatever_it_is_given(value: object) -> None:
    line = json_line(IDENTITY, "info", "tested", {"value": value})
    assert len(line) < 140_000
    assert json.loads(line)["event"] == "tested"


def test_fields_cannot_pose_as_the_head_of_the_line() -> None:
    line = rendered(worker="other", level="debug", timestamp=0)
    assert (line["worker"], line["level"], line["pid"]) == ("w-12345678", "info", os.getpid())
    assert (line["worker_"], line["level_"], line["timestamp_"]) == ("other", "debug", 0)


def test_a_traceback_is_one_bounded_string_without_locals_and_secrets() -> None:
    masking.remember("remembered-secret")

    def dive(depth: int) -> None:
        local = "a local value"
        if depth == 0:
            raise ValueError("remembered-secret", "postgresql://u:other-secret@h")
        dive(depth - 1)
        del local

    with pytest.raises(ValueError, match="remembered") as raised:
        dive(3)
    text = log_lines.traceback_text(raised.value)
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith("ValueError: ('***', 'postgresql://u:***@h')")
    assert "a local value" not in text
    with pytest.raises(RecursionError) as recursed:
        dive(100_000)
    assert len(log_lines.traceback_text(recursed.value)) < 17_000
    assert "RecursionError" in log_lines.traceback_text(recursed.value)


def test_the_console_shows_the_same_for_people() -> None:
    fields = {"job_id": 3, "error": "two words", "odd": "\x1b[31m", "exception": "Traceback:\n  \x1b[1mboom"}
    line = console_line(IDENTITY, "warning", "job_failed", fields).decode()
    assert re.match(r"\d\d:\d\d:\d\d\.\d{3} warning job_failed +job_id=3 error='two words' odd='\\x1b", line)
    assert "\x1b" not in line
    assert line.endswith("\n    Traceback:\n      ?[1mboom\n")


# --- everybody in the process


def test_an_event_carries_who_speaks_and_its_fields() -> None:
    line = only("logs.emit(events.JOB_SUCCEEDED, job_id=1, kind='message', duration_ms=1.5)")
    assert (line["level"], line["event"], line["worker"], line["version"]) == (
        "info",
        "job_succeeded",
        "w-1",
        "1",
    )
    assert (line["job_id"], line["kind"], line["duration_ms"]) == (1, "message", 1.5)


def test_an_exception_is_a_traceback_and_an_error_its_message() -> None:
    line = only("""
        try:
            raise ValueError('password=hunter2 is wrong')
        except ValueError as error:
            logs.emit(events.JOB_FAILED, error=error, exception=error)
    """)
    assert line["error"] == "password=*** is wrong"
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert "hunter2" not in json.dumps(line).replace("raise ValueError('password=hunter2", "")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('one', 2)", {"event": "print", "message": "one 2", "stream": "stdout", "level": "info"}),
        ("print('no end', end='')", {"event": "print", "message": "no end"}),
        ("import sys; sys.stderr.write('oh\\n')", {"event": "print", "message": "oh", "stream": "stderr"}),
        ("import sys; sys.stdout.buffer.write(b'b\\xff\\n')", {"event": "print", "message": "b\ufffd"}),
        ("print('\\ud800')", {"event": "print", "message": "\ufffd"}),
        ("print('a\\u2028b\\x85c')", {"event": "print", "message": "a\u2028b\x85c"}),
        (
            "import warnings; warnings.warn('careful')",
            {"event": "warning", "level": "warning", "message": "careful", "category": "UserWarning"},
        ),
        (
            "import logging; logging.getLogger('lib.part').warning('%d of %s', 1, 'x\\ny')",
            {"event": "log", "level": "warning", "logger": "lib.part", "message": "1 of x\ny"},
        ),
        (
            "import logging; logging.getLogger('lib').error('%d', 'not a number')",
            {"event": "log", "level": "error", "logger": "lib", "message": "%d"},
        ),
        ("raise ValueError('bug')", {"event": "internal_error", "error": "bug", "error_type": "ValueError"}),
        ("import not_there", {"event": "internal_error", "error_type": "ModuleNotFoundError"}),
        (
            "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='side')\nt.start(); t.join()",
            {"event": "internal_error", "error_type": "ZeroDivisionError", "where": "thread side"},
        ),
        (
            "class A:\n    def __del__(self): raise ValueError('late')\nA()",
            {"event": "internal_error", "error": "late", "error_type": "ValueError"},
        ),
        (
            "import structlog; structlog.get_logger().bind(a=1).warning('mine', b=float('nan'))",
            {"event": "mine", "level": "warning", "a": 1, "b": None},
        ),
        (
            "logs.job_logger(job_id=7).info('from %s', 'me')",
            {"event": "from me", "job_id": 7, "level": "info"},
        ),
    ],
)
def test_whoever_speaks_speaks_json(code: str, expected: dict[str, object]) -> None:
    assert expected.items() <= only(code).items()


def test_an_exception_that_a_library_logs_comes_with_its_traceback() -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}"
    for call in ("import logging; logging.exception('bad')", "logs.job_logger().exception('bad')"):
        line = only(code.format(call))
        assert line["level"] == "error"
        assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_an_exception_no_task_ever_saw_is_an_internal_error() -> None:
    line = only("""
        import asyncio, gc

        async def main():
            asyncio.get_running_loop().set_exception_handler(logs.loop_exception_handler)
            async def fail():
                raise ValueError('unseen')
            task = asyncio.create_task(fail(), name='the task')
            await asyncio.wait([task])
            del task
            gc.collect()

        asyncio.run(main())
    """)
    assert (line["event"], line["error"], line["error_type"]) == ("internal_error", "unseen", "ValueError")
    assert line["where"] == "the task: Task exception was never retrieved"


def test_the_arguments_of_a_callback_that_fails_show_no_secret() -> None:
    line = only("""
        import asyncio
        from worker import masking

        def fail(secret):
            raise ValueError(secret)

        async def main():
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(logs.loop_exception_handler)
            loop.call_soon(fail, 'remembered-secret')
            await asyncio.sleep(0)

        masking.remember('remembered-secret')
        asyncio.run(main())
    """)
    assert line["where"].startswith("event loop: Exception in callback fail('***')")
    assert "remembered" not in json.dumps(line)


def test_what_is_printed_past_python_goes_to_stderr() -> None:
    ran = run("import os, subprocess; os.write(1, b'raw\\n'); subprocess.run(['echo', 'child'])")
    assert ran.stdout == ""
    assert ran.stderr == "raw\nchild\n"


def test_lines_below_the_level_are_not_said() -> None:
    lines = said("""
        logs.configure(level='warning', worker='w-2')
        logs.emit(events.JOB_SUCCEEDED)
        print('no')
        import logging; logging.getLogger('x').info('no')
        logs.job_logger().info('no')
        logs.emit(events.JOB_FAILED)
    """)
    assert [(line["event"], line["worker"]) for line in lines] == [("job_failed", "w-2")]


def test_secrets_are_masked_in_what_others_say() -> None:
    code = """
        import logging, warnings
        from worker import masking
        masking.remember('remembered-secret')
        print('remembered-secret')
        warnings.warn('remembered-secret')
        logging.error('remembered-secret', exc_info=ValueError('remembered-secret'))
        class Said:
            __str__ = __repr__ = lambda self: 'remembered-secret'
        long = 'x' * 32760 + 'remembered-secret'
        nested = {'remembered-secret': [('remembered-secret', {'a': long}), Said(), b'remembered-secret']}
        logs.job_logger(a='remembered-secret', said=Said(), nested=nested, number=1).info('remembered-secret')
        logging.warning(Said(), stack_info=True)
        logs.emit(events.DATABASE_LOST, error='remembered-secret')
        raise ValueError('remembered-secret')
    """
    lines = said(code)
    assert len(lines) == 7
    assert "remembered" not in json.dumps(lines)
    assert [line["number"] for line in lines if "nested" in line] == [1]


def test_a_forked_child_speaks_too() -> None:
    lines = said("""
        import os
        print('parent')
        logs.flush(5)
        child = os.fork()
        if child == 0:
            print('child')
            logs.flush(5)
            os._exit(0)
        os.waitpid(child, 0)
    """)
    spoken = [line for line in lines if line["event"] == "print"]  # Python 3.12 warns of such a fork
    assert {line["message"] for line in spoken} == {"parent", "child"}
    assert len({line["pid"] for line in spoken}) == 2


def test_threads_do_not_mix_their_lines() -> None:
    lines = said("""
        import threading

        def speak(number):
            for n in range(500):
                logs.emit(events.JOB_SUCCEEDED, job_id=n, kind=number)
                print(number, n)

        threads = [threading.Thread(target=speak, args=(f"t{n}",)) for n in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    """)
    for kind in ("t0", "t1", "t2", "t3"):
        assert [line["job_id"] for line in lines if line.get("kind") == kind] == list(range(500))
        told = [line["message"] for line in lines if line.get("message", "").startswith(kind)]
        assert told == [f"{kind} {n}" for n in range(500)]


def test_whatever_a_handler_says_the_log_stays_one_object_a_line(workplace: Workplace) -> None:
    """I8. `events` parses every line. Nothing of it is lost, and the job has succeeded."""
    daemon = workplace.daemon()
    id = workplace.add("noisy")
    workplace.wait_for_state(id, "succeeded")
    workplace.healthy()
    assert daemon.stop() == 0
    text = json.dumps(daemon.events, ensure_ascii=False)
    for word in ("by print", "in bytes", "by a warning", "by logging", "with arguments", "by job.log", "by a thread", "by a task"):
        assert f"said {word}" in text
    assert "said in __del__" in text
    assert "said in" in [event["message"] for event in daemon.find("print", stream="stderr")]
    assert "lines \x1b[31m \ufffd" in [event["message"] for event in daemon.find("print", stream="stderr")]
    assert all({"timestamp", "level", "event", "worker", "pid", "version"} <= event.keys() for event in daemon.events)
    (said,) = daemon.find("said by job.log")
    assert (said["job_id"], said["number"], said["text"]) == (id, None, "\ufffd\x00")
    assert max(map(len, daemon.stdout_path.read_text().splitlines())) < 140_000
    assert daemon.find("log_lines_dropped") == []
    assert daemon.stderr == ""


def test_a_process_that_aborts_leaves_whole_lines(workplace: Workplace) -> None:
    """What the C library and faulthandler have to say goes to standard error."""
    daemon = workplace.daemon(PYTHONFAULTHANDLER="1")
    workplace.add("abort", max_attempts=1)
    assert daemon.wait() == -signal.SIGABRT
    assert daemon.stdout_path.read_text().endswith("\n")
    assert {event["event"] for event in daemon.events} >= {"daemon_started", "daemon_ready"}
    assert "Fatal Python error: Aborted" in daemon.stderr


def test_a_line_that_is_written_in_pieces_belongs_to_its_thread() -> None:
    lines = said("""
        import sys, threading

        turn = threading.Barrier(2)

        def speak(pieces):
            for piece in pieces:
                turn.wait()
                sys.stdout.write(piece)
                turn.wait()

        first = threading.Thread(target=speak, args=(["one ", "", "half\\n", "no end"],))
        second = threading.Thread(target=speak, args=(["other ", "line\\nand ", "more", ""],))
        for thread in (first, second): thread.start()
        for thread in (first, second): thread.join()
    """)
    assert sorted(line["message"] for line in lines) == ["and more", "no end", "one half", "other line"]


def test_lines_that_nobody_ends_wait_in_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_capture, "_UNFINISHED_LINES", 3)
    told: list[object] = []
    stream = log_capture.LineStream(lambda level, event, fields: told.append(fields["message"]), "stdout", 1)
    leave, threads = threading.Event(), []
    for number in range(5):
        written = threading.Event()

        def speak(number: int = number, written: threading.Event = written) -> None:
            stream.write(f"half {number}")
            written.set()
            leave.wait(60)  # two threads that are there have two numbers

        threads.append(threading.Thread(target=speak))
        threads[-1].start()
        assert written.wait(60)
    assert told == ["half 0", "half 1"]
    stream.finish()
    assert told[2:] == ["half 2", "half 3", "half 4"]
    leave.set()
    for thread in threads:
        thread.join()


def test_a_child_that_is_forked_while_another_thread_speaks_does_not_wait_for_it() -> None:
    lines = said("""
        import os, signal, sys, threading, warnings

        warnings.simplefilter("ignore")  # newer Pythons warn of such a fork
        speaking, leave = threading.Event(), threading.Event()

        def speak():
            with sys.stdout._lock:
                speaking.set()
                leave.wait(60)

        thread = threading.Thread(target=speak)
        thread.start()
        speaking.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            print("child")
            logs.flush(5)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        leave.set()
        thread.join()
        print(f"status {status}")
    """)
    assert [line["message"] for line in lines] == ["child", "status 0"]


# --- without a reader


def speaking(code: str, stdout: int) -> subprocess.Popen[bytes]:
    program = "from worker import events, log_sink, logs\nlogs.configure()\n" + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", program], stdout=stdout)


linux_pipes = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a test choose the size of a pipe")


@linux_pipes
def test_a_full_pipe_drops_lines_counts_them_and_says_so_when_it_flows_again() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = speaking(
        """
        import os, signal
        log_sink.MAX_QUEUED_LINES = 100
        signal.signal(signal.SIGUSR1, lambda *_: None)
        for n in range(1000):
            logs.emit(events.JOB_SUCCEEDED, job_id=n)
        print('spoken')
        signal.pause()
        logs.emit(events.JOB_SUCCEEDED, job_id=1000)
        """,
        writer,
    )
    os.close(writer)
    try:
        with open(reader, encoding="utf-8") as stream:
            wait_for(lambda: is_sleeping(process.pid))
            lines = read_until(stream, "log_lines_dropped")
            process.send_signal(signal.SIGUSR1)
            lines += [json.loads(line) for line in stream]
    finally:
        process.kill()
        process.wait()
    ids = [line["job_id"] for line in lines if line["event"] == "job_succeeded"]
    (dropped,) = [line["lines"] for line in lines if line["event"] == "log_lines_dropped"]
    # 1,000 events and one print were said before the pause; what was not dropped came in order, and all
    # came whole.
    prints = sum(line["event"] == "print" for line in lines)
    assert dropped == 1001 - (len(ids) - 1) - prints
    assert ids == sorted(ids)
    assert ids[-1] == 1000


def read_until(stream: Any, event: str) -> list[dict[str, Any]]:
    lines = []
    for line in stream:
        lines.append(json.loads(line))
        if lines[-1]["event"] == event:
            return lines
    raise AssertionError(f"no {event} among {lines}")


def is_sleeping(pid: int) -> bool:
    """Whether its main thread waits in `pause`."""
    with open(f"/proc/{pid}/task/{pid}/wchan") as file:
        return "pause" in file.read()


@pytest.mark.parametrize("closed", ["reader gone", "disk full", "no stdout"])
def test_a_stdout_that_takes_nothing_kills_nobody(closed: str) -> None:
    code = """
        import sys
        for n in range(2000):
            logs.emit(events.JOB_SUCCEEDED, job_id=n)
        logs.flush(0.1)
        sys.exit(7)
    """
    if closed == "reader gone":
        reader, stdout = os.pipe()
        os.close(reader)
    else:
        stdout = os.open("/dev/full" if closed == "disk full" else os.devnull, os.O_WRONLY)
    if closed == "no stdout":
        code = "import os; os.close(1)\nlogs._output = None\nlogs.configure()\n" + textwrap.dedent(code)
    process = speaking(code, stdout)
    os.close(stdout)
    assert process.wait(timeout=20) == 7


@linux_pipes
def test_lines_wait_for_a_pipe_that_others_made_non_blocking() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    sink = Sink(writer, dropped_line=lambda lines: b"dropped\n")
    line = b"x" * 99 + b"\n"
    for _ in range(1000):
        sink.put(line)
    assert not sink.flush(0.05)
    received = b""
    while len(received) < 1000 * len(line):
        received += os.read(reader, 65536)
    assert received == line * 1000
    assert sink.flush(5)
    os.close(reader)


@pytest.mark.parametrize(("number", "kept"), [(errno.ENOSPC, True), (errno.EPIPE, False)])
def test_lines_wait_for_room_on_a_disk_and_are_counted_when_nobody_will_read(
    monkeypatch: pytest.MonkeyPatch, number: int, kept: bool
) -> None:
    written: list[bytes] = []
    troubles = [OSError(number, "no"), OSError(number, "no")]

    def write(_fd: int, data: bytes) -> int:
        if troubles:
            raise troubles.pop()
        written.append(bytes(data))
        return len(data)

    monkeypatch.setattr("worker.log_sink.os.write", write)
    monkeypatch.setattr("worker.log_sink._RETRY_SECONDS", 0.01)
    sink = Sink(1, dropped_line=lambda lines: b"%d dropped\n" % lines)
    for line in (b"first\n", b"second\n", b"third\n"):
        sink.put(line)
        assert sink.flush(5)
    assert sink.flush(5)
    said = b"".join(written)
    assert said == (b"first\nsecond\nthird\n" if kept else b"third\n2 dropped\n")


@linux_pipes
def test_the_queue_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.log_sink.MAX_QUEUED_BYTES", 1000)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    told: list[int] = []
    sink = Sink(writer, dropped_line=lambda lines: told.append(lines) or b"dropped\n")
    sink.put(b"x" * 999 + b"\n")
    sink.put(b"y" * 1001)
    with open(reader, "rb") as stream:
        assert stream.readline().startswith(b"x")
        assert stream.readline() == b"dropped\n"
    assert told == [1]


# --- inside an application


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


def test_threads_speak_while_others_flush() -> None:
    reader, writer = os.pipe()
    sink = Sink(writer, dropped_line=lambda lines: b"dropped\n")
    done = threading.Event()

    def drain() -> None:
        while os.read(reader, 65536):
            pass
        done.set()

    threading.Thread(target=drain, daemon=True).start()
    for _ in range(50):
        sink.put(b"line\n")
        assert sink.flush(5)
    os.close(writer)
    assert done.wait(5)


def test_what_is_said_last_is_written_where_no_thread_can_be_started_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 refuses one as it goes down."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    reader, writer = os.pipe()
    try:
        sink = Sink(writer, dropped_line=lambda lines: b"dropped\n")
        sink.put(b"one\n")
        sink.put(b"two\n")
        assert sink.flush(5)
        assert os.read(reader, 100) == b"one\ntwo\n"
        sink.put(b"more than a pipe takes\n" * 10_000)
        assert not sink.flush(0.1), "nobody reads"
    finally:
        os.close(reader)
        os.close(writer)
