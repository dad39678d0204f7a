#!/usr/bin/env python3
"""This project beside other libraries, in one run, interleaved turn by turn: rates, latencies, CPU, and the ratios.

    python -m tests.bench.compare [--peers …] [--workloads none,effect,latency,snapshot] [--tasks 10,50] [--runs 3] [--jobs 20000]

Installs each peer into an environment of its own below --directory (once), starts a PostgreSQL of its own (or takes the
superuser's --database-url of a server on this machine) and prints tables in Markdown. What cannot be installed or does not work
is in them with the reason. Every run begins with a fresh database, filled by the peer's own bulk call, analyzed, after a
checkpoint, with one worker process.

none      jobs that do nothing        effect    one row a job, over the handler's own pool; ours commits it with the completion
latency   an idle worker, one job every 20 ms: from the return of the enqueue to the handler's first line
snapshot  `none` with three times the jobs, while a REPEATABLE READ snapshot is held

Each library works in the way that its documentation shows as the fast one; where that costs something (no limit on the tasks, a
loop of one's own in place of its worker), the plain way is there too, under another name.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from pathlib import Path

import asyncpg

from tests.bench.contest import WORKLOADS, Contestant, Setting, connected, delayed, drained
from tests.bench.peers import PEERS, Failed, install
from tests.bench.tables import print_tables
from worker.bench import machine
from worker.cluster import temporary_cluster

# As the others' harnesses set it; everything else, durability above all, is PostgreSQL's default.
SERVER = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min", "max_connections": "200"}


async def compare(setting: Setting, names: list[str], workloads: list[str], tasks: list[int], runs: int) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for workload in workloads:
        for turn in range(runs):
            # Nobody is always the first, or always behind the same neighbour.
            places = turn % max(len(names), 1)
            order = names[places:] + names[:places]
            for number in tasks[:1] if workload == "latency" else tasks:
                for name in order:
                    measure = delayed if workload == "latency" else drained
                    result: dict[str, object] = {"workload": workload, "tasks": number, "peer": name, "turn": turn}
                    try:
                        result |= await measure(Contestant(name, setting, workload, number))
                    except (Failed, asyncpg.PostgresError, OSError) as error:
                        result["error"] = str(error)
                    results.append(result)
                    print(json.dumps(result), file=sys.stderr, flush=True)
    return results


async def _look_at(server: str) -> tuple[str, int | None]:
    async with connected(server, "postgres") as connection:
        version, user, durability = await connection.fetchrow(
            "SELECT current_setting('server_version'), current_user::text, format("
            "'fsync %s, synchronous_commit %s, full_page_writes %s, shared_buffers %s', current_setting('fsync'),"
            " current_setting('synchronous_commit'), current_setting('full_page_writes'), current_setting('shared_buffers'))"
        )
        postmaster = machine.postmaster_of(connection.get_server_pid(), user=user, database="postgres")
    return f"PostgreSQL {version}, {durability}", postmaster


def _list(text: str, known: list[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=lambda text: _list(text, list(PEERS)), default=list(PEERS))
    parser.add_argument("--workloads", type=lambda text: _list(text, list(WORKLOADS)), default=list(WORKLOADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument(
        "--tasks", type=lambda text: [int(part) for part in text.split(",")], default=[10, 50], help="latency: the first"
    )
    parser.add_argument("--moments", type=int, default=750, help="jobs of a latency run")
    parser.add_argument("--directory", type=Path, default=Path.home() / ".cache" / "reliable-worker-compare", help="environments")
    parser.add_argument("--database-url", help="a superuser's, of a server on this machine; without it one is started")
    parser.add_argument("--json", type=Path, help="write every run and the versions there")
    options = parser.parse_args()
    directory = options.directory.absolute()
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in options.peers:
        try:
            versions[name] = install(name, directory)
        except Failed as error:
            missing[name] = str(error)
            print(f"{name} cannot be installed: {error}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        server = options.database_url or stack.enter_context(temporary_cluster(settings=SERVER)).dsn
        shown, postmaster = asyncio.run(_look_at(server))
        setting = Setting(server=server, postmaster=postmaster, directory=directory, jobs=options.jobs, moments=options.moments)
        results = asyncio.run(compare(setting, list(versions), options.workloads, options.tasks, options.runs))
    print_tables(results, versions, missing, setting, shown)
    if options.json:
        document = {"server": shown, "versions": versions, "missing": missing, "results": results}
        options.json.write_text(json.dumps(document, indent=1))
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
