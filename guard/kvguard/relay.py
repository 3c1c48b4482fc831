"""Forwards one request to the engine once, streams whole events unchanged, and reports what came of it.

The relay decides nothing: a break is reported to the owner of the request (`inflight`), who asks the
supervisor what it means. For that, it holds back what the client need not see if the request is replayed:
answers of 5xx, error events, and the status line until the first event is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from kvguard.api.asgi import Headers, Send, end_to_end, header
from kvguard.api.errors import ErrorReply
from kvguard.domain import Endpoint
from kvguard.sse import Cutter, End, Tail, has_error, read_body_end
from kvguard.upstream import Upstream, UpstreamBroken

MAX_HELD_BYTES = 16 << 20
"""A larger answer in one piece is passed on as it comes, and cannot be replayed once it has begun."""

PROGRESS_EVERY_TOKENS = 16
_ERROR_REST_S = 5.0
_MAY_MEAN_DEATH = frozenset({500, 502, 503, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request as it goes to the engine."""

    method: str
    target: str  # path and query, as the client wrote them
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An answer of the engine's that waits for the supervisor's verdict; `events`: the rest of a stream."""

    status: int
    headers: Headers
    body: bytes
    events: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The client has the whole answer."""

    end: End


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The engine did not answer to the end.

    held        what it said instead
    clean       it closed the stream properly, though without a finish reason
    never_sent  the engine has seen nothing of the request
    """

    reason: str
    held: Held | None = None
    clean: bool = False
    never_sent: bool = False


class Reply:
    """The client's side of one answer, over all attempts to get it."""

    def __init__(self, send: Send, extra_headers: Callable[[], Headers], clock: Callable[[], float]) -> None:
        self._send = send
        self._extra_headers = extra_headers
        self._clock = clock
        self.started = False
        self.finished = False
        self.is_stream = False  # of events
        self.sent_bytes = 0
        self.first_byte_at_s: float | None = None
        self.transcript: list[bytes] | None = None

    async def start(self, status: int, headers: Headers) -> None:
        if self.started:
            return
        self.started = True
        self.is_stream = (header(headers, b"content-type") or b"").startswith(b"text/event-stream")
        extra = [(name, value) for name, value in self._extra_headers() if header(headers, name) is None]
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *extra]})

    async def write(self, chunk: bytes) -> None:
        if not self.sent_bytes:
            self.first_byte_at_s = self._clock()
        self.sent_bytes += len(chunk)
        if self.transcript is not None:
            self.transcript.append(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, last: bytes = b"") -> None:
        self.finished = True
        if not self.sent_bytes:
            self.first_byte_at_s = self._clock()
        self.sent_bytes += len(last)
        await self._send({"type": "http.response.body", "body": last})

    async def ping(self) -> None:
        """Keep a client that waits for a stream from giving up. It commits the status; no other form of a
        comment is safe with the clients that there are."""
        if not self.started:
            await self.start(200, [(b"content-type", b"text/event-stream")])
        await self._send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, headers)
        await self.finish(body)

    async def release(self, held: Held) -> None:
        """Show the client what was held back, in the stream when that has begun."""
        if not self.started:
            await self.whole(held.status, held.headers, held.body)
        else:
            await self.finish(held.body if held.events else b"data: " + held.body + b"\n\n")

    async def error(self, error: ErrorReply) -> None:
        """Tell the client, in the stream when that has begun.

        An answer in one piece that has begun is left unfinished, so that the server cuts the connection: the
        client must not take it for a whole one.
        """
        if self.started:
            if self.is_stream:
                await self.finish(error.event())
        else:
            body = error.body()
            await self.whole(
                error.status, [*error.headers(), (b"content-length", str(len(body)).encode())], body
            )


async def forward(
    upstream: Upstream,
    endpoint: Endpoint,
    call: Call,
    reply: Reply,
    *,
    progress: Callable[[int], None],
    rewrite: Callable[[bytes], bytes] | None = None,
) -> Done | Broken:
    """Send `call` to the engine and its answer to the client.

    `progress` hears the tokens streamed so far; `rewrite` is applied to the events of a continuation.
    """
    try:
        response = await upstream.open(endpoint, call.method, call.target, call.headers, call.body)
    except UpstreamBroken as exc:
        return Broken(reason=str(exc), never_sent=not exc.reached)
    try:
        if response.content_type == "text/event-stream" and response.status < 400:
            return await _stream(response, reply, progress, rewrite)
        if response.content_length is None or response.content_length > MAX_HELD_BYTES:
            return await _pass(response, reply)
        return await _whole(response, reply)
    except (aiohttp.ClientError, OSError) as exc:
        return Broken(reason=str(exc) or type(exc).__name__)
    finally:
        response.close()


async def _whole(response: aiohttp.ClientResponse, reply: Reply) -> Done | Broken:
    body = await response.read()
    headers = end_to_end(response.raw_headers)
    if response.status in _MAY_MEAN_DEATH or reply.started:
        held = Held(status=response.status, headers=headers, body=body)
        return Broken(reason=f"HTTP {response.status}", held=held)
    await reply.whole(response.status, headers, body)
    return Done(end=read_body_end(body))


async def _pass(response: aiohttp.ClientResponse, reply: Reply) -> Done | Broken:
    await reply.start(response.status, end_to_end(response.raw_headers))
    async for chunk in response.content.iter_any():
        await reply.write(chunk)
    await reply.finish()
    return Done(end=End(complete=True))


async def _stream(
    response: aiohttp.ClientResponse,
    reply: Reply,
    progress: Callable[[int], None],
    rewrite: Callable[[bytes], bytes] | None,
) -> Done | Broken:
    cutter, tail = Cutter(), Tail()
    report_at = 1
    async for chunk in response.content.iter_any():
        events = cutter.feed(chunk)
        if not events:
            continue
        if has_error(events):
            return await _hold_error(response, events + cutter.rest())
        if rewrite is not None:
            events = rewrite(events)
        tail.add(events)
        if not reply.started:
            await reply.start(response.status, end_to_end(response.raw_headers))
        await reply.write(events)
        if cutter.events >= report_at:
            progress(cutter.events - 1)  # the first event of a chat only opens it
            report_at = cutter.events + PROGRESS_EVERY_TOKENS
    end = tail.end()
    if not end.complete:
        return Broken(reason="the stream ended without a finish reason", clean=True)
    await reply.finish(cutter.rest())
    return Done(end=end)


async def _hold_error(response: aiohttp.ClientResponse, events: bytes) -> Broken:
    """Keep an error event and what follows it; an engine ends the stream behind one."""
    rest = [events]
    try:
        async with asyncio.timeout(_ERROR_REST_S):
            rest += [chunk async for chunk in response.content.iter_any()]
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass
    headers = end_to_end(response.raw_headers)
    held = Held(status=response.status, headers=headers, body=b"".join(rest), events=True)
    return Broken(reason="error event", held=held)
