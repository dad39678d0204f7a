"""The check: reads what was recorded, puts every rule to it, and makes the report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from worker import events
from worker.store import audit, generating
from worker.store.audit import FinalRow
from worker.store.connection import Database
from worker.torture import end_rules, handlers, notes, other_rules, timing
from worker.torture.breaches import RULES, Breach, Findings
from worker.torture.daemons import MOST_AT_ONCE, REAP_SECONDS, check_exits, is_textbook, slot_of
from worker.torture.field import Field
from worker.torture.job_rules import JobFacts, JobRules
from worker.torture.other_rules import Excuse, Run
from worker.torture.running import Passed, Wish
from worker.version import VERSION

SHOWN_BREACHES: Final = 100
SHOWN_HISTORIES: Final = 20
"""Whole histories of jobs that the breaches are about."""
_STATEMENT_SECONDS: Final = 600.0
_BUSY_AGAIN_SECONDS: Final = 0.5


async def check(passed: Passed, wish: Wish, database: Database) -> tuple[Findings, dict[str, object]]:
    """Every rule against the recorded history. Returns what was found, and the document of the report but for its head."""
    field = passed.field
    findings = Findings()
    runs = list(notes.read(field.notes))
    connection = await database.connect("torture", statement_timeout_seconds=_STATEMENT_SECONDS)
    try:
        rules = JobRules(findings, handlers.KINDS)
        async for change in audit.changes(connection, database):
            rules.feed(change)
        end_rules.check_end(
            rules.facts,
            findings,
            handlers.KINDS,
            final=await audit.final_rows(connection, database),
            effects=await audit.effects(connection, database),
            ledger=await audit.ledger(connection, database),
            failures=await audit.failures(connection, database),
            acknowledged=sorted(field.load.acknowledged),
        )
        lease_changes = await audit.lease_changes(connection, database)
        acquired = other_rules.check_leases(lease_changes, findings, rules.facts)
        other_rules.check_fences(rules.facts.draws, findings)
        other_rules.check_guarded(await audit.guarded(connection, database), findings)
        other_rules.check_slots(
            await audit.slots(connection, database),
            lease_changes,
            rules.facts.inserts.values(),
            findings,
            resource=generating.NAME,
        )
        claimed: dict[int, tuple[str, str | None]] = {
            fence: (str(claim.job_id), claim.process) for fence, claim in rules.facts.claims.items()
        }
        other_rules.check_runs(runs, findings, claimed | acquired)
        other_rules.check_room(rules.facts.claims.values(), findings, most=_most_at_once)
        _check_handlers(field, runs, findings, rules.facts)
        histories = [change._asdict() async for change in audit.changes(connection, database, of=_jobs_of(findings))]
    finally:
        connection.terminate()
    logged, lines = _check_logs(field, findings, {history["job_id"] for history in histories})
    check_exits(field.slots, runs, findings, lease_seconds=wish.lease_seconds)
    recovery = timing.recovery(rules.facts.reaps, field.killed, findings, lease_seconds=wish.lease_seconds)
    late = timing.after_expiry(timing.recovered(rules.facts.reaps, field.killed), reap_seconds=REAP_SECONDS)
    returns = timing.returns(rules.facts.completed_at, field.ended, findings, usual=passed.usual)
    return findings, {
        "quiet": passed.quiet,
        "acknowledged": len(field.load.acknowledged),
        "counts": dict(sorted(rules.facts.counts.items())),
        "faults": dict(field.injected),
        "faults_without_effect": dict(field.unseen),
        "sessions_ended": dict(field.terminated),
        "processes_started": sum(len(slot.lives) for slot in field.slots),
        "stale_attempts_refused": _came_back_late(rules.facts, runs, field),
        "commits_without_answer": field.lost_commits
        + sum(slot.proxy.lost_commits.total() for slot in field.slots if slot.proxy is not None),
        "abandoned_by_their_process": dict(logged),
        "usual_per_second": round(passed.usual.least, 1),
        "recovery_seconds": recovery._asdict(),
        "reaped_after_expiry_seconds": late._asdict(),
        "return_seconds": {fault: times._asdict() for fault, times in returns.items()},
        "rules": {
            name: {
                "promise": promise,
                "tried": findings.tried[name],
                "breaches": sum(breach.rule == name for breach in findings.breaches),
            }
            for name, promise in RULES.items()
        },
        "breaches": [_shown(breach) for breach in findings.breaches[:SHOWN_BREACHES]],
        "histories": histories,
        "log_lines_of_these": lines,
        "steps": [step._asdict() for step in field.done],
    }


def _most_at_once(process: str) -> int:
    return 1 if is_textbook(slot_of(process)) else MOST_AT_ONCE


def _check_handlers(field: Field, runs: list[Run], findings: Findings, facts: JobFacts) -> None:
    lives = [life for slot in field.slots for life in slot.lives]
    died_at = {life.name: life.ended_at for life in lives if life.ended_at is not None}
    excuses = [excuse for slot in field.slots for excuse in slot.excuses] + _blocked(runs)
    other_rules.check_stops(
        runs,
        findings,
        died_at=died_at,
        excuses=excuses,
        deaf_kinds=handlers.DEAF,
        cancelled=facts.cancelled,
        taken_at={fence: field.local_moment(at) for fence, at in facts.taken.items()},
        lease_seconds=field.lease_seconds,
    )
    other_rules.check_suspects(runs, findings, facts.claims, died_at)
    other_rules.check_starts(runs, findings, leases=facts.leases, excuses=excuses, database_us=field.database_us)
    cleanly = (life for life in lives if life.asked == "term" and life.process.poll() == 0 and life.ended_at is not None)
    other_rules.check_deploys({life.name: field.database_us(life.ended_at) for life in cleanly}, facts.reaps, findings)


def _jobs_of(findings: Findings) -> list[int]:
    """The jobs that the first breaches are about."""
    found: set[int] = set()
    for breach in findings.breaches[:SHOWN_BREACHES]:
        for row in breach.rows:
            if isinstance(row, Run):
                found |= {int(row.subject)} if row.subject.isdecimal() else set()
            elif isinstance(row, FinalRow):
                found.add(row.id)
            elif isinstance(id := getattr(row, "job_id", None), int):
                found.add(id)
    return sorted(found)[:SHOWN_HISTORIES]


def head(wish: Wish, *, where: str, server_version: str, skipped: Mapping[str, str]) -> dict[str, object]:
    """What a reader has to know to do it again."""
    return {"version": VERSION, "server_version": server_version, "where": where, **asdict(wish), "skipped": dict(skipped)}


def _blocked(runs: list[Run]) -> list[Excuse]:
    """While a handler blocks its loop, nobody else in the process can be told anything."""
    return [
        Excuse(run.process, run.started_at, (run.ended_at or run.started_at) + _BUSY_AGAIN_SECONDS)
        for run in runs
        if run.kind == handlers.BLOCK
    ]


def _came_back_late(facts: JobFacts, runs: list[Run], field: Field) -> int:
    """Handlers that ended, in a process that lived, after their job had been taken from them: what they did counts for nothing."""
    return sum(
        run.ended_at is not None and field.database_us(run.ended_at) > facts.taken[run.fence]
        for run in runs
        if run.fence in facts.taken
    )


def _check_logs(field: Field, findings: Findings, jobs: Collection[object]) -> tuple[Counter[str], list[object]]:
    """What is to be seen in the logs that can be read. Counts abandoned attempts by reason, and returns what is said of `jobs`."""
    abandoned: Counter[str] = Counter()
    said: list[object] = []
    for life in (life for slot in field.slots if slot.sort != "holder" for life in slot.lives):
        if life.log is None:
            continue
        entries = read_log(life.log, life.name, findings)
        other_rules.check_log(life.name, entries, findings, started=handlers.STARTED, shutdown=events.SHUTDOWN_STARTED.name)
        abandoned.update(str(entry.get("reason")) for entry in entries if entry.get("event") == events.JOB_ABANDONED.name)
        said += [entry for entry in entries if entry.get("job_id") in jobs]
    return abandoned, said


def read_log(log: Path, process: str, findings: Findings) -> list[Mapping[str, object]]:
    """The lines of a daemon's log, as far as they are what they are to be."""
    text = log.read_text("utf-8", "replace")
    entries: list[Mapping[str, object]] = []
    for line in text[: text.rfind("\n") + 1].splitlines():  # the last line of a killed process may be cut
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if findings.expect(isinstance(entry, dict), "log_lines", f"{process} wrote something else", line[:1000]):
            entries.append(entry)
    return entries


def _shown(breach: Breach) -> dict[str, object]:
    rows = [row._asdict() if hasattr(row, "_asdict") else row for row in breach.rows]
    return {"rule": breach.rule, "promise": RULES[breach.rule], "text": breach.text, "rows": rows}
