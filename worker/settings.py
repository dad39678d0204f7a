"""The settings: read from the environment once, each refused by name when it cannot be what was meant.

Nothing falls back in silence: what is set and cannot be read stops the start. Unset or empty means the
default, and defaults derive from the lease, so that WORKER_LEASE_SECONDS alone is always a valid
configuration.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from worker.errors import ConfigError
from worker.masking import masked
from worker.setting_rules import (
    MAX_NAME_BYTES,
    NEVER,
    Default,
    Number,
    broken_relations,
    check_directory,
    check_file,
    check_handlers,
    check_name,
    check_queues,
    check_schema,
    count,
    plain,
    probability,
    seconds,
    word,
)

_DAY_SECONDS = 86_400
_MONTH_SECONDS = 30 * _DAY_SECONDS
_TEN_YEARS_SECONDS = 3650 * _DAY_SECONDS
_RETENTION = BeforeValidator(Number(0, _TEN_YEARS_SECONDS, no_limit=NEVER))
_PREFIX = "WORKER_"
_UNPREFIXED = {"database_url": "DATABASE_URL", "workers": "WORKERS"}
_URL_FILE = "DATABASE_URL_FILE"
_VARIABLES = {"schema_name": "WORKER_SCHEMA", **_UNPREFIXED}
_SECRET = ("database_url", "listen_database_url", "http_tokens")


def _own_name() -> str:
    return fit_name(socket.gethostname())


def fit_name(name: str) -> str:
    """`name`, made fit to be part of an identity."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)[:MAX_NAME_BYTES] or "worker"


def _own_runtime_dir() -> Path:
    environ = _environ.get()
    # systemd may list several directories.
    given = (environ.get("RUNTIME_DIRECTORY", "").split(":")[0], environ.get("XDG_RUNTIME_DIR", ""))
    temporary = (environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    return Path(next(filter(None, (*given, *temporary)), "/tmp")).absolute()


_environ: ContextVar[Mapping[str, str]] = ContextVar("environ", default=os.environ)


class Settings(BaseSettings):
    """Everything that can be set. After construction no default is missing.

    In code: `Settings(database_url="postgresql://…", workers=2)`. What is given there wins; what is not
    comes from the environment, then from the defaults. Durations are seconds. Raises `ConfigError` with a
    line for each fault.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    # None: the PG* variables say where the database is.
    database_url: Annotated[SecretStr | None, Default("the PG* variables")] = None
    workers: Annotated[int, count(1, 10_000)] = 4
    handlers: Annotated[str | None, BeforeValidator(check_handlers), Default("built-ins")] = None
    queues: Annotated[tuple[str, ...], BeforeValidator(check_queues)] = ("default",)

    lease_seconds: Annotated[float, seconds(1, _DAY_SECONDS)] = 30.0
    renew_seconds: Annotated[float, seconds(0.05, _DAY_SECONDS), Default("lease/3")] = Field(
        default_factory=lambda data: data["lease_seconds"] / 3
    )
    lease_margin_seconds: Annotated[float, seconds(0.05, _DAY_SECONDS), Default("lease/10")] = Field(
        default_factory=lambda data: data["lease_seconds"] / 10
    )
    claim_timeout_seconds: Annotated[float, seconds(0.05, 60), Default("min(2, lease/4)")] = Field(
        default_factory=lambda data: min(2.0, data["lease_seconds"] / 4)
    )
    query_timeout_seconds: Annotated[float, seconds(0.05, 60)] = 3.0
    connect_timeout_seconds: Annotated[float, seconds(0.05, 60)] = 3.0
    job_timeout_seconds: Annotated[float, seconds(0.1, _MONTH_SECONDS)] = 20.0
    poll_seconds: Annotated[float, seconds(0.05, 300)] = 0.5
    reap_seconds: Annotated[float, seconds(0.05, 300)] = 1.0

    # 1 is the textbook shape: one claim statement, one transaction per job.
    claim_batch: Annotated[int, count(1, 300)] = 300
    commit_batch: Annotated[int, count(1, 300)] = 300
    shutdown_grace_seconds: Annotated[float, seconds(0, 3600)] = 5.0
    backoff_base_seconds: Annotated[float, seconds(0, _MONTH_SECONDS)] = 1.0
    backoff_max_seconds: Annotated[float, seconds(0, _MONTH_SECONDS)] = 64.0
    # Connections for handlers and upkeep; claims, commits, leases and LISTEN have one each of their own
    # beside it.
    pool_size: Annotated[int, count(2, 1000), Default("min(WORKERS, 16), at least 2")] = Field(
        default_factory=lambda data: max(2, min(data["workers"], 16))
    )

    # None: never pruned. Succeeded and cancelled jobs; 0 deletes succeeded rows in the completing statement.
    retention_seconds: Annotated[float | None, _RETENTION] = 604_800.0
    dead_retention_seconds: Annotated[float | None, _RETENTION, Default(NEVER)] = None
    ledger_retention_seconds: Annotated[float | None, _RETENTION, Default(NEVER)] = None

    schema_name: Annotated[str, BeforeValidator(check_schema)] = "public"
    name: Annotated[str, BeforeValidator(check_name), Default("hostname")] = Field(default_factory=_own_name)
    runtime_dir: Annotated[
        Path,
        BeforeValidator(check_directory),
        Default("$RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR, the temp directory"),
    ] = Field(default_factory=_own_runtime_dir)
    log_level: Annotated[Literal["debug", "info", "warning", "error"], word("debug", "info", "warning", "error")] = "info"
    log_format: Annotated[Literal["json", "console"], word("json", "console")] = "json"

    # A direct route for LISTEN when DATABASE_URL is a transaction pooler.
    listen_database_url: Annotated[SecretStr | None, Default("none")] = None
    pooler: Annotated[Literal["transaction"] | None, word("transaction"), Default("none")] = None
    # Faults made on purpose by the built-in `sleep`.
    chaos_crash: Annotated[float, probability()] = 0.0
    chaos_latency: Annotated[float, probability()] = 0.0
    # For `serve` and `run --serve`: with commas between them, or a file with one a line.
    http_tokens: Annotated[SecretStr | None, Default("none")] = None
    http_tokens_file: Annotated[Path | None, BeforeValidator(check_file), Default("none")] = None
    # None: for ever.
    connect_wait_seconds: Annotated[float | None, BeforeValidator(Number(0, _MONTH_SECONDS, no_limit="")), Default("for ever")] = (
        None
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(*_faults(error)) from None
        broken = (*broken_relations(self), *_missing_database(self))
        if broken:
            raise ConfigError(*broken)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls, given=init_settings())


class _Environment(PydanticBaseSettingsSource):
    """The environment, keyed by field, so that a variable never competes with an argument as its alias."""

    def __init__(self, settings_cls: type[BaseSettings], given: Mapping[str, object]) -> None:
        super().__init__(settings_cls)
        self._given = given

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[str | None, str, bool]:
        text = _environ.get().get(variable_of(field_name), "").strip()
        return text or None, field_name, False

    def __call__(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, field in self.settings_cls.model_fields.items():
            text, _, _ = self.get_field_value(field, name)
            if text is not None and name not in self._given:
                values[name] = text
        if "database_url" not in self._given:
            values |= _url_from_file(_environ.get(), "database_url" in values)
        return values


def load_settings(environ: Mapping[str, str] = os.environ, **overrides: object) -> Settings:
    """The settings of this environment; `overrides`, by field, win. Raises `ConfigError`, a line a fault."""
    token = _environ.set(environ)
    try:
        return Settings(**overrides)
    finally:
        _environ.reset(token)


_GIVEN_TO_COMMANDS = "WORKER_LEASE_FENCE"
"""What `worker lease run` puts into the environment of its command, which may be a daemon."""


def unknown_settings(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Every WORKER_… variable that is no setting, with the nearest one that is.

    Never a reason to stop: Kubernetes sets WORKER_PORT and the like for a service that is called worker.
    """
    known = {variable_of(name).removeprefix(_PREFIX): variable_of(name) for name in Settings.model_fields}
    return [
        # Compared without the prefix, which would make all of them alike.
        (name, known[difflib.get_close_matches(name.removeprefix(_PREFIX), known, n=1, cutoff=0.0)[0]])
        for name in sorted(environ)
        if name.startswith(_PREFIX) and name not in known.values() and name != _GIVEN_TO_COMMANDS
    ]


@dataclass(frozen=True, slots=True)
class Documented:
    """A setting as the README's table shows it; `least` and `most` are None where nothing is counted."""

    variable: str
    default: str
    least: float | None
    most: float | None


def documented_settings() -> tuple[Documented, ...]:
    """The table of all settings, from the same rules that check them."""
    rows = []
    for name, field in Settings.model_fields.items():
        functions = [item.func for item in field.metadata if isinstance(item, BeforeValidator)]
        number = next((function for function in functions if isinstance(function, Number)), None)
        derived = next((item.text for item in field.metadata if isinstance(item, Default)), None)
        rows.append(
            Documented(
                variable=variable_of(name),
                default=derived if derived is not None else plain(field.default),
                least=number.least if number else None,
                most=number.most if number else None,
            )
        )
    return tuple(rows)


def variable_of(field: str) -> str:
    """The environment variable of a field."""
    return _VARIABLES.get(field) or _PREFIX + field.upper()


def _url_from_file(environ: Mapping[str, str], has_url: bool) -> dict[str, str]:
    path = environ.get(_URL_FILE, "").strip()
    if not path:
        return {}
    if has_url:
        raise ConfigError(f"{_URL_FILE}={_shown(path)} and DATABASE_URL are both set: keep one of them")
    try:
        text = Path(path).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{_URL_FILE}={_shown(path)} cannot be read: {reason}") from None
    if not text:
        raise ConfigError(f"{_URL_FILE}={_shown(path)} names an empty file: put the URL of the database in it")
    return {"database_url": text}


def _missing_database(settings: Settings) -> tuple[str, ...]:
    environ = _environ.get()
    if settings.database_url is not None or environ.get("PGHOST") or environ.get("PGDATABASE"):
        return ()
    return (
        "DATABASE_URL is not set: set it to postgresql://user@host/dbname with a password in its place, or set DATABASE_URL_FILE,"
        " or PGHOST and PGDATABASE",
    )


def _faults(errors: ValidationError) -> list[str]:
    # A default that derives from a refused value is no fault of its own.
    return [_fault(error) for error in errors.errors() if error["type"] != "default_factory_not_called"]


def _fault(error: Any) -> str:
    """One of pydantic's errors as our line: variable, value (never a secret's), rule."""
    field = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(field, Settings.model_fields, n=1, cutoff=0.0)[0]
        return f"Settings has no {field!r}; the nearest is {nearest!r}"
    reason = error.get("ctx", {}).get("error")
    rule = str(reason) if isinstance(reason, ValueError) else f"cannot be used: {error['msg']}"
    value = "" if field in _SECRET else f"={_shown(error['input'])}"
    return f"{variable_of(field)}{value} {rule}"


def _shown(value: object) -> str:
    text = str(value)
    # Somebody may have put the URL into the wrong variable.
    text = masked(text)
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
