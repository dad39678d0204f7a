"""Which finished jobs may share a transaction, and whose fault an error is."""

from __future__ import annotations

import itertools

import pytest

from worker.committing import STATEMENTS_A_GROUP, Caution, Finished, blame, group, newest_of_each_job
from worker.domain import AlreadyApplied, ClaimedJob, CodePlace, Effect, Succeeded
from worker.holding import Held, Holdings

_ids = itertools.count(1)


def effect(sql: str, *arguments: object, alone: bool = False) -> Effect:
    return Effect(sql=sql, arguments=arguments, alone=alone, number=1, called_from=CodePlace("app.py", 1))


def finished(*effects: Effect, id: int | None = None, fence: int | None = None) -> Finished:
    number = next(_ids)
    job = ClaimedJob(id or number, fence or number, f"key-{number}", "k", "default", 0, "null", 1, 5, 0, 0)
    return Finished(Held(job, 0.0), Succeeded(result=None, effects=effects), 1.0)


def grouped(finished: list[Finished], caution: Caution, largest: int) -> list[list[Finished]]:
    """All transactions, in the order in which they are written."""
    clean, careful = group(finished, caution, largest)
    return clean + careful


def sizes(groups: list[list[Finished]]) -> list[int]:
    return sorted(len(members) for members in groups)


# --- grouping


def test_jobs_without_and_with_one_effect_share_a_transaction() -> None:
    jobs = [finished(), finished(effect("INSERT a")), finished(effect("INSERT b"))]
    assert grouped(jobs, Caution(300), 300) == [jobs]


def test_no_group_is_larger_than_the_batch() -> None:
    assert sizes(grouped([finished() for _ in range(7)], Caution(3), 3)) == [1, 3, 3]


def test_a_batch_of_one_gives_every_job_its_own_transaction() -> None:
    assert sizes(grouped([finished(effect("INSERT a")) for _ in range(5)], Caution(1), 1)) == [1] * 5


def test_a_job_that_reads_or_sets_something_shares_with_nobody() -> None:
    plain = [finished(effect("INSERT a")) for _ in range(3)]
    reading = finished(effect("INSERT a"), effect("SELECT 1", alone=True))
    groups = grouped([plain[0], reading, *plain[1:]], Caution(300), 300)
    assert [reading] in groups
    assert plain in groups


def test_jobs_with_several_effects_are_bounded_by_their_statements() -> None:
    jobs = [finished(*[effect("INSERT a")] * 100) for _ in range(7)]
    groups = grouped(jobs, Caution(300), 300)
    assert sizes(groups) == [1, 3, 3]
    assert all(sum(len(one.effects) for one in members) <= STATEMENTS_A_GROUP for members in groups)


def test_a_single_job_with_more_statements_than_a_group_may_have_still_gets_its_turn() -> None:
    job = finished(*[effect("INSERT a")] * (STATEMENTS_A_GROUP + 1))
    small = [finished(), finished()]
    assert grouped([job], Caution(300), 300) == [[job]]
    assert sizes(grouped([job, *small], Caution(300), 300)) == [1, 2]
    assert sizes(grouped([*small, job], Caution(300), 300)) == [1, 2]


def test_every_job_is_in_exactly_one_group() -> None:
    caution = Caution(300)
    caution.failed(["UPDATE hot"], 300, alone=True)
    kinds = ([], [effect("INSERT a")], [effect("UPDATE hot")], [effect("SELECT 1", alone=True)], [effect("INSERT a")] * 90)
    jobs = [finished(*kinds[number % len(kinds)]) for number in range(500)]
    groups = grouped(jobs, caution, 300)
    assert sorted(id(one) for members in groups for one in members) == sorted(map(id, jobs))


# --- caution


def test_a_text_that_failed_goes_in_smaller_groups_and_its_neighbours_do_not() -> None:
    caution = Caution(300)
    caution.failed(["UPDATE hot"], 100, alone=False)
    jobs = [finished(effect("UPDATE hot", number)) for number in range(120)]
    others = [finished(effect("INSERT a")) for _ in range(120)]
    groups = grouped(jobs + others, caution, 300)
    assert sizes(groups) == [20, 50, 50, 120]
    assert others in groups


def test_a_text_that_met_a_lock_or_a_time_out_goes_alone() -> None:
    caution = Caution(300)
    caution.failed(["UPDATE hot"], 100, alone=True)
    assert sizes(grouped([finished(effect("UPDATE hot")) for _ in range(4)], caution, 300)) == [1] * 4


def test_a_text_that_fails_again_goes_in_no_larger_groups() -> None:
    caution = Caution(300)
    caution.failed(["slow"], 100, alone=True)
    caution.behaved(["slow"], 1)
    caution.failed(["slow"], 2, alone=False)
    assert caution.limit(["slow"]) == 2


def test_a_text_that_behaves_doubles_until_it_is_forgotten() -> None:
    caution = Caution(300)
    caution.failed(["UPDATE hot"], 2, alone=True)
    limits = []
    while caution.is_active:
        limits.append(caution.limit(["UPDATE hot"]))
        caution.behaved(["UPDATE hot"], limits[-1])
    assert limits == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert caution.limit(["UPDATE hot"]) == 300


def test_a_group_below_the_limit_proves_nothing() -> None:
    caution = Caution(300)
    caution.failed(["UPDATE hot"], 300, alone=False)
    caution.behaved(["UPDATE hot"], 5)
    assert caution.limit(["UPDATE hot"]) == 150


def test_what_failed_lately_is_written_last() -> None:
    caution = Caution(300)
    caution.failed(["UPDATE hot"], 100, alone=True)
    hot, clean, reading = finished(effect("UPDATE hot")), finished(), finished(effect("SELECT 1", alone=True))
    assert group([hot, clean, reading], caution, 300) == ([[clean], [reading]], [[hot]])


def test_a_text_that_ran_into_a_lock_is_left_alone_for_longer_each_time_up_to_a_bound() -> None:
    caution, now = Caution(300), 100.0
    assert caution.blocked_until(["UPDATE hot"]) <= now
    waits = []
    for _ in range(8):
        caution.block(["UPDATE hot"], now)
        waits.append(caution.blocked_until(["INSERT a", "UPDATE hot"]) - now)
        now += waits[-1]
    assert waits == sorted(waits)
    assert waits[0] < waits[1] < 0.5
    assert waits[-1] == waits[-2] == 2.0
    assert caution.limit(["UPDATE hot"]) == 1
    caution.behaved(["UPDATE hot"], 1)
    assert caution.blocked_until(["UPDATE hot"]) == 0.0


def test_only_what_was_never_tried_goes_straight_into_a_group() -> None:
    one = finished()
    assert one.is_fresh
    for tried in ({"tries": 1}, {"waits": 1}, {"uncertain": True}):
        one = finished()
        for name, value in tried.items():
            setattr(one, name, value)
        assert not one.is_fresh


def test_the_memory_of_failed_texts_is_bounded() -> None:
    caution = Caution(300)
    for number in range(5_000):
        caution.failed([f"UPDATE {number}"], 2, alone=True)
        caution.block([f"UPDATE {number}"], 100.0)
    assert caution.limit(["UPDATE 0"]) == 300
    assert caution.blocked_until(["UPDATE 0"]) == 0.0
    assert caution.limit(["UPDATE 4999"]) == 1


def test_the_most_careful_of_a_jobs_texts_decides() -> None:
    caution = Caution(300)
    caution.failed(["UPDATE hot"], 300, alone=True)
    assert caution.limit(["INSERT a", "UPDATE hot"]) == 1


# --- whose fault


@pytest.mark.parametrize("state", ["22P02", "23505", "42P01", "P0001", "57014", "RW001", "54001", "0A000", "2F002", None])
def test_an_error_of_its_own_statement_while_alone_is_the_jobs(state: str | None) -> None:
    assert blame(state, statement_of_job=True, alone=True, result_at_fault=False) == "job"


@pytest.mark.parametrize("state", ["22P02", "23505", "42P01", "57014", "40001", "RW001", None])
def test_an_error_of_a_group_is_nobodys_until_it_is_repeated_alone(state: str | None) -> None:
    assert blame(state, statement_of_job=True, alone=False, result_at_fault=False) == "company"


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03"])
@pytest.mark.parametrize("own", [True, False])
def test_conflicts_are_the_companys_fault_and_tried_again(state: str, own: bool) -> None:
    assert blame(state, statement_of_job=own, alone=True, result_at_fault=False) == "company"


@pytest.mark.parametrize("state", ["08006", "25006", "53100", "57P01", "58030", "XX000"])
@pytest.mark.parametrize("own", [True, False])
def test_a_database_that_refuses_work_keeps_the_outcome(state: str, own: bool) -> None:
    assert blame(state, statement_of_job=own, alone=True, result_at_fault=False) == "database"


def test_errors_of_the_fence_and_the_ledger_are_never_the_jobs() -> None:
    for state in ("22P02", "23505", "42501", "42P01", "P0001", "57014", "55P03", None):
        assert blame(state, statement_of_job=False, alone=True, result_at_fault=False) != "job"


def test_an_unstorable_result_is_the_jobs() -> None:
    assert blame("23514", statement_of_job=False, alone=True, result_at_fault=True) == "job"
    assert blame("22P05", statement_of_job=False, alone=True, result_at_fault=True) == "job"


# --- one attempt of a job


def test_only_the_newest_attempt_of_a_job_is_committed() -> None:
    old, new, other = finished(id=7_000, fence=3), finished(id=7_000, fence=4), finished()
    for order in itertools.permutations([old, new, other]):
        newest, stale = newest_of_each_job(order)
        assert {one.held.key for one in newest} == {new.held.key, other.held.key}
        assert stale == [old]


def test_claiming_a_job_again_loses_the_attempt_still_held_and_keeps_both_by_fence() -> None:
    holdings, told = Holdings(), []
    old, new = finished(id=9_000, fence=1).held, finished(id=9_000, fence=2).held
    old.on_lost = told.append
    holdings.add(old)
    holdings.add(new)
    assert told == ["lease_lost"]
    assert new.lost is None
    assert sorted(holdings.keys()) == [(9_000, 1), (9_000, 2)]
    holdings.remove(old)
    assert holdings.keys() == [(9_000, 2)]


def test_the_first_reason_for_a_lost_lease_stays() -> None:
    held, told = finished().held, []
    held.on_lost = told.append
    held.lose("cancelled")
    held.lose("lease_lost")
    assert (held.lost, told) == ("cancelled", ["cancelled"])


def test_an_outcome_without_effects_has_none() -> None:
    one = finished(effect("INSERT a"))
    one.outcome = AlreadyApplied()
    assert one.effects == ()
