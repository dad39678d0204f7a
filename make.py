#!/usr/bin/env python3
"""Set up this checkout and run it: `python3 make.py run | test | lint | setup | lock [arguments…]`.

Needs Python 3.11 or newer and nothing else: it makes `.venv`, installs the locked packages into it,
PostgreSQL among them, and starts the command there. It is itself plain standard library, readable by older
Pythons, so that it can say what is missing. Nothing outside the checkout is changed.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.realpath(__file__))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "set-up-from")
LOCK = "requirements.lock"

TESTED_MINORS = (13, 12, 11)  # of Python 3; a newer one is taken when there is none of these
NEWER_MINORS = tuple(range(14, 30))

ASK_SECONDS = 20
MAKE_VENV_SECONDS = 180
INSTALL_SECONDS = 900

# Settings of the caller's own Python life that would send packages, or imports, somewhere else than to .venv.
FOREIGN = {"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"}
FOREIGN |= {"PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
ENVIRON = {name: value for name, value in os.environ.items() if name not in FOREIGN}
ENVIRON.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", UV_PYTHON_DOWNLOADS="never")

PYTHON_PACKAGES = {
    "apt-get": "apt-get install python3 python3-venv",
    "dnf": "dnf install python3.12",
    "apk": "apk add python3",
    "brew": "brew install python",
}
VENV_PACKAGES = {
    "apt-get": "apt-get install python3.{minor}-venv",
    "dnf": "dnf install python3-virtualenv",
    "apk": "apk add py3-virtualenv",
    "brew": "brew install virtualenv",
}


def main(arguments):
    """Do what the first argument names; everything after it goes to the program that is started."""
    commands = {"run": run, "test": test, "lint": lint, "setup": set_up, "lock": lock}
    if not arguments or arguments[0] not in commands:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    os.chdir(ROOT)
    return commands[arguments[0]](*arguments[1:])


def run(*arguments):
    """`worker demo` on a PostgreSQL of its own."""
    set_up()
    become("-m", "worker", "demo", *arguments)


def test(*arguments):
    """All tests, on a PostgreSQL of their own; four files at a time on two cores, since most of what they do is wait."""
    set_up()
    workers = min((os.cpu_count() or 1) * 2, 6)
    # In the order of collection, which begins with the slow files; xdist would begin with those that have many tests.
    spread = ("-n", str(workers if workers > 1 else 0), "--dist", "loadfile", "--no-loadscope-reorder")
    become("-m", "pytest", *spread, *arguments)


def lint():
    """ruff and mypy, as CI runs them."""
    set_up()
    for check in (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy", "--strict")):
        status = subprocess.call((VENV_PYTHON, "-m", *check), env=ENVIRON)
        if status:
            return status
    return 0


def lock():
    """Write the lock files anew from pyproject.toml: newest versions, hashes, wheels only, no host names.

    requirements.lock is for development and CI; requirements-runtime.lock is what the container image runs,
    requirements-build.lock what builds it. Both take their versions from the first.
    """
    uv = shutil.which("uv") or fail("`lock` needs uv: pip install uv")
    compile_ = (
        *(uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"),
        *("--generate-hashes", "--only-binary", ":all:", "--no-emit-index-url", "--no-annotate"),
        *("--custom-compile-command", "python3 make.py lock", "--output-file"),
    )
    for path, selection in (
        (LOCK, ("pyproject.toml", "--all-extras", "--group", "dev", "--upgrade")),
        ("requirements-runtime.lock", ("pyproject.toml", "--extra", "http", "--constraint", LOCK)),
        ("requirements-build.lock", ("--group", "build", "--constraint", LOCK)),
    ):
        status = subprocess.call((*compile_, path, *selection), env=ENVIRON)
        if status:
            return status
    return 0


def set_up():
    """Make .venv hold exactly the locked packages and this checkout; at once when it does already."""
    # Two commands at a time in one checkout: the second waits, and finds the work done.
    checkout = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(checkout, fcntl.LOCK_EX)
    try:
        if is_set_up():
            return 0
        print("setting up .venv (once; packages come from your package index)", flush=True)
        make_venv()
        pip = (VENV_PYTHON, "-m", "pip", "install", "--quiet", "--quiet")
        install((*pip, "--require-hashes", "--only-binary", ":all:", "--requirement", LOCK))
        # A second step, since pip refuses an editable project among hashed requirements.
        install((*pip, "--no-deps", "--no-build-isolation", "--editable", "."))
        # Written last: without it the next call starts over.
        with open(STAMP, "w") as stamp:
            stamp.write(fingerprint())
        return 0
    finally:
        os.close(checkout)


def is_set_up():
    """Whether .venv was completed from these files at this place, and its interpreter still exists."""
    try:
        with open(STAMP) as stamp:
            if stamp.read() != fingerprint():
                return False
    except OSError:
        return False
    return answers((VENV_PYTHON, "-c", "")) is not None


def fingerprint():
    """Changes with everything that .venv is made from; also with the place, since a venv cannot be moved."""
    digest = hashlib.sha256(ROOT.encode())
    for path in (LOCK, "pyproject.toml"):
        with open(os.path.join(ROOT, path), "rb") as source:
            digest.update(source.read())
    return digest.hexdigest()


def make_venv():
    """An empty .venv with pip, by the best interpreter that can make one."""
    pythons = interpreters()
    if not pythons:
        fail("needs Python 3.11 or newer" + advice(PYTHON_PACKAGES))
    for python, _ in pythons:
        for maker in (
            (python, "-m", "venv"),
            (python, "-m", "virtualenv", "--quiet"),
            ("virtualenv", "--quiet", "--python", python),
            ("uv", "venv", "--quiet", "--seed", "--python", python),
        ):
            # A half-made one, also from the maker before this one, would be taken for whole.
            shutil.rmtree(VENV, ignore_errors=True)
            if os.path.lexists(VENV):
                fail(".venv cannot be replaced: remove it, or run as its owner")
            made = answers((*maker, VENV), MAKE_VENV_SECONDS) is not None
            if made and answers((VENV_PYTHON, "-m", "pip", "--version")) is not None:
                return
    python, minor = pythons[0]
    fail(python + " cannot make a virtual environment" + advice(VENV_PACKAGES).format(minor=minor))


def interpreters():
    """(path, minor version) of each Python from 3.11 up that really starts, best first."""
    found = {}
    for name in (sys.executable, "python3", *(f"python3.{minor}" for minor in TESTED_MINORS + NEWER_MINORS)):
        # The name alone proves little: version switchers put stand-ins on the PATH that only print an error.
        answer = answers((name, "-c", "import sys; print(*sys.version_info[:2], sys.executable)"))
        if answer:
            major, minor, path = answer.strip().split(" ", 2)
            if major == "3" and int(minor) >= min(TESTED_MINORS):
                found.setdefault(path, int(minor))
    return sorted(found.items(), key=lambda item: (item[1] in TESTED_MINORS, item[1]), reverse=True)


def answers(command, limit_seconds=ASK_SECONDS):
    """What a command prints, or None when it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=limit_seconds,
            env=ENVIRON,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def install(command):
    """Run pip where the person sees what it says."""
    if subprocess.call(command, stdin=subprocess.DEVNULL, env=ENVIRON, timeout=INSTALL_SECONDS):
        fail("could not install the packages (see above); is your package index reachable?")


def advice(packages):
    """The command that brings what is missing on this machine, as the rest of a line."""
    for manager, command in packages.items():
        if shutil.which(manager):
            return ": " + command
    return ": install a complete one, or virtualenv, or uv"


def become(*arguments):
    """Replace this process by the venv's Python: signals and the exit status are the program's own."""
    os.execve(VENV_PYTHON, (VENV_PYTHON, *arguments), ENVIRON)


def fail(message):
    """End with one line for the person."""
    sys.exit("make.py: " + message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
