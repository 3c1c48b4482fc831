"""The HTTP client towards the engine: no limits, untouched bytes, one more try for a stale connection."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from kvguard.api.asgi import Headers
from kvguard.domain import Endpoint

KEEPALIVE_S = 3.0
"""Below the 5 s after which llama-server closes an idle connection."""

CONNECT_TIMEOUT_S = 5.0

Body = bytes | AsyncIterator[bytes] | None

_NO_HEADERS_OF_ITS_OWN = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")


class UpstreamBroken(Exception):
    """The engine closed the connection, or, where `reached` is False, took none."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.reached = not isinstance(cause, aiohttp.ClientConnectorError)


class Upstream:
    """A pool of connections to whatever engine lives now."""

    def __init__(self) -> None:
        self._pooled: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def open(
        self, endpoint: Endpoint, method: str, target: str, headers: Headers, body: Body
    ) -> aiohttp.ClientResponse:
        """Send a request and return when the response's headers are there.

        A pooled connection may have been closed by the engine just now. So a request that broke before the
        first byte of a response is sent once more, on a new connection; an engine that is dead refuses that.
        Raises UpstreamBroken.
        """
        if self._pooled is None or self._fresh is None:
            self._pooled, self._fresh = _session(force_close=False), _session(force_close=True)
        try:
            return await _send(self._pooled, endpoint, method, target, headers, body)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as exc:
            if isinstance(exc, aiohttp.ClientConnectorError) or isinstance(body, AsyncIterator):
                raise UpstreamBroken(exc) from exc
            first = exc
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise UpstreamBroken(exc) from exc
        try:
            return await _send(self._fresh, endpoint, method, target, headers, body)
        except aiohttp.ClientConnectorError as exc:  # dead now, but it had taken the first try
            raise UpstreamBroken(first) from exc
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise UpstreamBroken(exc) from exc

    async def close(self) -> None:
        for session in (self._pooled, self._fresh):
            if session is not None:
                await session.close()
        self._pooled = self._fresh = None


def _session(*, force_close: bool) -> aiohttp.ClientSession:
    """A session without aiohttp's own limits: 100 connections would be a second queue, 300 s a deadline."""
    connector = (
        aiohttp.TCPConnector(limit=0, force_close=True)
        if force_close
        else aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NO_HEADERS_OF_ITS_OWN,
        max_line_size=64 << 10,
        max_field_size=64 << 10,
    )


async def _send(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    method: str,
    target: str,
    headers: Headers,
    body: Body,
) -> aiohttp.ClientResponse:
    sent = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
    if endpoint.api_key:
        sent["authorization"] = f"Bearer {endpoint.api_key}"
    url = URL(endpoint.base_url.rstrip("/") + target, encoded=True)
    return await session.request(method, url, data=body, headers=sent, allow_redirects=False)
