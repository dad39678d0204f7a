"""DSN: every form that libpq takes is read as libpq reads it, or refused in words that show no secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker import masking
from worker.errors import ConfigError
from worker.store.dsn import parse
from worker.store.passfile import password_from
from worker.store.target import Address, Target

PASSWORD = "a@b#c/d%e?f:g &="
ENCODED = "a%40b%23c%2Fd%25e%3Ff%3Ag%20%26%3D"


def read(text: str | None, **environ: str) -> Target:
    return parse(text, variable="DATABASE_URL", environ=environ)


def refusal(text: str | None, **environ: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read(text, **environ)
    (line,) = refused.value.lines
    assert line.startswith("DATABASE_URL: ")
    return line


def test_a_url_names_everything() -> None:
    target = read(f"postgresql://me:{ENCODED}@db.example:5433/app?application_name=billing&connect_timeout=7")
    assert target.addresses == (Address("db.example", 5433),)
    assert (target.user, target.password, target.dbname) == ("me", PASSWORD, "app")
    assert (target.application_name, target.connect_timeout_seconds) == ("billing", 7)


def test_the_keyword_form_names_the_same() -> None:
    text = r"host=db.example port = 5433 dbname='my \'app\'' user=me password='a b\\c' options='-c jit=off'"
    target = read(text)
    assert target.addresses == (Address("db.example", 5433),)
    assert (target.user, target.password, target.dbname) == ("me", r"a b\c", "my 'app'")
    assert target.options == "-c jit=off"


@pytest.mark.parametrize("text", [None, "", "  "])
def test_without_text_the_pg_variables_say_where(text: str | None) -> None:
    target = read(
        text,
        PGHOST="h",
        PGPORT="5433",
        PGUSER="me",
        PGPASSWORD="pw-variable",
        PGDATABASE="app",
        PGAPPNAME="a",
    )
    assert target.addresses == (Address("h", 5433),)
    assert (target.user, target.password, target.dbname, target.application_name) == (
        "me",
        "pw-variable",
        "app",
        "a",
    )


def test_the_text_wins_over_the_pg_variables_and_they_fill_its_gaps() -> None:
    target = read("postgresql://db.example/app", PGHOST="other", PGUSER="me", PGPASSWORD=PASSWORD)
    assert target.addresses == (Address("db.example", 5432),)
    assert (target.user, target.password, target.dbname) == ("me", PASSWORD, "app")


def test_the_database_is_named_like_the_user_when_it_is_not_named() -> None:
    assert read("postgresql://me@h").dbname == "me"


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("postgresql://%2Fvar%2Frun/app", [("/var/run", 5432)]),
        ("postgresql:///app?host=/var/run&port=5433", [("/var/run", 5433)]),
        ("postgresql://me@/app?host=/with space", [("/with space", 5432)]),
        ("postgresql://[::1]/app", [("::1", 5432)]),
        ("postgresql://[fe80::1%25eth0]:5433/app", [("fe80::1%eth0", 5433)]),
        ("postgresql://a,b:5433,[::1]:5434/app", [("a", 5432), ("b", 5433), ("::1", 5434)]),
        ("host=a,b port=1,2", [("a", 1), ("b", 2)]),
        ("host=a,b port=5433", [("a", 5433), ("b", 5433)]),
        ("host=/one,two", [("/one", 5432), ("two", 5432)]),
        (" postgres://h/app\n", [("h", 5432)]),
    ],
)
def test_sockets_ipv6_and_several_hosts_are_addresses(text: str, addresses: list[tuple[str, int]]) -> None:
    assert read(text).addresses == tuple(Address(host, port) for host, port in addresses)


def test_without_a_host_the_usual_sockets_are_tried_before_localhost() -> None:
    addresses = read("dbname=app").addresses
    assert addresses[-1] == Address("localhost", 5432)
    assert all(address.is_socket for address in addresses[:-1])


def test_target_session_attrs_and_options_are_kept() -> None:
    target = read("postgresql://a,b/app?target_session_attrs=read-write&options=-csearch_path%3Dx")
    assert target.target_session_attrs == "read-write"
    assert target.options == "-csearch_path=x"


def test_a_plus_sign_is_a_plus_sign() -> None:
    assert read("postgresql://u:a+b@h/app?application_name=c+d").password == "a+b"


def test_keepalives_can_be_set_and_switched_off() -> None:
    target = read("host=h keepalives_idle=60 keepalives_interval=7 keepalives_count=2 tcp_user_timeout=9000")
    assert target.keepalive.enabled
    assert (target.keepalive.idle_seconds, target.keepalive.interval_seconds) == (60, 7)
    assert (target.keepalive.count, target.keepalive.user_timeout_milliseconds) == (2, 9000)
    assert not read("host=h keepalives=0").keepalive.enabled


@pytest.mark.parametrize(("text", "seconds"), [("0", None), ("3", 3), ("600", 60)])
def test_a_connect_timeout_has_an_end(text: str, seconds: float | None) -> None:
    assert read(f"postgresql://h/app?connect_timeout={text}").connect_timeout_seconds == seconds


# The piece of each that must not be shown is "s3cret".
@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:s3@cret@h/app",
        "postgresql://u:s3#cret@h/app",
        "postgresql://u:s3/cret@h/app",
        "postgresql://u:s3?cret@h/app",
        "postgresql://u:s3%cret@h/app",
        "postgresql://u:p@s3?cret=1@h/app",
        "postgresql://u:p?s3cret=x@h/app",
        "postgresql://u:s3cret/x",
        "postgresql://u:s3cret",
        "postgresql://u:s3:cret@[::1/app",
        "host=h password=s3 cret",
        "host=h password=s3 cret=1",
        "host=h password=s3'cret",
        "host=h password='s3cret",
        "s3cret",
    ],
)
def test_a_badly_encoded_password_is_refused_and_no_part_of_it_shown(text: str) -> None:
    line = refusal(text)
    assert "s3" not in line
    assert "cret" not in line
    assert "percent-encode" in line or "keyword=value pairs" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("postgresql+asyncpg://u:p@h/app", "asyncpg:// is not a scheme of PostgreSQL; write postgres"),
        ("mysql://h/app", "mysql://"),
        ("postgresql://h/app?ssl=true", 'option "ssl" is not known; write sslmode=require'),
        ("postgresql://h/app?pgbouncer=true", "WORKER_POOLER=transaction"),
        ("postgresql://h/app?schema=jobs", "WORKER_SCHEMA"),
        ("host=h statement_timeout=5", 'option "statement_timeout" is not known'),
        ("postgresql://h/app?service=x", 'option "service" is not known'),
        ("postgresql://h/app?channel_binding=require", 'channel_binding "require" is not available'),
        ("postgresql://h/app?gssencmode=require", 'gssencmode "require" is not available'),
        ("postgresql://h/app?sslmode=requre", 'sslmode "requre" is not available; use one of: disable'),
        ("postgresql://h/app?target_session_attrs=master", "target_session_attrs"),
        ("postgresql://h/app?connect_timeout=3s", 'connect_timeout "3s" must be a whole number'),
        ("postgresql://h/a?sslmode=require&sslrootcert=/no/ca.pem", 'sslrootcert "/no/ca.pem" does not'),
        ("postgresql://h/app?sslcert=/none/me.pem", 'sslcert "/none/me.pem" does not exist'),
        ("postgresql://h/app?sslmode=verify-full", "sslrootcert"),
        ("postgresql:///app?host=/run&sslmode=verify-full", "Unix socket"),
        ("postgresql://h/app?sslrootcert=system&sslmode=require", "needs sslmode=verify-full"),
        ("host=a,b port=1,2,3", "2 hosts and 3 ports"),
        ("host=h port=0", "1 to 65535"),
        ("host=h port=70000", "1 to 65535"),
        ("postgresql://h/a%00b", "NUL"),
        ("postgresql://h/a%ffb", "UTF-8"),
        ("postgresql://::1/app", "stands in [ ]"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert said in refusal(text)


def test_a_bad_pg_variable_is_refused_as_well() -> None:
    assert 'sslmode "requre"' in refusal(None, PGHOST="h", PGSSLMODE="requre")


@pytest.mark.parametrize("name", ["user", "password", "dbname", "application_name", "options", "sslpassword"])
def test_bytes_that_are_not_utf_8_are_refused_without_being_shown(name: str) -> None:
    """A variable of the environment may hold any bytes; Python reads these as unpaired surrogates."""
    said = f"the {name} holds bytes that are not UTF-8"
    assert said in refusal(f"host=h {name}=s3\udcffcret")
    assert said in refusal(f"postgresql://h/?{name}=s3\udcffcret")
    variables = {"user": "PGUSER", "password": "PGPASSWORD", "dbname": "PGDATABASE"}
    if name in variables:
        assert said in refusal("host=h", **{variables[name]: "s3\udcffcret"})


def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "ca\udcff.pem"
    path.touch()
    assert read("host=h sslmode=verify-ca", PGSSLROOTCERT=str(path)).driver_options["sslrootcert"] == str(path)


def test_a_missing_authority_is_named_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "postgresql://h/app?sslmode=verify-full"
    assert f"{tmp_path}/.postgresql/root.crt does not exist" in refusal(text)
    (tmp_path / ".postgresql").mkdir()
    (tmp_path / ".postgresql/root.crt").touch()
    assert read(text).driver_options == {"sslmode": "verify-full"}


def test_the_systems_authorities_mean_full_verification() -> None:
    arguments = read("postgresql://h/app?sslrootcert=system").connect_arguments(Address("h", 5432))
    assert arguments["ssl"] is True


def test_neither_target_nor_messages_show_the_password() -> None:
    target = read(f"postgresql://me:{ENCODED}@h/app?sslpassword=key-secret")
    assert PASSWORD not in repr(target)
    assert "key-secret" not in repr(target)
    assert target.where == 'database "app" at h:5432 as user "me"'


@pytest.mark.parametrize(
    "text",
    [
        PASSWORD,
        ENCODED,
        f"postgresql://me:{ENCODED}@h/app",
        "key-secret",
        "no connection to postgresql://other:not-known@h/app, no more",
        "no connection to postgresql://other:not@known@h/app",
        "host=h password=not-known user=me",
        "host=h password='not known' user=me",
        'PGPASSWORD="not-known"',
        "{'password': 'not-known', 'x': 1}",
    ],
)
def test_secrets_are_masked_in_any_text(text: str) -> None:
    read(f"postgresql://me:{ENCODED}@h/app?sslpassword=key-secret")
    masked = masking.masked(f"before {text} after")
    assert masked.startswith("before ")
    assert masked.endswith(" after")
    for piece in (PASSWORD, ENCODED, "not-known", "not known", "known@", "key-secret"):
        assert piece not in masked


def test_a_password_that_is_also_a_name_does_not_blank_out_messages() -> None:
    read("postgresql://postgres:postgres@h/app")
    assert masking.masked('role "postgres" does not exist') == 'role "postgres" does not exist'


def passfile(directory: Path, content: str, mode: int = 0o600) -> Path:
    path = directory / "pgpass"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_a_password_comes_from_the_first_line_that_matches(tmp_path: Path) -> None:
    escaped = PASSWORD.replace(":", r"\:")
    path = passfile(tmp_path, f"# comment\n\nother:*:*:*:no\nh:5432:app:m\\:e:{escaped}\n*:*:*:*:last\n")
    assert password_from(path, "h", 5432, "app", "m:e") == PASSWORD
    assert password_from(path, "h", 5433, "app", "m:e") == "last"
    target = read("postgresql://m%3Ae@h/app", PGPASSFILE=str(path))
    assert target.connect_arguments(target.addresses[0])["password"] == PASSWORD


def test_a_password_from_a_file_is_masked_from_then_on(tmp_path: Path) -> None:
    target = read("postgresql://me@h/app", PGPASSFILE=str(passfile(tmp_path, "*:*:*:*:only-in-the-file\n")))
    target.connect_arguments(target.addresses[0])
    assert masking.masked("it said only-in-the-file") == "it said ***"


def test_a_socket_goes_by_the_name_of_localhost_or_its_directory(tmp_path: Path) -> None:
    path = passfile(tmp_path, "/run:*:*:*:by-path\nlocalhost:*:*:*:by-name\n")
    assert password_from(path, "/run", 5432, "app", "me") == "by-path"
    assert password_from(path, "/tmp", 5432, "app", "me") == "by-name"


def test_a_password_file_that_others_may_read_is_ignored_with_a_warning(tmp_path: Path) -> None:
    path = passfile(tmp_path, "*:*:*:*:open\n", mode=0o644)
    with pytest.warns(UserWarning, match="others may read it"):
        assert password_from(path, "h", 5432, "app", "me") is None


def test_a_password_file_that_is_not_there_gives_no_password(tmp_path: Path) -> None:
    assert password_from(tmp_path / "none", "h", 5432, "app", "me") is None


def test_a_user_without_a_name_is_told_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert "add user=" in refusal("host=h")
