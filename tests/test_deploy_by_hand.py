"""What an operator of a systemd host types: the steps at the head of each unit, and commands as the service runs them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest

from tests.commands import parse
from tests.documents import block
from tests.processes import ROOT

UNITS = sorted(path.name for path in (ROOT / "deploy").glob("*.service"))
PROGRAM = "/opt/reliable-worker/bin/worker"


def directives(unit: str) -> dict[str, str]:
    lines = (ROOT / "deploy" / unit).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def steps(unit: str) -> list[list[str]]:
    """The words of each command at the head of a unit, in their order."""
    lines = re.findall(r"^#   (.+)$", (ROOT / "deploy" / unit).read_text(), re.MULTILINE)
    return [shlex.split(command, comments=True) for line in lines for command in line.split(" && ")]


@pytest.mark.parametrize("unit", UNITS)
def test_the_head_of_a_unit_installs_it_before_it_starts_it(unit: str) -> None:
    said = steps(unit)
    copied = said.index(["install", "-m", "0644", unit, "/etc/systemd/system/"])
    assert said[copied + 1] == ["systemctl", "daemon-reload"]
    assert said[copied + 2][:3] == ["systemctl", "enable", "--now"]
    assert all(name.startswith(unit.removesuffix(".service")) for name in said[copied + 2][3:])
    if unit == "reliable-worker.service":
        (migrated,) = [place for place, words in enumerate(said) if words[-2:] == [PROGRAM, "migrate"]]
        assert migrated < copied, "without its tables the first start ends with 78 and is not repeated"
    else:
        assert "reliable-worker.service up to `migrate`" in (ROOT / "deploy" / unit).read_text()


@pytest.mark.parametrize("unit", UNITS)
def test_a_command_at_the_head_of_a_unit_runs_with_its_user_and_its_environment(unit: str) -> None:
    lines = directives(unit)
    for words in steps(unit):
        if PROGRAM in words:
            place = words.index(PROGRAM)
            assert words[:place] == as_service(lines)
            parse(words[place + 1 :])


def as_service(lines: dict[str, str]) -> list[str]:
    return [
        *("systemd-run", "-qGtP", "--wait"),
        *("-p", f"User={lines['User']}", "-p", f"EnvironmentFile={lines['EnvironmentFile']}"),
    ]


def by_hand(*arguments: str) -> list[str]:
    """What the README's function calls systemd-run with."""
    text = f"""systemd-run() {{ printf '%s\\n' "$@"; }}\n{block("sh", "systemd-run")}\nworker {shlex.join(arguments)}"""
    done = subprocess.run(["bash", "-eu", "-c", text], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_commands_by_hand_run_as_the_service_does() -> None:
    lines = directives("reliable-worker.service")
    # systemd reads its arguments as it reads ExecStart=: $NAME would be replaced, $$ is a dollar.
    assert by_hand("jobs", "retry", "--kind", "two words", "--key", "$5 ${DATABASE_URL}") == [
        *as_service(lines)[1:],
        *("-p", f"WorkingDirectory={lines['WorkingDirectory']}"),
        *("-E", f"WORKER_RUNTIME_DIR=/run/{lines['RuntimeDirectory']}"),
        *(PROGRAM, "jobs", "retry", "--kind", "two words", "--key", "$$5 $${DATABASE_URL}"),
    ]


def test_systemd_run_knows_the_options_of_commands_by_hand() -> None:
    if shutil.which("systemd-run") is None:
        pytest.skip("systemd-run is not on this machine")
    given = by_hand()
    options = given[: given.index(PROGRAM)]
    for more, is_known in (([], True), (["--no-such-option"], False)):
        done = subprocess.run(["systemd-run", *options, *more, "--version"], capture_output=True, timeout=60, check=False)
        assert (done.returncode == 0) is is_known


def test_the_readme_names_the_runtime_directories_of_the_templates() -> None:
    readme = (ROOT / "README.md").read_text()
    for unit in UNITS:
        name = directives(unit).get("RuntimeDirectory")
        assert name is None or f"/run/{name.replace('%i', '1')}" in readme
