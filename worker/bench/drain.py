"""Drain: how fast one process works off what waits, without and with effect, by number of tasks; and the yardsticks.

Each turn runs all of them, so that each ratio is made of figures that are a minute apart.
"""

from __future__ import annotations

from typing import Final

from worker.bench import yardsticks
from worker.bench.handlers import EFFECT, NOTHING
from worker.bench.running import Bench, drain, jobs_of
from worker.store.yardsticks import make_tables

WORDS: Final = {NOTHING: "no effect", EFFECT: "one effect"}
NAIVE: Final = "naive"
ONE_BY_ONE: Final = "one by one"
CEILING: Final = "ceiling"


def _name(kind: str, tasks: int) -> str:
    return f"{WORDS[kind]}, {tasks} tasks"


async def measure(bench: Bench) -> None:
    plan = bench.plan
    few = min(plan.jobs, yardsticks.ONE_BY_ONE_JOBS)
    async with bench.arena("drain") as on:
        await make_tables(on.connection, on.database)
        for turn in range(plan.runs):
            of = f"run {turn + 1} of {plan.runs}"
            for kind, words in WORDS.items():
                effect = kind == EFFECT
                for tasks in plan.tasks:
                    bench.say(f"drain, {_name(kind, tasks)}, {of}")
                    await on.empty()
                    sample = await drain(bench, on, jobs_of(kind, plan.jobs), tasks=tasks)
                    bench.book.add("drain", _name(kind, tasks), "jobs/s", sample)
                await on.empty()
                bench.say(f"drain, yardsticks, {words}, {of}")
                naive = await yardsticks.naive(bench, on, jobs=few, effect=effect)
                bench.book.add("drain", f"{NAIVE}, {words}", "jobs/s", naive)
                one_by_one = await yardsticks.one_by_one(bench, on, jobs=few, effect=effect)
                bench.book.add("drain", f"{ONE_BY_ONE}, {words}", "jobs/s", one_by_one)
                ceiling = await yardsticks.ceiling(bench, on, jobs=plan.jobs, effect=effect)
                bench.book.add("drain", f"{CEILING}, {words}", "jobs/s", ceiling)
    for kind, words in WORDS.items():
        for tasks in plan.tasks:
            for yardstick in (NAIVE, ONE_BY_ONE, CEILING):
                bench.book.compare("drain", _name(kind, tasks), f"{yardstick}, {words}")
