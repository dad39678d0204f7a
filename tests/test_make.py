"""make.py: sets up from a bare Python, finds its work done the second time, and says what is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import ROOT


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """make.py as a module that looks at a checkout and a PATH of the test's own."""
    specification = importlib.util.spec_from_file_location("make_under_test", ROOT / "make.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout)
    venv = checkout / ".venv"
    for name, value in {
        "ROOT": str(checkout),
        "VENV": str(venv),
        "VENV_PYTHON": str(venv / "bin" / "python"),
        "STAMP": str(venv / "set-up-from"),
    }.items():
        monkeypatch.setattr(module, name, value)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setitem(module.ENVIRON, "PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setattr(module, "TESTED_MINORS", (93, 92, 91))
    monkeypatch.setattr(module, "NEWER_MINORS", (94,))
    return module


def program(make: ModuleType, name: str, script: str) -> str:
    path = Path(os.environ["PATH"]) / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def python(make: ModuleType, minor: int, venv: str = "exit 1") -> str:
    """A stand-in that says its version, and does this when asked for a virtual environment."""
    path = Path(os.environ["PATH"]) / f"python3.{minor}"
    return program(make, path.name, f'case "$2" in venv) {venv};; virtualenv) exit 1;; *) echo 3 {minor} {path};; esac')


def test_the_newest_tested_python_that_really_starts_is_taken_first(make: ModuleType) -> None:
    newer, tested, older = python(make, 94), python(make, 92), python(make, 91)
    program(make, "python3.93", "echo 'pyenv: python3.93: command not found' >&2; exit 127")
    program(make, "python3", "echo 3 9 /usr/bin/python3")
    assert [path for path, _ in make.interpreters()] == [tested, older, newer]


def test_without_a_python_that_is_new_enough_one_line_names_the_package(make: ModuleType) -> None:
    program(make, "python3", "echo 3 9 /usr/bin/python3")
    program(make, "apt-get", "")
    with pytest.raises(SystemExit) as ending:
        make.make_venv()
    assert str(ending.value) == "make.py: needs Python 3.11 or newer: apt-get install python3 python3-venv"


def test_without_the_venv_module_one_line_names_the_package(make: ModuleType) -> None:
    path = python(make, 92)
    program(make, "virtualenv", "exit 1")
    program(make, "uv", "exit 1")
    program(make, "apt-get", "")
    with pytest.raises(SystemExit) as ending:
        make.make_venv()
    expected = f"make.py: {path} cannot make a virtual environment: apt-get install python3.92-venv"
    assert str(ending.value) == expected


WORKING_PYTHON = r"mkdir -p {0}/bin && printf '#!/bin/sh\n' > {0}/bin/python && chmod +x {0}/bin/python"


def test_a_half_made_environment_is_replaced_whole(make: ModuleType) -> None:
    left_over = Path(make.VENV) / "left-over"
    left_over.parent.mkdir()
    left_over.write_text("")
    python(make, 92, venv=WORKING_PYTHON.format('"$3"'))
    make.make_venv()
    assert Path(make.VENV_PYTHON).exists()
    assert not left_over.exists()


def test_another_maker_is_tried_when_venv_fails(make: ModuleType) -> None:
    python(make, 92)
    program(make, "virtualenv", WORKING_PYTHON.format('"$4"'))
    make.make_venv()
    assert Path(make.VENV_PYTHON).exists()


def set_up_with(make: ModuleType, monkeypatch: pytest.MonkeyPatch, *, ending_with: BaseException | None) -> list[str]:
    """Run `set_up` with the slow parts replaced; what it did, in order."""
    done: list[str] = []

    def make_venv() -> None:
        done.append("venv")
        program_path = Path(make.VENV_PYTHON)
        program_path.parent.mkdir(parents=True, exist_ok=True)
        program_path.write_text("#!/bin/sh\n")
        program_path.chmod(0o755)

    def install(command: tuple[str, ...]) -> None:
        done.append("editable" if "--editable" in command else "locked")
        if ending_with and done[-1] == "editable":
            raise ending_with

    monkeypatch.setattr(make, "make_venv", make_venv)
    monkeypatch.setattr(make, "install", install)
    if ending_with:
        with pytest.raises(type(ending_with)):
            make.set_up()
    else:
        make.set_up()
    return done


def test_the_second_time_nothing_is_done(make: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_up_with(make, monkeypatch, ending_with=None) == ["venv", "locked", "editable"]
    assert set_up_with(make, monkeypatch, ending_with=None) == []


def test_a_set_up_that_was_interrupted_starts_over(make: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_with(make, monkeypatch, ending_with=KeyboardInterrupt())
    assert set_up_with(make, monkeypatch, ending_with=None) == ["venv", "locked", "editable"]


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_a_change_of_what_it_is_made_from_makes_it_anew(make: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    set_up_with(make, monkeypatch, ending_with=None)
    with open(Path(make.ROOT) / name, "a") as source:
        source.write("# changed\n")
    assert set_up_with(make, monkeypatch, ending_with=None) == ["venv", "locked", "editable"]


def test_an_environment_that_was_moved_or_lost_its_interpreter_is_made_anew(
    make: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_with(make, monkeypatch, ending_with=None)
    os.unlink(make.VENV_PYTHON)
    assert not make.is_set_up()
    set_up_with(make, monkeypatch, ending_with=None)
    assert make.is_set_up()
    monkeypatch.setattr(make, "ROOT", make.ROOT + "/../checkout")
    assert not make.is_set_up()


def test_the_makefile_only_calls_the_script() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not on this machine")
    # Not as a child of the make that runs these tests: it would speak of the directories it enters, and hand on its ARGS.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "ARGS"}
    for target in ("run", "test", "lint"):
        command = ["make", "-n", target]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=20, check=True)
        assert done.stdout.split() == ["python3", "make.py", target]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_clone_in_a_long_path_with_spaces_sets_itself_up_and_needs_no_network_the_second_time(
    tmp_path: Path,
) -> None:
    checkout = tmp_path / ("a long path with spaces " * 4).strip() / "checkout"
    skip = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, checkout, ignore=skip)
    command = [sys.executable, str(checkout / "make.py"), "setup"]
    subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=500, check=True)
    offline = os.environ | {"PIP_NO_INDEX": "1", "UV_OFFLINE": "1"}
    installed_at = (checkout / ".venv" / "set-up-from").stat().st_mtime_ns
    subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=60, check=True, env=offline)
    assert (checkout / ".venv" / "set-up-from").stat().st_mtime_ns == installed_at
    own_python = checkout / ".venv" / "bin" / "python"
    done = subprocess.run(
        [own_python, "-c", "import worker.cluster; print(worker.cluster.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == str(checkout / "worker" / "cluster.py")
