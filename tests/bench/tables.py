"""The results as tables in Markdown: medians with their range, and our ratios turn by turn, losses included."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from tests.bench import peers
from tests.bench.contest import Setting
from tests.bench.peers import DELETING, OURS, PEERS, Failed
from worker.bench import machine

Result = Mapping[str, object]


def print_tables(
    results: Sequence[Result], versions: Mapping[str, str], missing: Mapping[str, str], setting: Setting, server: str
) -> None:
    here = machine.this_machine()
    print(f"\n{here.cpu}, {here.cores} cores, {here.system}; {server}; {here.python}, Node {_node()}.")
    print("One worker process each, start-up left out; medians (least–most) of interleaved runs; the ratio is made turn by turn.")
    for workload, tasks in dict.fromkeys((str(result["workload"]), int(str(result["tasks"]))) for result in results):
        of = [result for result in results if (result["workload"], result["tasks"]) == (workload, tasks)]
        print(f"\n### {workload}, {tasks} tasks{' (a ratio below 1: ours is the faster one)' if workload == 'latency' else ''}\n")
        print_table(of, versions, missing, latency=workload == "latency")
    print(f"\n`{DELETING}`: WORKER_RETENTION_SECONDS=0, so a finished job's row is deleted, as those say that do so.")
    print(f"Jobs a run: {setting.jobs:,}, fewer where the table says so; {setting.moments:,} for latency.")


def print_table(of: Sequence[Result], versions: Mapping[str, str], missing: Mapping[str, str], *, latency: bool) -> None:
    figure, unit, digits = ("p50", "p50 ms", 2) if latency else ("rate", "jobs/s", 0)
    columns = {"worker_us": "worker CPU µs a job", "server_us": "server CPU µs a job"}
    if latency:
        columns = {"p95": "p95 ms", "p99": "p99 ms"}
    facts_heads = ["jobs", "effect and completion", "finished rows"]
    heads = ["library", unit, *columns.values(), *facts_heads, f"{OURS} / it", f"{DELETING} / it"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in (*versions, *missing):
        peer = PEERS[name]
        mine = [result for result in of if result["peer"] == name]
        good = [result for result in mine if figure in result]
        facts = ["one transaction" if peer.atomic else "apart", "deleted" if peer.deletes else "kept"]
        if not good:
            reason = missing.get(name) or (str(mine[0]["error"]) if mine else "it was not run")
            label = f"{name} ({versions[name]})" if name in versions else name
            print(f"| {label} | no figure: {_in_a_cell(reason)} |{' |' * (len(columns) + 1)} {' | '.join(facts)} | | |")
            continue
        values = _numbers(good, figure)
        shown = f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"
        rest = [f"{statistics.median(_numbers(good, column)):.{digits}f}" for column in columns]
        jobs = f"{int(_numbers(good, 'jobs')[0]):,}"
        ratios = [_ratio(of, good, ours, figure) for ours in (OURS, DELETING)]
        print(f"| {name} ({versions[name]}) | {shown} | {' | '.join([*rest, jobs, *facts, *ratios])} |")


def _ratio(of: Iterable[Result], theirs: Iterable[Result], ours: str, figure: str) -> str:
    """The median of ours by theirs, each turn by itself, and the range."""
    mine = {result["turn"]: float(str(result[figure])) for result in of if result["peer"] == ours and figure in result}
    ratios = [mine[result["turn"]] / float(str(result[figure])) for result in theirs if result["turn"] in mine]
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def _numbers(results: Iterable[Result], name: str) -> list[float]:
    return [float(str(result[name])) for result in results]


def _in_a_cell(text: str) -> str:
    """Its last line, which is where a traceback says what was wrong."""
    lines = text.strip().splitlines() or ["nothing was said"]
    return " ".join(lines[-1].replace("|", "/").split())[:200]


def _node() -> str:
    try:
        return peers.run(["node", "--version"]).strip()
    except Failed:
        return "none"
