"""The hot routes as raw ASGI: everything that is not kvguard's own goes to the engine.

Routes that occupy a sequence (`demand.ROUTES`) are admitted; all others, unknown ones too, pass straight on.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import structlog

from kvguard.api import models
from kvguard.api.asgi import (
    BodyTooLarge,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    UntilClientGone,
    Upload,
    end_to_end,
    header,
    read_body,
)
from kvguard.api.auth import Keys
from kvguard.api.errors import ErrorReply
from kvguard.demand import ROUTES, DemandError, Dialect, Route, check_n, draft
from kvguard.domain import MIB, Snapshot, State
from kvguard.drain import Drain
from kvguard.entry import backend_failed
from kvguard.flight import Flight
from kvguard.inflight import Inflight, InflightParts
from kvguard.limiter import Limiter
from kvguard.metrics import Metrics
from kvguard.ports import Engine, Supervision
from kvguard.pricing import Pricer
from kvguard.priority import HEADER as PRIORITY_HEADER
from kvguard.priority import Priorities, PriorityError
from kvguard.relay import Call, Reply
from kvguard.upstream import Upstream, UpstreamBroken

_NEVER_FORWARDED = frozenset(
    {
        b"host",
        b"content-length",
        b"expect",
        b"authorization",
        b"x-api-key",
        b"x-request-id",
        PRIORITY_HEADER,
        b"x-conversation-id",  # llama-server would let the generation outlive its client
    }
)
_READ_TIMEOUT_MARGIN = 0.9

MAX_READ_AHEAD_BYTES = 1 << 20
"""A larger body of a route that is not admitted is passed on as it comes."""

_log = structlog.get_logger("kvguard.api")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """The settings that the request path needs.

    dialect        how the engine names the length of an answer; an attached one is known when it answers
    wait_s         longest wait for a place, unless the request says less
    ping_waiting   send SSE comments to streams that wait for a place
    priorities     who goes first
    bound_holds    whether the model's tokenizer never makes more tokens than the text has bytes
    """

    keys: Keys
    dialect: Callable[[], Dialect] = lambda: Dialect.UNKNOWN
    wait_s: float = 120.0
    max_body_bytes: int = 64 * MIB
    ping_waiting: bool = False
    ping_every_s: float = 10.0
    priorities: Priorities = field(default_factory=Priorities)
    bound_holds: Callable[[], bool] = lambda: True


class GuardApp:
    """The ASGI application for the engine's routes. `run` must be running beside it, and `close` ends it."""

    def __init__(
        self,
        *,
        supervision: Supervision,
        limiter: Limiter,
        engine: Callable[[], Engine | None],
        settings: GuardSettings,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervision = supervision
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._upstream = Upstream()
        self._drain = Drain(engine, clock=clock)
        self.inflight = Inflight(
            InflightParts(
                supervision=supervision,
                limiter=limiter,
                pricer=Pricer(engine, bound_holds=settings.bound_holds),
                upstream=self._upstream,
                drain=self._drain,
                metrics=metrics,
                dialect=settings.dialect,
                wait_s=settings.wait_s,
                ping_waiting=settings.ping_waiting,
                ping_every_s=settings.ping_every_s,
                clock=clock,
            )
        )

    async def run(self) -> None:
        """Background work of the request path; never returns. For the application's task group."""
        await self._drain.run(self.inflight.running)

    async def close(self) -> None:
        await self._upstream.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await _refuse_websocket(receive, send)
            return
        headers: Headers = scope["headers"]
        request_id = _request_id(headers)
        reply = Reply(send, lambda: self._own_headers(request_id), self._clock)
        key = self._settings.keys.name_of(headers)
        if key is None:
            await reply.error(_unauthorized())
            return
        route = ROUTES.get(scope["path"]) if scope["method"] == "POST" else None
        try:
            if route is None:
                await self._pass(scope, receive, reply, request_id)
            else:
                await self._admitted(route, key, scope, receive, reply, request_id)
        except ClientGone:
            pass

    def _own_headers(self, request_id: str) -> Headers:
        snapshot = self._supervision.snapshot
        config = snapshot.config_id
        if snapshot.degraded_by:
            config += "; degraded=" + ",".join(rung.value for rung in snapshot.degraded_by)
        headers: Headers = [(b"x-request-id", request_id.encode("latin-1"))]
        if config:
            headers.append((b"x-kvguard-config", config.encode("latin-1", "replace")))
        return headers

    # ------------------------------------------------------------ admitted routes

    async def _admitted(
        self, route: Route, key: str, scope: Scope, receive: Receive, reply: Reply, request_id: str
    ) -> None:
        arrived_at_s = self._clock()
        try:
            priority = self._settings.priorities.of(key, header(scope["headers"], PRIORITY_HEADER))
            body = await read_body(scope, receive, self._settings.max_body_bytes)
            item = draft(route, body, self._settings.dialect())
            capacity = self._supervision.snapshot.capacity
            if capacity is not None:
                check_n(item, capacity, self._settings.dialect())
        except BodyTooLarge:
            await self._refuse(route, reply, _too_large(self._settings.max_body_bytes))
            return
        except PriorityError as exc:
            await self._refuse(route, reply, ErrorReply(code="invalid_request", message=str(exc)))
            return
        except DemandError as exc:
            error = ErrorReply(code="invalid_request", message=str(exc), param=exc.param)
            await self._refuse(route, reply, error)
            return
        if item.stream:
            reply.transcript = []
        flight = Flight(
            request_id=request_id,
            key=key,
            priority=priority,
            path=scope["path"],
            body=body,
            call=_call(scope, request_id, body),
            draft=item,
            reply=reply,
            arrived_at_s=arrived_at_s,
            must_start_by_s=arrived_at_s + self._wait_s(scope["headers"]),
        )
        await self.inflight.serve(flight, receive)

    async def _refuse(self, route: Route, reply: Reply, error: ErrorReply) -> None:
        self._metrics.refused[route.name, error.code] += 1
        await reply.error(error)

    def _wait_s(self, headers: Headers) -> float:
        """The longest wait for a place: ours, or what the client says that it will bear."""
        limits_s = [self._settings.wait_s]
        slo_ms = _number(header(headers, b"x-slo-ttft-ms"))
        if slo_ms is not None:
            limits_s.append(slo_ms / 1000)
        read_timeout_s = _number(header(headers, b"x-stainless-read-timeout"))
        if read_timeout_s is not None:
            limits_s.append(read_timeout_s * _READ_TIMEOUT_MARGIN)
        return min(limits_s)

    # ------------------------------------------------------------ all other routes

    async def _pass(self, scope: Scope, receive: Receive, reply: Reply, request_id: str) -> None:
        snapshot = self._supervision.snapshot
        if snapshot.endpoint is None or not snapshot.ready:
            await reply.error(
                backend_failed(snapshot)
                if snapshot.state in (State.FAILED, State.STOPPED)
                else ErrorReply(
                    code="backend_starting", message=f"The backend is {snapshot.state.value}: try again soon."
                )
            )
            return
        call = _call(scope, request_id, b"")
        headers, body, gone = call.headers, b"", receive
        lists = scope["method"] == "GET" and scope["path"] in models.PATHS
        upload: Upload | None = None
        try:
            if _streams_in(scope):
                upload = Upload(receive, self._settings.max_body_bytes)
                headers, gone = _with_length(headers, scope["headers"]), upload.receive_behind
            elif _has_body(scope):
                body = await read_body(scope, receive, self._settings.max_body_bytes)
            async with UntilClientGone(gone):
                response = await self._upstream.open(
                    snapshot.endpoint, call.method, call.target, headers, upload or body or None
                )
                await (_copy_models(response, reply, snapshot) if lists else _copy(response, reply))
        except BodyTooLarge:
            await reply.error(_too_large(self._settings.max_body_bytes))
        except (UpstreamBroken, aiohttp.ClientError, OSError) as exc:
            await reply.error(self._why_broken(exc, upload))

    def _why_broken(self, exc: Exception, upload: Upload | None) -> ErrorReply:
        if upload is not None and upload.client_gone:
            raise ClientGone from exc
        if upload is not None and upload.too_large:
            return _too_large(self._settings.max_body_bytes)
        return ErrorReply(
            code="backend_failed", status=502, message=f"The backend broke off the request: {exc}."
        )


async def _copy(response: aiohttp.ClientResponse, reply: Reply) -> None:
    try:
        await reply.start(response.status, end_to_end(response.raw_headers))
        async for chunk in response.content.iter_any():
            await reply.write(chunk)
        await reply.finish()
    finally:
        response.close()


async def _copy_models(response: aiohttp.ClientResponse, reply: Reply, snapshot: Snapshot) -> None:
    if response.status != 200 or "content-encoding" in response.headers:
        await _copy(response, reply)
        return
    try:
        body = models.describe(await response.read(), snapshot)
        headers = end_to_end(response.raw_headers, drop=frozenset({b"content-length", b"etag"}))
        await reply.whole(200, [*headers, (b"content-length", str(len(body)).encode())], body)
    finally:
        response.close()


def _streams_in(scope: Scope) -> bool:
    """Whether a body is too large to be read first; a small one could be sent again on a new connection."""
    length = header(scope["headers"], b"content-length")
    if length is None:
        return header(scope["headers"], b"transfer-encoding") is not None
    return not length.isdigit() or int(length) > MAX_READ_AHEAD_BYTES


def _has_body(scope: Scope) -> bool:
    return header(scope["headers"], b"content-length") not in (None, b"0")


def _with_length(headers: Headers, original: Headers) -> Headers:
    length = header(original, b"content-length")
    return headers if length is None else [*headers, (b"content-length", length)]


def _call(scope: Scope, request_id: str, body: bytes) -> Call:
    target = scope["raw_path"].decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    headers = end_to_end(scope["headers"], drop=_NEVER_FORWARDED)
    headers.append((b"x-request-id", request_id.encode("latin-1")))
    return Call(method=scope["method"], target=target, headers=headers, body=body)


def _request_id(headers: Headers) -> str:
    given = header(headers, b"x-request-id")
    if given and len(given) <= 128 and given.isascii() and given.decode().isprintable():
        return given.decode()
    return uuid.uuid4().hex


def _number(value: bytes | None) -> float | None:
    try:
        number = float(value) if value is not None else None
    except ValueError:
        return None
    return number if number is not None and 0 < number < float("inf") else None


def _too_large(limit_bytes: int) -> ErrorReply:
    return ErrorReply(
        code="invalid_request",
        status=413,
        message=f"The request body is over the limit of {limit_bytes} bytes. "
        "Send less, or raise server.max_body_bytes.",
    )


def _unauthorized() -> ErrorReply:
    return ErrorReply(
        code="unauthorized", message="A valid API key is needed: send it as 'Authorization: Bearer KEY'."
    )


async def _refuse_websocket(receive: Receive, send: Send) -> None:
    """Answer the handshake with 403, which is all that a server may say before it accepts."""
    await receive()
    await send({"type": "websocket.close", "code": 1008, "reason": "kvguard does not relay WebSockets"})
