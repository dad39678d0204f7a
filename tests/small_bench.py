"""A small bench, what it leaves in a database, and what stands in the document that it prints."""

from __future__ import annotations

from typing import Any

import psycopg

SMALL = ("--jobs", "150", "--rows", "1500", "--ledger-rows", "2000", "--minutes", "0.02", "--runs", "1", "--tasks", "4")


def schemas(url: str) -> list[str]:
    """What is left of a bench, or there already."""
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT nspname FROM pg_namespace WHERE nspname ^@ 'worker_bench_'")]


def samples(document: dict[str, Any], scenario: str) -> dict[str, list[dict[str, Any]]]:
    return {figure["case"]: figure["runs"] for figure in document["figures"] if figure["scenario"] == scenario}
