"""The container image and the systemd units: correct by their own checkers, and in step with the program."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml
from typer.core import TyperGroup

from tests.processes import ROOT
from worker.api.auth import is_loopback
from worker.api.connections import MOST_CONNECTIONS, RESERVED_DESCRIPTORS
from worker.cli import app as cli
from worker.cli.serve import NEEDED
from worker.settings import load_settings, unknown_settings

DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNITS = ("reliable-worker.service", "reliable-worker@.service")
GENERATOR_UNIT = "reliable-worker-generator@.service"
HTTP_UNIT = "reliable-worker-http.service"


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
    for unit in (*UNITS, GENERATOR_UNIT, HTTP_UNIT):
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


def test_systemd_accepts_two_instances_of_the_generator(systemd_tree: Path) -> None:
    assert verify(systemd_tree, "reliable-worker-generator@1.service", "reliable-worker-generator@2.service") == (0, "")


def test_systemd_accepts_the_unit_of_the_http_interface(systemd_tree: Path) -> None:
    assert verify(systemd_tree, HTTP_UNIT) == (0, "")


def test_another_address_of_the_http_interface_needs_an_empty_line_before_it(systemd_tree: Path) -> None:
    """As the unit says at its head: a second ExecStart= alone is refused."""
    drop_in = systemd_tree / f"etc/systemd/system/{HTTP_UNIT}.d/override.conf"
    drop_in.parent.mkdir()
    another = "ExecStart=/opt/reliable-worker/bin/worker serve --host 0.0.0.0 --port 8080\n"
    drop_in.write_text(f"[Service]\nExecStart=\n{another}")
    assert verify(systemd_tree, HTTP_UNIT) == (0, "")
    drop_in.write_text(f"[Service]\n{another}")
    assert "more than one ExecStart=" in verify(systemd_tree, HTTP_UNIT)[1]


def test_systemd_would_have_complained_about_a_misspelt_line(systemd_tree: Path) -> None:
    unit = systemd_tree / "etc/systemd/system" / UNITS[0]
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchdogSecs="))
    assert "WatchdogSecs" in verify(systemd_tree, UNITS[0])[1]


def test_the_template_unit_differs_in_three_lines() -> None:
    plain, template = map(directives, UNITS)
    changes = [line for line in difflib.ndiff(plain, template) if line.startswith("+ ")]
    assert len(changes) == 3
    assert all("%i" in line for line in changes)


def test_the_generators_unit_differs_from_the_workers_in_what_it_runs_and_is_called() -> None:
    plain, generator = map(directives, (UNITS[0], GENERATOR_UNIT))
    changes = [line.removeprefix("+ ") for line in difflib.ndiff(plain, generator) if line.startswith("+ ")]
    assert [line.partition("=")[0] for line in changes] == ["Description", "ExecStart", "Environment", "RuntimeDirectory"]
    assert "ExecStart=/opt/reliable-worker/bin/worker generator run" in changes
    assert sum("%i" in line for line in changes) == 3


def test_the_http_unit_differs_from_the_workers_in_what_it_runs_opens_and_reads() -> None:
    plain, http = map(directives, (UNITS[0], HTTP_UNIT))
    differences = [line for line in difflib.ndiff(plain, http) if line[0] in "+-"]
    assert [line.partition("=")[0] for line in differences if line.startswith("+ ")] == [
        *("+ Description", "+ ExecStart", "+ EnvironmentFile", "+ LimitNOFILE"),
    ]
    # It has no heartbeat file.
    assert {line.partition("=")[0] for line in differences if line.startswith("- ")} == {
        *("- Description", "- ExecStart", "- RuntimeDirectory", "- RuntimeDirectoryMode"),
    }


def test_the_http_unit_runs_a_command_that_exists_where_no_token_is_needed_with_files_for_all_connections() -> None:
    lines = dict(line.split("=", 1) for line in directives(HTTP_UNIT) if "=" in line)
    program, name, *words = lines["ExecStart"].split()
    assert program == "/opt/reliable-worker/bin/worker"
    command = typer.main.get_command(cli).commands[name]  # type: ignore[attr-defined]
    given = command.make_context(name, words).params
    assert is_loopback(given["host"])
    assert given["port"] >= 1024, "it has no right to open others"
    assert int(lines["LimitNOFILE"]) >= MOST_CONNECTIONS + RESERVED_DESCRIPTORS


@pytest.mark.parametrize("unit", [*UNITS, GENERATOR_UNIT, HTTP_UNIT])
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


# --- the example for Compose


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    return document


def ours(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The services that run our image."""
    return {name: service for name, service in compose["services"].items() if service["image"].startswith("reliable-worker")}


def test_the_example_deploys_what_it_takes_to_watch_recovery(compose: dict[str, Any]) -> None:
    assert set(ours(compose)) == {"migrate", "generator", "worker", "api"}
    services = compose["services"]
    assert services["generator"]["deploy"]["replicas"] >= 2
    assert services["worker"]["deploy"]["replicas"] >= 2
    chaos = {name: value for name, value in services["worker"]["environment"].items() if "CHAOS" in name}
    assert chaos == {"WORKER_CHAOS_CRASH": "0.05", "WORKER_CHAOS_LATENCY": "0.10"}


def test_the_example_needs_one_image_that_has_all_it_runs(compose: dict[str, Any]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {service["image"] for service in ours(compose).values()} == {f"reliable-worker:{version}"}
    assert not any("build" in service for service in compose["services"].values())
    locked = re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements-runtime.lock").read_text(), re.MULTILINE)
    assert {name.replace("_", "-") for name in NEEDED} <= set(locked), "what `worker serve` needs"


def test_every_command_of_the_example_exists(compose: dict[str, Any]) -> None:
    for service in ours(compose).values():
        command, words = typer.main.get_command(cli), list(service["command"])
        while isinstance(command, TyperGroup):
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_the_examples_settings_are_valid_and_fit_the_time_to_stop(compose: dict[str, Any]) -> None:
    for name, service in ours(compose).items():
        environ = service["environment"]
        assert all(isinstance(value, str) for value in environ.values()), name
        assert unknown_settings(environ) == []
        settings = load_settings(environ)
        budget = settings.shutdown_grace_seconds + settings.lease_margin_seconds + 2 * settings.query_timeout_seconds
        assert name == "migrate" or budget < float(service["stop_grace_period"].removesuffix("s"))


def test_the_examples_parts_refer_to_each_other(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(compose) == {"name", "services", "volumes", "x-instance", "x-environment"}
    database = services["postgres"]["environment"]
    for service in ours(compose).values():
        assert set(service["depends_on"]) <= set(services)
        url = urlsplit(service["environment"]["DATABASE_URL"])
        assert (url.username, url.password) == (database["POSTGRES_USER"], database["POSTGRES_PASSWORD"])
        assert (url.hostname, url.path) == ("postgres", f"/{database['POSTGRES_USER']}")
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in compose["volumes"]


def test_compose_accepts_the_example() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not on this machine")
    command = [docker, "compose", "--file", str(ROOT / "deploy" / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
