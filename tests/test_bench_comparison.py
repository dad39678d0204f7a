"""The comparison with other libraries: ratios of one run, taken in turns, and the reason where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, environment
from tests.servers import Server


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_comparison_prints_ratios_of_one_run_and_names_what_cannot_be_installed(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.compare", "--database-url", server.dsn, "--directory", str(tmp_path)]
    amount = ("--jobs", "100", "--runs", "2", "--tasks", "2", "--workloads", "effect", "--json", str(tmp_path / "results.json"))
    ours, deleting = "reliable-worker", "reliable-worker-deleting"
    done = subprocess.run(
        [*command, *amount, "--peers", f"{ours},{deleting},graphile"],
        capture_output=True,
        text=True,
        # Nowhere is there an npm.
        env=environment(tmp_path, PATH=str(tmp_path)),
        cwd=ROOT,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    head, first, second, third = rows
    assert head[-2:] == [f"{ours} / it", f"{deleting} / it"]
    assert first[0].startswith(f"{ours} (")
    assert first[4:] == ["100", "one transaction", "kept", "1.00 (1.00–1.00)", first[-1]]
    assert second[4:] == ["100", "one transaction", "deleted", second[-2], "1.00 (1.00–1.00)"]
    assert third[0] == "graphile"
    assert "no figure" in third[1]
    assert "npm" in third[1]
    document = json.loads((tmp_path / "results.json").read_text())
    # Interleaved turn by turn, each time another one first; and every effect was counted, else there would be no rate.
    order = [(result["turn"], result["peer"]) for result in document["results"]]
    assert order == [(0, ours), (0, deleting), (1, deleting), (1, ours)]
    assert all(result["rate"] > 0 for result in document["results"])
