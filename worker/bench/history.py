"""History: what finished rows and a long queue in the table do to the rate. Jobs without effect, so that nothing hides it."""

from __future__ import annotations

from typing import Final

from worker.bench.arena import text_of
from worker.bench.handlers import NOTHING
from worker.bench.running import SMALL_BYTES, Bench, drain, jobs_of
from worker.store import benchmarks

# Of --rows, that many wait.
_WAITING_SHARE: Final = 2
# A long queue is measured over its beginning, so a short one is, too: neither has the small batches of an end in its figure.
_FIRST_SHARE: Final = 2


async def measure(bench: Bench) -> None:
    plan = bench.plan
    tasks = plan.tasks[0]
    waiting = max(plan.rows // _WAITING_SHARE, plan.jobs)
    first = plan.jobs // _FIRST_SHARE
    empty_case = f"empty table, {plan.jobs:,} waiting"
    finished_case = f"{plan.rows:,} finished rows, {plan.jobs:,} waiting"
    short_case = f"{plan.jobs:,} waiting, the first {first:,} of them"
    long_case = f"{waiting:,} waiting, the first {first:,} of them"
    async with bench.arena("history") as grown, bench.arena("growth") as fresh:
        bench.say(f"history, writing {plan.rows:,} finished rows")
        await benchmarks.fill_finished(grown.connection, grown.database, plan.rows, kind=NOTHING, text=text_of(SMALL_BYTES))
        await benchmarks.vacuum(grown.connection, grown.database)
        for turn in range(plan.runs):
            for case, on, count, part in (
                (empty_case, fresh, plan.jobs, None),
                (finished_case, grown, plan.jobs, None),
                (short_case, fresh, plan.jobs, first),
                (long_case, fresh, waiting, first),
            ):
                bench.say(f"history, {case}, run {turn + 1} of {plan.runs}")
                if on is fresh:
                    await on.empty()
                sample = await drain(bench, on, jobs_of(NOTHING, count), first=part, tasks=tasks)
                bench.book.add("history", case, "jobs/s", sample)
    bench.book.compare("history", finished_case, empty_case)
    bench.book.compare("history", long_case, short_case)
