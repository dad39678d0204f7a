"""The checker of `worker torture` accepts an ordinary history, and each of its rules has found a breach.

A checker that has never failed proves nothing: test_torture_*.py have histories with one breach each, a file for each subject of
the rules. A product that is broken on purpose is in test_torture_breaks.py, daemons that are in test_torture.py.
"""

from __future__ import annotations

from tests import (
    test_torture_attempts,
    test_torture_crashes,
    test_torture_effects,
    test_torture_ends,
    test_torture_fences,
    test_torture_generator,
    test_torture_job_leases,
    test_torture_named_leases,
)
from tests.torture_histories import judged, ordinary
from worker.torture.breaches import RULES

OF_JOBS = (
    test_torture_job_leases,
    test_torture_fences,
    test_torture_attempts,
    test_torture_crashes,
    test_torture_ends,
    test_torture_effects,
)


def test_an_ordinary_history_is_accepted() -> None:
    assert judged(ordinary).breaches == []


def test_every_rule_has_a_history_that_breaks_it() -> None:
    tables = [rules for of_jobs in OF_JOBS for rules in of_jobs.BREACHES.values()]
    tables += [rules for _, rules in test_torture_named_leases.LEASES.values()]
    tables += [rules for *_, rules in test_torture_generator.SLOTS.values()]
    by_themselves = {"guarded", "started_once", "told_to_stop", "no_start_after_shutdown"}
    by_themselves |= {"log_lines", "exits", "recovery", "return", "room", "one_suspect", "live_start"}
    assert set().union(*tables) | by_themselves == RULES.keys()
