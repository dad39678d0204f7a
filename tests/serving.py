"""`worker serve` under test: a real process on a port of its own, asked over a real socket."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psycopg
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

from tests.processes import Daemon, environment

TOKEN = "a-token-that-only-tests-know"
# Little is waited for on purpose; but no time-out is so short that a busy machine answers 503 by itself.
QUICK = {
    "WORKER_LEASE_SECONDS": "20",
    "WORKER_CLAIM_TIMEOUT_SECONDS": "10",
    "WORKER_QUERY_TIMEOUT_SECONDS": "10",
    "WORKER_BACKOFF_BASE_SECONDS": "0.05",
    "WORKER_SHUTDOWN_GRACE_SECONDS": "2",
}


class Served:
    """One server process, its database, and a client that knows the token."""

    def __init__(self, process: Daemon, database_url: str, token: str | None) -> None:
        self.process = process
        self.database_url = database_url
        started = process.wait_for_event("http_started", 20)
        self.port: int = started["port"]
        self.url = f"http://127.0.0.1:{self.port}"
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=20, trust_env=False)
        self.db: psycopg.Connection[Any] = psycopg.connect(database_url, autocommit=True, row_factory=namedtuple_row)

    def close(self) -> None:
        self.http.close()
        self.db.close()

    # --- what tests say often

    def ask(self, statement: str, *arguments: object) -> list[Any]:
        return self.db.execute(statement, arguments).fetchall()

    def job(self, id: int) -> Any:
        [row] = self.ask("SELECT * FROM jobs WHERE id = %s", id)
        return row

    def failures(self, id: int) -> list[Any]:
        return self.ask("SELECT * FROM job_failures WHERE job_id = %s ORDER BY fence", id)

    def add(self, kind: str = "remote", payload: object = None, **fields: Any) -> int:
        """A job, by SQL; its id."""
        names = ["kind", "payload", *fields]
        values = [kind, Jsonb(payload if payload is not None else {}), *fields.values()]
        marks = ", ".join(["%s"] * len(names))
        [row] = self.ask(f"INSERT INTO jobs ({', '.join(names)}) VALUES ({marks}) RETURNING id", *values)
        id: int = row.id
        return id

    def claim(self, processor: str = "p1", **fields: Any) -> dict[str, Any] | None:
        answer = self.http.post("/api/tasks/next", json={"processor": processor, **fields})
        if answer.status_code == 204:
            assert answer.content == b""
            return None
        assert answer.status_code == 200, answer.text
        task: dict[str, Any] = answer.json()
        return task

    def claimed(self, processor: str = "p1", **fields: Any) -> dict[str, Any]:
        """A task that is surely there."""
        task = self.claim(processor, **fields)
        assert task is not None
        return task

    def tell(self, verb: str, task: dict[str, Any], *, processor: str | None = None, **fields: Any) -> httpx.Response:
        """Heartbeat, complete, fail or release, as who holds the task unless another name is given."""
        body = {"processor": processor or task["processor"], "fence": task["fence"], **fields}
        return self.http.put(f"/api/tasks/{task['id']}/{verb}", json=body)

    def lapse(self, id: int) -> None:
        """Age the row: its lease is over, and nobody has noticed."""
        self.ask("UPDATE jobs SET lease_until = now() - interval '1 ms' WHERE id = %s RETURNING id", id)


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of a refusal, which has the one shape."""
    body = answer.json()
    assert {"error", "message"} <= body.keys(), body
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, body["error"]


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Callable[..., Served]]:
    """A factory of `worker serve` processes: `serve(database_url, *arguments, ready=True, token=None, **variables)`."""
    started: list[Daemon] = []
    served: list[Served] = []

    def serve(
        database_url: str, *arguments: str, ready: bool = True, token: str | None = TOKEN, command: str = "serve", **variables: str
    ) -> Served:
        tokens = {} if token is None else {"WORKER_HTTP_TOKENS": f"another-token-of-tests,{token}"}
        port = () if command == "run" else ("--port", "0")
        environ = environment(directory, **({"DATABASE_URL": database_url} | QUICK | tokens | variables))
        process = Daemon(
            (sys.executable, "-m", "worker", command, *port, *arguments), environ, directory, f"{command}-{len(started)}"
        )
        started.append(process)
        served.append(Served(process, database_url, token))
        if ready:
            process.wait_for_event("http_ready" if command == "serve" else "daemon_ready", 20)
        return served[-1]

    try:
        yield serve
    finally:
        for one in served:
            one.close()
        for process in started:
            process.kill()


@contextlib.contextmanager
def eating(served: Served, *, every: int, method: str = "POST") -> Iterator[str]:
    """The address of a proxy that passes every request on and loses the first of every `every` answers to `method`."""
    count = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            nonlocal count
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            answer = served.http.request(self.command, self.path, content=body, headers={"Content-Type": "application/json"})
            if self.command == method:
                count += 1
                if count % every == 1:
                    self.close_connection = True
                    return
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = do_PUT = do_DELETE = _pass_on  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
