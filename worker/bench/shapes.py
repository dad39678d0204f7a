"""Shapes: the same jobs beside many that are due tomorrow, in two queues, and with three priorities. Without effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker.bench.arena import text_of
from worker.bench.daemons import NO_SETTINGS
from worker.bench.handlers import DAY_SECONDS, NOTHING
from worker.bench.running import SMALL_BYTES, Bench, drain, jobs_of
from worker.store import benchmarks
from worker.store.benchmarks import Filling

# Of --rows, that many are due tomorrow.
_LATER_SHARE: Final = 2

PLAIN: Final = "plain"
QUEUES: Final = ("default", "second")
TWO_QUEUES: Final = "two queues, in turn"
THREE_PRIORITIES: Final = "three priorities"


async def measure(bench: Bench) -> None:
    plan = bench.plan
    later = max(plan.rows // _LATER_SHARE, 1)
    beside = f"{later:,} beside them due tomorrow"
    plain = jobs_of(NOTHING, plan.jobs)
    async with bench.arena("shapes") as fresh, bench.arena("later") as waiting:
        bench.say(f"shapes, writing {later:,} jobs due tomorrow")
        tomorrow = await benchmarks.moment_in(waiting.connection, DAY_SECONDS)
        filling = Filling(count=later, kind=NOTHING, text=text_of(SMALL_BYTES))
        await benchmarks.fill(waiting.connection, waiting.database, filling, keys="later-", due_at_seconds=tomorrow)
        cases = {
            PLAIN: (fresh, plain),
            beside: (waiting, plain),
            TWO_QUEUES: (fresh, replace(plain, queues=QUEUES)),
            THREE_PRIORITIES: (fresh, replace(plain, priorities=3)),
        }
        for turn in range(plan.runs):
            for name, (on, filling) in cases.items():
                bench.say(f"shapes, {name}, run {turn + 1} of {plan.runs}")
                if on is fresh:
                    await on.empty()
                extra = {"WORKER_QUEUES": ",".join(QUEUES)} if name == TWO_QUEUES else NO_SETTINGS
                sample = await drain(bench, on, filling, tasks=plan.tasks[0], extra=extra)
                bench.book.add("shapes", name, "jobs/s", sample)
        for name in (beside, TWO_QUEUES, THREE_PRIORITIES):
            bench.book.compare("shapes", name, PLAIN)
