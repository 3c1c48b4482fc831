"""A small HTTP client for an engine's own endpoints. Its errors never quote what was sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from kvguard.domain import Endpoint
from kvguard.ports import NotReady, ProtocolError

KEEPALIVE_S = 3.0
"""llama-server closes idle connections after 5 s; one that is closing must not be taken for a dead engine."""


class Answered(ProtocolError):
    """The engine answered with another status than 200."""

    def __init__(self, path: str, status: int) -> None:
        super().__init__(f"{path} answered HTTP {status}")
        self.status = status


class EngineHttp:
    """Sends one request at a time and decodes its answer."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._base_url = endpoint.base_url.rstrip("/")
        key = endpoint.api_key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, kind: Any = Any, *, timeout_s: float) -> Any:
        """Decode the answer as `kind`, a type that msgspec knows. Raises ProtocolError if it is none."""
        return _decode(path, await self._send("GET", path, None, timeout_s), kind)

    async def get_text(self, path: str, *, timeout_s: float) -> str:
        return (await self._send("GET", path, None, timeout_s)).decode(errors="replace")

    async def post(self, path: str, body: Mapping[str, Any], kind: Any = Any, *, timeout_s: float) -> Any:
        return _decode(path, await self._send("POST", path, msgspec.json.encode(body), timeout_s), kind)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        """Raises NotReady when it cannot be reached in time, Answered for any status but 200."""
        try:
            try:
                return await self._send_once(method, path, body, timeout_s)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):  # a kept one was closing
                return await self._send_once(method, path, body, timeout_s)
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            raise NotReady(f"{path}: {type(exc).__name__}") from exc

    async def _send_once(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        async with self._open().request(
            method,
            self._base_url + path,
            data=body,
            headers={"Content-Type": "application/json"} if body is not None else None,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            answer = await response.read()
            if response.status != 200:
                raise Answered(path, response.status)
            return answer

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:  # made here, since a session belongs to a running event loop
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session


def _decode(path: str, answer: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"{path} answered what is not understood") from exc
