"""The exit status of a daemon tells why it ended."""

from __future__ import annotations

import pytest

from tests.workplace import Workplace


@pytest.mark.parametrize(
    ("variables", "status", "says"),
    [
        ({"WORKERS": "4x"}, 78, "WORKERS"),
        ({"WORKER_RENEW_SECONDS": "2"}, 78, "WORKER_RENEW_SECONDS"),
        ({"WORKER_HANDLERS": "no_such_module:handlers"}, 78, "no_such_module"),
        ({"WORKER_HANDLERS": "tests.handlers_for_tests:gate"}, 78, "worker.Handlers"),
        ({"WORKER_RUNTIME_DIR": "/proc/nowhere"}, 78, "WORKER_RUNTIME_DIR"),
        ({"DATABASE_URL": "postgresql://127.0.0.1:1/nowhere", "WORKER_CONNECT_WAIT_SECONDS": "0.5"}, 69, "127.0.0.1"),
        ({"BROKEN_FOR_TEST": "worker.reaper:Reaper._pass"}, 1, "a bug for the test"),
        ({"BROKEN_FOR_TEST": "worker.claimer:Claimer._round"}, 1, "a bug for the test"),
        ({"BROKEN_FOR_TEST": "worker.keeper:Keeper._beat"}, 1, "a bug for the test"),
        ({"BROKEN_FOR_TEST": "worker.listener:Listener._listen"}, 1, "a bug for the test"),
    ],
    ids=lambda value: "-".join(value) + "=" + "-".join(value.values())[-24:] if isinstance(value, dict) else None,
)
def test_the_exit_status_tells_why(workplace: Workplace, variables: dict[str, str], status: int, says: str) -> None:
    """E10. All that is said about it is one JSON object a line on standard output."""
    daemon = workplace.daemon(ready=False, **variables)
    assert daemon.wait(60) == status
    errors = [event for event in daemon.events if event["level"] in ("error", "warning")]
    assert any(says in str(event) for event in errors), daemon.events


def test_wrong_usage_is_status_2(workplace: Workplace) -> None:
    assert workplace.daemon("--no-such-option", ready=False).wait() == 2


@pytest.mark.parametrize("where", ["committer:Committer._write", "pool:Pool._start", "attempt:Attempt._outcome"])
def test_a_bug_ends_the_process_in_order(workplace: Workplace, where: str) -> None:
    """Guarantee 6: status 1, and the jobs it held are there for the next one."""
    waiting = [workplace.add("nap", max_attempts=2) for _ in range(3)]
    daemon = workplace.daemon(ready=False, BROKEN_FOR_TEST=f"worker.{where}", WORKER_SHUTDOWN_GRACE_SECONDS="0.2")
    assert daemon.wait(60) == 1
    assert any("a bug for the test" in str(event) for event in daemon.find("internal_error"))
    workplace.daemon()
    workplace.wait_until_all("succeeded")
    assert workplace.ledger() == dict.fromkeys(waiting, 1)
