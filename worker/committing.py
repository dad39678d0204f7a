"""Which finished jobs may share a transaction, and whose fault an error is. Rules only; the committer applies them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from worker.domain import AlreadyApplied, Effect, Outcome, Succeeded
from worker.holding import Held

if TYPE_CHECKING:
    from worker.job import Job

STATEMENTS_A_GROUP = 300
"""Jobs with several effects run one after the other, a round trip each: bounds how long a group holds its locks."""
_REMEMBERED_TEXTS = 1_000
_FIRST_BLOCK_SECONDS = 0.05
_LONGEST_BLOCK_SECONDS = 2.0


@dataclass(slots=True)
class Finished:
    """One outcome on its way into the database."""

    held: Held
    outcome: Outcome
    duration_ms: float
    job: Job[object] | None = None
    """What the handler saw, for `on_failure`."""
    tries: int = 0
    """Conflicts that its own effects have run into so far."""
    waits: int = 0
    """How often it was put off because its row was locked, or for another's sake."""
    uncertain: bool = False
    """It was sent once, and nobody knows whether it was committed."""

    @property
    def is_fresh(self) -> bool:
        """Never tried: it may go straight into a group. Anything else is looked up first."""
        return not (self.tries or self.waits or self.uncertain)

    @property
    def effects(self) -> tuple[Effect, ...]:
        return self.outcome.effects if isinstance(self.outcome, Succeeded) else ()


class Caution:
    """Statement texts that failed lately and go in small groups until they have behaved; those that met a lock or a deadlock
    alone, and only every now and then, so that they hold up nobody else."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._limits: OrderedDict[str, int] = OrderedDict()
        self._blocked: dict[str, tuple[float, float]] = {}
        """Text to (not to be tried before, the delay that led there)."""

    @property
    def is_active(self) -> bool:
        return bool(self._limits)

    def limit(self, texts: Iterable[str]) -> int:
        """How many jobs with these effects may share a transaction."""
        if not self._limits:
            return self._largest
        return min((self._limits.get(text, self._largest) for text in texts), default=self._largest)

    def knows(self, texts: Iterable[str]) -> bool:
        """Whether one of these failed lately."""
        return bool(self._limits) and any(text in self._limits for text in texts)

    def failed(self, texts: Iterable[str], size: int, *, alone: bool) -> None:
        """A group of `size` failed. `alone`: by a deadlock, a lock or a time-out, which company makes worse."""
        for text in texts:
            known = self._limits.get(text, self._largest)
            self._limits[text] = 1 if alone else min(max(min(known, size) // 2, 8), known)
            self._limits.move_to_end(text)
        while len(self._limits) > _REMEMBERED_TEXTS:
            forgotten, _ = self._limits.popitem(last=False)
            self._blocked.pop(forgotten, None)

    def block(self, texts: Iterable[str], now: float) -> None:
        """A job alone with these effects ran into a lock, a deadlock or a time-out: nobody tries them for a while."""
        for text in texts:
            _, delay_seconds = self._blocked.get(text, (0.0, _FIRST_BLOCK_SECONDS / 2))
            delay_seconds = min(delay_seconds * 2, _LONGEST_BLOCK_SECONDS)
            self._blocked[text] = (now + delay_seconds, delay_seconds)
            self._limits[text] = 1

    def blocked_until(self, texts: Iterable[str]) -> float:
        """The local moment before which these effects are not to be tried."""
        return max((self._blocked.get(text, (0.0, 0.0))[0] for text in texts), default=0.0)

    def behaved(self, texts: Iterable[str], size: int) -> None:
        """A group of `size` was committed: twice as many may go next time."""
        if not self._limits:
            return
        for text in texts:
            self._blocked.pop(text, None)
            limit = self._limits.get(text)
            if limit is not None and size >= limit:
                if limit * 2 >= self._largest:
                    del self._limits[text]
                else:
                    self._limits[text] = limit * 2


@dataclass(slots=True)
class _Open:
    members: list[Finished] = field(default_factory=list)
    statements: int = 0


class Grouping(NamedTuple):
    """Completions split into transactions."""

    clean: list[list[Finished]]
    careful: list[list[Finished]]
    """With effects that failed lately: to be written last, so that they hold up nobody."""


def group(finished: Sequence[Finished], caution: Caution, largest: int) -> Grouping:
    """Split completions into transactions. Together: jobs whose effects only write rows. Alone: a job that reads or sets
    something (SELECT, set_config), since what it sees or leaves would not be what it had seen alone."""
    if not caution.is_active and all(_is_simple(one.outcome) for one in finished):
        return Grouping([list(finished[at : at + largest]) for at in range(0, len(finished), largest)], [])
    clean: list[list[Finished]] = []
    alone: list[list[Finished]] = []
    shared = _Open()
    filled: list[list[Finished]] = []
    careful: dict[tuple[str, ...], list[Finished]] = {}
    for one in finished:
        effects = one.effects
        texts = tuple(effect.sql for effect in effects)
        limit = caution.limit(texts)
        if limit < largest or caution.knows(texts):
            members = careful.setdefault(texts, [])
            members.append(one)
            if len(members) >= limit or any(effect.alone for effect in effects):
                filled.append(careful.pop(texts))
            continue
        if any(effect.alone for effect in effects):
            alone.append([one])
            continue
        statements = len(effects) if len(effects) > 1 else 0
        full = len(shared.members) >= largest or shared.statements + statements > STATEMENTS_A_GROUP
        if full and shared.members:
            clean.append(shared.members)
            shared = _Open()
        shared.members.append(one)
        shared.statements += statements
    if shared.members:
        clean.append(shared.members)
    return Grouping(clean + alone, filled + list(careful.values()))


def _is_simple(outcome: Outcome) -> bool:
    """No effect, or one that only writes rows."""
    if not isinstance(outcome, Succeeded):
        return True
    effects = outcome.effects
    return not effects or (len(effects) == 1 and not effects[0].alone)


Blame = Literal["job", "company", "database", "nobody"]

_OWN_CLASSES = frozenset({"22", "23", "42", "P0"})
_DATABASE_CLASSES = frozenset({"08", "25", "53", "57", "58", "XX"})
_COMPANY_CLASSES = frozenset({"40", "55"})


def blame(state: str | None, *, statement_of_job: bool, alone: bool, result_at_fault: bool) -> Blame:
    """Whose fault the SQLSTATE of a failed transaction is.

    job: its own statement or result, raised while it was alone · company: a group's error, or a conflict that another try may
    not meet · database: it refuses work for now · nobody: an error of our own statements, which is never the job's.
    """
    if not alone:
        return "company"
    if statement_of_job or result_at_fault:
        if state == "57014":
            return "job"  # a time-out of its own statement
        if state is not None and state[:2] in _COMPANY_CLASSES:
            return "company"
        if state is not None and state[:2] in _DATABASE_CLASSES:
            return "database"
        return "job"
    if state is None or state[:2] in _DATABASE_CLASSES:
        return "database"
    return "company" if state[:2] in _COMPANY_CLASSES else "nobody"


def is_result_at_fault(one: Finished, state: str | None, constraint: str | None) -> bool:
    """Whether an error of the completing statement, with this one alone in it, says that its result cannot be stored."""
    if not isinstance(one.outcome, Succeeded) or one.outcome.result is None:
        return False
    return (state or "")[:2] in ("22", "54") or constraint == "jobs_result_size"


def effect_texts(members: Iterable[Finished]) -> set[str]:
    return {effect.sql for one in members for effect in one.effects}


def newest_of_each_job(finished: Sequence[Finished]) -> tuple[list[Finished], list[Finished]]:
    """At most one attempt of a job goes into a group: the newest; older ones have lost their lease."""
    if len({one.held.job.id for one in finished}) == len(finished):
        return list(finished), []
    newest: dict[int, Finished] = {}
    stale: list[Finished] = []
    for one in finished:
        other = newest.get(one.held.job.id)
        if other is None:
            newest[one.held.job.id] = one
        elif other.held.job.fence < one.held.job.fence:
            newest[one.held.job.id] = one
            stale.append(other)
        else:
            stale.append(one)
    return list(newest.values()), stale


def completes(outcome: Outcome) -> bool:
    return isinstance(outcome, Succeeded | AlreadyApplied)
