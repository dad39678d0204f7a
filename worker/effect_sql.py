"""Which SQL an effect may be: one INSERT, UPDATE, DELETE, MERGE or SELECT.

Effects of several jobs may share a transaction. A statement that ends it would commit the neighbours unfenced, and one that
changes the session would change what they mean, so everything else is refused at the call, with the reason.
"""

from __future__ import annotations

import re
from functools import lru_cache

_WRITES = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE"})
# Functions that leave something in the session, wherever in the text they are named: in doubt alone, which is only slower.
_SESSION_FUNCTIONS = re.compile(r"set_config|pg_(try_)?advisory_(un)?lock", re.IGNORECASE)
# An E'…' goes on behind a quote that follows after a line break, and so does what its backslashes mean.
_ESCAPED = r"'(?:[^'\\]|\\.|'')*'"
_GOES_ON = r"(?:[ \t\f\v]|--[^\n\r]*+)*+[\n\r](?:[ \t\n\r\f\v]|--[^\n\r]*+[\n\r])*+"
# As the server's own scanner reads it: six characters are space, a comment ends at \r too, and every character outside ASCII may be
# part of a name (so that `é$$` is one, and begins no quoted text).
_TOKEN = re.compile(
    rf"""
      (?P<skip>  [ \t\n\r\f\v]+ | --[^\n\r]* )
    | (?P<block> /\* )
    | (?P<text>  [eE]{_ESCAPED}(?:{_GOES_ON}{_ESCAPED})* | '(?:[^']|'')*' | "(?:[^"]|"")*" )
    | (?P<dollar> \$(?:[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_\x80-\U0010ffff]*)?\$ )
    | (?P<word>  [A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]* )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=4_096)
def must_be_alone(sql: str) -> bool:
    """True if the statement may read or change more than rows, so that its job must not share a transaction.

    Raises ValueError for what is not one INSERT, UPDATE, DELETE, MERGE or SELECT (a leading WITH is allowed).
    """
    words = _words(sql)
    verb = _verb(words)
    if verb not in _WRITES and verb != "SELECT":
        raise ValueError(
            f"effect: one INSERT, UPDATE, DELETE, MERGE or SELECT is allowed, not {verb or 'an empty statement'!r};"
            " for anything else use `async with job.transaction()`"
        )
    return verb == "SELECT" or _SESSION_FUNCTIONS.search(sql) is not None


def _verb(words: list[tuple[str, int]]) -> str:
    """The statement's verb: its first word, or the first verb outside parentheses behind a leading WITH."""
    if not words:
        return ""
    first, depth = words[0]
    if first != "WITH":
        return first
    following = [*words[1:], ("", 0)]
    for (word, at), after in zip(words[1:], following[1:], strict=True):
        names_a_query = after == (
            "AS",
            depth,
        )  # WITH insert AS (…): legal, since only SELECT is a reserved word
        if at == depth and not names_a_query and (word in _WRITES or word in ("SELECT", "VALUES", "TABLE")):
            return word
    return first


def _words(sql: str) -> list[tuple[str, int]]:
    """The bare words in upper case with their depth of parentheses; no comment, string, quoted name or number."""
    words: list[tuple[str, int]] = []
    depth = at = 0
    ended = False
    while at < len(sql):
        found = _TOKEN.match(sql, at)
        if found is None:  # an unterminated quote: the server will name it, nothing behind it can be a second statement
            break
        at = found.end()
        kind, token = found.lastgroup, found.group()
        if kind == "skip":
            continue
        if kind == "block":
            at = _end_of_comment(sql, at)
            continue
        if ended:
            raise ValueError("effect: one statement a call; call job.effect once for each")
        if kind == "dollar":
            end = sql.find(token, at)
            at = len(sql) if end < 0 else end + len(token)
        elif kind == "word":
            words.append((token.upper(), depth))
        elif token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
        elif token == ";":
            ended = True
    return words


def _end_of_comment(sql: str, at: int) -> int:
    """The place behind a block comment whose inside begins at `at`; PostgreSQL lets them nest."""
    depth = 1
    for mark in re.finditer(r"/\*|\*/", sql[at:]):
        depth += 1 if mark.group() == "/*" else -1
        if depth == 0:
            return at + mark.end()
    return len(sql)
