"""The README, as tests hold it to the code: its blocks, its tables, its prose."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.processes import ROOT

README = (ROOT / "README.md").read_text()


class Block(NamedTuple):
    """A fenced block. `marker` is the comment on the line before it, if there is one."""

    language: str
    marker: str
    text: str


def read_blocks() -> list[Block]:
    pattern = r"(?:^<!-- (?P<marker>.+?) -->\n)?^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^ *```$"
    return [
        Block(found["language"], found["marker"] or "", re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE))
        for found in re.finditer(pattern, README, re.MULTILINE | re.DOTALL)
    ]


BLOCKS = read_blocks()
PROSE = re.sub(r"^ *```\w+\n.*?^ *```$", "", README, flags=re.MULTILINE | re.DOTALL)
FLOWING = " ".join(PROSE.split())
SENT = "CREATE TABLE sent (key text PRIMARY KEY, body text NOT NULL)"
"""The table that the README's example writes to."""


def block(language: str, containing: str) -> str:
    """The one block of this language with this text in it."""
    (text,) = [each.text for each in BLOCKS if each.language == language and containing in each.text]
    return text


def table(head: str) -> list[list[str]]:
    """The cells of the table whose first line is `head`."""
    start = README.index(f"\n{head}\n") + 1
    lines = README[start:].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines[2:]]


def code(text: str) -> str:
    return text.strip("`")
