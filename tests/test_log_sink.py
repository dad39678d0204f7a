"""Logs without a reader: nobody waits for one, lines wait in a bounded number, and what is dropped is counted."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from tests.waiting import wait_for
from worker.log_sink import Sink


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
            wait_for(lambda: is_sleeping(process.pid), 60)
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
    assert process.wait(timeout=60) == 7


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
    assert sink.flush(60)
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
        assert sink.flush(60)
    assert sink.flush(60)
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


def test_threads_speak_while_others_flush() -> None:
    reader, writer = os.pipe()
    sink = Sink(writer, dropped_line=lambda lines: b"%d dropped\n" % lines)
    heard: list[bytes] = []

    def listen() -> None:
        with open(reader, "rb") as stream:
            heard.extend(stream)

    def speak(name: int) -> None:
        for number in range(500):
            sink.put(b"%d by %d\n" % (number, name))

    listener = threading.Thread(target=listen)
    speakers = [threading.Thread(target=speak, args=(name,)) for name in range(4)]
    for thread in (listener, *speakers):
        thread.start()
    try:
        while any(thread.is_alive() for thread in speakers):
            assert sink.flush(60)
        assert sink.flush(60)
    finally:
        os.close(writer)
        listener.join()
    for name in range(4):
        assert [line for line in heard if line.endswith(b" by %d\n" % name)] == [b"%d by %d\n" % (n, name) for n in range(500)]
    assert len(heard) == 2000


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
