"""How the daemons reach the database: a URL that names the process, straight or through its proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from urllib.parse import quote, urlencode

from worker.store.connection import Database
from worker.store.target import Address
from worker.torture.proxy import Connect

_CHECKS_HOST: Final = "verify-full"


def checks_host(database: Database) -> bool:
    """Whether the server's certificate has to name the host, which a proxy on the loopback interface is not."""
    options = database.target.driver_options
    return options.get("sslmode") == _CHECKS_HOST or options.get("sslrootcert") == "system"


def connect_to(database: Database) -> Connect:
    """How a proxy opens a connection to the server: to the first address that answers."""

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        failed: OSError | None = None
        for address in database.target.addresses:
            try:
                if address.is_socket:
                    return await asyncio.open_unix_connection(str(address))
                return await asyncio.open_connection(address.host, address.port)
            except OSError as error:
                failed = error
        raise failed or ConnectionError("no address")

    return connect


def url_of(database: Database, *, user: str | None, through_port: int | None) -> Callable[[str], str]:
    """A function that makes the DATABASE_URL of the process of that name."""
    target = database.target
    addresses = target.addresses if through_port is None else (Address("127.0.0.1", through_port),)
    password = None if user is not None else target.connect_arguments(target.addresses[0])["password"]
    options = dict(target.driver_options)
    if target.options is not None:
        options["options"] = target.options
    if through_port is None:
        options["target_session_attrs"] = target.target_session_attrs
    # In the query, where a socket's directory and an IPv6 address need no brackets.
    options["host"] = ",".join(address.host for address in addresses)
    options["port"] = ",".join(str(address.port) for address in addresses)

    def url(process: str) -> str:
        credentials = quote(user or target.user, safe="")
        if password:
            credentials += f":{quote(str(password), safe='')}"
        query = urlencode(options | {"application_name": process}, quote_via=quote)
        return f"postgresql://{credentials}@/{quote(target.dbname, safe='')}?{query}"

    return url
