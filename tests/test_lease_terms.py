"""`Leases`: what is refused, and when it is said."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.lease_blocks import hold_once
from tests.lease_rows import Db, row
from tests.roles import url_as
from worker import Leases
from worker.errors import ConfigError, DatabaseUnavailable, SchemaError


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": ""}, "name: "),
        ({"name": "x" * 513}, "name: "),
        ({"ttl_seconds": 0.5}, "ttl_seconds: "),
        ({"ttl_seconds": 86_401}, "ttl_seconds: "),
        ({"wait_seconds": -1}, "wait_seconds: "),
        ({"wait_seconds": float("inf")}, "wait_seconds: "),
        ({"holder": "x" * 129}, "holder: "),
        ({"metadata": {"x": {1}}}, "metadata: "),
    ],
)
async def test_terms_are_checked_at_the_call(leases: Leases, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        leases.hold(**({"name": "nightly"} | arguments))


async def test_metadata_that_only_the_database_can_measure_is_refused_at_the_entry(leases: Leases, db: Db) -> None:
    with pytest.raises(ValueError, match="metadata: "):
        await hold_once(leases, "nightly", metadata={"x": "y" * 10_000})
    assert row(db, "nightly") is None


async def test_either_a_dsn_or_a_url_is_needed_and_only_while_it_is_entered(database_url: str) -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"dsn": database_url, "url": "http://localhost"},
        {"dsn": database_url, "pooler": "session"},
        {"url": "http://localhost", "pooler": "transaction"},
    ]
    for arguments in wrong:
        with pytest.raises(TypeError):
            Leases(**arguments)
    leases = Leases(database_url)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="async with Leases"):
            await hold_once(leases, "nightly")
        if leases.where == "":
            async with leases:
                hold = leases.hold("nightly")
                async with hold:
                    pass
                with pytest.raises(RuntimeError, match="call hold again"):
                    async with hold:
                        pass
    with pytest.raises(RuntimeError, match="entered once"):
        await leases.__aenter__()


def test_over_http_it_needs_the_extra_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("worker.lease_http", "worker.http_calls"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match=r"extra http: pip install 'reliable-worker\[http\]'"):
        Leases(url="http://127.0.0.1:8080", bearer="token")


async def test_a_database_without_the_schema_or_the_password_is_a_config_error_that_says_what_to_do(
    empty_database_url: str,
) -> None:
    async with Leases(empty_database_url) as leases:
        with pytest.raises(SchemaError, match="worker migrate"):
            await hold_once(leases, "nightly")
    async with Leases(url_as("nobody_here", empty_database_url)) as leases:
        with pytest.raises((ConfigError, DatabaseUnavailable)):
            await hold_once(leases, "nightly")
