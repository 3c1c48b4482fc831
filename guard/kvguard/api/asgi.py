"""Small helpers of raw ASGI: headers, a bounded body, and the race with a client that leaves.

Raw, since a framework's request object costs more than all of admission does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from types import TracebackType
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"trailers",
        b"transfer-encoding",
        b"upgrade",
    }
)


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class BodyTooLarge(Exception):
    """The request body is over the limit."""


_DISCARD_S = 1.0


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Value of the first header of that lower-case name."""
    for key, value in headers:
        if key == name:
            return value
    return None


def end_to_end(headers: Iterable[tuple[bytes, bytes]], *, drop: frozenset[bytes] = frozenset()) -> Headers:
    """Lower-case headers without the hop-by-hop ones, those that `connection` names, and `drop`."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = header(lowered, b"connection")
    hops = HOP_BY_HOP | drop
    if named is not None:
        hops |= {token.strip().lower() for token in named.split(b",")}
    return [(name, value) for name, value in lowered if name not in hops]


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Read the whole body. Raises BodyTooLarge before the excess is kept, ClientGone if the client leaves."""
    declared = header(scope["headers"], b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        if header(scope["headers"], b"expect") is None:
            await discard_body(receive, limit_bytes)
        raise BodyTooLarge
    chunks: list[bytes] = []
    size_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size_bytes += len(chunk)
        if size_bytes > limit_bytes:
            await discard_body(receive, limit_bytes)
            raise BodyTooLarge
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def discard_body(receive: Receive, limit_bytes: int) -> None:
    """Read on for a moment and keep nothing: a client that is still sending would not read the answer, and
    closing in its face resets the connection before the answer arrives."""
    size_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while size_bytes < limit_bytes:
                message = await receive()
                size_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


class Upload:
    """A request body as an asynchronous iterator, for one that is passed on as it comes.

    An exception in here reaches the consumer as some error of its own, so what happened is kept as well.
    """

    def __init__(self, receive: Receive, limit_bytes: int) -> None:
        self._receive = receive
        self._left_bytes = limit_bytes
        self._ended = asyncio.Event()
        self.client_gone = False
        self.too_large = False

    def __aiter__(self) -> Upload:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.client_gone = True
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            self._left_bytes -= len(chunk)
            if self._left_bytes < 0:
                self.too_large = True
                raise BodyTooLarge
            if not message.get("more_body", False):
                self._ended.set()
            if chunk:
                return chunk
        raise StopAsyncIteration

    async def receive_behind(self) -> Message:
        """`receive` for whoever waits for the disconnect: it must not take a part of the body away."""
        await self._ended.wait()
        return await self._receive()


class UntilClientGone:
    """Run a block as long as the client is there; ClientGone is raised where the block waits when it leaves.

    For use after the body was read: from then on `receive` returns only for a disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> UntilClientGone:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._watch_client(), name="client-watch")
        return self

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        if not self._gone:
            return
        remaining = self._task.uncancel()
        if kind is asyncio.CancelledError and remaining == 0:
            raise ClientGone from exc
