"""Who may ask: client keys by name, the admin key, and which addresses may be bound without any."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvguard.api.asgi import header

ANONYMOUS = "anonymous"


class AuthError(ValueError):
    """The keys cannot be used as they are; the message names the remedy."""


class Keys:
    """Secrets by name. Comparison takes the same time for every wrong key."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        for name, secret in secrets.items():
            if not secret.isascii() or not secret.strip():
                raise AuthError(f"API key {name!r} must be non-empty ASCII")
        self._secrets = [(name, secret.encode()) for name, secret in secrets.items()]

    def __bool__(self) -> bool:
        return bool(self._secrets)

    def name_of(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Name of the key that a request carries, None without a valid one; anonymous where no key is set."""
        if not self._secrets:
            return ANONYMOUS
        presented = _presented(headers)
        found = None
        for name, secret in self._secrets:
            if hmac.compare_digest(presented, secret):
                found = name
        return found


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The secret in `Authorization: Bearer` or, as Anthropic's clients send it, in `x-api-key`."""
    headers = list(headers)
    scheme, _, secret = (header(headers, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return secret.strip()
    return header(headers, b"x-api-key") or b""


def read_key_file(path: Path) -> dict[str, str]:
    """Read `NAME=KEY` or `KEY` lines; `#` starts a comment. Raises AuthError naming the line."""
    secrets: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, separator, secret = text.partition("=")
        if not separator or not secret.strip("= "):  # a bare key may end in base64's padding
            name, secret = f"key{number}", text
        if name.strip() in secrets:
            raise AuthError(f"{path}:{number}: the name {name.strip()!r} is used twice")
        secrets[name.strip()] = secret.strip()
    return secrets


def check_listen(host: str, *, has_keys: bool, insecure_listen: bool) -> None:
    """Raise AuthError where strangers could use the server without a key."""
    if has_keys or insecure_listen or is_loopback(host):
        return
    raise AuthError(
        f"refusing to listen on {host} without a key: give --api-key NAME=KEY, bind 127.0.0.1, "
        "or say --insecure-listen if the network is trusted"
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
