"""Payloads: what a job costs by the size of its payload. A cliff would be a cost that grows faster than the bytes."""

from __future__ import annotations

import itertools
from typing import Final

from worker.bench.drain import WORDS
from worker.bench.running import SMALL_BYTES, Bench, drain, jobs_of

SIZES: Final = (SMALL_BYTES, 4_096, 102_400)
# At most so much payload a run: those of 100 kB are measured with fewer jobs.
_BYTES_A_RUN: Final = 200_000_000
_LEAST_JOBS: Final = 100


def _size(payload_bytes: int) -> str:
    return f"{payload_bytes} B" if payload_bytes < 1_024 else f"{payload_bytes // 1_024} kB"


def _name(kind: str, payload_bytes: int) -> str:
    return f"{WORDS[kind]}, {_size(payload_bytes)}"


async def measure(bench: Bench) -> None:
    plan = bench.plan
    seconds: dict[tuple[str, int], list[float]] = {}
    async with bench.arena("payloads") as on:
        for turn in range(plan.runs):
            for size in SIZES:
                jobs = min(plan.jobs, max(_BYTES_A_RUN // size, _LEAST_JOBS))
                for kind in WORDS:
                    bench.say(f"payloads, {_name(kind, size)}, run {turn + 1} of {plan.runs}")
                    await on.empty()
                    sample = await drain(bench, on, jobs_of(kind, jobs, size), tasks=plan.tasks[0])
                    bench.book.add("payloads", _name(kind, size), "jobs/s", sample)
                    seconds.setdefault((kind, size), []).append(sample.seconds / sample.jobs)
    for kind in WORDS:
        for small, large in itertools.pairwise(SIZES):
            # Above 1 the cost has grown faster than the bytes.
            growth = [
                (more / less) / (large / small) for more, less in zip(seconds[kind, large], seconds[kind, small], strict=True)
            ]
            name = f"{WORDS[kind]}: time a job, {_size(large)} / {_size(small)}, by {large / small:g} (the bytes)"
            bench.book.note_ratio("payloads", name, growth)
