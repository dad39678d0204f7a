"""Whoever speaks in the process, and however, speaks one JSON object a line."""

from __future__ import annotations

import json
import signal

import pytest

from tests.log_programs import only, run, said
from tests.workplace import Workplace


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
            called = asyncio.Event()
            loop.call_soon(called.set)
            await called.wait()

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
