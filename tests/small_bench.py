"""A small bench, what it leaves in a database, and what stands in the document that it prints."""

from __future__ import annotations

from typing import Any

from tests.servers import schemas_like

SMALL = ("--jobs", "150", "--rows", "1500", "--ledger-rows", "2000", "--minutes", "0.02", "--runs", "1", "--tasks", "4")


def schemas(url: str) -> list[str]:
    """What is left of a bench, or there already."""
    return schemas_like(url, "worker_bench_")


def samples(document: dict[str, Any], scenario: str) -> dict[str, list[dict[str, Any]]]:
    return {figure["case"]: figure["runs"] for figure in document["figures"] if figure["scenario"] == scenario}
