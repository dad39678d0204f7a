"""Ledger: jobs with effects and random keys, beside an empty ledger and a long one, whose keys are random too.

Each run begins after a checkpoint, so that nearly every row it adds to a long ledger is the first on its page: the worst case,
with a whole page a row in the write-ahead log.
"""

from __future__ import annotations

from dataclasses import replace

from worker.bench.handlers import EFFECT
from worker.bench.results import BenchFailed
from worker.bench.running import Bench, drain, jobs_of
from worker.store import bench_tables, benchmarks


async def measure(bench: Bench) -> None:
    plan = bench.plan
    rows = plan.ledger_rows
    empty_case, long_case = "empty ledger, random keys", f"{rows:,} ledger rows, random keys"
    jobs = replace(jobs_of(EFFECT, plan.jobs), random_keys=True)
    async with bench.arena("ledger") as long, bench.arena("blank") as blank:
        bench.say(f"ledger, writing {rows:,} rows")
        await bench_tables.fill_ledger(long.connection, long.database, rows)
        for turn in range(plan.runs):
            for case, on in ((empty_case, blank), (long_case, long)):
                bench.say(f"ledger, {case}, run {turn + 1} of {plan.runs}")
                if on is blank:
                    await on.empty()
                else:
                    await benchmarks.empty_but_ledger(on.connection, on.database)
                bench.book.add("ledger", case, "jobs/s", await drain(bench, on, jobs, tasks=plan.tasks[0]))
        found = await bench_tables.count_ledger(long.connection, long.database)
        if found < rows + plan.runs * plan.jobs:
            raise BenchFailed(f"the ledger holds {found} rows: {rows + plan.runs * plan.jobs} or more were due")
    bench.book.compare("ledger", long_case, empty_case)
