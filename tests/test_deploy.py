"""The container image and the systemd units: correct by their own checkers, and in step with the program."""

from __future__ import annotations

import difflib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worker.settings import load_settings, unknown_settings

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNITS = ("reliable-worker.service", "reliable-worker@.service")


def final_stage() -> list[str]:
    return DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :].strip().splitlines()


def directives(unit: str) -> list[str]:
    lines = (ROOT / "deploy" / unit).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not in this environment; it has no wheel for this platform")
    done = subprocess.run([hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_image_runs_the_worker_as_an_unprivileged_user_in_an_importable_directory() -> None:
    stage = final_stage()
    assert 'ENTRYPOINT ["worker"]' in stage
    assert 'CMD ["run"]' in stage
    assert "USER 10001:10001" in stage
    assert "WORKDIR /app" in stage
    assert any(line.startswith("HEALTHCHECK") and '["worker", "health"]' in line for line in stage)
    assert not any(line.startswith("EXPOSE") for line in stage)


def test_everything_the_image_installs_from_an_index_is_pinned_by_hash() -> None:
    commands = DOCKERFILE.replace("\\\n", " ").replace("&&", "\n").splitlines()
    installs = [line for line in commands if "pip install" in line]
    assert len(installs) == 3
    for line in installs:
        assert "--require-hashes" in line or "--no-deps /opt/wheel/" in line


def test_what_the_dockerfile_copies_is_let_through_by_dockerignore() -> None:
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for line in DOCKERFILE.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == let_through


@pytest.fixture
def systemd_tree(tmp_path: Path) -> Path:
    """A file system in which our units find what they name; the program and targets are empty stand-ins."""
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for unit in UNITS:
        shutil.copy(ROOT / "deploy" / unit, units)
    for target in ("sysinit", "basic", "shutdown", "network-online", "multi-user"):
        (units / f"{target}.target").write_text(f"[Unit]\nDescription={target}\n")
    program = tmp_path / "opt/reliable-worker/bin/worker"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


def verify(tree: Path, *units: str) -> tuple[int, str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    done = subprocess.run(
        ["systemd-analyze", "verify", f"--root={tree}", *units],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_systemd_accepts_the_units(systemd_tree: Path) -> None:
    assert verify(systemd_tree, "reliable-worker.service", "reliable-worker@1.service") == (0, "")


def test_systemd_would_have_complained_about_a_misspelt_line(systemd_tree: Path) -> None:
    unit = systemd_tree / "etc/systemd/system" / UNITS[0]
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchdogSecs="))
    assert "WatchdogSecs" in verify(systemd_tree, UNITS[0])[1]


def test_the_template_unit_differs_in_three_lines() -> None:
    plain, template = map(directives, UNITS)
    changes = [line for line in difflib.ndiff(plain, template) if line.startswith("+ ")]
    assert len(changes) == 3
    assert all("%i" in line for line in changes)


@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_states_the_promised_lines(unit: str) -> None:
    assert {
        "Type=notify",
        "NotifyAccess=main",
        "After=network-online.target",
        "Wants=network-online.target",
        "User=reliable-worker",
        "EnvironmentFile=/etc/reliable-worker/env",
        "Restart=on-failure",
        "RestartSec=3s",
        "RestartPreventExitStatus=78",
        "TimeoutStopSec=15s",
        "KillMode=mixed",
        "WatchdogSec=30s",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
    } <= set(directives(unit))


def test_the_unit_gives_a_default_stop_all_the_time_it_may_take() -> None:
    settings = load_settings({"DATABASE_URL": "postgresql://localhost/app"})
    budget = settings.shutdown_grace_seconds + settings.lease_margin_seconds + 2 * settings.query_timeout_seconds
    assert budget < 15


def test_the_example_environment_is_a_valid_configuration() -> None:
    lines = (ROOT / "deploy" / "reliable-worker.env.example").read_text().splitlines()
    # Examples are commented out as `#NAME=value`, prose as `# text`.
    assignments = [line.removeprefix("#") for line in lines if line and not line.startswith("# ")]
    environ = dict(line.split("=", 1) for line in assignments)
    assert len(environ) == len(assignments) >= 4
    assert unknown_settings(environ) == []
    assert load_settings(environ).workers == int(environ["WORKERS"])
