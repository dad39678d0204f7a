"""An effect is there once, with its completion, and so is what follows from it: the checker finds each that is not."""

from __future__ import annotations

from tests.torture_histories import OPERATOR, A, Breaches, History, Story, broken, each_breach, each_of, judged, ordinary, writer

# --- what keeps every promise


def own_transaction(history: History) -> None:
    history.add()
    history.claim()
    done = history.succeed(by=writer(A, "pool"), said_fence=None)
    history.change(1, history.now_of(1), writer(A, "pool"), txid=done.txid, said_fence=101)


def pruned_and_enqueued_again(history: History) -> None:
    """The ledger still has the key: the second time nothing is applied."""
    history.add(1, key="k")
    history.claim(1)
    history.succeed(1)
    history.change(1, None, OPERATOR)
    history.add(2, key="k")
    history.claim(2)
    history.succeed(2, effect=False)


def follow_up(history: History) -> None:
    history.add(1, kind="chain")
    history.claim(1)
    done = history.succeed(1)
    history.add(2, key="k1/next", by=writer(A, "commit"), txid=done.txid)
    history.claim(2)
    history.succeed(2)


def generated_key(history: History) -> None:
    history.add(key="auto:1")
    history.claim()
    history.succeed()


@each_of(
    own_transaction,
    pruned_and_enqueued_again,
    follow_up,
    generated_key,
)
def test_effects_that_commit_with_their_completion_are_accepted(write: Story) -> None:
    assert judged(write).breaches == []


# --- one breach each


def effect_applied_twice(history: History) -> None:
    """Look without lock after a lost COMMIT: it was taken for rolled back, and done again."""
    history.add()
    history.claim()
    done = history.succeed()
    history.effect(1, done.txid, 101)


def effect_applied_again_for_the_same_key(history: History) -> None:
    pruned_and_enqueued_again(history)
    done = history.changes[-1]
    history.effect(2, done.txid, history.now_of(2).fence)


def effect_committed_apart(history: History) -> None:
    history.add()
    history.claim()
    done = history.succeed(effect=False)
    history.effect(1, done.txid + 1, 101)


def effect_of_an_older_attempt(history: History) -> None:
    """Answers were matched by the id alone: what the fence refused was applied because its job was in the answer."""
    history.add()
    history.claim()
    history.expire()
    history.reap()
    history.claim(owner=A)
    done = history.succeed(effect=False)
    history.effect(1, done.txid, 101)


def effect_of_a_failed_attempt(history: History) -> None:
    history.add(most=1)
    history.claim()
    done = history.end(state="dead")
    history.effect(1, done.txid, 101)


def effect_of_a_later_job_only(history: History) -> None:
    history.add(1, key="k")
    history.claim(1)
    history.succeed(1, effect=False)
    history.change(1, None, OPERATOR)
    history.add(2, key="k")
    history.claim(2)
    history.succeed(2)


def no_effect(history: History) -> None:
    history.add()
    history.claim()
    history.succeed(effect=False)


def follow_up_forgotten(history: History) -> None:
    history.add(kind="chain")
    history.claim()
    history.succeed()


def follow_up_apart(history: History) -> None:
    history.add(1, kind="chain")
    history.claim(1)
    history.succeed(1)
    history.add(2, key="k1/next", by=writer(A, "commit"))
    history.claim(2)
    history.succeed(2)


def follow_up_of_a_failure(history: History) -> None:
    history.add(1, kind="chain", most=1)
    history.claim(1)
    done = history.end(1, state="dead")
    history.add(2, key="k1/next", by=writer(A, "commit"), txid=done.txid)
    history.claim(2)
    history.succeed(2)


def key_not_in_the_ledger(history: History) -> None:
    history.add()
    history.claim()
    done = history.succeed(effect=False)
    history.effect(1, done.txid, 101, entered=False)


def key_entered_by_another(history: History) -> None:
    ordinary(history)
    history.ledger = [row._replace(fence=7) for row in history.ledger]


BREACHES: Breaches = {
    effect_applied_twice: {"effect_once"},
    effect_applied_again_for_the_same_key: {"effect_once", "ledger"},
    effect_committed_apart: {"effect_with_completion"},
    effect_of_an_older_attempt: {"effect_with_completion"},
    effect_of_a_failed_attempt: {"effect_with_completion"},
    no_effect: {"effect_iff_succeeded"},
    effect_of_a_later_job_only: {"effect_iff_succeeded"},
    follow_up_forgotten: {"outbox"},
    follow_up_apart: {"outbox"},
    follow_up_of_a_failure: {"outbox"},
    key_not_in_the_ledger: {"ledger"},
    key_entered_by_another: {"ledger"},
}


@each_breach(BREACHES)
def test_an_effect_that_is_missing_doubled_or_apart_is_found(write: Story, rules: set[str]) -> None:
    assert broken(judged(write)) == rules
