"""Settings, from any text: what is meant is kept within its bounds and relations, anything else is refused in one line that names
the variable and shows no secret."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.fuzzing import EDGES, GIVEN, tries
from worker import masking
from worker.errors import ConfigError
from worker.setting_rules import Number
from worker.settings import Settings, documented_settings, load_settings, variable_of
from worker.store.dsn import parse

SECRET = "tr0ub4dor"
URL = f"postgresql://me:{SECRET}@db.example/app"
ROWS = {row.variable: row for row in documented_settings()}
FIELDS = {variable_of(field): field for field in Settings.model_fields}
SECRETS = {"DATABASE_URL", "WORKER_LISTEN_DATABASE_URL", "WORKER_HTTP_TOKENS"}
NUMBERS = {variable for variable, row in ROWS.items() if row.least is not None}
WHOLE = {"WORKERS", "WORKER_CLAIM_BATCH", "WORKER_COMMIT_BATCH", "WORKER_POOL_SIZE"}

DIGITS = st.text("0123456789.-+_e xX٤", max_size=12)
DECIMALS = st.decimals(-1, 10**9, places=3).map(str) | st.integers(-1, 10**20).map(str)
WORDS = st.sampled_from(
    ["never", "NEVER", "inf", "nan", "json", "INFO", "debug", "transaction", "a,b", "app.jobs:handlers", "pg_x", URL]
)
TEXTS = st.text(GIVEN, max_size=40) | st.text(GIVEN, min_size=40, max_size=5000) | EDGES | DIGITS | DECIMALS | WORDS


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secrets of these inputs would be masked in every text of later tests."""
    monkeypatch.setattr(masking, "_secrets", ())


def assert_is_one_clear_line(line: str, *variables: str) -> None:
    assert any(re.match(rf"{re.escape(name)}\b", line) for name in variables), line
    assert line.isprintable(), line
    assert len(line) < 1000
    assert SECRET not in line


def assert_within_bounds(settings: Settings) -> None:
    for variable in NUMBERS:
        row, value = ROWS[variable], getattr(settings, FIELDS[variable])
        assert value is None or row.least <= value <= row.most, variable
        assert value is not None or "never" in row.default or row.default == "for ever" or variable == "WORKER_RETENTION_SECONDS"
        assert isinstance(value, int if variable in WHOLE else float | None)
    assert settings.queues
    assert all(1 <= len(queue.encode()) <= 128 for queue in settings.queues)
    assert 1 <= len(settings.schema_name.encode()) <= 63
    assert 1 <= len(settings.name.encode()) <= 119
    assert settings.runtime_dir.is_absolute()


@tries(500)
@given(variable=st.sampled_from(sorted(ROWS)), text=TEXTS)
@example(variable="WORKER_NAME", text=URL)
@example(variable="WORKER_RUNTIME_DIR", text=URL)
@example(variable="WORKER_HTTP_TOKENS_FILE", text=URL)
def test_any_text_is_a_value_within_bounds_or_one_line_that_names_the_variable(variable: str, text: str) -> None:
    assume(text == URL or SECRET not in text)  # Hypothesis tries what it finds in this file
    try:
        settings = load_settings({"DATABASE_URL": URL, variable: text})
    except ConfigError as error:
        for line in error.lines:  # more than one where it breaks several relations
            assert_is_one_clear_line(line, *ROWS)
            assert re.search(rf"\b{variable}\b", line)
            if variable in SECRETS and len(text.strip()) > 3:
                assert text.strip() not in line
    else:
        assert_within_bounds(settings)
        assert_relations_hold(settings)
        # A queue may be called anything, a URL too.
        assert SECRET not in repr(settings) or variable in ("WORKER_QUEUES", "WORKER_SCHEMA")


# --- relations

SECONDS = {
    "WORKER_LEASE_SECONDS": (1, 90),
    "WORKER_RENEW_SECONDS": (0, 30),
    "WORKER_LEASE_MARGIN_SECONDS": (0, 9),
    "WORKER_CLAIM_TIMEOUT_SECONDS": (0, 30),
    "WORKER_QUERY_TIMEOUT_SECONDS": (0, 60),
    "WORKER_RETENTION_SECONDS": (0, 100),
    "WORKER_LEDGER_RETENTION_SECONDS": (0, 100),
}
CLOSE = {
    name: st.decimals(least, most, places=2).map(str) | st.integers(least, most).map(str) for name, (least, most) in SECONDS.items()
}
for name in ("WORKER_RETENTION_SECONDS", "WORKER_LEDGER_RETENTION_SECONDS"):
    CLOSE[name] |= st.just("never")


def exact(value: float) -> Fraction:
    """As a person typed it."""
    return Fraction(repr(value))


def broken_relations_of(settings: Settings) -> set[str]:
    """By SPEC's formulas, in exact arithmetic: the variables that are at fault."""
    T, R, M = exact(settings.lease_seconds), exact(settings.renew_seconds), exact(settings.lease_margin_seconds)
    Q, C = exact(settings.query_timeout_seconds), exact(settings.claim_timeout_seconds)
    slack = T / 10**9
    found = set()
    if T / 3 + slack < R or 2 * R + min(Q, R / 2) > T - M + slack:
        found.add("WORKER_RENEW_SECONDS")
    if T / 20 - slack > M:
        found.add("WORKER_LEASE_MARGIN_SECONDS")
    if T / 2 + slack < C:
        found.add("WORKER_CLAIM_TIMEOUT_SECONDS")
    ledger, retention = settings.ledger_retention_seconds, settings.retention_seconds
    if ledger is not None and (retention is None or ledger < retention):
        found.add("WORKER_LEDGER_RETENTION_SECONDS")
    return found


def assert_relations_hold(settings: Settings) -> None:
    assert not broken_relations_of(settings)


@tries(500)
@given(variables=st.fixed_dictionaries({}, optional=CLOSE))
def test_a_combination_is_accepted_exactly_when_every_relation_holds(variables: dict[str, str]) -> None:
    alone = []
    for variable, text in variables.items():
        try:
            Number(ROWS[variable].least, ROWS[variable].most, no_limit="never")(text)  # type: ignore[arg-type]
        except ValueError:
            alone.append(variable)
    try:
        settings = load_settings({"DATABASE_URL": URL, **variables})
    except ConfigError as error:
        for line in error.lines:
            assert_is_one_clear_line(line, *SECONDS)
        named = {line.partition("=")[0] for line in error.lines}
        if alone:
            assert named == set(alone)
            return
        unchecked = Settings.model_construct(**values_of(variables))
        assert named == broken_relations_of(unchecked)
        for line in error.lines:
            assert len(re.findall(r"WORKER_\w+=", line)) >= 2, "a relation names all its variables"
    else:
        assert not alone
        assert_within_bounds(settings)
        assert_relations_hold(settings)


def values_of(variables: dict[str, str]) -> dict[str, object]:
    """The fields without the check of their relations; the defaults derive as documented."""
    given = {FIELDS[name]: None if text == "never" else float(text) for name, text in variables.items()}
    lease = given.get("lease_seconds") or 30.0
    derived = {"renew_seconds": lease / 3, "lease_margin_seconds": lease / 10, "claim_timeout_seconds": min(2.0, lease / 4)}
    return {"lease_seconds": lease, **derived, **given}


# --- the address of the database

PIECES = st.sampled_from([*"@:/?#%&=+'\\\" ,;[]{}", "a", "1", "%40", "%zz", "\n", "\udcff", "ü", "://", "host=", "password="])
# With a whole option of its own in it, a password could not be told from one.
AROUND = st.lists(PIECES.filter(lambda piece: not piece.endswith("t=")), max_size=4).map("".join)
PASSWORDS = st.builds("{}{}{}".format, AROUND, st.just(SECRET), AROUND)
TAILS = st.lists(
    st.sampled_from(
        ["/app", "?sslmode=require", "?a=b", "&sslmode=", ":5432", ",other", "#x", " host=h", " sslmode=no", "?port=x", "@"]
    )
    | PIECES,
    max_size=4,
).map("".join)
ADDRESSES = st.one_of(
    st.builds(
        "{}{}:{}@{}{}".format,
        st.sampled_from(["postgresql://", "postgres://", "postgresql+asyncpg://", "mysql://", "//", ""]),
        st.sampled_from(["me", "", "m%40e", "m e"]),
        PASSWORDS,
        st.sampled_from(["db.example", "[::1]", "", "a,b"]),
        TAILS,
    ),
    st.builds("host=h user=me password={}{}{}".format, st.sampled_from(["", "'", '"']), PASSWORDS, TAILS),
    st.builds("postgresql://h/app?user=me&password={}{}".format, PASSWORDS, TAILS),
    st.builds("postgresql://h/app?sslpassword={}{}".format, PASSWORDS, TAILS),
)


@tries(800)
@given(text=ADDRESSES)
def test_no_part_of_a_password_is_shown_however_badly_the_address_is_written(text: str) -> None:
    masking._secrets = ()
    try:
        target = parse(text, variable="DATABASE_URL", environ={})
    except ConfigError as error:
        (line,) = error.lines
        assert_is_one_clear_line(line, "DATABASE_URL")
    else:
        assert SECRET not in repr(target)
        assert SECRET not in target.where


@tries(600)
@given(
    text=st.text(GIVEN, max_size=60) | st.lists(PIECES, max_size=12).map("".join),
    environ=st.dictionaries(
        st.sampled_from(
            [
                "PGHOST",
                "PGPORT",
                "PGUSER",
                "PGPASSWORD",
                "PGDATABASE",
                "PGSSLMODE",
                "PGCONNECT_TIMEOUT",
                "PGSSLROOTCERT",
                "PGOPTIONS",
            ]
        ),
        st.text(GIVEN, max_size=12) | EDGES,
        max_size=4,
    ),
)
def test_any_text_is_an_address_or_one_line_that_says_what_is_wrong(text: str, environ: dict[str, str]) -> None:
    masking._secrets = ()
    try:
        target = parse(text, variable="DATABASE_URL", environ=environ)
    except ConfigError as error:
        (line,) = error.lines
        assert_is_one_clear_line(line, "DATABASE_URL", *environ)
    else:
        assert target.addresses
        assert all(1 <= address.port <= 65_535 for address in target.addresses)
        assert target.user
        assert target.dbname


@tries(200)
@given(name=st.text(GIVEN, max_size=300) | EDGES | st.just(os.sep * 5000))
@example(name="a\x00b")
def test_any_name_of_a_file_with_the_url_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    path = str(Path("/nonexistent") / name.replace("..", "")) if name else "/"
    with pytest.raises(ConfigError) as refused:
        load_settings({"DATABASE_URL_FILE": path})
    (line,) = refused.value.lines
    assert_is_one_clear_line(line, "DATABASE_URL_FILE")


@tries(400)
@given(
    text=st.builds("{}{}{}".format, TAILS, ADDRESSES, TAILS),
    known=st.lists(st.sampled_from(["password", "password=", "postgresql://", "://me", "host", ":", "PASSWORD"]), max_size=2),
)
@example(text=f"host=h password={SECRET}", known=["password="])
@example(text=f"postgresql://me:{SECRET}@h/app", known=["://me"])
def test_what_is_masked_hides_nothing_by_which_another_secret_is_known(text: str, known: list[str]) -> None:
    """A password may be the word `password`."""
    masking._secrets = ()
    alone = masking.masked(text)
    masking.remember(*known)
    assert SECRET in alone or SECRET not in masking.masked(text)
