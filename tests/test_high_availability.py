"""A standby takes over. What was acknowledged is there, fences go on rising, and the daemons find the way by themselves."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.processes import ROOT, Daemon
from tests.replicas import Pair, lacking, pairs
from tests.waiting import wait_for, wait_while
from tests.workplace import LEASE_SECONDS, Note, Workplace
from worker.lost_claims import MOST_OUTSTANDING

WANTED = "TEST_HIGH_AVAILABILITY"
"""Two of these always run: a failover with a synchronous standby, and one with an asynchronous one. The others when this is set."""
pytestmark = pytest.mark.skipif(lacking() is not None, reason=f"no standby can be made: {lacking()}")
only_when_wanted = pytest.mark.skipif(not os.environ.get(WANTED), reason=f"takes minutes with the others like it: set {WANTED}=1")

SOON_SECONDS = 60
"""For what has to happen sooner or later, on a machine that is busy with something else."""

GUIDE = ROOT / "docs" / "high-availability.md"


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pairs() as made:
        yield made


@pytest.fixture
def place(pair: Pair, daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Workplace]:
    """Daemons that know both servers."""
    with contextlib.closing(Workplace(pair.url, tmp_path, daemon)) as made:
        yield made


class Client(threading.Thread):
    """An application that goes on enqueueing, whatever happens, and remembers what it was told."""

    def __init__(self, url: str) -> None:
        super().__init__(name="client", daemon=True)
        self.acknowledged: dict[str, int] = {}
        self._url = url
        self._ending = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._ending.is_set():
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self._url, autocommit=True) as db:
                while not self._ending.wait(0.005):
                    key = f"client-{number}"
                    row = db.execute("SELECT id FROM enqueue_job('nap', '{}', %s)", [key]).fetchone()
                    assert row is not None
                    self.acknowledged[key] = row[0]
                    number += 1
            self._ending.wait(0.05)

    def __enter__(self) -> Client:
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ending.set()
        if failure[0] is None:
            self.join(SOON_SECONDS)
            assert not self.is_alive()

    def goes_on(self, jobs: int = 50) -> None:
        """That many more were acknowledged."""
        before = len(self.acknowledged)
        wait_for(lambda: len(self.acknowledged) >= before + jobs, SOON_SECONDS)


def in_trouble(*processes: Daemon) -> None:
    """Each has noticed; which of its loops was first does not matter."""
    wait_for(lambda: all(any(event["level"] == "warning" for event in process.events) for process in processes))


def nothing_more_is_told(client: Client, *processes: Daemon) -> None:
    """To the client or to a daemon, for the time of a lease."""

    def told() -> list[int]:
        return [len(client.acknowledged), *(len(process.find("job_succeeded")) for process in processes)]

    before = told()
    wait_while(lambda: told() == before, LEASE_SECONDS)


def nothing_is_lost(place: Workplace, client: Client, *processes: Daemon) -> None:
    """What the client was told and what the daemons said is what the database holds in the end."""
    place.wait_until_all("succeeded", SOON_SECONDS)
    rows = {row.idempotency_key: row.id for row in place.ask("SELECT idempotency_key, id FROM jobs")}
    assert client.acknowledged.items() <= rows.items()
    ledger = place.ask("SELECT job_id, fence FROM ledger")
    assert Counter(row.job_id for row in ledger) == dict.fromkeys(rows.values(), 1)
    said = [(event["job_id"], event["fence"]) for process in processes for event in process.find("job_succeeded")]
    assert set(said) <= {(row.job_id, row.fence) for row in ledger}
    assert len(said) == len(set(said))
    assert [process.process.poll() for process in processes] == [None] * len(processes)


def fences_rise(before: list[Note], after: list[Note]) -> None:
    """None was handed out twice, and those of the new primary are above all of the old one."""
    assert max(Counter(note.fence for note in [*before, *after]).values()) == 1
    assert max(note.fence for note in before) < min(note.fence for note in after)


@pytest.mark.parametrize("failovers", [1, pytest.param(2, marks=only_when_wanted)])
def test_failovers_lose_nothing_that_was_acknowledged(pair: Pair, place: Workplace, failovers: int) -> None:
    """The primary dies under load; the second time it is the one that took over the first time."""
    pair.synchronous()
    processes = [place.daemon() for _ in range(2)]
    with Client(pair.url) as client:
        for number in range(failovers):
            if number > 0:
                pair.standby.copy_of(pair.primary)
                pair.standby.start()
                pair.synchronous()
            client.goes_on()
            place.wait_for_notes("end", count=len(place.notes("end")) + 20, timeout_seconds=SOON_SECONDS)
            pair.primary.crash()
            before = place.notes("start")
            pair.fail_over()
            assert max(note.fence for note in before) <= pair.primary.value("SELECT last_value FROM fence_seq")
            place.reconnect()
            place.wait_for_notes("end", count=len(place.notes("end")) + 20, timeout_seconds=SOON_SECONDS)
            client.goes_on()
    assert max(Counter(note.fence for note in place.notes("start")).values()) == 1
    nothing_is_lost(place, client, *processes)


@only_when_wanted
def test_an_old_primary_that_nobody_told_can_acknowledge_nothing(pair: Pair, place: Workplace) -> None:
    """Its standby has left it. Daemons that are still there wait; when it is stopped they go on with the new one, and when it comes
    back, with commits that only it has, it is left alone."""
    pair.synchronous()
    processes = [place.daemon() for _ in range(2)]
    with Client(pair.url) as client:
        client.goes_on()
        pair.fail_over()
        old = pair.standby
        wait_for(lambda: old.value("SELECT count(*) FROM pg_stat_replication") == 0)
        in_trouble(*processes)
        nothing_more_is_told(client, *processes)
        old.crash()
        place.reconnect()
        client.goes_on()
        old.start(default_transaction_read_only="on")
        place.terminate()
        client.goes_on()
        assert old.value("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'reliable-worker%%'") == 0
    nothing_is_lost(place, client, *processes)


@only_when_wanted
def test_a_primary_that_turns_read_only_is_left_with_its_connections_open(pair: Pair, place: Workplace) -> None:
    """25006 is an outage: finished work waits for its end. The listener moves too, though its old connection still answers."""
    pair.synchronous()
    process = place.daemon(WORKER_POLL_SECONDS="30", WORKER_LEASE_SECONDS="12")
    running = [place.add("gated", {"gate": "gate"}), place.add("own", {"gate": "gate"}), place.add("gated_plain", {"gate": "gate"})]
    place.wait_for_notes("start", count=3)
    pair.primary.set("default_transaction_read_only", "on")
    place.open_gate()
    process.wait_for_event("database_lost")
    wait_for(lambda: pair.primary.value("SELECT bool_and(replay_lsn = pg_current_wal_lsn()) FROM pg_stat_replication"))
    pair.fail_over()
    place.db.close()
    place.db = place._connect()
    for id in running:
        place.wait_for_state(id, "succeeded")
    # A handler's own transaction is its attempt's; whatever else has finished is kept.
    assert [place.job(id).attempts for id in running] in ([1, 2, 1], [1, 1, 1])
    wait_for(lambda: place.backends("listen"), 15)
    wait_for(lambda: place.value("SELECT bool_or(hungry) FROM processes"))
    added = time.monotonic()
    place.add("nap", key="woken")
    assert place.wait_for_notes("start", "woken")[0].at_seconds - added < 10  # and not when it polls


def add_for_later(place: Workplace, jobs: int) -> list[int]:
    """So that both servers know them before they are due; to make them due then needs no NOTIFY, which would wait for others'."""
    rows = place.ask(
        "INSERT INTO jobs (kind, payload, available_at) SELECT 'nap', '{}', now() + interval '1 hour'"
        " FROM generate_series(1, %s) RETURNING id",
        jobs,
    )
    return [row.id for row in rows]


@only_when_wanted
def test_while_the_standby_is_away_everybody_waits(pair: Pair, place: Workplace) -> None:
    pair.synchronous()
    processes = [place.daemon() for _ in range(2)]
    with Client(pair.url) as client:
        client.goes_on()
        pair.standby.stop()
        in_trouble(*processes)
        nothing_more_is_told(client, *processes)
        pair.standby.start()
        client.goes_on()
    nothing_is_lost(place, client, *processes)


@only_when_wanted
def test_claims_without_an_answer_do_not_take_every_connection(pair: Pair, place: Workplace) -> None:
    """While the standby is away each of them keeps its session in the server, and nobody can stop it."""
    pair.synchronous()
    processes = [place.daemon() for _ in range(2)]
    ids = place.add_many(400, "nap", {"seconds": 0.02})
    place.wait_for_notes("end", count=40)
    pair.standby.stop()
    in_trouble(*processes)
    unanswered = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name ~ ' claim$'"
    wait_for(lambda: place.value(unanswered))
    wait_while(lambda: place.value(unanswered) <= len(processes) * MOST_OUTSTANDING, 4 * LEASE_SECONDS)
    pair.standby.start()
    place.wait_until_all("succeeded", 30)
    assert place.ledger() == dict.fromkeys(ids, 1)


def recipe() -> list[str]:
    """The statements of the guide for the promotion of an asynchronous standby."""
    (block,) = re.findall(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return [statement.strip() for statement in re.sub(r"--.*", "", block).split(";") if statement.strip()]


def test_after_an_asynchronous_failover_the_recipe_lets_no_fence_be_drawn_twice(pair: Pair, place: Workplace) -> None:
    """Claims and completions are lost with the primary. What they stood for is done again, under fences above all seen."""
    processes = [place.daemon() for _ in range(2)]
    # Known to both servers, due later.
    long, *ids = add_for_later(place, 101)
    place.db.execute("UPDATE jobs SET payload = %s, idempotency_key = 'long' WHERE id = %s", ['{"seconds": 60}', long])
    lsn = pair.primary.value("SELECT pg_current_wal_lsn()::text")
    wait_for(lambda: pair.standby.value("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", lsn))
    pair.standby.set("primary_conninfo", "")
    wait_for(lambda: pair.primary.value("SELECT count(*) FROM pg_stat_replication") == 0)
    place.db.execute("UPDATE jobs SET available_at = now()")
    wait_for(lambda: place.states() == {"succeeded": 100, "running": 1}, SOON_SECONDS)
    lost = place.notes("start")
    pair.primary.crash()

    statements = recipe()
    (jump,) = (number for number, statement in enumerate(statements) if "setval" in statement)
    with pair.standby.connect() as db:
        for statement in statements[: jump - 1]:
            db.execute(statement)
    with pair.standby.connect() as db:
        told = place.wait_for_notes("told:lease_untrusted", "long", timeout_seconds=SOON_SECONDS)
        # The daemons stay out, though jobs are due here; and the jump is needed, as these fences would come again.
        for statement in ("BEGIN READ WRITE", "UPDATE jobs SET available_at = now(), payload = '{}'", "COMMIT"):
            db.execute(statement)
        wait_while(lambda: db.execute("SELECT max(fence) FROM jobs").fetchone() == (0,), LEASE_SECONDS)
        last = db.execute("SELECT last_value FROM fence_seq").fetchone()
        assert last is not None
        assert last[0] < max(note.fence for note in lost)
        for statement in statements[jump - 1 :]:
            db.execute(statement)
    place.reconnect()
    place.wait_until_all("succeeded", SOON_SECONDS)
    again = [note for note in place.notes("start") if note not in lost]
    assert len(again) >= 101
    fences_rise(lost, again)
    assert told[0].at_seconds < next(note.at_seconds for note in again if note.key == "long")
    assert place.ledger() == dict.fromkeys([long, *ids], 1)
    assert [process.process.poll() for process in processes] == [None, None]
