"""Threads and forked children that speak at the same time: their lines stay whole, in order, and theirs."""

from __future__ import annotations

import threading

import pytest

from tests.log_programs import said
from worker import log_capture


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
