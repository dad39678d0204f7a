"""How hard the tests with generated input look: at the same few inputs in every run, or, with HYPOTHESIS_PROFILE=long, at many new
ones; `HYPOTHESIS_PROFILE=long pytest tests/test_fuzz_sql.py --timeout 0` takes its time."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LONG = "long"
_TIMES_AS_MANY = 20

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeatable")

# No time limit for one input anywhere: on a busy machine any of them may take long.
settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
settings.register_profile(LONG, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.load_profile(PROFILE)


def tries(number: int, **more: object) -> settings:
    """So many inputs, twenty times as many in a long hunt."""
    return settings(max_examples=number * (_TIMES_AS_MANY if PROFILE == LONG else 1), **more)  # type: ignore[arg-type]


STORABLE = st.characters(exclude_categories=("Cs",), exclude_characters="\x00")
"""What PostgreSQL can store."""

GIVEN = STORABLE | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF, categories=("Cs",))
"""What the environment and a command line can hold: no NUL, and bytes that are no UTF-8 as half surrogates (surrogateescape)."""

EDGES = st.sampled_from(
    ["", " ", "0", "-1", "null", "'", '"', "\\", "%s", "{}", "{schema}", "$1", "\n", "\x1b[2J", "ü", "\U0001f600", "\u202e\u061c"]
)
"""Texts that have hurt somebody before."""
