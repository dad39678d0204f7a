"""Who may ask: bearer tokens, and what stands in for them on the loopback interface."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from worker.api.problems import Problem
from worker.errors import ConfigError
from worker.masking import remember
from worker.settings import Settings

TOKENS = "WORKER_HTTP_TOKENS"
TOKENS_FILE = "WORKER_HTTP_TOKENS_FILE"
LEAST_CHARACTERS = 16
MOST_TOKENS = 100
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")


class Tokens:
    """The tokens that are accepted; only their digests are kept. False when there are none."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [_digest(token.encode()) for token in tokens]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, authorization: bytes | None) -> bool:
        """Whether this header names one of them. How long it takes tells nothing about them."""
        scheme, _, token = (authorization or b"").partition(b" ")
        given = _digest(token.strip())
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found and scheme.lower() == b"bearer"

    def refusal(self, authorization: bytes | None) -> Problem:
        """The 401 for a request without a token, or with a wrong one."""
        challenge = "Bearer" if authorization is None else 'Bearer error="invalid_token"'
        message = "a bearer token is needed" if authorization is None else "this token is not accepted"
        return Problem(401, "unauthorized", message, headers={"WWW-Authenticate": challenge})


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def read_tokens(settings: Settings) -> Tokens:
    """The tokens of these settings. Raises ConfigError for a file that cannot be read and tokens that cannot be right."""
    source, texts = TOKENS, []
    if settings.http_tokens is not None:
        texts = settings.http_tokens.get_secret_value().split(",")
    elif settings.http_tokens_file is not None:
        source = f"{TOKENS_FILE}={str(settings.http_tokens_file)!r}"
        try:
            texts = settings.http_tokens_file.read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"{source} cannot be read: {reason}") from None
        texts = [line for line in texts if not line.lstrip().startswith("#")]
    tokens = [text.strip() for text in texts if text.strip()]
    remember(*tokens)
    # Their number, never the tokens: somebody may have put another secret there.
    for number, token in enumerate(tokens, 1):
        if len(token) < LEAST_CHARACTERS or not _TOKEN.fullmatch(token):
            raise ConfigError(
                f"{source}: token {number} must be at least {LEAST_CHARACTERS} letters, digits or characters of . _ ~ + / = -"
            )
    if not tokens and (settings.http_tokens is not None or settings.http_tokens_file is not None):
        raise ConfigError(f"{source} holds no token")
    if len(tokens) > MOST_TOKENS:
        raise ConfigError(f"{source} holds {len(tokens)} tokens, at most {MOST_TOKENS} are allowed")
    return Tokens(tokens)


def require_tokens(host: str, addresses: Sequence[str], tokens: Tokens) -> None:
    """Refuse (ConfigError) to be reachable from other machines without a token."""
    if not tokens and not all(is_loopback(address) for address in addresses):
        raise ConfigError(
            f"{TOKENS} is not set: it, or {TOKENS_FILE}, is needed for --host {host}, which other machines can reach;"
            " without tokens only a loopback address such as 127.0.0.1 is served"
        )


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def addresses_of(host: str, port: int) -> list[tuple[int, str]]:
    """(family, address) of a host to listen on. Raises ConfigError for a name that leads nowhere."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} cannot be used: {getattr(error, 'strerror', None) or error}") from None
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def check_local_caller(host: bytes | None, origin: bytes | None) -> Problem | None:
    """Without tokens: is this a program on this machine that means us, rather than a web page in its browser?

    A page of another site can make a browser send requests here, either openly (it then sends `Origin`), or after its own name has
    been made to lead to 127.0.0.1 (DNS rebinding; `Host` then is that name). Both are refused.
    """
    name = _host_name(b"//" + (host or b""))
    if name != "localhost" and not is_loopback(name):
        return Problem(403, "forbidden", f"without {TOKENS} only requests to localhost or a loopback address are served")
    if origin is not None and origin.partition(b"://")[2] != host:
        return Problem(403, "forbidden", f"without {TOKENS} no web page of another origin is served")
    return None


def _host_name(url: bytes) -> str:
    try:
        return (urlsplit(url.decode("ascii")).hostname or "").rstrip(".")
    except ValueError:
        return ""
