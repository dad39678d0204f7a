"""Jobs that harm: their process, their neighbours, their own row. And what is done to jobs from outside at the worst moment."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.waiting import any_moment, wait_for
from tests.workplace import POLL_NEVER, Supervisor, Workplace, both_shapes

ODD_PLACES = ("", "_in_a_thread", "_in_a_transaction")


@both_shapes
@pytest.mark.parametrize("kind", ["exit", "kill"])
def test_a_job_that_kills_its_process_ends_dead_and_takes_no_neighbours_with_it(
    workplace: Workplace, shape: dict[str, str], kind: str
) -> None:
    """D2, guarantee 8: dead after three claims, three restarts, everybody else done."""
    poison = workplace.add(kind, key="poison", max_attempts=3)
    others = workplace.add_many(20, "nap", {"seconds": 0.1})
    with Supervisor(workplace, **shape) as supervisor:
        dead = workplace.wait_for_state(poison, "dead", timeout_seconds=40)
        for id in others:
            workplace.wait_for_state(id, "succeeded", timeout_seconds=20)
        workplace.healthy()
    assert (dead.attempts, dead.crashes) == (3, 3)
    assert dead.last_error.startswith("worker lost: ")
    assert [failure.outcome for failure in workplace.failures(poison)] == ["crashed"] * 3
    assert len(workplace.notes("start", "poison")) == 3
    assert supervisor.crashes == 3
    # Who ran beside it at its first claim was a suspect once; nobody suffered twice.
    assert workplace.value("SELECT max(crashes) FROM jobs WHERE id = ANY (%s)", others) <= 1
    assert set(workplace.ledger().values()) == {1}


def test_a_suspect_runs_as_the_only_one_of_its_sort(workplace: Workplace) -> None:
    """Guarantee 8: several poisonous jobs, one process: none is claimed together with another."""
    poisons = [workplace.add("exit", {"seconds": 0.3}, key=f"poison-{number}", max_attempts=2) for number in range(3)]
    with Supervisor(workplace) as supervisor:
        for id in poisons:
            workplace.wait_for_state(id, "dead", timeout_seconds=40)
    by_process: dict[int, set[str]] = {}
    for note in workplace.notes("start"):
        if note.attempt == 2:
            by_process.setdefault(note.pid, set()).add(note.key)
    assert [len(keys) for keys in by_process.values()] == [1, 1, 1]
    assert supervisor.crashes >= 4


def test_each_job_is_rescued_up_to_its_own_limit(workplace: Workplace) -> None:
    """D4."""
    limits = (1, 2, 4)
    ids = [workplace.add("kill", max_attempts=limit) for limit in limits]
    with Supervisor(workplace):
        rows = [workplace.wait_for_state(id, "dead", timeout_seconds=60) for id in ids]
    assert [row.attempts for row in rows] == list(limits)
    assert [len(workplace.failures(id)) for id in ids] == list(limits)


def test_jobs_taken_down_by_a_neighbour_run_again(workplace: Workplace) -> None:
    """Guarantee 6: a lost process costs them an attempt, and nothing else."""
    victims = [workplace.add("nap", {"seconds": 0.5}) for _ in range(3)]
    with Supervisor(workplace):
        workplace.wait_for_notes("start", count=3)
        workplace.add("exit", max_attempts=1)
        for id in victims:
            row = workplace.wait_for_state(id, "succeeded", timeout_seconds=20)
            assert row.attempts <= 2
    assert workplace.ledger() == dict.fromkeys(victims, 1)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("unprintable", "Unprintable"),
        ("group", "ExceptionGroup"),
        ("demanding", "Demanding"),
        ("SystemExit", "SystemExit"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("CancelledError", "CancelledError"),
        ("surrogate", "ValueError"),
        ("slippery", "Slippery"),
        ("slippery cause", "ValueError"),
        ("circle", "ValueError"),
        ("long name", "EEEE"),
        ("base group", "BaseExceptionGroup"),
        ("bottomless", "RecursionError"),
        # Python turns the one that ends a generator into this where it leaves a coroutine.
        ("StopIteration", "RuntimeError"),
        ("StopAsyncIteration", "StopAsyncIteration"),
        ("GeneratorExit", "GeneratorExit"),
        ("MemoryError", "MemoryError"),
        ("TimeoutError", "TimeoutError"),
        ("InterruptedError", "InterruptedError"),
    ],
)
def test_an_odd_exception_is_that_jobs_failure_and_nothing_more(workplace: Workplace, how: str, name: str) -> None:
    """D8: recorded with the name of its type, wherever it comes from, and the slot is free again."""
    daemon = workplace.daemon(WORKERS="1")
    ids = {where: workplace.add(f"fail_oddly{where}", {"how": how}, max_attempts=2) for where in ODD_PLACES}
    for where, id in ids.items():
        row = workplace.wait_for_state(id, "dead")
        assert row.attempts == 2
        names = {name, how} if "Stop" in how else {name}
        assert any(row.last_error.startswith(known) for known in names), (where, row.last_error)
        failures = workplace.failures(id)
        assert [failure.outcome for failure in failures] == ["error"] * 2
        assert daemon.wait_for_event("job_dead", job_id=id)["error_type"].startswith(tuple(names))
    workplace.healthy()
    assert daemon.find("internal_error") == []
    assert daemon.process.poll() is None


@both_shapes
def test_failing_jobs_retry_with_growing_delays_and_end_dead(workplace: Workplace, shape: dict[str, str]) -> None:
    daemon = workplace.daemon(**shape, WORKER_BACKOFF_BASE_SECONDS="0.2", WORKER_BACKOFF_MAX_SECONDS="0.6")
    id = workplace.add("fail", max_attempts=5)
    row = workplace.wait_for_state(id, "dead")
    assert row.attempts == 5
    starts = [note.at_seconds for note in workplace.notes("start")]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert len(gaps) == 4
    for gap, full in zip(gaps, (0.2, 0.4, 0.6, 0.6), strict=True):
        assert gap >= full / 2  # that it is not much more is said by the delays, which a busy machine does not lengthen
    daemon.wait_for_event("job_dead", job_id=id)
    delays = [event["retry_in_seconds"] for event in daemon.find("job_failed", job_id=id)]
    assert all(full / 2 <= delay <= full for delay, full in zip(delays, (0.2, 0.4, 0.6, 0.6), strict=True))
    assert [event["attempt"] for event in daemon.find("job_dead")] == [5]


def test_a_retry_comes_within_the_cap_after_any_number_of_attempts(workplace: Workplace) -> None:
    """D5: numbers at which 2^n leaves an int, a float or an interval behind; and where the column itself ends."""
    daemon = workplace.daemon(WORKER_BACKOFF_BASE_SECONDS="60", WORKER_BACKOFF_MAX_SECONDS="64")  # none comes again meanwhile
    most = 2**31 - 1
    numbers = [0, 5, 31, 38, 62, 63, 64, 1_100, 32_767, 10**9, most - 2, most - 1]
    rows = workplace.ask(
        "INSERT INTO jobs (kind, payload, attempts, max_attempts)"
        " SELECT 'fail', '{}', n, %s FROM unnest(%s::int[]) WITH ORDINALITY AS u(n, place) ORDER BY place RETURNING id",
        most,
        numbers,
    )
    ids = [row.id for row in rows]
    for id in ids[:-1]:
        delay = daemon.wait_for_event("job_failed", job_id=id)["retry_in_seconds"]
        assert 0 < delay <= 64
    rows = workplace.ask("SELECT *, extract(epoch FROM available_at - started_at)::float8 AS after FROM jobs ORDER BY id")
    assert [row.attempts for row in rows] == [number + 1 for number in numbers]
    assert all(row.state == "ready" and 30 <= row.after < 64 + 60 for row in rows[:-1])
    assert workplace.wait_for_state(ids[-1], "dead").attempts == most
    workplace.healthy()


def test_counters_at_their_end_stop_neither_reaper_nor_claims(workplace: Workplace) -> None:
    """One row that cannot be written would fail the statement for all."""
    most = 2**31 - 1
    workplace.db.execute(
        "INSERT INTO jobs (kind, payload, state, attempts, max_attempts, crashes, lease_owner, lease_until) VALUES"
        " ('nap', '{}', 'running', %(most)s, %(most)s, 32767, 'nobody', now()),"
        " ('nap', '{}', 'running', %(most)s - 1, %(most)s, 32767, 'nobody', now()),"
        " ('nap', '{}', 'ready', %(most)s, %(most)s, 0, NULL, NULL)",
        {"most": most},
    )
    daemon = workplace.daemon()
    wait_for(lambda: workplace.states() == {"dead": 2, "succeeded": 1}, 30)
    assert workplace.value("SELECT max(attempts) FROM jobs") == most
    assert workplace.value("SELECT max(crashes) FROM jobs") == 32_767
    workplace.healthy()
    troubles = daemon.find("claim_failed") + daemon.find("reaper_failed")
    assert {said["error_type"] for said in troubles} <= {"TimeoutError"}  # a busy machine


def test_an_unknown_kind_waits_for_who_knows_it_without_using_attempts(workplace: Workplace) -> None:
    """D10, a rolling deploy: the old version never runs it, the new one does."""
    id = workplace.add("nap", key="new kind", max_attempts=1)
    old = workplace.daemon(WORKER_HANDLERS="", WORKER_POLL_SECONDS="0.05")
    old.wait_for_event("unknown_kind", kind="nap")
    released = old.wait_for_event("job_released", job_id=id, reason="unknown_kind")
    row = workplace.wait_for_state(id, "ready")
    assert (row.attempts, released["attempt"]) == (0, 1)
    # Put back with a delay: not in a circle.
    assert workplace.value("SELECT available_at >= started_at + interval '5 seconds' FROM jobs WHERE id = %s", id)
    assert old.stop() == 0
    workplace.db.execute("UPDATE jobs SET available_at = now()")
    workplace.daemon()
    row = workplace.wait_for_state(id, "succeeded")
    assert row.attempts == 1


@both_shapes
def test_a_cancellation_and_a_completion_agree_on_who_came_first(workplace: Workplace, shape: dict[str, str]) -> None:
    """D13: sixty rounds, fired at random around the completion; what the caller was told is what happened."""
    workplace.daemon(**shape)
    rounds = random.Random(13)
    told = {}
    spread_seconds = 0.02
    for _ in range(60):
        id = workplace.add("nap", {"seconds": 0.005})
        any_moment(rounds, spread_seconds)
        told[id] = workplace.value("SELECT cancel_job(%s)", id)
        spread_seconds *= 1.1 if told[id] == "cancelled" else 0.9  # around the completion on a slow machine, too
    for id, state in told.items():
        row = workplace.wait_for_state(id, "succeeded", "cancelled")
        assert row.state == state
        assert workplace.ledger()[id] == (1 if state == "succeeded" else 0)
    assert set(told.values()) == {"succeeded", "cancelled"}
    workplace.healthy()


def test_a_cancelled_job_stops_at_once(workplace: Workplace) -> None:
    daemon = workplace.daemon(WORKER_LEASE_SECONDS="300")
    id = workplace.add("nap", {"seconds": 200})
    workplace.wait_for_notes("start")
    assert workplace.value("SELECT cancel_job(%s)", id) == "cancelled"
    workplace.wait_for_notes("told:cancelled", timeout_seconds=60)  # its next renewal, in 100 s, would tell it too
    daemon.wait_for_event("job_abandoned", job_id=id, reason="cancelled")
    assert workplace.ledger() == {}
    workplace.healthy()


@both_shapes
def test_a_job_due_later_runs_then_and_once(workplace: Workplace, shape: dict[str, str]) -> None:
    """D15: three lease lengths ahead, by the clock of the database; nobody is woken by its insertion."""
    for _ in range(2):
        workplace.daemon(**shape, **POLL_NEVER, WORKER_LEASE_SECONDS="1")
    id = workplace.value("SELECT id FROM enqueue_job('nap', '{}', run_at => now() + interval '3 seconds')")
    row = workplace.wait_for_state(id, "succeeded", timeout_seconds=40)
    late = workplace.value("SELECT started_at - available_at FROM jobs WHERE id = %s", id).total_seconds()
    assert 0 <= late < 30  # and not when somebody polls
    assert row.attempts == 1
    assert len(workplace.notes("start")) == 1


def test_failures_do_not_grow_a_job_without_limit(workplace: Workplace) -> None:
    """D16: 30 failures of 1 MB each."""
    workplace.daemon(WORKER_BACKOFF_BASE_SECONDS="0", WORKER_LOG_LEVEL="error", ready=False)
    id = workplace.add("fail", {"characters": 1_000_000}, max_attempts=30)
    row = workplace.wait_for_state(id, "dead", timeout_seconds=60)
    assert (row.attempts, len(row.last_error)) == (30, 1000)
    failures = workplace.failures(id)
    assert [failure.attempt for failure in failures] == list(range(11, 31))
    assert all(len(failure.error.encode()) <= 8192 for failure in failures)


@both_shapes
def test_a_redelivered_job_leaves_one_effect_a_key(workplace: Workplace, shape: dict[str, str]) -> None:
    """Guarantee 4: run again by hand, or enqueued anew after its row was pruned; the ledger remembers the key."""
    daemon = workplace.daemon(**shape)
    for kind in ("nap", "own"):
        id = workplace.add(kind, key=kind)
        workplace.wait_for_state(id, "succeeded")
        workplace.db.execute("UPDATE jobs SET state = 'ready', completed_at = NULL WHERE id = %s", (id,))
        workplace.wait_for_notes("start", kind, count=2)
        workplace.wait_for_state(id, "succeeded")
        workplace.db.execute("DELETE FROM jobs WHERE id = %s", (id,))
        again = workplace.add(kind, key=kind)
        workplace.wait_for_state(again, "succeeded")
        assert workplace.ledger() == {id: 1}
        for attempt in (2, 1):
            daemon.wait_for_event("effect_already_applied", kind=kind, attempt=attempt)
        assert len(daemon.find("effect_already_applied", kind=kind)) == 2
        workplace.db.execute("TRUNCATE ledger")
