"""How many tasks `worker serve` hands out and takes back: `python tests/bench/http_load.py URL [--token T] [--connections 16]`.

Each connection claims a task and completes it, one request after the other, over a socket of its own. Tasks have to be there: with
`--enqueue N` they are put in first, by SQL, into the database of DATABASE_URL. The client shares the machine with the server and
PostgreSQL, so the figure is what all three together can do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from urllib.parse import urlsplit

import orjson
import psycopg
import uvloop


class Client:
    """One keep-alive connection."""

    def __init__(self, host: str, port: int, token: str | None) -> None:
        self._host, self._port = host, port
        self._head = f"host: {host}:{port}\r\ncontent-type: application/json\r\n"
        if token is not None:
            self._head += f"authorization: Bearer {token}\r\n"

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    def close(self) -> None:
        self._writer.close()

    async def ask(self, method: str, path: str, body: dict[str, object]) -> tuple[int, bytes]:
        text = orjson.dumps(body)
        self._writer.write(f"{method} {path} HTTP/1.1\r\n{self._head}content-length: {len(text)}\r\n\r\n".encode() + text)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        _, _, rest = head.partition(b"content-length: ")
        length = int(rest.partition(b"\r\n")[0]) if rest else 0
        return int(head[9:12]), await self._reader.readexactly(length)


async def work(client: Client, number: int, until: float, counts: Counter[str], latencies: dict[str, list[float]]) -> None:
    await client.connect()
    serial = 0
    while time.perf_counter() < until:
        serial += 1
        started = time.perf_counter()
        wish = {"processor": f"load-{number}", "request_id": f"{os.getpid()}-{number}-{serial}"}
        status, text = await client.ask("POST", "/api/tasks/next", wish)
        counts[f"claim {status}"] += 1
        if status != 200:
            await asyncio.sleep(0.01)
            continue
        latencies["claim"].append(time.perf_counter() - started)
        task = orjson.loads(text)
        started = time.perf_counter()
        done = {"processor": f"load-{number}", "fence": task["fence"], "output": {"ok": True}}
        status, _ = await client.ask("PUT", f"/api/tasks/{task['id']}/complete", done)
        counts[f"complete {status}"] += 1
        latencies["complete"].append(time.perf_counter() - started)
    client.close()


async def run(arguments: argparse.Namespace) -> None:
    address = urlsplit(arguments.url)
    clients = [Client(address.hostname or "127.0.0.1", address.port or 80, arguments.token) for _ in range(arguments.connections)]
    counts: Counter[str] = Counter()
    latencies: dict[str, list[float]] = {"claim": [], "complete": []}
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, client in enumerate(clients):
            group.create_task(work(client, number, started + arguments.seconds, counts, latencies))
    seconds = time.perf_counter() - started
    print(dict(sorted(counts.items())))
    for verb, times in latencies.items():
        times.sort()
        if times:
            p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
            print(f"{verb}: {len(times) / seconds:,.0f} a second, p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--token")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--enqueue", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.enqueue:
        with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
            fill = "INSERT INTO jobs (kind, payload) SELECT 'load', '{\"n\": 1}' FROM generate_series(1, %s)"
            connection.execute(fill, [arguments.enqueue])
    uvloop.run(run(arguments))


if __name__ == "__main__":
    main()
