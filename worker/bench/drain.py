"""Drain: how fast one process works off what waits, by effect, number of tasks and size of payload; and the yardsticks."""

from __future__ import annotations

from typing import Final, NamedTuple

from worker.bench import yardsticks
from worker.bench.handlers import EFFECT, NOTHING
from worker.bench.running import SMALL_BYTES, Bench, drain
from worker.store.yardsticks import make_tables

PAYLOADS: Final = (4_096, 102_400)
# At most so much payload a run: 100 kB payloads are measured with fewer jobs.
_PAYLOAD_BYTES_A_RUN: Final = 100_000_000
_LEAST_JOBS: Final = 100
_NAIVE_SHARE: Final = 8

_WORDS: Final = {NOTHING: "no effect", EFFECT: "one effect"}


class _Case(NamedTuple):
    kind: str
    tasks: int
    payload_bytes: int
    jobs: int

    @property
    def name(self) -> str:
        return _name(self.kind, self.tasks, self.payload_bytes)


def _name(kind: str, tasks: int, payload_bytes: int) -> str:
    size = f"{payload_bytes} B" if payload_bytes < 1_024 else f"{payload_bytes // 1_024} kB"
    return f"{_WORDS[kind]}, {tasks} tasks, {size}"


async def measure(bench: Bench) -> None:
    plan = bench.plan
    cases = [_Case(kind, tasks, SMALL_BYTES, plan.jobs) for tasks in plan.tasks for kind in (NOTHING, EFFECT)]
    for size in PAYLOADS:
        jobs = min(plan.jobs, max(_PAYLOAD_BYTES_A_RUN // size, _LEAST_JOBS))
        cases += [_Case(kind, plan.tasks[0], size, jobs) for kind in (NOTHING, EFFECT)]
    async with bench.arena("drain") as on:
        await make_tables(on.connection, on.database)
        for turn in range(plan.runs):
            for case in cases:
                bench.say(f"drain, {case.name}, run {turn + 1} of {plan.runs}")
                await on.empty()
                sample = await drain(bench, on, kind=case.kind, jobs=case.jobs, tasks=case.tasks, payload_bytes=case.payload_bytes)
                bench.book.add("drain", case.name, "jobs/s", sample)
            await on.empty()
            for kind in (NOTHING, EFFECT):
                bench.say(f"drain, yardsticks, {_WORDS[kind]}, run {turn + 1} of {plan.runs}")
                effect = kind == EFFECT
                naive = await yardsticks.naive(bench, on, jobs=max(plan.jobs // _NAIVE_SHARE, _LEAST_JOBS), effect=effect)
                bench.book.add("drain", f"naive, {_WORDS[kind]}", "jobs/s", naive)
                ceiling = await yardsticks.ceiling(bench, on, jobs=plan.jobs, effect=effect)
                bench.book.add("drain", f"ceiling, {_WORDS[kind]}", "jobs/s", ceiling)
    for kind in (NOTHING, EFFECT):
        for tasks in plan.tasks:
            for yardstick in ("naive", "ceiling"):
                bench.book.compare("drain", _name(kind, tasks, SMALL_BYTES), f"{yardstick}, {_WORDS[kind]}")
