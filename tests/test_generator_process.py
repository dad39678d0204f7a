"""The generator as a process and a command: it stops in order, waits for its database, and anybody may start and stop it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import namedtuple_row

from tests.commands import worker
from tests.generators import SLOW_MACHINE_SECONDS, Fleet, Route
from tests.processes import below_a_namespace, process_1_of
from tests.psql import grant
from tests.roles import role, url_as
from tests.servers import Server
from tests.waiting import wait_for
from tests.workplace import Workplace

# --- stopping


def slow_insert(seconds: float) -> str:
    """Makes each production take so long, and notes when it had ended."""
    return f"""
        CREATE TABLE ended (at timestamptz);
        CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_sleep({seconds});
            INSERT INTO ended VALUES (clock_timestamp());
            RETURN NULL;
        END $$;
        CREATE TRIGGER slow AFTER INSERT ON jobs FOR EACH STATEMENT EXECUTE FUNCTION be_slow();
    """


def in_production(fleet: Fleet) -> bool:
    found: int = fleet.value(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'"
        " AND application_name = 'reliable-worker generator' AND query LIKE '%%produce_slots%%'"
    )
    return found == 1


def test_a_leader_that_is_told_to_stop_releases_only_after_its_production_has_ended(fleet: Fleet) -> None:
    """H9."""
    fleet.db.execute(slow_insert(1))
    leader = fleet.lead("--every", "0.5", WORKER_LEASE_SECONDS="6", WORKER_QUERY_TIMEOUT_SECONDS="3")
    other = fleet.stand_by(WORKER_LEASE_SECONDS="6", WORKER_QUERY_TIMEOUT_SECONDS="3")
    wait_for(lambda: in_production(fleet))
    leader.signal(signal.SIGTERM)
    assert leader.wait() == 0
    leader.wait_for_event("generator_released")
    ended, released = fleet.value("SELECT max(at) FROM ended"), fleet.value("SELECT released_at FROM leases")
    if released is not None:  # else the other one has it already
        assert ended < released
    assert fleet.produced() > 0
    fence = other.wait_for_event("generator_leader")["fence"]
    assert fence > leader.find("generator_leader")[0]["fence"]


def test_a_production_that_is_locked_out_does_not_hold_up_the_stop(fleet: Fleet) -> None:
    """H9: nothing is written then, the lease is released, another one makes up for the slots."""
    leader = fleet.lead("--rate", "5")
    fleet.wait_for_more()
    with psycopg.connect(fleet.url) as other:
        other.execute("LOCK TABLE jobs IN SHARE MODE")
        leader.wait_for_event("generator_failed")
        assert leader.stop() == 0  # the lock is still there
        assert leader.find("generator_released")
        other.rollback()
    fleet.lead()
    fleet.wait_for_more(3)
    fleet.each_slot_once(0.2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_every_stop_signal_ends_leader_and_standby_with_0(fleet: Fleet, number: signal.Signals) -> None:
    leader, other = fleet.lead(), fleet.stand_by()
    for one in (other, leader):
        one.signal(number)
        assert one.wait() == 0
        assert [event["event"] for event in one.events][-1] == "shutdown_complete"
        assert one.find("shutdown_complete", status=0)
        assert one.stderr == ""
    assert fleet.holder is None


def test_signals_at_any_moment_of_the_start_end_it_with_0(fleet: Fleet) -> None:
    for delay_seconds in (0.3, 0.35, 0.4, 0.5, 0.6):
        one = fleet.run()
        time.sleep(delay_seconds)
        if not one.events:
            one.wait_for_event("generator_started")
        one.signal(signal.SIGTERM)
        one.signal(signal.SIGTERM)
        assert one.wait() == 0
    assert fleet.holder is None


def test_a_second_signal_does_not_wait_for_a_production(fleet: Fleet) -> None:
    fleet.db.execute(slow_insert(50))
    leader = fleet.lead(WORKER_LEASE_SECONDS="120", WORKER_QUERY_TIMEOUT_SECONDS="60")
    wait_for(lambda: in_production(fleet))
    leader.signal(signal.SIGTERM)
    leader.wait_for_event("shutdown_started")
    leader.signal(signal.SIGTERM)
    assert leader.wait() in (0, 75)
    assert fleet.value("SELECT count(*) FROM ended") == 0


def test_an_instance_as_process_1_stops_like_any_other(fleet: Fleet) -> None:
    outer = fleet.run_below(below_a_namespace())
    outer.wait_for_event("generator_leader", pid=1)
    os.kill(process_1_of(outer), signal.SIGTERM)
    assert outer.wait() == 0
    assert fleet.holder is None


# --- the database away, or not what it should be


def test_an_outage_costs_no_slot(private_workplace: Workplace, tmp_path: Path) -> None:
    """At the start and in the middle it is waited for; two instances, and still one leader."""
    place = private_workplace
    with contextlib.closing(Fleet(place.url, tmp_path)) as fleet:
        first, second = fleet.run("--rate", "10"), fleet.run()
        fleet.leader()
        fleet.wait_for_more(3)
        fleet.db.close()
        place.cluster.stop()
        for one in (first, second):
            one.wait_for_event("database_lost", 15)
        third = fleet.run()
        third.wait_for_event("database_lost", 15)
        place.cluster.start()
        fleet.db = psycopg.connect(fleet.url, autocommit=True, row_factory=namedtuple_row)
        place.reconnect()
        fleet.wait_for_more(3, 20)
        wait_for(lambda: third.find("generator_standby") or third.find("generator_leader"))
        fleet.each_slot_once(0.1)
        for one in fleet.instances:
            assert one.stop() == 0


def test_a_stop_during_an_outage_leaves_the_lease_to_expiry_and_says_so(workplace: Workplace, tmp_path: Path) -> None:
    """Connections are refused: it tries to release for a while, then ends with 75."""
    with contextlib.closing(Fleet(workplace.url, tmp_path)) as fleet:
        limits = {"WORKER_LEASE_SECONDS": "20", "WORKER_QUERY_TIMEOUT_SECONDS": "3"}
        leader, other = fleet.lead(**limits), fleet.stand_by(**limits)
        with workplace.outage():
            for one in (leader, other):
                one.wait_for_event("database_lost")
                one.signal(signal.SIGTERM)
            assert (leader.wait(), other.wait()) == (75, 0)
        assert not leader.find("generator_released")
        # By its own decision, not by the limit of the stop.
        assert "uptime_ms" in leader.find("shutdown_complete", status=75)[0]


def test_a_lease_is_called_released_only_if_the_database_says_so(fleet: Fleet) -> None:
    """H9: somebody keeps its row locked, so that it cannot be released in time."""
    leader = fleet.lead("--every", "3600", WORKER_LEASE_SECONDS="20", WORKER_QUERY_TIMEOUT_SECONDS="4")
    with psycopg.connect(fleet.url) as other:
        other.execute("SELECT FROM leases FOR UPDATE")
        assert leader.stop() == 75
        assert not leader.find("generator_released")
        assert fleet.holder is not None


def test_a_stop_that_gets_no_answer_ends_in_time_with_75(fleet: Fleet) -> None:
    with Route(fleet.url) as route:
        leader = fleet.lead(DATABASE_URL=route.url, WORKER_LEASE_SECONDS="10")
        route.cut()
        leader.signal(signal.SIGTERM)
        # Margin and two query time-outs.
        assert leader.wait(3 + SLOW_MACHINE_SECONDS) == 75
    assert not leader.find("generator_released")
    assert leader.find("shutdown_complete", status=75)


def test_what_is_wrong_at_the_start_has_its_own_exit_status(fleet: Fleet, empty_database_url: str, server: Server) -> None:
    missing = fleet.run(DATABASE_URL=empty_database_url)
    assert missing.wait() == 78
    assert "worker migrate" in missing.find("config_invalid")[0]["error"]
    wrong = fleet.run(WORKER_LEASE_SECONDS="soon")
    assert wrong.wait() == 78
    assert "WORKER_LEASE_SECONDS" in wrong.find("config_invalid")[0]["error"]
    away = fleet.run(DATABASE_URL="postgresql://127.0.0.1:1/x", WORKER_CONNECT_WAIT_SECONDS="0.5")
    assert away.wait() == 69
    assert fleet.run("--min", "20").wait() == 78  # beside the longest pause of 10


def test_it_runs_with_the_grants_of_the_daemon_alone(fleet: Fleet, server: Server) -> None:
    with role(server, fleet.url) as name:
        fleet.db.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC")
        grant(fleet.url, "daemon", name)
        leader = fleet.lead("--rate", "20", DATABASE_URL=url_as(name, fleet.url))
        fleet.wait_for_more(5)
        assert leader.stop() == 0


def test_it_leaves_a_heartbeat_for_worker_health(fleet: Fleet) -> None:
    leader, other = fleet.lead(), fleet.stand_by()

    def well() -> bool:
        done = worker("health", directory=fleet.directory)
        return done.returncode == 0 and done.stdout.count("\tok") == 2

    wait_for(well)
    for one in (leader, other):
        assert one.stop() == 0
    assert list(fleet.directory.glob("*.health")) == []


# --- start and stop, from anywhere


def test_start_and_stop_work_from_any_process(fleet: Fleet) -> None:
    leader, other = fleet.lead("--rate", "20"), fleet.stand_by()
    fleet.wait_for_more(3)
    stopped = fleet.command("stop", "--json")
    assert json.loads(stopped.stdout)["state"] == "STOPPED"
    produced = fleet.produced()
    for one in (leader, other):
        one.wait_for_event("generator_standby", reason="stopped")
    wait_for(lambda: fleet.holder is None)
    again = fleet.run()
    again.wait_for_event("generator_standby", reason="stopped")
    assert fleet.produced() == produced
    started = json.loads(fleet.command("start", "--json").stdout)
    assert started["state"] == "STARTED"
    assert started["produced"] == produced
    fleet.wait_for_more(3)
    status = fleet.status()
    assert status["holder"] == fleet.holder
    assert status["fence"] == fleet.value("SELECT fence FROM leases")
    assert (status["rate"], status["state"]) == (20, "STARTED")


def test_a_stop_waits_for_a_production_in_flight(fleet: Fleet) -> None:
    fleet.db.execute(slow_insert(2))
    fleet.lead(WORKER_LEASE_SECONDS="6", WORKER_QUERY_TIMEOUT_SECONDS="3")
    wait_for(lambda: in_production(fleet))
    stopped = fleet.command("stop", "--json")
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads(stopped.stdout)["produced"] == fleet.produced() > 0


def test_a_stop_that_came_before_the_first_instance_is_kept(fleet: Fleet) -> None:
    assert fleet.command("stop").returncode == 0
    one = fleet.run("--rate", "50")
    one.wait_for_event("generator_standby", reason="stopped")
    assert fleet.produced() == 0
    fleet.command("start")
    fleet.wait_for_more(3)
    fleet.each_slot_once(0.02)


def test_a_changed_rate_reaches_the_leader_within_a_second(fleet: Fleet) -> None:
    leader = fleet.lead("--every", "3600")
    before = fleet.produced()
    fleet.command("start", "--rate", "50", "--min", "0", "--max", "0")
    fleet.wait_for_more(5)
    # The spacing counts from the change: its first slot was at most 0.02 s later.
    first_moment, first_late = fleet.slots()[before]
    assert first_late.total_seconds() < 1 + SLOW_MACHINE_SECONDS, first_moment
    late = fleet.slots()[-5:]
    assert all(moment.microsecond % 20_000 == 0 for moment, _ in late)
    assert fleet.value("SELECT payload FROM jobs ORDER BY id DESC LIMIT 1") == {"sleep_duration_seconds": 0}
    assert len(leader.find("generator_leader")) == 1


def test_refused_jobs_are_counted_and_told_and_do_not_stop_the_loop(fleet: Fleet) -> None:
    """H6."""
    fleet.db.execute("ALTER TABLE jobs ADD CONSTRAINT no_bad CHECK (kind <> 'bad')")
    leader = fleet.lead("--kind", "bad", "--payload", '{"secret": 1}', "--rate", "20")
    wait_for(lambda: fleet.value("SELECT failed FROM generators") > 10)
    told = leader.find("generator_failed")
    assert len(told) == 1
    assert "no_bad" in told[0]["error"]
    assert "secret" not in leader.stdout_path.read_text()
    status = fleet.status()
    assert (status["produced"], "no_bad" in status["last_error"]) == (0, True)
    assert status["failed"] < 20 * 60
    fleet.command("start", "--kind", "good", "--payload", "{}")
    fleet.wait_for_more(3)
    assert fleet.status()["last_error"] is None


# --- the commands


def test_status_is_a_table_of_lines_in_a_pipe_and_one_document_with_json(fleet: Fleet) -> None:
    lines = dict(line.split("\t") for line in fleet.command("status").stdout.splitlines())
    status = fleet.status()
    assert list(status)[:5] == ["state", "holder", "fence", "rate", "produced"]
    assert list(status.values())[:5] == ["STOPPED", None, None, 1.0, 0]
    assert set(lines) == {"what", *status}
    assert (lines["state"], lines["holder"], lines["kind"]) == ("STOPPED", "-", "sleep")
    started = json.loads(fleet.command("start", "--every", "3600", "--json").stdout)
    assert (started["every_seconds"], started["rate"]) == (3600, pytest.approx(1 / 3600))
    assert fleet.status() == started


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rate", "0"),
        ("--rate", "abc"),
        ("--rate", "nan"),
        ("--rate", "1", "--every", "1"),
        ("--min", "5", "--max", "4"),
        ("--max", "86401"),
        ("--kind", "x"),
        ("--payload", "{}"),
        ("--kind", "x", "--payload", "{"),
        ("--kind", "x" * 129, "--payload", "{}"),
        ("--kind", "x", "--payload", "{}", "--min", "1"),
    ],
)
def test_options_that_cannot_be_meant_are_wrong_usage(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    for command in ("run", "start"):
        done = worker("generator", command, *arguments, directory=tmp_path, DATABASE_URL="postgresql://127.0.0.1:1/x")
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""


def test_a_payload_may_come_from_standard_input_or_a_file(fleet: Fleet) -> None:
    (fleet.directory / "payload.json").write_text('{"from": "file"}')
    for payload, stdin, expected in (("-", '{"from": "stdin"}', "stdin"), ("@payload.json", "", "file")):
        done = worker(
            *("generator", "start", "--kind", "x", "--payload", payload),
            directory=fleet.directory,
            stdin=stdin,
            DATABASE_URL=fleet.url,
        )
        assert done.returncode == 0, done.stderr
        assert fleet.value("SELECT payload ->> 'from' FROM generators") == expected
