"""History: what finished rows and a long queue in the table do to the rate. Jobs without effect, so that nothing hides it."""

from __future__ import annotations

from typing import Final

from worker.bench.arena import filling
from worker.bench.handlers import NOTHING
from worker.bench.running import SMALL_BYTES, Bench, drain
from worker.store import benchmarks

# Of --rows, that many wait.
_WAITING_SHARE: Final = 2


async def measure(bench: Bench) -> None:
    plan = bench.plan
    tasks = plan.tasks[0]
    waiting = max(plan.rows // _WAITING_SHARE, plan.jobs)
    empty_case = f"empty table, {plan.jobs:,} waiting"
    finished_case = f"{plan.rows:,} finished rows, {plan.jobs:,} waiting"
    waiting_case = f"{waiting:,} waiting, the first {plan.jobs:,} of them"
    async with bench.arena("history") as grown, bench.arena("growth") as fresh:
        bench.say(f"history, writing {plan.rows:,} finished rows")
        await benchmarks.fill_finished(grown.connection, grown.database, plan.rows, kind=NOTHING, text=filling(SMALL_BYTES))
        await benchmarks.vacuum(grown.connection, grown.database)
        for turn in range(plan.runs):
            of = f"run {turn + 1} of {plan.runs}"
            bench.say(f"history, {empty_case}, {of}")
            await fresh.empty()
            sample = await drain(bench, fresh, kind=NOTHING, jobs=plan.jobs, tasks=tasks)
            bench.book.add("history", empty_case, "jobs/s", sample)
            bench.say(f"history, {finished_case}, {of}")
            sample = await drain(bench, grown, kind=NOTHING, jobs=plan.jobs, tasks=tasks)
            bench.book.add("history", finished_case, "jobs/s", sample)
            bench.say(f"history, {waiting_case}, {of}")
            await fresh.empty()
            sample = await drain(bench, fresh, kind=NOTHING, jobs=plan.jobs, waiting=waiting, tasks=tasks)
            bench.book.add("history", waiting_case, "jobs/s", sample)
    bench.book.compare("history", finished_case, empty_case)
    bench.book.compare("history", waiting_case, empty_case)
