"""The checker for everything beside the jobs' own rows: named leases, slots of the generator, handlers' notes. No I/O."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from worker.store.audit import Change, GuardedRow, LeaseChange, LeaseStanding, Slots
from worker.torture.breaches import Findings
from worker.torture.job_rules import Claim, Draw, JobFacts, Reap, process_of

# A named lease is judged by clock_timestamp() within the statement, a little before the trigger reads it.
_BETWEEN_READINGS_US: Final = 50_000
_TELLING_SECONDS: Final = 0.1
"""A cancelled handler has to get its turn before it can end."""
_TAKEN_SECONDS: Final = 1.0
"""So long after its job was taken nobody may be at it; it should have stopped before that."""


def check_leases(changes: Iterable[LeaseChange], findings: Findings, facts: JobFacts) -> dict[int, tuple[str, str | None]]:
    """Named leases, resource by resource: holders and fences as for jobs. Their fences come from the jobs' sequence.

    Returns, by fence, the resource and its holder.
    """
    expect = findings.expect
    acquired: dict[int, tuple[str, str | None]] = {}
    previous: LeaseChange | None = None
    highest = 0
    for change in changes:
        if previous is None or previous.resource != change.resource:
            previous, highest = None, 0
        before = None if previous is None else previous.new
        expect(change.old == before, "unbroken", "this lease did not come from there", previous, change)
        previous = change
        if change.new is not None:
            own = _is_of(change.writer, change.new.holder)
            expect(own, "lease_by_holder", "written by somebody who is not its holder", change)
        if change.new is None:
            over = change.old is None or _is_over(change.old, change.at)
            expect(over, "one_live_lease", "a live lease was deleted", change)
            continue
        old, new = change.old, change.new
        if old is None or new.fence != old.fence:
            if new.fence == 0:
                expect(old is None and new.released is not None, "fence_rises", "an acquisition without a fence", change)
                continue
            facts.count("leases acquired")
            expect(old is None or _is_over(old, change.at), "one_live_lease", "acquired while it was held", change)
            expect(new.fence > highest, "fence_rises", "the fence did not rise with the acquisition", change)
            other = facts.claims.get(new.fence) or acquired.get(new.fence)
            expect(other is None, "fence_rises", "the fence was given to somebody else as well", change, other)
            acquired[new.fence] = (change.resource, new.holder)
            facts.draws.append(Draw(change.begun, change.at, new.fence, change.resource))
            highest = max(highest, new.fence)
            continue
        expect(new.holder == old.holder, "one_live_lease", "another holder under the same fence", change)
        what = "released" if new.released is not None else "renewed"
        facts.count(f"leases {what}")
        live = old.released is None and old.expires > change.at - _BETWEEN_READINGS_US
        expect(live, "lease_by_holder", f"{what} after it was over", change)
    return acquired


def _is_of(session: str, holder: str) -> bool:
    """Whether the session belongs to the holder: a process that is called so, or an instance with eight hex digits behind it."""
    return session.partition(" ")[0] in (holder, process_of(holder))


def check_fences(draws: Iterable[Draw], findings: Findings) -> None:
    """A fence drawn in a transaction that began after another one was drawn is the higher one, whoever they belong to: jobs and
    named leases draw from one sequence."""
    draws = list(draws)
    earlier = sorted(draws, key=lambda draw: draw.at)
    position, highest = 0, None
    for draw in sorted(draws):
        while position < len(earlier) and earlier[position].at < draw.begun:
            if highest is None or earlier[position].fence > highest.fence:
                highest = earlier[position]
            position += 1
        rises = highest is None or highest.fence < draw.fence
        findings.expect(rises, "fence_rises", "drawn later, and lower", highest, draw)


def _is_over(standing: LeaseStanding, at: int) -> bool:
    return standing.released is not None or standing.expires <= at


def check_slots(
    slots: Sequence[Slots],
    leases: Sequence[LeaseChange],
    inserts: Iterable[Change],
    findings: Findings,
    *,
    resource: str,
) -> None:
    """Each slot of the generator once, its jobs and its mark in one transaction, under a lease that is live."""
    expect = findings.expect
    made: dict[int, list[Change]] = {}
    keys: dict[str, Change] = {}
    for insert in inserts:
        if insert.key.startswith(f"{resource}:"):
            made.setdefault(insert.txid, []).append(insert)
            other = keys.setdefault(insert.key, insert)
            expect(other is insert, "slot_once", "produced twice", other, insert)
    previous: Slots | None = None
    its_leases = [change for change in leases if change.resource == resource]
    for mark in slots:
        jobs = made.pop(mark.txid, [])
        expect(previous is None or mark.old == previous.new, "slot_once", "another mark was left", previous, mark)
        expect(mark.new > mark.old, "slot_once", "the mark went back", mark)
        expect(len(jobs) == mark.produced, "slot_once", f"{len(jobs)} jobs for {mark.produced} slots", mark, *jobs[:5])
        held = next((change.new for change in reversed(its_leases) if change.at <= mark.at), None)
        live = held is not None and not _is_over(held, mark.at - _BETWEEN_READINGS_US)
        # Who changes what is wanted moves the mark as well, and produces nothing.
        expect(live or not jobs, "slot_once", "produced without a live lease", mark, held)
        own = held is not None and all(_is_of(job.writer, held.holder) for job in jobs)
        expect(own or not jobs, "slot_once", "produced by somebody who has not got the lease", mark, held, *jobs[:5])
        previous = mark
    for jobs in made.values():
        expect(False, "slot_once", "produced without moving the mark", *jobs[:5])


def check_room(claims: Iterable[Claim], findings: Findings, *, most: Callable[[str], int]) -> None:
    """No claim takes more rows than its process may take at once. `most`: of the process of that name."""
    taken = Counter((claim.process or "", claim.txid) for claim in claims)
    for (process, txid), rows in taken.items():
        findings.expect(rows <= most(process), "room", f"{process} took {rows} jobs at once, in transaction {txid}")


def check_deploys(stopped_at: Mapping[str, int], reaps: Iterable[Reap], findings: Findings) -> None:
    """Who has stopped cleanly has left nothing behind. `stopped_at`: by process, on the database's clock."""
    left: dict[str, list[Reap]] = {}
    for reap in reaps:
        if reap.at > stopped_at.get(reap.process, reap.at):
            left.setdefault(reap.process, []).append(reap)
    for process in stopped_at:
        jobs = left.get(process, [])
        findings.expect(not jobs, "deploy", f"{process} left {len(jobs)} jobs to the end of their leases", *jobs[:5])


def check_guarded(rows: Iterable[GuardedRow], findings: Findings) -> None:
    """A resource that checks fences lets none pass that is lower than one before."""
    highest: dict[str, GuardedRow] = {}
    for row in rows:
        before = highest.setdefault(row.resource, row)
        findings.expect(row.fence >= before.fence, "guarded", "a stale fence was let in", before, row)
        highest[row.resource] = max(before, row, key=lambda one: one.fence)


# --- what handlers and holders wrote down


class Run(NamedTuple):
    """One run of a handler, or one block under a named lease, by its own note; local seconds."""

    subject: str
    """The job's id, or the lease's resource."""
    fence: int
    kind: str
    process: str
    started_at: float
    ended_at: float | None
    """None: its process was gone before, or it runs on."""


class Excuse(NamedTuple):
    """A time in which a process could not be told anything: it was frozen, or a handler blocked its loop."""

    process: str
    begin: float
    end: float


def check_runs(runs: Sequence[Run], findings: Findings, owners: Mapping[int, tuple[str, str | None]]) -> None:
    """Each runs once under its fence, in the process that was given it. `owners`: by fence, the subject and the process."""
    started: dict[int, Run] = {}
    for run in runs:
        other = started.setdefault(run.fence, run)
        findings.expect(other is run, "started_once", "two runs under one fence", other, run)
        own = owners.get(run.fence) == (run.subject, run.process)
        findings.expect(own, "started_once", "started under a fence that this process was not given", run, owners.get(run.fence))


def check_suspects(runs: Iterable[Run], findings: Findings, claims: Mapping[int, Claim], died_at: Mapping[str, float]) -> None:
    """In each process one after the other."""
    by_process: dict[str, list[Run]] = {}
    for run in runs:
        if run.fence in claims and claims[run.fence].is_suspect:
            by_process.setdefault(run.process, []).append(run)
    for process, suspects in by_process.items():
        suspects.sort(key=lambda run: run.started_at)
        for run, following in itertools.zip_longest(suspects, suspects[1:]):
            ended_at = run.ended_at or died_at.get(process, math.inf)
            alone = following is None or ended_at <= following.started_at
            findings.expect(alone, "one_suspect", "another one beside it", run, following)


def check_starts(
    runs: Iterable[Run],
    findings: Findings,
    *,
    leases: Mapping[int, Sequence[tuple[int, int]]],
    excuses: Sequence[Excuse],
    database_us: Callable[[float], int],
) -> None:
    """A handler starts while its lease is live by the database's clock. Not judged: who was stopped between look and start."""
    by_process = _by_process(excuses)
    for run in runs:
        start = database_us(run.started_at)
        known = [until for at, until in leases.get(run.fence, ()) if at <= start + _BETWEEN_READINGS_US]
        if not known:
            continue
        live = known[-1] >= start - _BETWEEN_READINGS_US
        excused = any(excuse.begin <= run.started_at <= excuse.end for excuse in by_process.get(run.process, []))
        findings.expect(live or excused, "live_start", f"started {(start - known[-1]) / 1e6:.3f} s after its lease was over", run)


def check_stops(
    runs: Sequence[Run],
    findings: Findings,
    *,
    died_at: Mapping[str, float],
    excuses: Sequence[Excuse],
    deaf_kinds: Collection[str],
    cancelled: Collection[int],
    taken_at: Mapping[int, float],
    lease_seconds: float,
) -> None:
    """What can be told to stop has stopped before the next one for the same subject starts; and if none does, soon after its job
    was taken. `taken_at`: by fence, in local seconds.

    Those in `cancelled`, by fence, may take as long as their lease would have been trusted: the word of it may be lost, and whoever
    retries such a job at once does not wait for the first attempt to hear.
    """
    by_subject: dict[str, list[Run]] = {}
    for run in runs:
        by_subject.setdefault(run.subject, []).append(run)
    by_process = _by_process(excuses)

    def has_stopped(run: Run, by: float) -> bool:
        ends = [moment for moment in (run.ended_at, died_at.get(run.process)) if moment is not None]
        excused = any(excuse.begin <= by and excuse.end >= run.started_at for excuse in by_process.get(run.process, []))
        return excused or (bool(ends) and min(ends) <= by + _TELLING_SECONDS)

    for attempts in by_subject.values():
        attempts.sort(key=lambda run: run.fence)  # not by their starts: an old one may start behind a new one
        for run, following in itertools.zip_longest(attempts, attempts[1:]):
            if run.kind in deaf_kinds:
                continue
            if following is not None and run.fence not in cancelled:
                in_time = has_stopped(run, following.started_at)
                findings.expect(in_time, "told_to_stop", "still running when the next one started", run, following)
            if run.fence in taken_at:
                trusted_seconds = lease_seconds if run.fence in cancelled else 0.0
                in_time = has_stopped(run, taken_at[run.fence] + trusted_seconds + _TAKEN_SECONDS)
                findings.expect(in_time, "told_to_stop", "still running when its job had long been taken", run)


def _by_process(excuses: Iterable[Excuse]) -> Mapping[str, Sequence[Excuse]]:
    found: dict[str, list[Excuse]] = {}
    for excuse in excuses:
        found.setdefault(excuse.process, []).append(excuse)
    return found


def check_log(process: str, events: Sequence[Mapping[str, object]], findings: Findings, *, started: str, shutdown: str) -> None:
    """Within one log, whose lines are in order: no handler's `started` line after the `shutdown` line."""
    stopping = False
    for event in events:
        if event.get("event") == shutdown:
            stopping = True
        elif event.get("event") == started:
            findings.expect(not stopping, "no_start_after_shutdown", f"{process}: a handler started", dict(event))
