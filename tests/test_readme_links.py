"""What the README and docs/ refer to is there, and no command line in them shows a secret to `ps`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^ *```\w+\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def prose(document: Path) -> str:
    return _BLOCK.sub("", document.read_text("utf-8"))


def headings(document: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)


def anchor(heading: str) -> str:
    """How a heading is linked to."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_link_leads_to_a_file_or_a_heading(document: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", prose(document)):
        path, _, fragment = link.partition("#")
        target = document.parent / path if path else document
        assert target.is_file(), link
        if fragment:
            assert fragment in map(anchor, headings(target)), link


def test_the_links_that_there_are_would_be_found() -> None:
    assert sum(len(re.findall(r"\]\(([^)]+)\)", prose(document))) for document in DOCUMENTS) >= 40


def test_a_section_of_the_readme_that_is_named_exists() -> None:
    """As `README, systemd`, where there can be no link."""
    named = {
        name
        for path in (*DOCUMENTS, *(ROOT / "deploy").iterdir())
        for name in re.findall(r"\bREADME, (\w[\w ]*)", path.read_text("utf-8"))
    }
    assert named <= set(headings(ROOT / "README.md"))
    assert named, "the units name one"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_file_that_is_named_exists(document: Path) -> None:
    for name in re.findall(r"`((?:worker|deploy|examples|app)/[\w/.@-]+)`", prose(document)):
        assert (ROOT / name).exists() or (ROOT / "examples" / name).exists(), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_no_command_of_ours_is_given_a_secret_where_everybody_can_read_it(document: Path) -> None:
    """The arguments of a process show in `ps`, its environment does not. (psql has no variable for a whole URL.)"""
    spans = re.findall(r"`([^`\n]+)`", prose(document))
    blocks = [line for text in _BLOCK.findall(document.read_text("utf-8")) for line in text.splitlines()]
    for line in (*spans, *blocks):
        command = line.partition("#")[0].strip()
        if re.match(r"(worker|python3?) ", command):
            assert not re.search(r"\$\{?DATABASE_URL|postgres(ql)?://|--token\b", command), line
