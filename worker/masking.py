"""Keeps secrets out of text that people will read: logs, stored error texts, messages on a terminal.

What is remembered here (whole DSNs, passwords) is replaced wherever it turns up, and so is whatever looks
like a password in a URL or a connection string, remembered or not. Applied to free text only: the names and
numbers of our own lines cannot hold a secret.
"""

from __future__ import annotations

import re

MASK = "***"
# Below this length a "password" is as likely a syllable of an ordinary word.
_LEAST_LENGTH = 4
_MESSAGE_CHARACTERS = 1000
_CHAINED = 100
# Of these the detail is the row: not null, check or partition, WITH CHECK OPTION. Its words are in the server's language.
_SHOWS_ROW = frozenset({"23502", "23514", "44000"})
# The same in the text of other drivers; where its end cannot be told, to the end.
_ROW = re.compile(r"Failing row contains \(.*?(?:\)\.(?=\n|\Z)|\Z)", re.DOTALL)
_NO_ROW = "(row not shown)"
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")

_secrets: tuple[str, ...] = ()
# The greedy middle reaches the last @ before a space: a raw @ in a password must not leave its tail behind.
# The bounds keep a long hostile text linear.
_URL_PASSWORD = re.compile(r"\b[a-z][a-z0-9+.-]{0,30}://[^\s:/@]{0,200}:(\S{0,1000})@", re.IGNORECASE)
_KEYWORD_PASSWORD = re.compile(
    r"""password["']?\s{0,9}[=:]\s{0,9}('(?:[^'\\]|\\.){0,1000}'|"(?:[^"\\]|\\.){0,1000}"|[^\s,;&)]{1,1000})""",
    re.IGNORECASE,
)


def remember(*secrets: str | None) -> None:
    """From now on `masked` replaces these; None and very short ones are passed over."""
    global _secrets
    known = {*_secrets, *(secret for secret in secrets if secret and len(secret) >= _LEAST_LENGTH)}
    # The longest first, so that a DSN goes before the password inside it.
    _secrets = tuple(sorted(known, key=len, reverse=True))


def masked(text: str) -> str:
    """`text` without any secret that we know of or can recognise."""
    # All are looked for in the text as it came: what replaces one must not hide where another begins.
    hidden = [match.span() for secret in _secrets if secret in text for match in re.finditer(re.escape(secret), text)]
    if "://" in text:
        hidden += [match.span(1) for match in _URL_PASSWORD.finditer(text)]
    if "password" in text.lower():
        hidden += [match.span(1) for match in _KEYWORD_PASSWORD.finditer(text)]
    if not hidden:
        return text
    shown = []
    end = -1
    for start, stop in sorted(hidden):
        if start > end:
            shown += [text[max(end, 0) : start], MASK]
        end = max(end, stop)
    return "".join([*shown, text[end:]])


def without_rows(text: str, error: BaseException) -> str:
    """`text`, in which `error` or its traceback is shown, without the rows that PostgreSQL puts into the detail of an error: they
    hold what the user's tables hold, a payload included."""
    for one in _chain(error):
        detail = _row_in(one)
        if detail:
            # In the traceback of a group every line of it is indented.
            lines = r"\n[ |]*".join(map(re.escape, detail.split("\n")))
            text = re.sub(lines, _NO_ROW, text)
    return _ROW.sub(_NO_ROW, text)


def _row_in(error: BaseException) -> str:
    """The detail of a PostgreSQL error, where it is a row."""
    try:
        detail = getattr(error, "detail", None)
        return detail if isinstance(detail, str) and getattr(error, "sqlstate", None) in _SHOWS_ROW else ""
    except BaseException:  # properties of the user's own exception, whatever they do
        return ""


def _chain(error: BaseException) -> list[BaseException]:
    """The error and all that a traceback shows with it: causes, contexts, members of groups."""
    found = [error]
    for one in found:  # grows meanwhile
        more = [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
        found += [other for other in more if other is not None and all(other is not known for known in found)]
        if len(found) > _CHAINED:
            break
    return found


def safe_text(error: BaseException) -> str:
    """What an error says, in at most 1,000 characters that can be stored and shown, and no secret."""
    try:
        text = str(error)
    except BaseException:  # it may be the user's code
        text = "(its message cannot be read)"
    text = _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", masked(without_rows(text, error))).strip()
    return (text or type(error).__name__)[:_MESSAGE_CHARACTERS]
